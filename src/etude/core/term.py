"""A term: one summand of the loss, as plain values.

What a recipe's `[[terms]]` says, without the recipe: which teacher, how much of its distribution, measured how, trained
how, on which tokens. It computes nothing; `core.objective` makes a loss of a list of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from etude.axes.names import (
    LABEL,
    REFERENCE,
    REWARD,
    Baseline,
    Correctness,
    Divergence,
    Estimator,
    Form,
    Gives,
    Importance,
    Owner,
    Reduction,
    Source,
    Support,
    Tail,
)
from etude.axes.schedules import Ramp, as_ramp
from etude.axes.terms import asks_verdict, check_term
from etude.core.divergences import DivergenceFn, divergence_fn

ALL_SOURCES = frozenset(Source)


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the loss. The defaults are the plain reverse KL of on-policy distillation.

    Raises:
        ValueError: a parameter is missing, out of range, or would do nothing under the other axes.
    """

    name: str = "reverse_kl"  # how metrics call it
    teacher: str = "teacher"  # a teacher's name; "label": the one-hot label, i.e. cross-entropy; "reward": a verifier
    extrapolation: float | None = None  # lambda of the target teacher^lambda reference^(1 - lambda); None: 1
    support: Support = Support.FULL
    renormalise: bool = False  # sampled support: both sides renormalised over the ids the sampler's cuts kept
    top_k: int | None = None  # top_k: ids kept a side
    owner: Owner | None = None  # top_k; None: the teacher's
    tail: Tail | None = None  # top_k; None: bucket
    divergence: Divergence = Divergence.REVERSE_KL
    beta: float | None = None  # jsd: the teacher's weight in the mixture; alpha_beta: the student's power
    alpha: float | None = None  # skewed divergences: the skew; alpha_beta: the teacher's power
    head_mass: float | None = None  # adaptive_kl: the teacher's probability that counts as its head
    rescale: bool = False  # jsd: divide by beta (1 - beta)
    detach_mixture: bool = False  # skew_reverse_kl: the student inside the mixture is a constant
    estimator: Estimator = Estimator.ANALYTIC
    form: Form | None = None  # sampled support; None: k2 when differentiated, k1 as a reward
    discount: float = 0.0  # policy gradient: 0 token-level, 1 sequence-level; a reward, at the end of its row, needs it
    length_normalise: bool = False  # policy gradient: returns divided by the student's tokens they reach over
    baseline: Baseline = Baseline.NONE  # policy gradient
    whiten: bool = False  # policy gradient: advantages of the round (baseline group: of the group) to deviation 1
    advantage_clip: float | None = None  # policy gradient: largest size of an advantage
    importance: Importance = Importance.NONE  # policy gradient
    clip: float | None = None  # ppo_clip
    bounds: tuple[float, float] | None = None  # truncated, masked: lowest and highest ratio
    coefficient: float | Ramp = 1.0
    sources: Collection[Source] = ALL_SOURCES  # whose rows it trains
    train_truncated: bool = True  # rows cut at the length limit
    left_out_ids: Collection[int] = ()  # ids not trained wherever they were written, such as special tokens
    skip_first: int = 0  # leading tokens of a completion that are not trained
    first_tokens: int | Ramp | None = None  # the horizon: tokens after these are not trained; None: to the end
    source_weights: Mapping[Source, float] = field(default_factory=dict[Source, float])  # by who wrote; left out: 1
    correctness: Correctness | None = None  # rows a verifier calls right, or wrong; None: both
    right_weight: float = 1.0  # of rows a verifier calls right, where both kinds are trained
    wrong_weight: float = 1.0
    perplexity_temperature: float | None = None  # one kind of rows: weighed by perplexity within each question
    disagreement_weight: float | None = None  # policy gradient: weight of a row's first token, falling to 1
    teacher_entropy: float | None = None  # nats: only tokens at which the teacher is less certain than this
    entropy_share: float | None = None  # of the round's tokens, those where the student is least certain
    confident_wrong_share: float | None = None  # of the others, those it is surest of against its teacher
    reduction: Reduction = Reduction.TOKEN_MEAN

    @property
    def teachers(self) -> tuple[str, ...]:
        """Names of the models whose marks it needs, each what `needs` says."""
        if self.teacher in (LABEL, REWARD):
            return ()
        return (self.teacher,) if self.extrapolation is None else (self.teacher, REFERENCE)

    @property
    def needs(self) -> frozenset[Gives]:
        """What its teacher must give about each rollout."""
        if self.teacher == LABEL:
            return frozenset({Gives.LABELS})
        if self.teacher == REWARD:
            return frozenset({Gives.REWARDS})
        kept = {Gives.KEPT_MASS} if self.renormalise else set[Gives]()
        needs = {Gives.SAMPLED_LOGPROBS} if self.support is Support.SAMPLED else {Gives.HIDDEN_STATES}
        if self.baseline is Baseline.STATE_KL or self.teacher_entropy is not None:
            needs.add(Gives.HIDDEN_STATES)
        if self.confident_wrong_share is not None or self._weighed_by_teacher:
            needs.add(Gives.SAMPLED_LOGPROBS)
        return frozenset(needs | kept)

    @property
    def rewards_needed(self) -> bool:
        """Whether `prepare` must turn log-ratios, or the rows' rewards, into advantages."""
        return self.estimator is Estimator.POLICY_GRADIENT

    @property
    def log_ratios_needed(self) -> bool:
        """Whether those are log-ratios, for which the student must be asked before the round's first step."""
        return self.rewards_needed and self.teacher != REWARD

    @property
    def verdicts_needed(self) -> bool:
        """Whether a verifier must say which rows are right."""
        return asks_verdict(self)

    @property
    def student_logprobs_needed(self) -> bool:
        """Whether the student must be asked about the drawn tokens before the round's first step."""
        by_perplexity = self.perplexity_temperature is not None and not self._weighed_by_teacher
        return self.log_ratios_needed or self.confident_wrong_share is not None or by_perplexity

    @property
    def _weighed_by_teacher(self) -> bool:
        return self.perplexity_temperature is not None and self.correctness is Correctness.WRONG

    @property
    def train_special(self) -> bool:
        """Whether every id is trained: what the recipe says in place of the ids."""
        return not self.left_out_ids

    @property
    def chooses(self) -> bool:
        """Whether it trains the informative tokens of a round only."""
        return self.entropy_share is not None or self.confident_wrong_share is not None

    @property
    def round_moments_needed(self) -> bool:
        """Whether its advantages are centred over the whole round, and not (only) over each question's rows."""
        return self.baseline is Baseline.BATCH or (self.whiten and self.baseline is not Baseline.GROUP)

    def coefficient_at(self, step: int) -> float:
        """Its coefficient at an optimiser step, from 0."""
        return as_ramp(self.coefficient).value(step)

    def horizon_at(self, step: int) -> int | None:
        """Trained tokens of a completion in the round that begins with this step; None: all."""
        return None if self.first_tokens is None else as_ramp(self.first_tokens).whole(step)

    def divergence_fn(self) -> DivergenceFn:
        """The divergence with its parameters filled in; per token, knows no mask and no weight."""
        return divergence_fn(
            self.divergence,
            beta=self.beta,
            alpha=self.alpha,
            head_mass=self.head_mass,
            rescale=self.rescale,
            detach_mixture=self.detach_mixture,
        )

    def __post_init__(self) -> None:
        self._read_words()
        check_term(self)
        self.divergence_fn()

    def _read_words(self) -> None:
        """Plain words, as a notebook writes them, become the axes' own; an unknown one is a ValueError."""
        words = {"support": Support, "divergence": Divergence, "estimator": Estimator, "importance": Importance}
        for name, axis in (words | {"reduction": Reduction, "baseline": Baseline}).items():
            object.__setattr__(self, name, axis(getattr(self, name)))
        optional = {"form": Form, "owner": Owner, "tail": Tail, "correctness": Correctness}
        for name, axis in optional.items():
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else axis(value))
        object.__setattr__(self, "sources", frozenset(Source(source) for source in self.sources))
        object.__setattr__(self, "left_out_ids", frozenset(self.left_out_ids))
        weights = {Source(source): weight for source, weight in self.source_weights.items()}
        object.__setattr__(self, "source_weights", weights)
        if self.extrapolation == 1.0:  # the reference cancels, so it is never asked
            object.__setattr__(self, "extrapolation", None)
        if self.support is Support.TOP_K:
            object.__setattr__(self, "owner", self.owner or Owner.TEACHER)
            object.__setattr__(self, "tail", self.tail or Tail.BUCKET)
