"""Which values of a term go together: one set of checks for the recipe and for a `Term` built by hand.

Each check says in one sentence what was found and what was expected. Whether a sound term has the gradient its name
promises is `legality`'s question, asked afterwards. Pure Python: a recipe is checked without torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NoReturn, Protocol

from etude.axes.names import (
    LABEL,
    REFERENCE,
    REWARD,
    Baseline,
    Correctness,
    Divergence,
    Estimator,
    Form,
    Importance,
    Owner,
    Reduction,
    Source,
    Support,
    Tail,
)
from etude.axes.schedules import Ramp, as_ramp

SKEWED = (Divergence.SKEW_FORWARD_KL, Divergence.SKEW_REVERSE_KL)
BOUNDED = (Importance.TRUNCATED, Importance.MASKED)


class TermValues(Protocol):
    """The values of a term: what the recipe's term and `core.term.Term` have in common."""

    @property
    def name(self) -> str: ...
    @property
    def teacher(self) -> str: ...
    @property
    def support(self) -> Support: ...
    @property
    def renormalise(self) -> bool: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def owner(self) -> Owner | None: ...
    @property
    def tail(self) -> Tail | None: ...
    @property
    def divergence(self) -> Divergence: ...
    @property
    def beta(self) -> float | None: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def rescale(self) -> bool: ...
    @property
    def detach_mixture(self) -> bool: ...
    @property
    def estimator(self) -> Estimator: ...
    @property
    def form(self) -> Form | None: ...
    @property
    def discount(self) -> float: ...
    @property
    def length_normalise(self) -> bool: ...
    @property
    def baseline(self) -> Baseline: ...
    @property
    def whiten(self) -> bool: ...
    @property
    def advantage_clip(self) -> float | None: ...
    @property
    def importance(self) -> Importance: ...
    @property
    def clip(self) -> float | None: ...
    @property
    def bounds(self) -> tuple[float, ...] | None: ...
    @property
    def coefficient(self) -> float | Ramp: ...
    @property
    def sources(self) -> Collection[Source]: ...
    @property
    def train_truncated(self) -> bool: ...
    @property
    def skip_first(self) -> int: ...
    @property
    def first_tokens(self) -> float | Ramp | None: ...
    @property
    def train_special(self) -> bool: ...
    @property
    def source_weights(self) -> Mapping[Source, float]: ...
    @property
    def correctness(self) -> Correctness | None: ...
    @property
    def right_weight(self) -> float: ...
    @property
    def wrong_weight(self) -> float: ...
    @property
    def perplexity_temperature(self) -> float | None: ...
    @property
    def disagreement_weight(self) -> float | None: ...
    @property
    def teacher_entropy(self) -> float | None: ...
    @property
    def extrapolation(self) -> float | None: ...
    @property
    def entropy_share(self) -> float | None: ...
    @property
    def confident_wrong_share(self) -> float | None: ...
    @property
    def reduction(self) -> Reduction: ...


def check_term(term: TermValues) -> None:
    """Refuse values that are out of range, or would do nothing under the other axes.

    Raises:
        ValueError: one sentence.
    """
    for check in (
        _check_support,
        _check_divergence,
        _check_target,
        _check_estimator,
        _check_importance,
        _check_tokens,
        _check_choice,
        _check_rows,
        _check_perplexity,
        _check_reward,
    ):
        check(term)


def _refuse(term: TermValues, found: str, expected: str) -> NoReturn:
    raise ValueError(f"term '{term.name}' has {found}; {expected}")


def _check_support(term: TermValues) -> None:
    if term.form is not None and term.support is not Support.SAMPLED:
        _refuse(term, f"form '{term.form}' with support '{term.support}'", "a form belongs to support 'sampled'")
    if term.renormalise and term.support is not Support.SAMPLED:
        _refuse(term, f"renormalise with support '{term.support}'", "it belongs to support 'sampled'")
    if term.support is Support.TOP_K and (term.top_k is None or term.top_k < 1):
        _refuse(term, f"top_k {term.top_k} with support 'top_k'", "expected how many ids are kept, at least 1")
    if term.support is not Support.TOP_K and (term.top_k, term.owner, term.tail) != (None, None, None):
        _refuse(
            term,
            f"top_k {term.top_k}, owner {term.owner} and tail {term.tail} with support '{term.support}'",
            "all three belong to support 'top_k'",
        )


def _check_divergence(term: TermValues) -> None:
    if term.divergence is Divergence.JSD and term.beta is not None:
        if not 0.0 <= term.beta <= 1.0:
            _refuse(term, f"beta {term.beta}", "it is the teacher's weight in jsd's mixture, between 0 and 1")
        if term.rescale and term.beta in (0.0, 1.0):
            _refuse(term, f"rescale with beta {term.beta}", "at its ends jsd is a KL, which needs no rescaling")
    if term.divergence in SKEWED and term.alpha is not None and not 0.0 < term.alpha < 1.0:
        _refuse(term, f"alpha {term.alpha}", "a skew lies strictly between 0 and 1 (0 is the plain KL)")


def _check_target(term: TermValues) -> None:
    if term.extrapolation is None:
        return
    if term.teacher in (LABEL, REFERENCE, REWARD):
        _refuse(
            term,
            f"extrapolation {term.extrapolation} with teacher '{term.teacher}'",
            "a model other than the reference is extrapolated",
        )
    if not term.extrapolation > 0.0:
        _refuse(
            term,
            f"extrapolation {term.extrapolation}",
            "expected the teacher's power, above 0 (1 is the teacher itself, less lies between it and the reference)",
        )


def _check_estimator(term: TermValues) -> None:
    if term.estimator is Estimator.ANALYTIC:
        idle = {
            "discount": term.discount,
            "length_normalise": term.length_normalise,
            "baseline": None if term.baseline is Baseline.NONE else term.baseline,
            "whiten": term.whiten,
            "advantage_clip": term.advantage_clip,
            "importance": None if term.importance is Importance.NONE else term.importance,
            "disagreement_weight": term.disagreement_weight,
        }
        given = [f"{key} {value}" for key, value in idle.items() if value]
        if given:
            _refuse(term, f"{', '.join(given)} with estimator 'analytic'", "these belong to 'policy_gradient'")
    if not 0.0 <= term.discount <= 1.0:
        _refuse(term, f"discount {term.discount}", "expected 0 (each token alone) to 1 (the whole rest of the row)")
    if term.baseline is Baseline.STATE_KL and (term.discount or term.length_normalise or term.whiten):
        _refuse(
            term,
            "baseline 'state_kl' with a discount, length_normalise or whiten",
            "it is the mean of one token's own log-ratio and of nothing else",
        )
    if term.whiten and term.baseline is Baseline.BATCH:
        _refuse(term, "whiten with baseline 'batch'", "whitening takes the round's mean off already")
    if term.advantage_clip is not None and not term.advantage_clip > 0.0:
        _refuse(term, f"advantage_clip {term.advantage_clip}", "expected a size above 0")


def _check_importance(term: TermValues) -> None:
    if (term.clip is not None) != (term.importance is Importance.PPO_CLIP):
        _refuse(term, f"clip {term.clip} with importance '{term.importance}'", "a clip goes with 'ppo_clip' alone")
    if term.clip is not None and not 0.0 < term.clip < 1.0:
        _refuse(term, f"clip {term.clip}", "expected a share between 0 and 1")
    if (term.bounds is not None) != (term.importance in BOUNDED):
        _refuse(
            term,
            f"bounds {term.bounds} with importance '{term.importance}'",
            "bounds go with 'truncated' and 'masked' alone",
        )
    if term.bounds is not None and not 0.0 <= term.bounds[0] < term.bounds[1]:
        _refuse(term, f"bounds {term.bounds}", "expected [low, high] with 0 <= low < high")


def _check_tokens(term: TermValues) -> None:
    if as_ramp(term.coefficient).lowest < 0.0 or as_ramp(term.coefficient).highest <= 0.0:
        _refuse(term, f"coefficient {term.coefficient}", "expected a number above 0, or a ramp between such and 0")
    if term.skip_first < 0:
        _refuse(term, f"skip_first {term.skip_first}", "expected a number of tokens, from 0 on")
    # Rounded as a horizon is, since a ramp that starts at 0.4 starts with no token.
    if term.first_tokens is not None and as_ramp(as_ramp(term.first_tokens).lowest).whole(0) <= term.skip_first:
        _refuse(
            term,
            f"first_tokens {term.first_tokens} with skip_first {term.skip_first}",
            "the horizon must lie beyond the tokens that are skipped, or nothing is trained",
        )
    if term.disagreement_weight is not None and not term.disagreement_weight > 1.0:
        _refuse(term, f"disagreement_weight {term.disagreement_weight}", "expected a weight above 1")
    if term.teacher_entropy is not None and (term.teacher == LABEL or term.teacher_entropy < 0.0):
        _refuse(
            term,
            f"teacher_entropy {term.teacher_entropy} with teacher '{term.teacher}'",
            "expected a threshold in nats, from 0 on, for a model's entropy",
        )


def _check_choice(term: TermValues) -> None:
    shares = {"entropy_share": term.entropy_share, "confident_wrong_share": term.confident_wrong_share}
    for key, share in shares.items():
        if share is not None and not 0.0 < share < 1.0:
            _refuse(term, f"{key} {share}", "expected a share of the tokens, strictly between 0 and 1")
    if term.confident_wrong_share is not None and term.teacher == LABEL:
        _refuse(
            term,
            f"confident_wrong_share {term.confident_wrong_share} with teacher 'label'",
            "who is wrong is said by a model's log-probability of the drawn token",
        )


def asks_verdict(term: TermValues) -> bool:
    """Whether a verifier must say of each row if it is right."""
    return term.correctness is not None or term.right_weight != term.wrong_weight


def _check_rows(term: TermValues) -> None:
    """Weights of whole rows: each above 0, and none that only repeats another key."""
    weights = {f"source_weights.{source}": weight for source, weight in term.source_weights.items()}
    verdicts = {"right_weight": term.right_weight, "wrong_weight": term.wrong_weight}
    for key, weight in (weights | verdicts).items():
        if not 0.0 < weight < math.inf:
            leaves_out = "sources says" if key in weights else "correctness says"
            _refuse(term, f"{key} {weight}", f"expected a number above 0; {leaves_out} whose rows are left out")
    for source in term.source_weights:
        if source not in term.sources:
            _refuse(term, f"source_weights.{source}", f"it trains no rows of '{source}', see its sources")
    if term.correctness is not None and (term.right_weight, term.wrong_weight) != (1.0, 1.0):
        _refuse(
            term,
            f"right_weight {term.right_weight} and wrong_weight {term.wrong_weight} with correctness "
            f"'{term.correctness}'",
            "these weigh both kinds of rows, and one kind alone has its coefficient",
        )
    if term.right_weight == term.wrong_weight != 1.0:
        _refuse(term, f"right_weight and wrong_weight both {term.right_weight}", "that is its coefficient")
    if asks_verdict(term) and term.teacher == REWARD:
        _refuse(
            term,
            f"correctness {term.correctness}, right_weight {term.right_weight} and wrong_weight {term.wrong_weight} "
            "with teacher 'reward'",
            "a reward says by itself which rows are right",
        )


def _check_perplexity(term: TermValues) -> None:
    if term.perplexity_temperature is None:
        return
    if not 0.0 < term.perplexity_temperature < math.inf:
        _refuse(term, f"perplexity_temperature {term.perplexity_temperature}", "expected a number above 0")
    if term.correctness is None:
        _refuse(
            term,
            f"perplexity_temperature {term.perplexity_temperature} without correctness",
            "right rows are weighed by the student's perplexity, wrong ones by the teacher's, so say which it trains",
        )
    if term.correctness is Correctness.WRONG and term.teacher == LABEL:
        _refuse(
            term,
            f"perplexity_temperature {term.perplexity_temperature} on wrong rows with teacher 'label'",
            "wrong rows are weighed by a model's perplexity",
        )


def _check_reward(term: TermValues) -> None:
    """What asks for a model's log-probabilities has none in a reward, and a group's mean is a mean of rewards."""
    if term.teacher != REWARD:
        if term.baseline is Baseline.GROUP:
            _refuse(
                term,
                f"baseline 'group' with teacher '{term.teacher}'",
                "it is the mean reward of a question's rows and belongs to teacher 'reward'; write baseline 'batch', "
                "the mean of the round's rows, or 'none'",
            )
        return
    idle = {
        "form": term.form,
        "baseline": term.baseline if term.baseline is Baseline.STATE_KL else None,
        "disagreement_weight": term.disagreement_weight,
        "teacher_entropy": term.teacher_entropy,
        "confident_wrong_share": term.confident_wrong_share,
    }
    given = [f"{key} {value}" for key, value in idle.items() if value is not None]
    if given:
        _refuse(term, f"{', '.join(given)} with teacher 'reward'", "these compare with a model, and a reward is none")
