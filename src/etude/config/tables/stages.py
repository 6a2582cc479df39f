"""`[[stages]]`: what one stage of a run does otherwise than the recipe says.

Written as changes, kept whole: `etude.config.stages` lays each stage over its recipe, so that here nothing is left out.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from etude.config.noun import Many, Noun, ToldElsewhere
from etude.config.tables.data import DataConfig
from etude.config.tables.models import ReferenceConfig, TeacherConfig
from etude.config.tables.sampler import SamplerConfig
from etude.config.tables.terms import LossConfig, TermConfig
from etude.config.tables.training import CheckpointConfig, EvaluationConfig, OptimConfig, TrainConfig

UNNAMED = "stage"  # a stage without a name and a method

_AS_IN_RECIPE = ToldElsewhere()


class StageConfig(Noun):
    """One stage: a student's stretch of the way, with a sampler, terms and an optimiser of its own."""

    method: str | None = Field(
        default=None, description="A named point of the axes; its sampler and terms replace the recipe's."
    )
    name: str = Field(
        default=UNNAMED,
        description="Of the stage's folder in the run's, after its number. Left out: the method, or stage.",
    )
    teacher: Annotated[TeacherConfig | None, _AS_IN_RECIPE] = Field(
        default=None, description="Changes to [teacher]; its own teacher, where the recipe has none."
    )
    reference: Annotated[ReferenceConfig | None, _AS_IN_RECIPE] = Field(
        default=None, description="Changes to [reference]; its own reference, where the recipe has none."
    )
    data: Annotated[DataConfig, _AS_IN_RECIPE] = Field(
        description="Changes to [data]; one of prompts, dataset and task replaces the recipe's."
    )
    sampler: Annotated[SamplerConfig, _AS_IN_RECIPE] = Field(
        default=SamplerConfig(), description="Changes to [sampler]."
    )
    terms: Annotated[Many[TermConfig], _AS_IN_RECIPE] = Field(
        default=(TermConfig(),), min_length=1, description="What is learned in this stage, all of it, if any is given."
    )
    loss: Annotated[LossConfig, _AS_IN_RECIPE] = Field(default=LossConfig(), description="Changes to [loss].")
    train: Annotated[TrainConfig, _AS_IN_RECIPE] = Field(
        default=TrainConfig(), description="Changes to [train]; steps are the stage's own."
    )
    optim: Annotated[OptimConfig, _AS_IN_RECIPE] = Field(
        default=OptimConfig(), description="Changes to [optim]; each stage begins with a fresh optimiser."
    )
    evaluation: Annotated[EvaluationConfig, _AS_IN_RECIPE] = Field(
        default=EvaluationConfig(), description="Changes to [evaluation]."
    )
    checkpoint: Annotated[CheckpointConfig, _AS_IN_RECIPE] = Field(
        default=CheckpointConfig(), description="Changes to [checkpoint]."
    )
