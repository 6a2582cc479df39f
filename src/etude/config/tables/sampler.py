"""`[sampler]`: axis 1, who writes the rows of a round."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from etude.axes.names import Source
from etude.axes.schedules import Ramp, as_ramp
from etude.config.noun import Many, Noun, OnlyWhen
from etude.config.tables.models import Precision
from etude.config.tables.ramp import RampConfig, ramp_of

_OF_REPLAY = OnlyWhen("replay_fraction is above 0", lambda sampler: sampler.replay.highest > 0)
_OF_MIXTURE = OnlyWhen("student_fraction is below 1", lambda sampler: sampler.fraction.lowest < 1)
_OF_COINS = OnlyWhen(
    "student_fraction is below 1 or replay_fraction above 0",
    lambda sampler: _OF_MIXTURE.holds(sampler) or _OF_REPLAY.holds(sampler),
)


class AdaptiveConfig(Noun):
    """`[sampler.adaptive]`: the student's share begins at student_fraction and rises when the student gets worse.

    Whenever the held-out divergence is `tolerance` above the reference, the share goes up by `rise`, to 1 at most, and
    that measurement becomes the reference; the first reference is the student before training.
    """

    rise: float = Field(default=0.1, gt=0, le=1, description="Added to the share at a time. 0.1 in DistiLLM (2024).")
    tolerance: float = Field(
        default=0.1,
        ge=0,
        description="Growth of heldout/reverse_kl, in nats, at which the share rises. 0.1 in DistiLLM, where it is of "
        "the cross-entropy on held-out completions.",
    )


class SamplerConfig(Noun):
    """`[sampler]`: who writes the rows that are trained on, and how."""

    student_fraction: float | RampConfig = Field(
        default=1.0,
        description="Probability that the student writes a row: a number, or a table that moves with the step. 1: "
        "on-policy, best in GKD.",
    )
    adaptive: AdaptiveConfig | None = Field(
        default=None,
        description="Table: student_fraction rises when the held-out divergence does. Left out: it does not.",
    )
    other: Annotated[
        Literal[Source.DATASET, Source.TEACHER] | None,
        replace(_OF_MIXTURE, default=Source.DATASET),
    ] = Field(
        default=None,
        description='Where the remaining rows come from: the "dataset"\'s own completions, or the "teacher".',
    )
    mix: Annotated[Literal["row", "batch"], _OF_COINS] = Field(
        default="row", description="A coin for each row, or one for all rows of a round, as published for GKD."
    )
    teacher_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Student and teacher write together: each token is the teacher's with this probability, 0.2 in "
        "MiniLLM (2023). Left out: the student writes alone.",
    )
    teacher_top_k: int | None = Field(
        default=None,
        ge=1,
        description="Student and teacher write together: the teacher replaces what is not among its own likeliest k, "
        "25 in SKD (2024). Left out: the student writes alone.",
    )
    replay_fraction: float | RampConfig = Field(
        default=0.0,
        description="Share of the student's rows that are replayed from earlier rounds: a number, or a table that "
        "moves with the step. 0: it writes each row afresh.",
    )
    replay_capacity: Annotated[int | None, replace(_OF_REPLAY, default=1000)] = Field(
        default=None,
        ge=1,
        description="Rows kept for replay, the newest, over all processes. 1000 in DistiLLM (2024).",
    )
    max_age: Annotated[int | None, _OF_REPLAY] = Field(
        default=None,
        ge=1,
        description="Optimiser steps after which a row is no longer replayed. Left out: as long as it is kept.",
    )
    recorded: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of a recording (etude record), from where the command is called: the student's rows and "
        "their prompts come from it, round for round, and when it ends from its beginning again. Left out: the student "
        "writes.",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Of sampling only; loss.temperature is separate. 1: the student's own distribution.",
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the likeliest tokens of this total probability. 1: all."
    )
    top_k: int = Field(default=0, ge=0, description="Sample from this many likeliest tokens. 0: all.")
    max_new_tokens: int = Field(
        default=256, ge=1, description="Longest completion, in tokens; longer ones are cut there."
    )
    samples_per_prompt: int = Field(default=1, ge=1, description="Completions of each prompt in a round.")
    dtype: Precision = Field(
        default="auto",
        description="Of the copy that writes; the gap to the student's log-probs is measured. auto: compute_dtype.",
    )
    rows_per_batch: int = Field(
        default=64, ge=1, description="Rows written side by side; sets memory, and the result only by rounding."
    )
    stop: Many[str] = Field(
        default=(), description="Tokens that end a completion, beside the tokenizer's and the model's own."
    )

    @property
    def writers(self) -> frozenset[Source]:
        """Who may write a row of a round."""
        writers = {Source.STUDENT} if self.student_writes else set[Source]()
        return frozenset(writers | {self.other} if self.other else writers)

    @property
    def student_writes(self) -> bool:
        """Whether the student may write a row at some step."""
        return self.adaptive is not None or self.fraction.highest > 0

    @property
    def fraction(self) -> Ramp:
        """The student's share of the rows; where it is adaptive, the one it begins with."""
        return as_ramp(cast("float | Ramp", ramp_of(self.student_fraction)))

    @property
    def replay(self) -> Ramp:
        """The share of the student's rows that are replayed."""
        return as_ramp(cast("float | Ramp", ramp_of(self.replay_fraction)))

    @property
    def joint(self) -> bool:
        """Whether the teacher has a hand in the student's rows."""
        return self.teacher_share is not None or self.teacher_top_k is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 <= self.fraction.lowest <= self.fraction.highest <= 1:
            raise ValueError(
                f"student_fraction goes from {self.fraction.lowest} to {self.fraction.highest}; it is a probability, "
                "between 0 and 1"
            )
        if self.joint:
            self._check_joint()
        if self.adaptive is not None and not (self.fraction.constant and self.fraction.highest < 1):
            raise ValueError(
                f"[sampler.adaptive] raises student_fraction, which goes from {self.fraction.lowest} to "
                f"{self.fraction.highest}; write one number below 1, where it begins"
            )
        self._check_replay()
        self._check_recorded()
        if not self.student_writes and self.other is Source.DATASET and self.samples_per_prompt > 1:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt} only repeats rows that all come from the dataset; "
                "remove it or raise student_fraction"
            )
        return self

    def _check_joint(self) -> None:
        if self.teacher_share is not None and self.teacher_top_k is not None:
            raise ValueError(
                f"teacher_share = {self.teacher_share} and teacher_top_k = {self.teacher_top_k} are two ways to write "
                "together; remove one"
            )
        if self.top_p < 1 or self.top_k > 0:
            raise ValueError(
                f"top_p = {self.top_p} and top_k = {self.top_k} cut what student and teacher write with together; "
                "write top_p = 1 and top_k = 0"
            )
        if not self.student_writes:
            raise ValueError(
                "teacher_share and teacher_top_k are about the student's rows and it writes none; remove it"
            )

    def _check_replay(self) -> None:
        if not 0 <= self.replay.lowest <= self.replay.highest <= 1:
            raise ValueError(
                f"replay_fraction goes from {self.replay.lowest} to {self.replay.highest}; it is a share, between 0 "
                "and 1"
            )
        if self.replay.highest > 0 and not self.student_writes:
            raise ValueError("replay_fraction is about the student's rows and it writes none; remove it")

    def _check_recorded(self) -> None:
        if self.recorded is None:
            return
        others = {
            "replay_fraction": self.replay.highest > 0,
            "teacher_share": self.teacher_share is not None,
            "teacher_top_k": self.teacher_top_k is not None,
        }
        for key, written in others.items():
            if written:
                raise ValueError(f"{key} is about rows that are written, and recorded hands them out; remove one")
        if not self.student_writes:
            raise ValueError("recorded is about the student's rows and there are none; remove it")
