"""A number that moves with the step, as a recipe writes it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from etude.axes.schedules import Kind, Ramp
from etude.config.noun import Noun


class RampConfig(Noun):
    """A number that moves with the step: `start` up to step `first`, `end` from step `last` on.

    A recipe that leaves `last` out means its own end; `etude.config.load` knows how many steps there are and fills it.
    """

    start: float = Field(description="The value at first.")
    end: float = Field(description="The value at last.")
    kind: Literal["linear", "cosine", "step"] = Field(
        default="linear", description="How it goes from one to the other."
    )
    first: int = Field(default=0, ge=0, description="Optimiser step at which it begins to move; not for step.")
    last: int | None = Field(
        default=None,
        ge=1,
        description="Optimiser step from which on it is at its end. Left out: train.steps, of the recipe or the stage; "
        "a step must be told.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.ramp()
        return self

    def ramp(self) -> Ramp:
        """As the axes have it."""
        kind: Kind = self.kind
        return Ramp(self.start, self.end, kind=kind, first=self.first, last=self.last)


def ramp_of(value: object) -> object:
    """A table that moves with the step as the ramp it describes, anything else as it is."""
    return value.ramp() if isinstance(value, RampConfig) else value
