"""Who writes which row: the dataset, or a seeded mixture of two samplers.

Both are samplers themselves, so the loop knows only one. The coin of a row depends on (seed, stage, round, row) and on
nothing else, that of a whole round on (seed, stage, round), so both are the same on any number of ranks and after a
resume; a share that follows the evaluations is the one thing remembered. Rows that student and teacher write together,
token by token, are `models/joint.py`'s, rows of earlier rounds `models/replay.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast, get_args

from etude.axes.names import FinishReason, Source
from etude.axes.schedules import Ramp, as_ramp
from etude.core.records import Prompt, Rollout
from etude.errors import DataError, RecipeError
from etude.models.adaptive import AdaptiveFraction
from etude.models.roles import AbstractSampler, AbstractStudent
from etude.runtime.seeds import Key

Mix = Literal["row", "batch"]
_FRACTION = "fraction.json"


def require_mix(mix: str) -> None:
    """Raise `RecipeError` for a word that is no mix."""
    if mix not in get_args(Mix):
        raise RecipeError(f"there is no mix '{mix}'; write one of {', '.join(get_args(Mix))}")


class DatasetSampler(AbstractSampler):
    """Hands out the dataset's own completions, as they are."""

    version = 0

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        return [self._rollout(prompt) for prompt in prompts]

    def _rollout(self, prompt: Prompt) -> Rollout:
        if prompt.completion_ids is None:
            raise DataError(
                f"row {prompt.row} of the round has no completion of its own, and the recipe takes rows from the "
                "dataset; name the completion column in data.columns, or write student_fraction = 1"
            )
        return Rollout(
            prompt=prompt,
            completion_ids=prompt.completion_ids,
            source=Source.DATASET,
            finish_reason=FinishReason.STOP,
            version=self.version,
        )

    def refresh(self, student: AbstractStudent, version: int) -> None:
        """The dataset does not change; only the stamp does."""
        self.version = version


class MixtureSampler(AbstractSampler):
    """The student writes with probability `student_fraction` (GKD's lambda), somebody else otherwise.

    Args:
        student: writes its share.
        other: writes the rest.
        student_fraction: 0 to 1, a ramp of the optimiser steps the student has taken (ImitKD's annealing), or one
            that follows the evaluations (DistiLLM's threshold).
        mix: "row": a coin for each row, so that every round has about its share of both. "batch": one coin for all
            rows of a round, as published for GKD (Agarwal et al. 2023, "On-Policy Distillation of Language Models",
            algorithm 1).

    Raises:
        RecipeError: there is no such mix.
    """

    def __init__(
        self,
        student: AbstractSampler,
        other: AbstractSampler,
        student_fraction: float | Ramp | AdaptiveFraction,
        *,
        mix: Mix = "row",
    ) -> None:
        require_mix(mix)
        self.student = student
        self.other = other
        self.adaptive = student_fraction if isinstance(student_fraction, AdaptiveFraction) else None
        self.student_fraction = self.adaptive or as_ramp(cast("float | Ramp", student_fraction))
        self.mix = mix
        self.version = student.version

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        draws = replace(key, purpose=f"{key.purpose}/writer")
        # A batch goes by the coin of its global row 0, which every rank can toss, also the ranks without that row.
        coins = [prompt.row if self.mix == "row" else 0 for prompt in prompts]
        fraction = self.student_fraction.value(self.version)
        by_student = [draws.uniforms(coin, 1).item() < fraction for coin in coins]
        written = {
            student: iter(sampler.sample([p for p, s in zip(prompts, by_student, strict=True) if s is student], key))
            for student, sampler in ((True, self.student), (False, self.other))
        }
        return [next(written[student]) for student in by_student]

    def refresh(self, student: AbstractStudent, version: int) -> None:
        self.student.refresh(student, version)
        self.other.refresh(student, version)
        self.version = version

    @property
    def parts(self) -> Mapping[str, AbstractSampler]:
        return {"student": self.student, "other": self.other}

    def observe(self, metrics: Mapping[str, float]) -> None:
        super().observe(metrics)
        if self.adaptive:
            self.adaptive.observe(metrics)

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.adaptive:
            (folder / _FRACTION).write_text(json.dumps(self.adaptive.facts()), encoding="utf-8")

    def load(self, folders: Sequence[Path], mine: Callable[[int], bool]) -> None:
        super().load(folders, mine)
        if self.adaptive:  # every process has heard the same
            self.adaptive.restore(json.loads((folders[0] / _FRACTION).read_text(encoding="utf-8")))
