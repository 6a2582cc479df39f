"""Where in a run we are: rounds and steps, and the learning rate there.

A round is prompts, rollouts, scores; it has `updates_per_round` x `epochs` optimiser steps, one by default. The number
of steps taken is the whole state: round and place within the round follow from it, and so do the learning rate and
every random number. Pure arithmetic, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from etude.axes.names import Schedule


@dataclass(frozen=True, slots=True)
class Plan:
    """How many steps a stage takes and how they fall into rounds.

    >>> plan = Plan(steps=5, updates_per_round=2)
    >>> [(plan.round_of(step), plan.place_of(step)) for step in range(5)]
    [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    >>> list(plan.rounds(after=3))
    [1, 2]
    """

    steps: int  # optimiser steps in all
    updates_per_round: int = 1  # parts a round's rows are cut into, one step each
    epochs: int = 1  # times a round's rows are gone through
    stage: int = 0  # index of the stage; part of every random key

    @property
    def steps_per_round(self) -> int:
        return self.updates_per_round * self.epochs

    def round_of(self, step: int) -> int:
        """The round in which step number `step` (from 0) is taken."""
        return step // self.steps_per_round

    def first_step(self, round: int) -> int:
        """Number of the first step taken in that round."""
        return round * self.steps_per_round

    def place_of(self, step: int) -> int:
        """Steps already taken in that round before it."""
        return step % self.steps_per_round

    def rounds(self, after: int) -> Iterator[int]:
        """The rounds still to come, the unfinished one first, when `after` steps have been taken."""
        if after < self.steps:
            yield from range(self.round_of(after), self.round_of(self.steps - 1) + 1)

    def update_of(self, row: int, num_rows: int) -> int:
        """Which update of an epoch trains global row `row`; contiguous, and the same for any number of ranks."""
        return row * self.updates_per_round // num_rows


def learning_rate_factor(
    step: int, *, steps: int, warmup_steps: int = 0, schedule: Schedule = Schedule.CONSTANT, final_fraction: float = 0.0
) -> float:
    """Share of the peak learning rate for step number `step` (from 0).

    Rises linearly to 1 over the warm-up, then stays, or falls (linearly or along half a cosine) to `final_fraction` at
    the last step.

    >>> [round(learning_rate_factor(s, steps=6, warmup_steps=2, schedule=Schedule.LINEAR), 2) for s in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule is Schedule.CONSTANT:
        return 1.0
    first = max(warmup_steps - 1, 0)  # the step at which the peak is reached
    progress = (step - first) / max(steps - 1 - first, 1)
    if schedule is Schedule.LINEAR:
        return 1.0 - (1.0 - final_fraction) * progress
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))
