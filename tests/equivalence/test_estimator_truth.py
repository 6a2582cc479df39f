"""What the legality table promises, by enumeration: every completion of three tokens over three ids, 27 in all.

A student and a teacher have their own logits after every prefix (13 of them). Each completion goes through `Objective`
as a row of its own, weighted with the probability that the behaviour writes it, so the gradient of the sum *is* the
expected gradient, without noise. It is compared with the gradient of the named objective written out from scratch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from etude.axes.legality import RULES, Rule, Sampling
from etude.axes.names import (
    REFERENCE,
    REWARD,
    Baseline,
    Divergence,
    Estimator,
    FinishReason,
    Form,
    Importance,
    Owner,
    Source,
    Support,
    Tail,
)
from etude.axes.schedules import Ramp
from etude.core.collate import collate
from etude.core.divergences import jsd, reverse_kl
from etude.core.estimators import form_value
from etude.core.linear import OutputHead
from etude.core.objective import Objective, Term
from etude.core.records import Prompt, Rollout, Scored, Scores, as_ids
from etude.core.support import top_k_divergence

VOCAB, LENGTH = 3, 3
COMPLETIONS = list(itertools.product(range(VOCAB), repeat=LENGTH))
PREFIXES = [p for length in range(LENGTH) for p in itertools.product(range(VOCAB), repeat=length)]
STATE = {prefix: s for s, prefix in enumerate(PREFIXES)}
# [27, 3] state before each token of each completion, and the tokens
STATES_YC = torch.tensor([[STATE[y[:t]] for t in range(LENGTH)] for y in COMPLETIONS])
TOKENS_YC = torch.tensor(COMPLETIONS)


def random_logits(seed: int) -> Tensor:
    return torch.randn(len(PREFIXES), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STUDENT, TEACHER, OLDER = random_logits(1), random_logits(2), random_logits(1) + 0.3 * random_logits(3)
ORIGIN = random_logits(4)  # of the reference


def token_logprobs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[27, 3] log-probability of each token of each completion."""
    return (logits / temperature).log_softmax(-1)[STATES_YC, TOKENS_YC]


def probabilities(behaviour_logprobs_YC: Tensor) -> Tensor:
    """[27] of each completion."""
    return behaviour_logprobs_YC.sum(-1).exp()


def entropy_of(logits: Tensor) -> Tensor:
    """[13] nats."""
    probabilities_SV = logits.softmax(-1)
    return -(probabilities_SV * probabilities_SV.log()).sum(-1)


OWN = token_logprobs(STUDENT)
REWARDS = torch.randn(len(COMPLETIONS), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
SINGLES = [(y,) for y in range(len(COMPLETIONS))]
PAIRS = list(itertools.product(range(len(COMPLETIONS)), repeat=2))


class Unjudged(Objective):
    """The objective without its legality check, to see what it keeps from us."""

    def _judge(self, sampling: Sampling) -> tuple[Rule, ...]:
        return ()


def expected_gradient(
    objective: Objective,
    behaviour: Tensor = OWN,
    *,
    first_step: Tensor = STUDENT,
    advantages: Tensor | None = None,
    source: Source = Source.STUDENT,
    written: Tensor | None = None,
    step: int = 0,
    groups: Sequence[tuple[int, ...]] = SINGLES,
) -> Tensor:
    """[13, 3] of the objective's one term, summed over tokens, on the student's logits.

    `behaviour` [27, 3] are the log-probabilities under whoever wrote; `first_step` the student's logits when advantages
    were made; `advantages` [27, 3] replaces them; `written` [3] says which tokens were not a tool's; `groups` are
    completions of one question, every row weighted with the probability that all of its group are written.
    """
    before = token_logprobs(first_step, objective.temperature)
    models = {"teacher": TEACHER, REFERENCE: ORIGIN}
    drawn = {name: token_logprobs(logits, objective.temperature) for name, logits in models.items()}
    entropies = entropy_of(first_step / objective.temperature)[STATES_YC]
    rows = list[Scored]()
    answers = [(number, y) for number, group in enumerate(groups) for y in group]
    for row, (number, y) in enumerate(answers):
        rollout = Rollout(
            Prompt(as_ids([0]), row=row, group=number),
            as_ids(list(COMPLETIONS[y])),
            source,
            FinishReason.LENGTH,
            version=0,
            behaviour_logprobs=behaviour[y],
            written=written,
        )
        hidden = functional.one_hot(STATES_YC[y], len(PREFIXES)).double()
        marks = {name: Scores(name, sampled_logprobs=drawn[name][y], hidden=hidden) for name in models}
        rows.append(
            Scored(rollout, marks, student_logprobs=before[y], student_entropy=entropies[y], reward=REWARDS[y].item())
        )
    prepared = objective.prepare(rows, step=step)
    weighted = list[Scored]()
    for (number, y), row in zip(answers, prepared, strict=True):
        assert row.weights is not None
        likely = probabilities(behaviour)[list(groups[number])].prod()
        weighted.append(row.with_prepared(weights=row.weights * likely))
        if advantages is not None:
            weighted[-1] = weighted[-1].with_prepared(advantages=advantages[y : y + 1])
    batch = collate(weighted)
    width = batch.token_ids_BT.shape[1]  # prompts are one token long, so a token is predicted from its own offset
    states_RC = STATES_YC[[y for _, y in answers]]
    states_N = states_RC[batch.predicted_from_N // width, batch.predicted_from_N % width]
    table = STUDENT.T.clone().requires_grad_()
    loss, _ = objective.sum(
        functional.one_hot(states_N, len(PREFIXES)).double(),
        OutputHead(table),
        batch,
        torch.ones(1, dtype=torch.float64),
        {name: OutputHead(logits.T) for name, logits in models.items()},
    )
    return torch.autograd.grad(loss, table)[0].T


# The named objectives, written out ----------------------------------------------------------------------------------


def gradient_of(loss: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = STUDENT.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def kl(first: Tensor, second: Tensor) -> Tensor:
    return (first * (first / second).log()).sum(-1)


def error_in_the_head(p: Tensor, q: Tensor, head_mass: float) -> Tensor:
    """[S] share of |p - q| on the teacher's likeliest ids, state by state."""
    shares = list[Tensor]()
    for p_V, q_V in zip(p, q, strict=True):
        order = sorted(range(VOCAB), key=lambda v, p_V=p_V: -p_V[v])
        head = [v for i, v in enumerate(order) if i == 0 or p_V[order[: i + 1]].sum() <= head_mass]
        shares.append((p_V - q_V)[head].abs().sum() / (p_V - q_V).abs().sum())
    return torch.stack(shares)


def of_alpha_beta(p: Tensor, q: Tensor, alpha: float, beta: float) -> Tensor:
    s = alpha + beta
    return (alpha / s * p**s + beta / s * q**s - p**alpha * q**beta).sum(-1) / (alpha * beta)


def of_jsd(p: Tensor, q: Tensor, beta: float, rescale: bool = False) -> Tensor:
    if beta in (0.0, 1.0):
        return kl(q, p) if beta else kl(p, q)
    m = beta * p + (1 - beta) * q
    return (beta * kl(p, m) + (1 - beta) * kl(q, m)) / (beta * (1 - beta) if rescale else 1.0)


def of_adaptive(p: Tensor, q: Tensor, head_mass: float, *, fixed: bool = True) -> Tensor:
    share = error_in_the_head(p, q.detach() if fixed else q, head_mass)
    return share * kl(p, q) + (1 - share) * kl(q, p)


def of_skew_reverse(p: Tensor, q: Tensor, alpha: float, detach_mixture: bool = False) -> Tensor:
    return kl(q, (1 - alpha) * p + alpha * (q.detach() if detach_mixture else q))


BY_HAND: dict[Divergence, Callable[..., Tensor]] = {
    Divergence.FORWARD_KL: kl,
    Divergence.REVERSE_KL: lambda p, q: kl(q, p),
    Divergence.JSD: of_jsd,
    Divergence.SKEW_FORWARD_KL: lambda p, q, alpha: kl(p, alpha * p + (1 - alpha) * q),
    Divergence.SKEW_REVERSE_KL: of_skew_reverse,
    Divergence.ALPHA_BETA: of_alpha_beta,
    Divergence.ADAPTIVE_KL: of_adaptive,
    Divergence.TOTAL_VARIATION: lambda p, q: (p - q).abs().sum(-1) / 2,
}
ALL_TOKENS = torch.ones(len(COMPLETIONS), LENGTH, dtype=torch.bool)


def at_states(
    value: Callable[[Tensor, Tensor], Tensor],
    behaviour: Tensor = OWN,
    temperature: float = 1.0,
    trained: Tensor = ALL_TOKENS,
    target: Tensor = TEACHER,
) -> Tensor:
    """Gradient of a function of p and q at each state, states visited as the behaviour does and not differentiated."""
    visits_YC = probabilities(behaviour)[:, None] * trained

    def loss(student: Tensor) -> Tensor:
        values_S = value((target / temperature).softmax(-1), (student / temperature).softmax(-1))
        return (visits_YC * values_S[STATES_YC]).sum()

    return gradient_of(loss)


def token_level(
    name: Divergence,
    behaviour: Tensor = OWN,
    temperature: float = 1.0,
    trained: Tensor = ALL_TOKENS,
    target: Tensor = TEACHER,
    **parameter: float,
) -> Tensor:
    """Gradient of the divergence at each state."""
    return at_states(lambda p, q: BY_HAND[name](p, q, **parameter), behaviour, temperature, trained, target)


def sequence_level(temperature: float = 1.0, length: int = LENGTH) -> Tensor:
    """Gradient of KL(student || teacher) between distributions over whole completions, or their first tokens."""

    def loss(student: Tensor) -> Tensor:
        q = token_logprobs(student, temperature)
        c = q[:, :length] - token_logprobs(TEACHER, temperature)[:, :length]
        return (q.sum(-1).exp() * c.sum(-1)).sum()

    return gradient_of(loss)


def weighted_scores(coefficients_YC: Tensor, behaviour: Tensor = OWN) -> Tensor:
    """sum_y P(y) sum_t coefficient grad log q(y_t)."""
    return gradient_of(lambda q: (probabilities(behaviour)[:, None] * coefficients_YC * token_logprobs(q)).sum())


REVERSE, FORWARD = token_level(Divergence.REVERSE_KL), token_level(Divergence.FORWARD_KL)
LOG_RATIOS = OWN - token_logprobs(TEACHER)


def same(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-6)


def biased(surrogate: str, found: Tensor, exact: Tensor) -> bool:
    """Whether a surrogate's gradient is not the exact one; prints by how much (`make estimator-bias` shows all)."""
    bias = ((found - exact).norm() / exact.norm()).item()
    angle = functional.cosine_similarity(found.flatten(), exact.flatten(), dim=0).item()
    print(f"\nbias {surrogate:<58} {bias:7.1%}   cosine {angle:6.3f}")
    return bias > 1e-6


def test_the_yardsticks_differ() -> None:
    """Otherwise agreement with one of them would say little."""
    for a, b in itertools.combinations([REVERSE, FORWARD, sequence_level(), torch.zeros_like(REVERSE)], 2):
        assert (a - b).abs().max() > 0.05


# Exact --------------------------------------------------------------------------------------------------------------

FULL = [
    (Divergence.FORWARD_KL, {}),
    (Divergence.REVERSE_KL, {}),
    *((Divergence.JSD, {"beta": beta}) for beta in (0.0, 0.1, 0.5, 0.9, 1.0)),
    (Divergence.SKEW_FORWARD_KL, {"alpha": 0.1}),
    (Divergence.SKEW_REVERSE_KL, {"alpha": 0.1}),
    (Divergence.JSD, {"beta": 0.1, "rescale": True}),
    (Divergence.ALPHA_BETA, {"alpha": 0.5, "beta": 0.5}),
    (Divergence.ALPHA_BETA, {"alpha": 0.2, "beta": 0.7}),
    (Divergence.ALPHA_BETA, {"alpha": 1.5, "beta": -0.5}),
    (Divergence.TOTAL_VARIATION, {}),
]
NOT_REVERSE = [
    (name, parameter)
    for name, parameter in FULL
    if name is not Divergence.REVERSE_KL and parameter != {"beta": 1.0}  # which is reverse KL as well
]
SAMPLED = {"support": Support.SAMPLED}
POLICY = {"support": Support.SAMPLED, "estimator": Estimator.POLICY_GRADIENT}


def legal(kind: str, sampling: Sampling | None = None, temperature: float = 1.0, **term: object) -> Objective:
    objective = Objective([Term(**term)], sampling=sampling, temperature=temperature)
    assert [rule.kind for rule in objective.verdicts] == [kind]
    return objective


@pytest.mark.parametrize(("divergence", "parameter"), FULL)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_full_support(divergence: Divergence, parameter: dict[str, float], temperature: float) -> None:
    objective = legal("exact", temperature=temperature, divergence=divergence, **parameter)
    assert same(expected_gradient(objective), token_level(divergence, temperature=temperature, **parameter))
    # Whoever writes decides which states are visited, and nothing else.
    elsewhere = token_logprobs(OLDER, 0.5)
    assert same(
        expected_gradient(objective, elsewhere),
        token_level(divergence, elsewhere, temperature, **parameter),
    )


@pytest.mark.parametrize(("alpha", "beta", "end"), [(1.0, 0.0, FORWARD), (0.0, 1.0, REVERSE)])
def test_alpha_beta_at_its_ends(alpha: float, beta: float, end: Tensor) -> None:
    assert same(expected_gradient(legal("exact", divergence=Divergence.ALPHA_BETA, alpha=alpha, beta=beta)), end)


@pytest.mark.parametrize("owner", Owner)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_tail(owner: Owner, k: int, temperature: float) -> None:
    sampling = Sampling(temperature=temperature)
    term = {"support": Support.TOP_K, "top_k": k, "owner": owner, "tail": Tail.SAMPLED}
    own = token_logprobs(STUDENT, temperature)
    found = expected_gradient(legal("exact", sampling, temperature, **term), own)
    assert same(found, token_level(Divergence.REVERSE_KL, own, temperature))


@pytest.mark.parametrize(
    "term",
    [
        SAMPLED,
        POLICY,
        POLICY | {"importance": Importance.RATIO},
        POLICY | {"baseline": Baseline.STATE_KL},
        POLICY | {"baseline": Baseline.STATE_KL, "importance": Importance.RATIO},
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_drawn_tokens_equal_the_whole_vocabulary(term: dict[str, object], temperature: float) -> None:
    objective = legal("exact", Sampling(temperature=temperature), temperature, **term)
    own = token_logprobs(STUDENT, temperature)
    assert same(expected_gradient(objective, own), token_level(Divergence.REVERSE_KL, own, temperature))


@pytest.mark.parametrize(("sampling_temperature", "loss_temperature"), [(0.5, 1.0), (1.5, 1.0), (1.0, 2.0)])
def test_ratio_corrects_another_sampling_temperature(sampling_temperature: float, loss_temperature: float) -> None:
    sampling = Sampling(temperature=sampling_temperature)
    behaviour = token_logprobs(STUDENT, sampling_temperature)
    expected = token_level(Divergence.REVERSE_KL, behaviour, loss_temperature)
    for baseline in (Baseline.NONE, Baseline.STATE_KL):
        term = POLICY | {"importance": Importance.RATIO, "baseline": baseline}
        assert same(expected_gradient(legal("exact", sampling, loss_temperature, **term), behaviour), expected)


# Each token drawn from a fifth of the teacher and four of the student.
JOINT = (0.2 * TEACHER.softmax(-1) + 0.8 * STUDENT.softmax(-1)).log()[STATES_YC, TOKENS_YC]


@pytest.mark.parametrize("baseline", [Baseline.NONE, Baseline.STATE_KL])
def test_ratio_corrects_tokens_in_which_the_teacher_had_a_hand(baseline: Baseline) -> None:
    sampling = Sampling(joint=True)
    objective = legal("exact", sampling, **POLICY, importance=Importance.RATIO, baseline=baseline)
    assert same(expected_gradient(objective, JOINT), token_level(Divergence.REVERSE_KL, JOINT))
    whole = legal("exact", sampling, divergence=Divergence.FORWARD_KL)
    assert same(expected_gradient(whole, JOINT), token_level(Divergence.FORWARD_KL, JOINT))


@pytest.mark.parametrize("importance", [Importance.NONE, Importance.RATIO])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_discount_one_is_the_sequence_level_kl(importance: Importance, temperature: float) -> None:
    objective = legal(
        "exact", Sampling(temperature=temperature), temperature, **POLICY, discount=1.0, importance=importance
    )
    own = token_logprobs(STUDENT, temperature)
    assert same(expected_gradient(objective, own), sequence_level(temperature))


# Targets of two models ----------------------------------------------------------------------------------------------

POWERS = [0.5, 1.25, 2.0]


def beyond(power: float, temperature: float = 1.0) -> Tensor:
    """Logits that at this loss temperature give p^power ref^(1 - power); its normaliser differs from state to state."""
    p, ref = ((logits / temperature).log_softmax(-1) for logits in (TEACHER, ORIGIN))
    target = power * p + (1 - power) * ref
    assert target.logsumexp(-1).std() > 0.01
    return temperature * target


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize(("divergence", "parameter"), FULL)
def test_full_support_towards_an_extrapolated_target(
    power: float, divergence: Divergence, parameter: dict[str, float]
) -> None:
    found = expected_gradient(legal("exact", extrapolation=power, divergence=divergence, **parameter))
    assert same(found, token_level(divergence, target=beyond(power), **parameter))
    assert not same(found, token_level(divergence, **parameter))


@pytest.mark.parametrize(
    "term",
    [
        SAMPLED,
        POLICY,
        POLICY | {"importance": Importance.RATIO},
        POLICY | {"baseline": Baseline.STATE_KL},
        {"support": Support.TOP_K, "top_k": 1, "tail": Tail.SAMPLED},
    ],
)
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_drawn_tokens_towards_an_extrapolated_target(term: dict[str, object], power: float, temperature: float) -> None:
    """The log-ratio lacks its state's log Z, a number that no draw changes: under k1 and k2 it moves no gradient."""
    objective = legal("exact", Sampling(temperature=temperature), temperature, extrapolation=power, **term)
    own = token_logprobs(STUDENT, temperature)
    expected = token_level(Divergence.REVERSE_KL, own, temperature, target=beyond(power, temperature))
    assert same(expected_gradient(objective, own), expected)


def test_extrapolated_returns_are_those_of_the_extrapolated_completions() -> None:
    """Discount 1: the target is p(y)^power ref(y)^(1 - power) over whole completions, with one normaliser for all."""
    power = 1.25
    found = expected_gradient(legal("exact", **POLICY, discount=1.0, extrapolation=power))
    p, ref = (token_logprobs(logits).sum(-1) for logits in (TEACHER, ORIGIN))
    target_Y = (power * p + (1 - power) * ref).log_softmax(0)

    def loss(student: Tensor) -> Tensor:
        q = token_logprobs(student).sum(-1)
        return (q.exp() * (q - target_Y)).sum()

    assert same(found, gradient_of(loss))


def test_the_reference_as_a_teacher() -> None:
    for term in ({}, SAMPLED, POLICY):
        found = expected_gradient(legal("exact", teacher=REFERENCE, **term))
        assert same(found, token_level(Divergence.REVERSE_KL, target=ORIGIN))


def test_a_power_of_one_is_the_teacher() -> None:
    for term in ({}, SAMPLED, POLICY):
        assert same(expected_gradient(legal("exact", extrapolation=1.0, **term)), REVERSE)


@pytest.mark.parametrize("importance", [Importance.TRUNCATED, Importance.MASKED])
def test_bounded_ratios_of_an_extrapolated_target(importance: Importance) -> None:
    (low, high), behaviour = (0.8, 1.2), token_logprobs(OLDER)
    ratio = (OWN - behaviour).exp()
    outside = (ratio < low) | (ratio > high)
    weight = ratio.clamp(low, high) if importance is Importance.TRUNCATED else torch.where(outside, 0.0, ratio)
    term = {"importance": importance, "extrapolation": 1.25}
    found = expected_gradient(legal("surrogate", **POLICY, **term, bounds=(low, high)), behaviour)
    losses = OWN - beyond(1.25)[STATES_YC, TOKENS_YC]
    assert same(found, weighted_scores(weight * losses, behaviour))
    wide = expected_gradient(legal("surrogate", **POLICY, **term, bounds=(0.0, 100.0)), behaviour)
    assert same(wide, token_level(Divergence.REVERSE_KL, behaviour, target=beyond(1.25)))


@pytest.mark.parametrize("writer", [Source.DATASET, Source.TEACHER])
def test_label_is_the_cross_entropy_of_what_was_written(writer: Source) -> None:
    behaviour = token_logprobs(TEACHER)
    sampling = Sampling(rows=frozenset({writer}))
    objective = legal("exact", sampling, teacher="label", divergence=Divergence.FORWARD_KL)
    expected = weighted_scores(-torch.ones(27, 3), behaviour)
    assert same(expected_gradient(objective, behaviour, source=writer), expected)


JUDGED = POLICY | {"teacher": REWARD, "discount": 1.0}


def of_expected_reward(temperature: float = 1.0) -> Tensor:
    """Gradient of minus the expected reward, all completions written by the student that is differentiated."""
    return gradient_of(lambda student: -(token_logprobs(student, temperature).sum(-1).exp() * REWARDS).sum())


@pytest.mark.parametrize("importance", [Importance.NONE, Importance.RATIO])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_reward_has_the_gradient_of_its_expectation(importance: Importance, temperature: float) -> None:
    objective = legal("exact", Sampling(temperature=temperature), temperature, **JUDGED, importance=importance)
    found = expected_gradient(objective, token_logprobs(STUDENT, temperature))
    assert found.abs().max() > 0.05
    assert same(found, of_expected_reward(temperature))


# Surrogates: each equals its own closed form ------------------------------------------------------------------------


def returns_by_hand(rewards_YC: Tensor, discount: float) -> Tensor:
    return sum(
        discount ** (u - t) * functional.one_hot(torch.tensor(t), LENGTH) * rewards_YC[:, u : u + 1]
        for t in range(LENGTH)
        for u in range(t, LENGTH)
    )


def test_discounted() -> None:
    found = expected_gradient(legal("surrogate", **POLICY, discount=0.5))
    assert same(found, weighted_scores(returns_by_hand(LOG_RATIOS, 0.5)))
    assert biased("discount 0.5, against token-level KL", found, REVERSE)
    assert biased("discount 0.5, against sequence-level KL", found, sequence_level())


@pytest.mark.parametrize("joint", [False, True])
def test_single_token_ratio_of_returns(joint: bool) -> None:
    sampling = Sampling(joint=True) if joint else Sampling(temperature=0.5)
    behaviour = JOINT if joint else token_logprobs(STUDENT, 0.5)
    objective = legal("surrogate", sampling, **POLICY, importance=Importance.RATIO, discount=1.0)
    found = expected_gradient(objective, behaviour)
    coefficients = (OWN - behaviour).exp() * returns_by_hand(LOG_RATIOS, 1.0)
    assert same(found, weighted_scores(coefficients, behaviour))
    writer = "joint writing" if joint else "temperature 0.5"
    assert biased(f"{writer}, single-token ratio, discount 1", found, sequence_level())


def test_advantages_of_the_first_step_lag_behind() -> None:
    """In a round's second step: written and valued by the older student, differentiated at today's."""
    behaviour = token_logprobs(OLDER)
    objective = legal("surrogate", Sampling(steps_per_round=2), **POLICY, importance=Importance.RATIO)
    found = expected_gradient(objective, behaviour, first_step=OLDER)
    coefficients = (OWN - behaviour).exp() * (behaviour - token_logprobs(TEACHER))
    assert same(found, weighted_scores(coefficients, behaviour))
    assert biased("second step of a round", found, token_level(Divergence.REVERSE_KL, behaviour))
    # With today's log-probabilities in the advantage nothing would lag.
    assert same(expected_gradient(objective, behaviour), token_level(Divergence.REVERSE_KL, behaviour))


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_replayed_rows_are_right_at_each_token_and_wrong_where_it_stands(discount: float) -> None:
    """Written by the older student, valued and differentiated at today's: the ratio sees one token at a time."""
    behaviour = token_logprobs(OLDER)
    objective = legal("surrogate", Sampling(stale=True), **POLICY, importance=Importance.RATIO, discount=discount)
    found = expected_gradient(objective, behaviour)
    ratio = (OWN - behaviour).exp()
    assert same(found, weighted_scores(ratio * returns_by_hand(LOG_RATIOS, discount), behaviour))
    at_its_states = token_level(Divergence.REVERSE_KL, behaviour)
    assert same(found, at_its_states) == (discount == 0.0)
    own = sequence_level() if discount else REVERSE
    assert biased(f"replayed rows, discount {discount:g}, against own states", found, own)
    # The ratio of the whole prefix would put it right; of the whole completion, where returns reach over all of it.
    if discount == 0.0:
        prefix = (OWN - behaviour).cumsum(-1).exp()
        assert same(weighted_scores(prefix * LOG_RATIOS, behaviour), REVERSE)
    # The whole vocabulary needs no ratio: at the states that are visited it is exact.
    assert same(expected_gradient(legal("exact", Sampling(stale=True)), behaviour), at_its_states)


def test_ppo_clip() -> None:
    clip, behaviour = 0.2, token_logprobs(OLDER)
    objective = legal("surrogate", **POLICY, importance=Importance.PPO_CLIP, clip=clip)
    found = expected_gradient(objective, behaviour)
    ratio, advantages = (OWN - behaviour).exp(), -LOG_RATIOS
    held = ((advantages > 0) & (ratio > 1 + clip)) | ((advantages < 0) & (ratio < 1 - clip))
    assert held.any()
    assert same(found, weighted_scores(torch.where(held, 0.0, -advantages * ratio), behaviour))
    assert biased(f"ppo_clip {clip:g}", found, token_level(Divergence.REVERSE_KL, behaviour))
    # Where nothing is clipped it is the exact one.
    assert same(expected_gradient(objective), REVERSE)


@pytest.mark.parametrize("importance", [Importance.TRUNCATED, Importance.MASKED])
def test_bounded_ratios(importance: Importance) -> None:
    (low, high), behaviour = (0.8, 1.2), token_logprobs(OLDER)
    ratio = (OWN - behaviour).exp()
    outside = (ratio < low) | (ratio > high)
    assert (ratio < low).any()
    assert (ratio > high).any()
    weight = ratio.clamp(low, high) if importance is Importance.TRUNCATED else torch.where(outside, 0.0, ratio)
    found = expected_gradient(legal("surrogate", **POLICY, importance=importance, bounds=(low, high)), behaviour)
    assert same(found, weighted_scores(weight * LOG_RATIOS, behaviour))
    # Where no ratio leaves the bounds it is the plain one, and the exact gradient.
    wide = expected_gradient(legal("surrogate", **POLICY, importance=importance, bounds=(0.0, 100.0)), behaviour)
    plain = expected_gradient(legal("exact", **POLICY, importance=Importance.RATIO), behaviour)
    assert same(wide, plain)
    assert same(wide, token_level(Divergence.REVERSE_KL, behaviour))
    assert biased(f"{importance} {low:g} to {high:g}", found, plain)


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_length_normalise(discount: float) -> None:
    found = expected_gradient(legal("surrogate", **POLICY, discount=discount, length_normalise=True))
    remaining = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    assert same(found, weighted_scores(returns_by_hand(LOG_RATIOS, discount) / remaining))
    assert biased(f"length_normalise, discount {discount:g}", found, sequence_level() if discount == 1.0 else REVERSE)


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_a_constant_off_every_return_changes_noise_alone(discount: float) -> None:
    """The round is all 27 completions, each once; its mean is a number, and whatever it is, the gradient stays."""
    returns = returns_by_hand(LOG_RATIOS, discount)
    mean, deviation = returns.mean(), returns.std(correction=0)
    assert mean.abs() > 0.1
    true = sequence_level() if discount else REVERSE
    centred = expected_gradient(legal("surrogate", **POLICY, discount=discount, baseline=Baseline.BATCH))
    assert same(centred, weighted_scores(returns - mean))
    assert same(centred, true)
    whitened = expected_gradient(legal("surrogate", **POLICY, discount=discount, whiten=True))
    assert same(whitened, weighted_scores((returns - mean) / deviation))
    assert same(whitened * deviation, true)
    assert biased(f"whiten, discount {discount:g}", whitened, true)


def test_clipped_advantages() -> None:
    """After the baseline, whichever it is: -A held between -1/2 and 1/2."""
    state_kl = kl(STUDENT.softmax(-1), TEACHER.softmax(-1))[STATES_YC]
    mean, deviation = LOG_RATIOS.mean(), LOG_RATIOS.std(correction=0)
    for term, losses in (
        ({}, LOG_RATIOS),
        ({"baseline": Baseline.BATCH}, LOG_RATIOS - mean),
        ({"whiten": True}, (LOG_RATIOS - mean) / deviation),
        ({"baseline": Baseline.STATE_KL}, LOG_RATIOS - state_kl),
    ):
        assert (losses.abs() > 0.5).any()
        found = expected_gradient(legal("surrogate", **POLICY, advantage_clip=0.5, **term))
        assert same(found, weighted_scores(losses.clamp(-0.5, 0.5))), term
        shaping = ", ".join(f"{key} {value}" for key, value in term.items()) or "no baseline"
        assert biased(f"advantage_clip 0.5, {shaping}", found, weighted_scores(losses))
        wide = expected_gradient(legal("surrogate", **POLICY, advantage_clip=100.0, **term))
        assert same(wide, weighted_scores(losses)), term


def test_disagreement_weight() -> None:
    found = expected_gradient(legal("surrogate", **POLICY, disagreement_weight=1.5))
    weights = torch.ones_like(LOG_RATIOS)
    for y, sizes in enumerate(LOG_RATIOS.abs().tolist()):
        for t in range(LENGTH):
            weights[y, t] = 1 + 0.5 * (1 - sum(sizes[:t]) / sum(sizes))
    assert same(found, weighted_scores(weights * LOG_RATIOS))
    assert biased("disagreement_weight 1.5", found, REVERSE)


def of_advantages(advantages_Y: Tensor, discount: float = 1.0) -> Tensor:
    """Every token of a completion answers for its number, discounted by the tokens to the end."""
    to_the_end = torch.arange(LENGTH - 1, -1, -1, dtype=torch.float64)
    return weighted_scores(-advantages_Y[:, None] * discount**to_the_end)


def test_a_reward_off_the_rounds_mean() -> None:
    found = expected_gradient(legal("surrogate", **JUDGED, baseline=Baseline.BATCH))
    assert same(found, of_advantages(REWARDS - REWARDS.mean()))
    assert same(found, of_expected_reward())  # whatever the constant
    whitened = expected_gradient(legal("surrogate", **JUDGED, whiten=True))
    assert same(whitened * REWARDS.std(correction=0), of_expected_reward())
    assert biased("reward: whiten", whitened, of_expected_reward())


def test_a_reward_off_its_groups_mean() -> None:
    """Over every pair of answers: a row's own share of the mean, one half, is missing, and a pair has two rows."""
    found = expected_gradient(legal("surrogate", **JUDGED, baseline=Baseline.GROUP), groups=PAIRS)
    assert same(found, 2 * (1 - 1 / 2) * of_expected_reward())


def test_a_groups_whitened_rewards() -> None:
    """Of two different rewards one is sqrt(1/2) above the mean and the other as much below, whatever their size."""
    found = expected_gradient(legal("surrogate", **JUDGED, baseline=Baseline.GROUP, whiten=True), groups=PAIRS)
    sign_YZ = (REWARDS[:, None] - REWARDS).sign()
    assert same(found, of_advantages(2 * 0.5**0.5 * (sign_YZ * probabilities(OWN)).sum(-1)))
    assert biased("reward: group of 2, whiten", found / 2, of_expected_reward())


@pytest.mark.parametrize("baseline", [Baseline.NONE, Baseline.GROUP])
def test_a_discounted_reward(baseline: Baseline) -> None:
    objective = legal("surrogate", **JUDGED | {"discount": 0.5}, baseline=baseline)
    found = expected_gradient(objective, groups=PAIRS if baseline is Baseline.GROUP else SINGLES)
    rewards = REWARDS
    if baseline is Baseline.GROUP:  # the mean is taken off the reward, and what is left is discounted
        rewards = REWARDS - (REWARDS * probabilities(OWN)).sum()
    assert same(found, of_advantages(rewards, 0.5))
    assert biased(f"reward: discount 0.5, baseline {baseline}", found, of_expected_reward())


def test_a_clipped_reward() -> None:
    found = expected_gradient(legal("surrogate", **JUDGED, advantage_clip=0.5))
    assert (REWARDS.abs() > 0.5).any()
    assert same(found, of_advantages(REWARDS.clamp(-0.5, 0.5)))
    assert biased("reward: advantage_clip 0.5", found, of_expected_reward())


def test_a_length_normalised_reward() -> None:
    found = expected_gradient(legal("surrogate", **JUDGED, length_normalise=True))
    remaining = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    assert same(found, weighted_scores(-REWARDS[:, None] / remaining))
    assert biased("reward: length_normalise", found, of_expected_reward())


@pytest.mark.parametrize("importance", [Importance.PPO_CLIP, Importance.TRUNCATED, Importance.MASKED])
def test_bounded_ratios_of_rewards(importance: Importance) -> None:
    behaviour = token_logprobs(OLDER)
    ratio = (OWN - behaviour).exp()
    limits = {"clip": 0.2} if importance is Importance.PPO_CLIP else {"bounds": (0.8, 1.2)}
    objective = legal("surrogate", **JUDGED, importance=importance, **limits)
    weight = {
        Importance.PPO_CLIP: torch.where(torch.where(REWARDS[:, None] > 0, ratio > 1.2, ratio < 0.8), 0.0, ratio),
        Importance.TRUNCATED: ratio.clamp(0.8, 1.2),
        Importance.MASKED: torch.where((ratio < 0.8) | (ratio > 1.2), 0.0, ratio),
    }[importance]
    found = expected_gradient(objective, behaviour)
    assert same(found, weighted_scores(-REWARDS[:, None] * weight, behaviour))
    assert biased(f"reward: {importance}", found, of_expected_reward())
    # On the student's own tokens nothing is cut, and it is the exact one.
    assert same(expected_gradient(objective), of_expected_reward())


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.5), Sampling(steps_per_round=2)])
def test_single_token_ratio_of_rewards(sampling: Sampling) -> None:
    behaviour = token_logprobs(OLDER) if sampling.steps_per_round > 1 else token_logprobs(STUDENT, 0.5)
    objective = legal("surrogate", sampling, **JUDGED, importance=Importance.RATIO)
    found = expected_gradient(objective, behaviour)
    assert same(found, weighted_scores(-(OWN - behaviour).exp() * REWARDS[:, None], behaviour))
    writer = "second step of a round" if sampling.steps_per_round > 1 else "temperature 0.5"
    assert biased(f"reward: {writer}, single-token ratio", found, of_expected_reward())


@pytest.mark.parametrize("head_mass", [0.5, 0.8])
def test_adaptive_kl_has_its_weights_fixed(head_mass: float) -> None:
    found = expected_gradient(legal("surrogate", divergence=Divergence.ADAPTIVE_KL, head_mass=head_mass))
    assert same(found, at_states(lambda p, q: of_adaptive(p, q, head_mass)))
    # The gradient of its value has (forward - reverse) grad w more.
    missing = at_states(lambda p, q: error_in_the_head(p, q, head_mass) * (kl(p, q) - kl(q, p)).detach())
    of_its_value = at_states(lambda p, q: of_adaptive(p, q, head_mass, fixed=False))
    assert same(found + missing, of_its_value)
    assert biased(f"adaptive_kl, head_mass {head_mass:g}", found, of_its_value)


def test_a_detached_mixture() -> None:
    term = {"divergence": Divergence.SKEW_REVERSE_KL, "alpha": 0.3}
    found = expected_gradient(legal("surrogate", **term, detach_mixture=True))
    assert same(found, at_states(lambda p, q: (q * (q / (0.7 * p + 0.3 * q)).log().detach()).sum(-1)))
    # The gradient of its value has -alpha q / m grad q more.
    missing = at_states(lambda p, q: -0.3 * (q * (q / (0.7 * p + 0.3 * q)).detach()).sum(-1))
    of_its_value = token_level(Divergence.SKEW_REVERSE_KL, alpha=0.3)
    assert same(found + missing, of_its_value)
    assert biased("skew_reverse_kl 0.3, detach_mixture", found, of_its_value)


# Top-k ---------------------------------------------------------------------------------------------------------------


def kept_by(owner: Owner, k: int) -> list[list[int]]:
    """Of each state, the ids that are kept."""

    def likeliest(logits_V: Tensor) -> set[int]:
        return set(sorted(range(VOCAB), key=lambda v: -logits_V[v])[:k])

    kept = list[list[int]]()
    for student_V, teacher_V in zip(STUDENT, TEACHER, strict=True):
        sides = {Owner.STUDENT: likeliest(student_V), Owner.TEACHER: likeliest(teacher_V)}
        kept.append(sorted(sides.get(owner, set[int]().union(*sides.values()))))
    return kept


def lumped(of: Callable[..., Tensor], p: Tensor, q: Tensor, kept: list[int]) -> Tensor:
    rest = [v for v in range(VOCAB) if v not in kept]
    if not rest:
        return of(p, q)
    return of(*(torch.cat([x[kept], x[rest].sum().reshape(1)]) for x in (p, q)))


def rescaled(of: Callable[..., Tensor], p: Tensor, q: Tensor, kept: list[int]) -> Tensor:
    return of(*(x[kept] / x[kept].sum() for x in (p, q)))


def of_kept(value: Callable[[Tensor, Tensor, list[int]], Tensor], owner: Owner, k: int) -> Tensor:
    """Gradient of a function of one state's p, q and kept ids."""

    def of_states(p: Tensor, q: Tensor) -> Tensor:
        return torch.stack([value(*each) for each in zip(p, q, kept_by(owner, k), strict=True)])

    return at_states(of_states)


def top_k(k: int, owner: Owner, tail: Tail, **term: object) -> Objective:
    return legal("surrogate", support=Support.TOP_K, top_k=k, owner=owner, tail=tail, **term)


LUMPS = [
    (Divergence.FORWARD_KL, {}),
    (Divergence.REVERSE_KL, {}),
    (Divergence.JSD, {"beta": 0.3}),
    (Divergence.SKEW_REVERSE_KL, {"alpha": 0.1}),
    (Divergence.ALPHA_BETA, {"alpha": 0.2, "beta": 0.7}),
    (Divergence.TOTAL_VARIATION, {}),
]


@pytest.mark.parametrize(("divergence", "parameter"), LUMPS)
@pytest.mark.parametrize("owner", Owner)
def test_bucket_and_renormalise(divergence: Divergence, parameter: dict[str, float], owner: Owner) -> None:
    def of(p: Tensor, q: Tensor) -> Tensor:
        return BY_HAND[divergence](p, q, **parameter)

    whole = token_level(divergence, **parameter)
    for tail, coarse, sizes in ((Tail.BUCKET, lumped, (1, 2)), (Tail.RENORMALISE, rescaled, (2,))):
        for k in sizes:
            found = expected_gradient(top_k(k, owner, tail, divergence=divergence, **parameter))
            expected = of_kept(lambda p, q, kept, coarse=coarse: coarse(of, p, q, kept), owner, k)
            assert same(found, expected), (tail, k)
            if (tail, k) != (Tail.BUCKET, 2):  # a bucket of one id is that id
                assert biased(f"top_k {k} of {owner}, {tail}, {divergence}", found, whole)


@pytest.mark.parametrize("owner", Owner)
@pytest.mark.parametrize("k", [1, 2])
def test_truncate_has_its_coefficient_detached(owner: Owner, k: int) -> None:
    reverse = expected_gradient(top_k(k, owner, Tail.TRUNCATE))
    expected = of_kept(lambda p, q, kept: (q * (q / p).log().detach())[kept].sum(), owner, k)
    assert same(reverse, expected)
    assert biased(f"top_k {k} of {owner}, truncate, reverse_kl", reverse, REVERSE)
    # The derivative of the truncated sum has the gradient of the kept mass more.
    of_the_sum = of_kept(lambda p, q, kept: (q * (q / p).log())[kept].sum(), owner, k)
    mass = of_kept(lambda p, q, kept: q[kept].sum(), owner, k)
    assert same(reverse + mass, of_the_sum)
    assert not same(reverse, of_the_sum)
    forward = expected_gradient(top_k(k, owner, Tail.TRUNCATE, divergence=Divergence.FORWARD_KL))
    assert same(forward, of_kept(lambda p, q, kept: (p * (p / q).log())[kept].sum(), owner, k))
    assert biased(f"top_k {k} of {owner}, truncate, forward_kl", forward, FORWARD)


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("owner", Owner)
def test_all_ids_kept_is_the_full_divergence(tail: Tail, owner: Owner) -> None:
    divergences = LUMPS[1:2] if tail is Tail.SAMPLED else LUMPS[:3]
    for divergence, parameter in divergences:
        term = {"support": Support.TOP_K, "top_k": VOCAB, "owner": owner, "tail": tail, "divergence": divergence}
        found = expected_gradient(Objective([Term(**term, **parameter)]))
        assert same(found, token_level(divergence, **parameter)), divergence


# Which tokens ---------------------------------------------------------------------------------------------------------

PLACES = torch.arange(LENGTH)
GROWING = Ramp(1, 3, kind="linear", last=4)  # 1, 2 (of 1.5), 2, 3 (of 2.5), 3


@pytest.mark.parametrize(
    ("term", "step", "first", "last"),
    [
        ({"first_tokens": 2}, 0, 0, 2),
        ({"first_tokens": 2}, 9, 0, 2),
        ({"first_tokens": GROWING}, 0, 0, 1),
        ({"first_tokens": GROWING}, 2, 0, 2),
        ({"first_tokens": GROWING}, 4, 0, 3),
        ({"skip_first": 1}, 0, 1, 3),
        ({"skip_first": 1, "first_tokens": 2}, 0, 1, 2),
        ({"first_tokens": 64}, 0, 0, 3),
        ({"skip_first": 3}, 0, 3, 3),
    ],
)
def test_horizon(term: dict[str, object], step: int, first: int, last: int) -> None:
    trained = ((first <= PLACES) & (last > PLACES)).expand(27, LENGTH)
    expected = token_level(Divergence.REVERSE_KL, trained=trained)
    for axes in ({}, SAMPLED, POLICY, POLICY | {"baseline": Baseline.STATE_KL}):
        assert same(expected_gradient(legal("exact", **axes, **term), step=step), expected), axes
    # A trained token answers for the row's reward wherever that ends, and for the trained tokens that follow.
    rewarded = expected_gradient(legal("exact", **JUDGED, **term), step=step)
    assert same(rewarded, weighted_scores(trained * -REWARDS[:, None]))
    sequence = expected_gradient(legal("exact", **POLICY, discount=1.0, **term), step=step)
    assert same(sequence, weighted_scores(trained * returns_by_hand(trained * LOG_RATIOS, 1.0)))
    assert same(sequence, sequence_level(length=last)) is (first == 0)  # else earlier tokens had to answer as well


@pytest.mark.parametrize("written", [[True, False, True], [False, True, True], [True, True, False]])
def test_what_a_tool_wrote_is_no_action_and_costs_nothing(written: list[bool]) -> None:
    """Two turns with a tool's answer between them (and a tool first, and a tool last), which is drawn by the tool."""
    own = torch.tensor(written)
    tool = token_logprobs(OLDER, 0.7)
    behaviour = torch.where(own, OWN, tool)
    expected = token_level(Divergence.REVERSE_KL, behaviour, trained=own.expand(27, LENGTH))
    for axes in ({}, SAMPLED, POLICY, POLICY | {"baseline": Baseline.STATE_KL}):
        assert same(expected_gradient(legal("exact", **axes), behaviour, written=own), expected), axes

    def whole(student: Tensor) -> Tensor:
        """Expected sum of the log-ratios of the student's tokens, when student and tool take turns."""
        q = token_logprobs(student)
        reached = torch.where(own, q, tool).sum(-1).exp()
        return (reached * ((q - token_logprobs(TEACHER)) * own).sum(-1)).sum()

    sequence = expected_gradient(legal("exact", **POLICY, discount=1.0), behaviour, written=own)
    assert same(sequence, gradient_of(whole))


def test_a_reward_is_earned_by_the_students_own_tokens() -> None:
    """The last token is a tool's: the reward comes after it, and the student's tokens answer for it."""
    own = torch.tensor([True, True, False])
    behaviour = torch.where(own, OWN, token_logprobs(OLDER, 0.7))

    def whole(student: Tensor) -> Tensor:
        reached = torch.where(own, token_logprobs(student), behaviour).sum(-1).exp()
        return -(reached * REWARDS).sum()

    assert same(expected_gradient(legal("exact", **JUDGED), behaviour, written=own), gradient_of(whole))


def test_moments_of_the_round_leave_a_tool_out() -> None:
    own = torch.tensor([True, False, True])
    found = expected_gradient(legal("surrogate", **POLICY, whiten=True), written=own)
    trained = LOG_RATIOS[:, own]
    losses = (LOG_RATIOS - trained.mean()) / trained.std(correction=0)
    assert same(found, weighted_scores(own * losses))


def test_length_normalise_counts_the_students_own_tokens() -> None:
    own = torch.tensor([True, False, True])
    found = expected_gradient(legal("surrogate", **POLICY, discount=1.0, length_normalise=True), written=own)
    remaining = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
    assert same(found, weighted_scores(own * returns_by_hand(own * LOG_RATIOS, 1.0) / remaining))


@pytest.mark.parametrize("threshold", [0.6, 0.9])
def test_teacher_entropy_is_a_gate_at_the_state(threshold: float) -> None:
    p = TEACHER.softmax(-1)
    uncertain_YC = (-(p * p.log()).sum(-1) > threshold)[STATES_YC]
    assert uncertain_YC.any()
    assert not uncertain_YC.all()
    forward = {"divergence": Divergence.FORWARD_KL}
    for axes, name in (
        (forward, Divergence.FORWARD_KL),
        ({}, Divergence.REVERSE_KL),
        (SAMPLED, Divergence.REVERSE_KL),
        (POLICY, Divergence.REVERSE_KL),
    ):
        found = expected_gradient(legal("exact", **axes, teacher_entropy=threshold))
        assert same(found, token_level(name, trained=uncertain_YC)), axes
        assert not same(found, token_level(name)), axes


def chosen(entropy_share: float, confident_wrong_share: float | None) -> Tensor:
    """[27, 3] of all 81 tokens, each counted once: the least certain, and of the others those with the largest c."""
    entropies = entropy_of(STUDENT)[STATES_YC].float()  # in the precision in which they are compared
    uncertain = entropies >= sorted(entropies.flatten().tolist())[-round(entropy_share * 81)]
    if confident_wrong_share is None:
        return uncertain
    others = sorted(LOG_RATIOS.float()[~uncertain].tolist())
    kept = uncertain | (LOG_RATIOS.float() >= others[-round(confident_wrong_share * len(others))])
    assert uncertain.sum() < kept.sum() < 81
    return kept


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_where_the_student_is_uncertain_is_a_choice_of_states(share: float) -> None:
    trained = chosen(share, None)
    expected = token_level(Divergence.REVERSE_KL, trained=trained)
    for axes in ({}, SAMPLED, POLICY, POLICY | {"baseline": Baseline.STATE_KL}):
        found = expected_gradient(legal("exact", **axes, entropy_share=share))
        assert same(found, expected), axes
        assert not same(found, REVERSE), axes


def test_confident_and_wrong_tokens() -> None:
    """Over the whole vocabulary states are weighed by how often they are chosen; of drawn tokens, draws are chosen."""
    choice = {"entropy_share": 0.3, "confident_wrong_share": 0.2}
    trained = chosen(0.3, 0.2)
    whole = token_level(Divergence.REVERSE_KL, trained=trained)
    assert same(expected_gradient(legal("exact", **choice)), whole)
    for axes in (SAMPLED, POLICY):
        found = expected_gradient(legal("surrogate", **axes, **choice))
        assert same(found, weighted_scores(trained * LOG_RATIOS))
        assert not same(found, whole)


# Refused: what each would have done ---------------------------------------------------------------------------------


def unjudged(**term: object) -> Objective:
    return Unjudged([Term(**term)])


def is_zero(found: Tensor) -> bool:
    return bool(found.abs().max() < 1e-7)


def no_rows() -> None:
    assert not expected_gradient(unjudged(sources={Source.DATASET})).any()


def label_divergence() -> None:
    """Any divergence to a label is computed as cross-entropy, which is none of the other four."""
    behaviour = token_logprobs(TEACHER)
    cross_entropy = weighted_scores(-torch.ones(27, 3), behaviour)
    label_YCV = functional.one_hot(TOKENS_YC, VOCAB).double().log()

    def jsd_to_the_label(student: Tensor) -> Tensor:
        values = jsd(student_logprobs=student.log_softmax(-1)[STATES_YC], teacher_logprobs=label_YCV, beta=0.5)
        return (probabilities(behaviour)[:, None] * values).sum()

    assert not same(cross_entropy, gradient_of(jsd_to_the_label))
    for name, parameter in FULL[1:]:
        found = expected_gradient(unjudged(teacher="label", divergence=name, **parameter), behaviour)
        assert same(found, cross_entropy)
    towards_label = reverse_kl(student_logprobs=STUDENT.log_softmax(-1)[0], teacher_logprobs=label_YCV[0, 0])
    assert towards_label > 1000  # reverse KL to a label is infinite; finite only by a floor under log 0


def label_support() -> None:
    """Nothing is sampled: the same cross-entropy as with full support."""
    behaviour = token_logprobs(TEACHER)
    found = expected_gradient(unjudged(teacher="label", divergence=Divergence.FORWARD_KL, **SAMPLED), behaviour)
    assert same(found, weighted_scores(-torch.ones(27, 3), behaviour))
    assert not same(found, token_level(Divergence.REVERSE_KL, behaviour))


def label_estimator() -> None:
    """log p of the label is 0 or minus infinity: as a reward it is log q(y) alone, sharpening without any teacher."""
    found = expected_gradient(unjudged(**POLICY), advantages=-OWN)
    assert same(found, gradient_of(lambda q: -entropy(q)))


def entropy(student: Tensor) -> Tensor:
    logprobs = student.log_softmax(-1)
    return (probabilities(OWN)[:, None] * -(logprobs.exp() * logprobs).sum(-1)[STATES_YC]).sum()


def label_own_rows() -> None:
    assert is_zero(expected_gradient(unjudged(teacher="label", divergence=Divergence.FORWARD_KL)))


def reward_divergence() -> None:
    """Whatever it is called, nothing is measured."""
    for name, parameter in NOT_REVERSE:
        assert same(expected_gradient(unjudged(**JUDGED, divergence=name, **parameter)), of_expected_reward())


def reward_support() -> None:
    """The vocabulary is not looked at: the gradient is that of the drawn tokens. Were the row's number every id's, a
    state's sum over ids would be that number, whatever the student does."""
    assert same(expected_gradient(unjudged(**JUDGED | {"support": Support.FULL})), of_expected_reward())

    def spread(student: Tensor) -> Tensor:
        values_YC = (student.softmax(-1)[STATES_YC] * REWARDS[:, None, None]).sum(-1)
        return -(probabilities(OWN)[:, None] * values_YC).sum()

    assert is_zero(gradient_of(spread))


def reward_estimator() -> None:
    assert is_zero(expected_gradient(unjudged(**SAMPLED, teacher=REWARD)))


def reward_last_token() -> None:
    found = expected_gradient(unjudged(**JUDGED | {"discount": 0.0}))
    last = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    assert same(found, weighted_scores(-REWARDS[:, None] * last))
    assert not same(found, of_expected_reward())


def state_value_advantage() -> None:
    logprobs, teacher = STUDENT.log_softmax(-1), TEACHER.log_softmax(-1)
    state_kl = reverse_kl(student_logprobs=logprobs, teacher_logprobs=teacher)[STATES_YC]
    assert is_zero(expected_gradient(unjudged(**POLICY), advantages=-state_kl))


def renormalised_one() -> None:
    """One id has all the probability on both sides: no value and no gradient, however far apart the sides are."""
    leaf = STUDENT.clone().requires_grad_()
    one = TEACHER.argmax(-1, keepdim=True).repeat(1, 2)  # twice, since a set of one is refused further down, too
    for name in (kl, lambda p, q: kl(q, p)):
        q, p = (x.softmax(-1).gather(-1, one[:, :1]) for x in (leaf, TEACHER))
        by_hand = name(p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True))
        assert not by_hand.any()
    values = top_k_divergence(
        reverse_kl,
        student_logprobs_nV=leaf.log_softmax(-1),
        teacher_logprobs_nV=TEACHER.log_softmax(-1),
        ids_nK=one,
        tail=Tail.RENORMALISE,
    )
    assert not values.any()
    assert not torch.autograd.grad(values.sum(), leaf)[0].any()
    term = {"support": Support.TOP_K, "top_k": 1, "tail": Tail.RENORMALISE}
    for owner in (Owner.STUDENT, Owner.TEACHER):
        with pytest.raises(ValueError, match="with one kept id compares 1 with 1"):
            expected_gradient(unjudged(**term, owner=owner))
    agree = STUDENT.argmax(-1) == TEACHER.argmax(-1)
    assert agree.any()
    assert not expected_gradient(unjudged(**term, owner=Owner.UNION))[agree].any()


def sampled_tail_divergence() -> None:
    """One drawn token has the gradient of reverse KL, whatever the term calls it."""
    term = {"support": Support.TOP_K, "top_k": 1, "tail": Tail.SAMPLED}
    for name, parameter in NOT_REVERSE:
        found = expected_gradient(unjudged(divergence=name, **parameter, **term))
        assert same(found, REVERSE)
        assert not same(found, token_level(name, **parameter))


def sampled_divergence() -> None:
    for name, parameter in NOT_REVERSE:
        found = expected_gradient(unjudged(divergence=name, **parameter, **SAMPLED))
        assert same(found, REVERSE)
        assert not same(found, token_level(name, **parameter))


def k1_loss() -> None:
    assert is_zero(expected_gradient(unjudged(**SAMPLED, form=Form.K1)))


def k3_loss() -> None:
    assert same(expected_gradient(unjudged(**SAMPLED, form=Form.K3)), FORWARD)


def as_reward(form: Form) -> Tensor:
    return expected_gradient(unjudged(**POLICY), advantages=-form_value(LOG_RATIOS, form))


def k2_reward() -> None:
    found = as_reward(Form.K2)
    assert same(found, weighted_scores(LOG_RATIOS**2 / 2))
    for name, parameter in FULL:
        assert not same(found, token_level(name, **parameter))


def k3_reward() -> None:
    assert same(as_reward(Form.K3), REVERSE - FORWARD)


def sampled_rows() -> None:
    behaviour = token_logprobs(TEACHER)
    found = expected_gradient(unjudged(**SAMPLED), behaviour)
    assert not same(found, token_level(Divergence.REVERSE_KL, behaviour))
    mixed = 0.5 * found + 0.5 * expected_gradient(unjudged(**SAMPLED))
    assert not same(mixed, 0.5 * token_level(Divergence.REVERSE_KL, behaviour) + 0.5 * REVERSE)


def truncated_sampling() -> None:
    """Top-k of 2, with the ratio to the distribution really sampled from: one token in three is never seen."""
    smallest = STUDENT.argmin(-1, keepdim=True)
    truncated = STUDENT.scatter(-1, smallest, -1e9)
    behaviour = token_logprobs(truncated)
    found = expected_gradient(unjudged(**POLICY, importance=Importance.RATIO), behaviour)
    assert not same(found, token_level(Divergence.REVERSE_KL, behaviour))


def uncorrected_temperature() -> None:
    behaviour = token_logprobs(STUDENT, 0.5)
    for term in (SAMPLED, POLICY):
        assert not same(expected_gradient(unjudged(**term), behaviour), token_level(Divergence.REVERSE_KL, behaviour))


def uncorrected_joint() -> None:
    for term in (SAMPLED, POLICY):
        assert not same(expected_gradient(unjudged(**term), JOINT), token_level(Divergence.REVERSE_KL, JOINT))


def uncorrected_steps() -> None:
    behaviour = token_logprobs(OLDER)
    for term in (SAMPLED, POLICY):
        found = expected_gradient(unjudged(**term), behaviour, first_step=OLDER)
        assert not same(found, token_level(Divergence.REVERSE_KL, behaviour))


def uncorrected_replay() -> None:
    """Valued by today's student, unlike a round's later steps; half of the rows today's own, too."""
    behaviour = token_logprobs(OLDER)
    truth = token_level(Divergence.REVERSE_KL, behaviour)
    for term in (SAMPLED, POLICY, {"support": Support.TOP_K, "top_k": 1, "tail": Tail.SAMPLED}):
        replayed, own = expected_gradient(unjudged(**term), behaviour), expected_gradient(unjudged(**term))
        assert not same(replayed, truth)
        assert not same(0.5 * replayed + 0.5 * own, 0.5 * truth + 0.5 * REVERSE)


DEMONSTRATIONS: Sequence[Callable[[], None]] = (
    no_rows,
    label_divergence,
    label_support,
    label_estimator,
    label_own_rows,
    reward_divergence,
    reward_support,
    reward_estimator,
    reward_last_token,
    state_value_advantage,
    renormalised_one,
    sampled_tail_divergence,
    sampled_divergence,
    k1_loss,
    k3_loss,
    k2_reward,
    k3_reward,
    sampled_rows,
    truncated_sampling,
    uncorrected_temperature,
    uncorrected_joint,
    uncorrected_steps,
    uncorrected_replay,
)


@pytest.mark.parametrize("demonstration", DEMONSTRATIONS, ids=lambda function: function.__name__)
def test_refused(demonstration: Callable[[], None]) -> None:
    demonstration()


def test_every_refusal_is_demonstrated() -> None:
    shown = [demonstration.__name__.replace("_", "-") for demonstration in DEMONSTRATIONS]
    assert shown == [rule.name for rule in RULES if rule.kind == "refused"]
