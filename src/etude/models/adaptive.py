"""The student's share of the rows, raised where the student gets worse: DistiLLM's threshold.

Unlike a ramp it is not a function of the step alone: it hears of every evaluation, and a checkpoint holds it. It knows
no sampler; `models/mixture.py` asks it for the share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.errors import RecipeError

OBSERVED = "heldout/reverse_kl"  # what stands for the validation loss: lower is better, and every run has it


@dataclass(slots=True)
class AdaptiveFraction:
    """phi: goes up by `rise`, to 1 at most, when the held-out divergence is `tolerance` above the reference, or more.

    The reference is the first measurement, and after every rise the one that caused it. It never goes down.

    >>> phi = AdaptiveFraction(0.0, rise=0.25, tolerance=0.5)
    >>> for divergence in (2.0, 1.0, 2.25, 2.5, 2.75, 3.0):
    ...     phi.observe({"heldout/reverse_kl": divergence})
    ...     print(phi.value(step=0), phi.reference)
    0.0 2.0
    0.0 2.0
    0.0 2.0
    0.25 2.5
    0.25 2.5
    0.5 3.0

    Ko et al. 2024, "DistiLLM: Towards Streamlined Distillation for Large Language Models", section 3.2 (from 0 by 0.1;
    the published tolerance, 0.1, is of the cross-entropy on held-out completions of the data).

    Raises:
        RecipeError: a share outside 0 to 1, no rise, or a negative tolerance.
    """

    fraction: float = 0.0  # phi, as it is now
    rise: float = 0.1
    tolerance: float = 0.1  # nats a token
    reference: float | None = None  # None: nothing was measured yet

    def __post_init__(self) -> None:
        if not (0.0 <= self.fraction <= 1.0 and 0.0 < self.rise <= 1.0 and self.tolerance >= 0.0):
            raise RecipeError(
                f"an adaptive share of {self.fraction} that rises by {self.rise} beyond a tolerance of "
                f"{self.tolerance}; write a share from 0 to 1, a rise above 0 and up to 1, and a tolerance of at "
                "least 0"
            )

    def value(self, step: int) -> float:
        """The share, which is the same at every step until the next evaluation."""
        return self.fraction

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Hear what an evaluation has measured.

        Raises:
            RecipeError: it has not measured the divergence.
        """
        if OBSERVED not in metrics:
            raise RecipeError(
                f"the student's share follows {OBSERVED}, and the evaluation measured {', '.join(metrics) or 'nothing'}"
                "; name a [teacher] to compare with, or leave out [sampler.adaptive]"
            )
        measured = metrics[OBSERVED]
        if self.reference is None:
            self.reference = measured
        elif measured >= self.reference + self.tolerance:
            self.fraction = min(self.fraction + self.rise, 1.0)
            self.reference = measured

    def facts(self) -> dict[str, float | None]:
        """What a checkpoint holds of it, as JSON values."""
        return {"fraction": self.fraction, "reference": self.reference}

    def restore(self, facts: Mapping[str, float]) -> None:
        """Take back what `facts` gave."""
        self.fraction, self.reference = facts["fraction"], facts["reference"]
