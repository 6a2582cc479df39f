"""Teachers made of the student itself: underneath its adapters, as each round begins, and as a moving average.

The first two mark with the student's own modules, so that they cost no second model; adapters, weights and modes are
as before when they have marked, also after an exception. They hear of each optimiser step from the loop and change
their marks at the end of a round only, because a round's hidden states are read with one head in all its steps.
What has to come back bit for bit is saved with the run's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from etude.errors import CheckpointError, ModelError, PairError
from etude.models.roles import AbstractStudent
from etude.models.teachers import InProcessTeacher
from etude.runtime.checkpoints import load_tensors, save_tensors

_AVERAGE, _MARKING = "average.safetensors", "marking.safetensors"


class BaseTeacher(InProcessTeacher):
    """The model underneath the student's adapters, which are switched off while it marks.

    Args:
        name: the teacher's name in the recipe.
        student: who learns; what it trains must be adapters and nothing else.
        tokens_per_batch: padded tokens of one forward pass.

    Raises:
        ModelError: weights of the model underneath are trained, so that this teacher would move.
    """

    def __init__(self, name: str, student: AbstractStudent, *, tokens_per_batch: int = 8192) -> None:
        trained = [weight for weight in student.trainable_parameters() if ".lora_" not in weight]
        if trained:
            raise ModelError(
                f"the teacher '{name}' is the student without its adapters, and {len(trained)} of its own weights are "
                f'trained ({trained[0]} first); train adapters alone (student.lora), or write weights = "model"'
            )
        super().__init__(name, student.backbone, tokens_per_batch=tokens_per_batch)

    def marking(self) -> AbstractContextManager[None]:
        return self.backbone.without_adapters()


class LiveTeacher(InProcessTeacher):
    """The student as it was when the round began. Keeps a copy of what is trained, and nothing else.

    Args:
        name: the teacher's name in the recipe.
        student: who learns.
        tokens_per_batch: padded tokens of one forward pass.
    """

    def __init__(self, name: str, student: AbstractStudent, *, tokens_per_batch: int = 8192) -> None:
        super().__init__(name, student.backbone, tokens_per_batch=tokens_per_batch)
        self._trained = student.trainable_parameters()
        self._marking = {key: weight.detach().clone() for key, weight in self._trained.items()}
        self._behind = False  # whether the student has moved on since

    @contextmanager
    def marking(self) -> Iterator[None]:
        present = {key: weight.data for key, weight in self._trained.items()}
        try:
            for key, weight in self._trained.items():
                weight.data = self._marking[key]
            yield
        finally:
            for key, weight in self._trained.items():
                weight.data = present[key]

    def begin(self, student: AbstractStudent) -> None:
        self._take({key: weight.detach() for key, weight in self._trained.items()})

    def follow(self, student: AbstractStudent, step: int, *, round_over: bool) -> None:
        self._behind = True
        if round_over:
            self.begin(student)

    def save(self, folder: Path) -> None:
        """Inside a round, the weights it began with."""
        if self._behind:
            save_tensors(folder / _MARKING, self._marking)

    def load(self, folder: Path, student: AbstractStudent) -> None:
        self.begin(student)
        if (folder / _MARKING).exists():
            self._take(load_tensors(folder / _MARKING))
            self._behind = True

    def _take(self, weights: dict[str, Tensor]) -> None:
        for key, kept in self._marking.items():
            kept.copy_(weights[key])
        self._behind = False


class EmaTeacher(InProcessTeacher):
    """A moving average of the student: average += rate * (student - average), every so many optimiser steps.

    Of the weights as they act: with adapters, of W + scale * B A and not of A and B, whose averages multiply to
    something else. Kept in float32 at least, for in bfloat16 most of its movements would be rounded away; it marks with
    a copy in `dtype` that is renewed at the end of a round.

    Args:
        name: the teacher's name in the recipe.
        student: who learns, and where the average begins.
        rate: the share of the student that comes in at a time, above 0 and at most 1.
        every: optimiser steps between two of these.
        dtype: precision to mark in.
        tokens_per_batch: padded tokens of one forward pass.

    Raises:
        PairError: a rate or an interval that is not such.
    """

    def __init__(
        self,
        name: str,
        student: AbstractStudent,
        *,
        rate: float,
        every: int = 1,
        dtype: str = "float32",
        tokens_per_batch: int = 8192,
    ) -> None:
        if not 0 < rate <= 1 or every < 1:
            raise PairError(
                f"the teacher '{name}' averages the student at rate {rate} every {every} steps; expected a rate above "
                "0 and at most 1, and 1 step or more"
            )
        super().__init__(name, student.backbone.copy_as(dtype), tokens_per_batch=tokens_per_batch)
        self.rate, self.every = rate, every
        self._average = {
            key: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for key, weight in self._weights_of(student)
        }
        self._behind = False  # whether the average has moved on from what marks

    def begin(self, student: AbstractStudent) -> None:
        with torch.no_grad():
            for key, weight in self._weights_of(student):
                self._average[key].copy_(weight)
        self._settle()

    @torch.no_grad()
    def follow(self, student: AbstractStudent, step: int, *, round_over: bool) -> None:
        if step % self.every == 0:
            for key, weight in self._weights_of(student):
                average = self._average[key]
                average.lerp_(weight.to(average.dtype), self.rate)
            self._behind = True
        if round_over and self._behind:
            self._settle()

    def save(self, folder: Path) -> None:
        """The average and, inside a round, the weights that mark in it."""
        save_tensors(folder / _AVERAGE, self._average)
        if self._behind:
            save_tensors(folder / _MARKING, dict(self.backbone.named_parameters()))

    def load(self, folder: Path, student: AbstractStudent) -> None:
        if not (folder / _AVERAGE).exists():
            raise CheckpointError(
                f"the checkpoint {folder.parents[1].name} holds no average for the teacher '{self.name}'; start over "
                "with --fresh"
            )
        for key, weight in load_tensors(folder / _AVERAGE).items():
            self._average[key].copy_(weight)
        self._settle()
        if (folder / _MARKING).exists():
            self._mark_with(load_tensors(folder / _MARKING))
            self._behind = True

    def _weights_of(self, student: AbstractStudent) -> Iterator[tuple[str, Tensor]]:
        """Each weight once, tied ones under the name they have here."""
        names = dict(self.backbone.named_parameters())
        yield from ((key, weight) for key, weight in student.backbone.effective_weights() if key in names)

    def _settle(self) -> None:
        self._mark_with(self._average)
        self._behind = False

    @torch.no_grad()
    def _mark_with(self, weights: dict[str, Tensor]) -> None:
        for key, weight in self.backbone.named_parameters():
            weight.copy_(weights[key])
