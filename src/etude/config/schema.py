"""What a person may write in a recipe: one frozen table per noun, and the only home of every default.

The nouns stand in `tables/`; here they become a `Recipe`, with the checks that concern more than one of them. A field's
description says what it is, its unit, and where its default comes from; `etude show --keys` prints them. The checks
need nothing but the recipe itself: one source of data, a teacher where one is asked for, no option that would do
nothing. Whether a term has the gradient its name promises is the table's business in `etude.axes.legality`; `load.py`
asks it. Nothing below the recipes floor sees these classes.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from etude.axes.legality import Sampling
from etude.axes.names import REFERENCE, REWARD, Baseline, Source
from etude.axes.terms import asks_verdict
from etude.config.noun import Idle, Many, Noun, spelled
from etude.config.tables.data import DataConfig
from etude.config.tables.models import ReferenceConfig, StudentConfig, TeacherConfig
from etude.config.tables.sampler import SamplerConfig
from etude.config.tables.stages import StageConfig
from etude.config.tables.terms import LossConfig, TermConfig
from etude.config.tables.training import (
    CheckpointConfig,
    DeviceConfig,
    EvaluationConfig,
    OptimConfig,
    PreflightConfig,
    TrainConfig,
)


class Recipe(Noun):
    """A whole run: one sampler, a list of terms, and everything around them."""

    method: str | None = Field(
        default=None, description="A named point of the axes whose settings this recipe starts from."
    )
    seed: int = Field(default=0, ge=0, description="Every random number of the run follows from it.")
    name: str = Field(
        default="run",
        min_length=1,
        pattern=r"^[A-Za-z0-9_=-][A-Za-z0-9._=-]*$",  # it names a folder, which stays where runs are
        description="Of the run: letters, digits, -, _, = and dots. Left out: the recipe file's name.",
    )
    output: str = Field(
        default_factory=lambda recipe: f"runs/{recipe['name']}",
        min_length=1,
        description="Folder of the run, from where the command is called. Left out: runs/NAME.",
    )
    student: StudentConfig = Field(description="Who learns.")
    teacher: TeacherConfig | None = Field(
        default=None, description="Who marks. May be left out where only labels and rewards are trained."
    )
    reference: ReferenceConfig | None = Field(
        default=None,
        description="What a term stays near or extrapolates from. Left out: the student as the run, or the stage, "
        "begins, where a term asks.",
    )
    data: DataConfig = Field(description="Where prompts come from.")
    sampler: SamplerConfig = Field(default=SamplerConfig(), description="Who writes.")
    terms: Many[TermConfig] = Field(
        default=(TermConfig(),), min_length=1, description="What is learned: summands of the loss."
    )
    loss: LossConfig = Field(default=LossConfig(), description="What all terms share.")
    train: TrainConfig = Field(default=TrainConfig(), description="How much.")
    optim: OptimConfig = Field(default=OptimConfig(), description="How fast.")
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="What is measured.")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="What is kept.")
    device: DeviceConfig = Field(default=DeviceConfig(), description="Where it runs.")
    preflight: PreflightConfig = Field(default=PreflightConfig(), description="What is proved before step 1.")
    stages: Many[StageConfig] | None = Field(
        default=None,
        min_length=1,
        description="What one student goes through in turn, each a table of changes to the tables above. Left out: the "
        "recipe itself is the only one.",
    )

    @property
    def stage_recipes(self) -> tuple[Recipe, ...]:
        """Each stage as a recipe of its own, whose run's folder is in this one's; without stages the recipe itself."""
        if self.stages is None:
            return (self,)
        return tuple(self._of_stage(number, stage) for number, stage in enumerate(self.stages, start=1))

    def _of_stage(self, number: int, stage: StageConfig) -> Recipe:
        name = f"{number}-{stage.name}"
        tables = {key: getattr(stage, key) for key in StageConfig.model_fields}
        return self.model_copy(update=tables | {"name": name, "output": f"{self.output}/{name}", "stages": None})

    @property
    def sampling(self) -> Sampling:
        """How rows are written, as far as a term's gradient depends on it; `Point.of` takes it."""
        return Sampling(
            rows=self.sampler.writers,
            temperature=self.sampler.temperature,
            top_p=self.sampler.top_p,
            top_k=self.sampler.top_k,
            joint=self.sampler.joint,
            stale=self.sampler.replay.highest > 0 or self.sampler.recorded is not None,
            steps_per_round=self.train.updates_per_round * self.train.epochs,
        )

    @property
    def asks_reference(self) -> bool:
        """Whether a term needs the reference's marks; an extrapolation of 1 is the teacher itself."""
        return any(term.teacher == REFERENCE or term.extrapolation not in (None, 1.0) for term in self.terms)

    @model_validator(mode="after")
    def _check_terms(self) -> Self:
        if self.stages is not None:  # each is checked as a recipe of its own; what is common to them need not be one
            return self
        names = [term.name for term in self.terms]
        for place, term in enumerate(self.terms):
            if term.name in names[:place]:
                raise ValueError(f'terms.{place}: a second term is called "{term.name}"; give it a name of its own')
            if not self.sampler.writers & set(term.sources):
                raise ValueError(
                    f"terms.{place}: sources = {spelled(term.sources)} trains nothing, rows come from "
                    f"{' and '.join(sorted(self.sampler.writers))}; name one of those"
                )
            for source in term.as_term.source_weights:
                if source not in self.sampler.writers:
                    raise ValueError(
                        f"terms.{place}: source_weights.{source} does nothing, rows come from "
                        f"{' and '.join(sorted(self.sampler.writers))}; remove it"
                    )
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if self.has_teacher_model or self.stages is not None:
            return self
        for place, term in enumerate(self.terms):
            if term.teacher == "teacher" and self.teacher is None:
                raise ValueError(
                    f'terms.{place} ("{term.name}") compares the student with a teacher and there is no [teacher]; '
                    'name its model, or write teacher = "label" for this term'
                )
        lacking = "there is no [teacher]" if self.teacher is None else "[teacher] has stored scores only"
        if self.sampler.joint:
            raise ValueError(
                f"sampler.teacher_share and teacher_top_k let the teacher write with the student and {lacking}; name "
                "its model"
            )
        if self.sampler.other is Source.TEACHER:
            raise ValueError(f'sampler.other = "teacher" lets the teacher write and {lacking}; name its model')
        return self

    @property
    def has_teacher_model(self) -> bool:
        """Whether the teacher marks in person: stored scores alone do without."""
        return self.teacher is not None and (self.teacher.weights != "model" or self.teacher.model is not None)

    @model_validator(mode="after")
    def _check_own_teacher(self) -> Self:
        if self.teacher is None or self.stages is not None:
            return self
        weights = self.teacher.weights
        if weights == "base" and self.student.lora is None:
            raise ValueError(
                'teacher.weights = "base" is the student with its adapters switched off and it has none; write '
                '[student.lora], or teacher.weights = "model" with the student\'s model'
            )
        writes = self.sampler.joint or self.sampler.other is Source.TEACHER
        if writes and (weights not in ("model", "ema") or self.teacher.offload):
            how = "offload = true" if self.teacher.offload else f"weights = {spelled(weights)}"
            raise ValueError(
                f"[sampler] lets the teacher write and with teacher.{how} it can only mark; write a teacher.model, "
                "or let the student write alone"
            )
        return self

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        named = any(term.teacher == REFERENCE or term.extrapolation is not None for term in self.terms)
        if self.reference is not None and self.stages is None and not named:
            raise Idle("reference", self.reference.model, 'a term has teacher = "reference" or an extrapolation')
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if self.stages is not None:
            return self
        for place, term in enumerate(self.terms):
            if term.teacher == REWARD and self.data.task is None and self.data.verifier is None:
                raise ValueError(
                    f'terms.{place} ("{term.name}") trains on a reward and nobody judges the answers; write '
                    "data.verifier, or take prompts from a data.task"
                )
            if asks_verdict(term.as_term) and self.data.task is None and self.data.verifier is None:
                raise ValueError(
                    f'terms.{place} ("{term.name}") asks which rows are right and nobody judges the answers; write '
                    "data.verifier, or take prompts from a data.task"
                )
            if term.baseline is Baseline.GROUP and self.sampler.samples_per_prompt < 2:
                raise ValueError(
                    f'terms.{place} ("{term.name}") has baseline = "group" and each prompt is answered once, so that '
                    "every answer would be as good as its group; write sampler.samples_per_prompt = 2 or more"
                )
            if term.baseline is Baseline.GROUP and self.sampler.replay.highest > 0:
                raise ValueError(
                    f'terms.{place} ("{term.name}") has baseline = "group" and a replayed answer is one to another '
                    'question than those around it; write sampler.replay_fraction = 0, or baseline = "batch"'
                )
        return self

    @model_validator(mode="after")
    def _check_perplexity(self) -> Self:
        """A row's perplexity is compared with those of the other answers to its question."""
        if self.stages is not None:
            return self
        for place, term in enumerate(self.terms):
            if term.perplexity_temperature is None:
                continue
            if self.sampler.samples_per_prompt < 2:
                raise ValueError(
                    f'terms.{place} ("{term.name}") has a perplexity_temperature and each prompt is answered once, so '
                    "that every answer would weigh 1; write sampler.samples_per_prompt = 2 or more"
                )
            if self.sampler.replay.highest > 0:
                raise ValueError(
                    f'terms.{place} ("{term.name}") has a perplexity_temperature and a replayed answer is one to '
                    "another question than those around it; write sampler.replay_fraction = 0"
                )
        return self

    @property
    def rewarded(self) -> bool:
        """Whether a term trains on what the verifier says."""
        return any(term.teacher == REWARD or asks_verdict(term.as_term) for term in self.terms)

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        rows = self.train.prompts_per_round * self.sampler.samples_per_prompt
        if self.stages is None and self.train.updates_per_round > rows:
            raise ValueError(
                f"train.updates_per_round = {self.train.updates_per_round} is more than the {rows} rows of a round; "
                "lower it or raise prompts_per_round"
            )
        capacity, max_age = self.sampler.replay_capacity, self.sampler.max_age
        if capacity is not None and capacity < rows:
            raise ValueError(
                f"sampler.replay_capacity = {capacity} does not hold the {rows} rows of one round; raise it, or lower "
                "prompts_per_round"
            )
        steps = self.train.updates_per_round * self.train.epochs
        if max_age is not None and max_age < steps:
            raise ValueError(
                f"sampler.max_age = {max_age} replays nothing, the round before is {steps} steps old; raise max_age, "
                "or write replay_fraction = 0"
            )
        return self

    @model_validator(mode="after")
    def _check_adaptive(self) -> Self:
        if self.sampler.adaptive is None:
            return self
        if not self.has_teacher_model:
            lacking = "there is no [teacher]" if self.teacher is None else "[teacher] has stored scores only"
            raise ValueError(
                f"[sampler.adaptive] follows the held-out divergence from the teacher and {lacking}; name its model"
            )
        if self.evaluation.every == 0:
            raise ValueError(
                "[sampler.adaptive] follows the evaluations and evaluation.every = 0 makes none while training; write "
                "how many steps lie between them"
            )
        return self
