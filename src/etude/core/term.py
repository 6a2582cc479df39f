"""A term: one summand of the loss, as plain values.

What a recipe's `[[terms]]` says, without the recipe: which teacher, how much of its distribution, measured how, trained
how, on which rows. It computes nothing; `core.objective` makes a loss of a list of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from etude.axes.names import LABEL, Divergence, Estimator, Form, Gives, Importance, Reduction, Source, Support
from etude.core.divergences import DivergenceFn, divergence_fn

ALL_SOURCES = frozenset(Source)


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the loss. The defaults are the plain reverse KL of on-policy distillation.

    Raises:
        ValueError: a parameter is missing, out of range, or would do nothing under the other axes.
    """

    name: str = "reverse_kl"  # how metrics call it
    teacher: str = "teacher"  # a teacher's name, or "label": the one-hot label, i.e. cross-entropy
    support: Support = Support.FULL
    divergence: Divergence = Divergence.REVERSE_KL
    beta: float | None = None  # jsd: the teacher's weight in the mixture
    alpha: float | None = None  # skewed divergences
    estimator: Estimator = Estimator.ANALYTIC
    form: Form | None = None  # sampled support; None: k2 when differentiated, k1 as a reward
    discount: float = 0.0  # policy gradient: 0 token-level, 1 sequence-level
    importance: Importance = Importance.NONE  # policy gradient
    clip: float | None = None  # ppo_clip
    coefficient: float = 1.0
    sources: Collection[Source] = ALL_SOURCES  # whose rows it trains
    train_truncated: bool = True  # rows cut at the length limit
    reduction: Reduction = Reduction.TOKEN_MEAN

    @property
    def needs(self) -> frozenset[Gives]:
        """What its teacher must give about each rollout."""
        if self.teacher == LABEL:
            return frozenset({Gives.LABELS})
        return frozenset({Gives.HIDDEN_STATES if self.support is Support.FULL else Gives.SAMPLED_LOGPROBS})

    @property
    def rewards_needed(self) -> bool:
        """Whether `prepare` must turn log-ratios into advantages."""
        return self.estimator is Estimator.POLICY_GRADIENT

    def divergence_fn(self) -> DivergenceFn:
        """The divergence with its parameter filled in; per token, knows no mask and no weight."""
        return divergence_fn(self.divergence, beta=self.beta, alpha=self.alpha)

    def __post_init__(self) -> None:
        # Plain words, as a notebook writes them, become the axes' own; an unknown one is a ValueError.
        words = {"support": Support, "divergence": Divergence, "estimator": Estimator, "importance": Importance}
        for name, axis in (words | {"reduction": Reduction}).items():
            object.__setattr__(self, name, axis(getattr(self, name)))
        object.__setattr__(self, "form", None if self.form is None else Form(self.form))
        object.__setattr__(self, "sources", frozenset(Source(source) for source in self.sources))

        def refuse(found: str, expected: str) -> None:
            raise ValueError(f"term '{self.name}' has {found}; {expected}")

        self.divergence_fn()
        if self.form is not None and self.support is not Support.SAMPLED:
            refuse(f"form '{self.form}' with support '{self.support}'", "a form belongs to support 'sampled'")
        if self.estimator is Estimator.ANALYTIC and (self.discount or self.importance is not Importance.NONE):
            refuse(
                f"discount {self.discount} and importance '{self.importance}' with estimator '{self.estimator}'",
                "both belong to 'policy_gradient'",
            )
        if not 0.0 <= self.discount <= 1.0:
            refuse(f"discount {self.discount}", "expected 0 (each token alone) to 1 (the whole rest of the row)")
        if (self.clip is not None) != (self.importance is Importance.PPO_CLIP):
            refuse(f"clip {self.clip} with importance '{self.importance}'", "a clip goes with 'ppo_clip' alone")
        if self.clip is not None and not 0.0 < self.clip < 1.0:
            refuse(f"clip {self.clip}", "expected a share between 0 and 1")
