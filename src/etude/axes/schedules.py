"""A scalar of the step: constant, or on its way from one value to another.

For anything in a recipe that may change while training: coefficients, a jsd's beta, the share of rows the student
writes, the horizon up to which a row is trained. A `Ramp` is a pure function of the step, so that a resumed run needs
nothing of it from a checkpoint. Pure Python. It does not know what it is the value of, nor which values that may have:
`lowest` and `highest` let the owner check both before the first step. The learning rate has its own warm-up and decay
in `training.stages`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["constant", "linear", "cosine", "step"]


@dataclass(frozen=True, slots=True, eq=False)
class Ramp:
    """From `start` to `end` over the steps `first` to `last`: `start` up to `first`, `end` from `last` on.

    Steps are optimiser steps of the stage, counted from 0. In between, with u = (step - first) / (last - first):

    - `constant`: `start` at every step, the other fields stay unset

        >>> [Ramp(0.5).value(step) for step in (0, 7)]
        [0.5, 0.5]

    - `linear`: start + (end - start) u

        >>> [Ramp(1.0, 0.0, kind="linear", first=2, last=6).value(step) for step in (0, 2, 3, 4, 5, 6, 9)]
        [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]

    - `cosine`: start + (end - start) (1 - cos(pi u)) / 2, level at both ends

        >>> [round(Ramp(1.0, 0.0, kind="cosine", last=4).value(step), 3) for step in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]

    - `step`: jumps at step `last`, the first one with `end`; `first` stays unset

        >>> [Ramp(1.0, 0.0, kind="step", last=2).value(step) for step in range(4)]
        [1.0, 1.0, 0.0, 0.0]

    One that never changes equals the plain number, and hashes like it:

        >>> Ramp(0.5) == 0.5, Ramp(0.5, 0.5, kind="linear", last=9) == 0.5, Ramp(0.5, 1.0, kind="linear", last=9) == 0.5
        (True, True, False)

    Raises:
        ValueError: an unknown kind, a value that is not finite, a field that is missing or would do nothing, or steps
            that do not ascend from 0.

    Reference: annealing of the student's share, Lin et al. 2020 (ImitKD); growing horizon, arXiv 2602.15260.
    """

    start: float
    end: float | None = None
    kind: Kind = "constant"
    first: int = 0
    last: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"a ramp of kind '{self.kind}'; expected one of {', '.join(get_args(Kind))}")
        if not all(math.isfinite(value) for value in (self.start, self._end)):
            raise ValueError(f"a ramp from {self.start} to {self._end}; expected finite numbers")
        if self.kind == "constant":
            if self.end is not None or self.last is not None or self.first != 0:
                raise ValueError(
                    f"a constant of {self.start} has end {self.end}, first {self.first}, last {self.last}; "
                    "it has a start alone, or another kind"
                )
            return
        if self.end is None or self.last is None:
            raise ValueError(f"a {self.kind} ramp has end {self.end} and last {self.last}; expected a number for both")
        if self.kind == "step" and self.first != 0:
            raise ValueError(f"a step ramp has first {self.first}; it jumps at `last`, {self.last}, and takes no first")
        if not 0 <= self.first < self.last:
            raise ValueError(f"a {self.kind} ramp over steps {self.first} to {self.last}; expected 0 <= first < last")

    def value(self, step: int) -> float:
        """The scalar at that step."""
        if self.last is None or step <= self.first:
            return float(self.start)
        if step >= self.last:
            return float(self._end)
        if self.kind == "step":
            return float(self.start)
        progress = (step - self.first) / (self.last - self.first)
        if self.kind == "cosine":
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        value = self.start + (self._end - self.start) * progress
        return min(max(value, self.lowest), self.highest)  # rounding may not carry a beta beyond 1

    def whole(self, step: int) -> int:
        """The value as a number of tokens or rows: the nearest integer, halves upwards.

        >>> [Ramp(16, 64, kind="linear", last=5).whole(step) for step in range(6)]
        [16, 26, 35, 45, 54, 64]
        """
        return math.floor(self.value(step) + 0.5)

    @property
    def _end(self) -> float:
        return self.start if self.end is None else self.end

    @property
    def lowest(self) -> float:
        """The smallest value at any step."""
        return float(min(self.start, self._end))

    @property
    def highest(self) -> float:
        """The largest value at any step."""
        return float(max(self.start, self._end))

    @property
    def constant(self) -> bool:
        """Whether it has one value at every step, whatever its kind."""
        return self.start == self._end

    def _key(self) -> float | tuple[float, float | None, Kind, int, int | None]:
        return self.start if self.constant else (self.start, self.end, self.kind, self.first, self.last)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ramp):
            return self._key() == other._key()
        return self.constant and self.start == other if isinstance(other, int | float) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


def as_ramp(value: float | Ramp) -> Ramp:
    """A ramp as it is, a number as the ramp that stays there.

    >>> as_ramp(0.5).value(3), as_ramp(Ramp(0.0, 1.0, kind="linear", last=4)).value(3)
    (0.5, 0.75)
    """
    return value if isinstance(value, Ramp) else Ramp(value)
