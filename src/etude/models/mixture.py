"""Who writes which row: the dataset, or a seeded mixture of two samplers.

Both are samplers themselves, so the loop knows only one. The draw of a row depends on (seed, stage, round, row) and on
nothing else, so it is the same on any number of ranks and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from etude.axes.names import FinishReason, Source
from etude.core.records import Prompt, Rollout
from etude.errors import DataError
from etude.models.roles import AbstractSampler, AbstractStudent
from etude.runtime.seeds import Key


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
    """Row by row, the student with probability `student_fraction` (GKD's lambda), somebody else otherwise."""

    def __init__(self, student: AbstractSampler, other: AbstractSampler, student_fraction: float) -> None:
        self.student = student
        self.other = other
        self.student_fraction = student_fraction
        self.version = student.version

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        draws = replace(key, purpose=f"{key.purpose}/writer")
        by_student = [draws.uniforms(prompt.row, 1).item() < self.student_fraction for prompt in prompts]
        written = {
            student: iter(sampler.sample([p for p, s in zip(prompts, by_student, strict=True) if s is student], key))
            for student, sampler in ((True, self.student), (False, self.other))
        }
        return [next(written[student]) for student in by_student]

    def refresh(self, student: AbstractStudent, version: int) -> None:
        self.student.refresh(student, version)
        self.other.refresh(student, version)
        self.version = version
