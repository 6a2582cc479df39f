"""`[train]`, `[optim]`, `[evaluation]`, `[checkpoint]`, `[device]` and `[preflight]`: how much, how fast, where."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from etude.axes.names import Check, Schedule
from etude.config.noun import Many, Noun, OnlyWhen, Word


class TrainConfig(Noun):
    """`[train]`: how much is trained. A round is prompts, completions, marks; then optimiser steps on them."""

    steps: int = Field(
        default=200, ge=1, description="Optimiser steps in all. 200: where published runs on one task end."
    )
    prompts_per_round: int = Field(default=8, ge=1, description="Prompts of a round, over all processes.")
    updates_per_round: int = Field(
        default=1, ge=1, description="Parts a round's rows are split into, one optimiser step each."
    )
    epochs: int = Field(default=1, ge=1, description="Passes over a round's rows. 1 x 1 step is on-policy.")
    tokens_per_micro_batch: int = Field(
        default=8192,
        ge=1,
        description="Padded tokens of one forward and backward pass; sets memory, and with dropout off no result.",
    )


class OptimConfig(Noun):
    """`[optim]`: AdamW and its learning rate."""

    learning_rate: float = Field(
        default=1e-5,
        gt=0,
        description="At its peak. 1e-5: safe for full fine-tuning of billions; ten times that for LoRA.",
    )
    schedule: Word[Schedule] = Field(default=Schedule.LINEAR, description="How it moves after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which it rises from 0 to the peak.")
    final_fraction: Annotated[
        float,
        OnlyWhen("schedule is not constant", lambda optim: optim.schedule is not Schedule.CONSTANT, default=0.1),
    ] = Field(default=1.0, ge=0, le=1, description="Learning rate of the last step, as a share of the peak.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decoupled decay of the weights, each step, times the learning rate."
    )
    beta1: float = Field(
        default=0.9, ge=0, lt=1, description="Decay of the gradient's running mean. AdamW's own default."
    )
    beta2: float = Field(
        default=0.999, ge=0, lt=1, description="Decay of its square's running mean. AdamW's own default."
    )
    epsilon: float = Field(default=1e-8, gt=0, description="Added to the divisor. AdamW's own default.")
    clip_norm: float = Field(default=1.0, ge=0, description="Largest norm of the whole gradient; 0 clips nothing.")


class EvaluationConfig(Noun):
    """`[evaluation]`: what is measured on held-out prompts, before, during and after."""

    every: int = Field(default=50, ge=0, description="Steps between evaluations; 0: before and after only.")
    prompts: int = Field(default=64, ge=1, description="Held-out prompts used, at most.")
    samples_per_prompt: int = Field(
        default=1, ge=1, description="Completions of each, sampled at temperature 1 whatever the sampler does."
    )
    greedy: bool = Field(
        default=True, description="Accuracy of the likeliest answer as well, where answers can be verified."
    )
    show: int = Field(default=6, ge=0, description="Answers kept to be read, before and after.")


class CheckpointConfig(Noun):
    """`[checkpoint]`: what a killed run goes on from."""

    every: int = Field(default=50, ge=0, description="Steps between checkpoints; 0: at the end only.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints kept. 2: one to fall back on.")


class DeviceConfig(Noun):
    """`[device]`: where it runs."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="auto: cuda, else mps, else cpu.")
    threads: int = Field(
        default=0, ge=0, description="CPU threads of torch. 0: by the size of the models; tiny ones want one."
    )


class PreflightConfig(Noun):
    """`[preflight]`: what is proved of the pair before step 1."""

    allow: Many[Word[Check]] = Field(
        default=(), description="Checks whose refusal becomes a warning, where what they refuse is meant."
    )
