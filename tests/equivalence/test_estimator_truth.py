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
from etude.axes.names import Divergence, Estimator, FinishReason, Form, Importance, Source, Support
from etude.core.collate import collate
from etude.core.divergences import divergence_fn, jsd, reverse_kl
from etude.core.estimators import form_value
from etude.core.linear import OutputHead
from etude.core.objective import Objective, Term
from etude.core.records import Prompt, Rollout, Scored, Scores, as_ids

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


def token_logprobs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[27, 3] log-probability of each token of each completion."""
    return (logits / temperature).log_softmax(-1)[STATES_YC, TOKENS_YC]


def probabilities(behaviour_logprobs_YC: Tensor) -> Tensor:
    """[27] of each completion."""
    return behaviour_logprobs_YC.sum(-1).exp()


OWN = token_logprobs(STUDENT)


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
) -> Tensor:
    """[13, 3] of the objective's one term, summed over tokens, on the student's logits.

    `behaviour` [27, 3] are the log-probabilities under whoever wrote; `first_step` the student's logits when advantages
    were made; `advantages` [27, 3] replaces them.
    """
    before, teacher = token_logprobs(first_step, objective.temperature), token_logprobs(TEACHER, objective.temperature)
    rows = list[Scored]()
    for y, completion in enumerate(COMPLETIONS):
        rollout = Rollout(
            Prompt(as_ids([0]), row=y),
            as_ids(list(completion)),
            source,
            FinishReason.LENGTH,
            version=0,
            behaviour_logprobs=behaviour[y],
        )
        marks = Scores(
            "teacher", sampled_logprobs=teacher[y], hidden=functional.one_hot(STATES_YC[y], len(PREFIXES)).double()
        )
        rows.append(Scored(rollout, {"teacher": marks}, student_logprobs=before[y]))
    prepared = objective.prepare(rows)
    weighted = list[Scored]()
    for y, row in enumerate(prepared):
        assert row.weights is not None
        weighted.append(row.with_prepared(weights=row.weights * probabilities(behaviour)[y]))
        if advantages is not None:
            weighted[-1] = weighted[-1].with_prepared(advantages=advantages[y : y + 1])
    batch = collate(weighted)
    width = batch.token_ids_BT.shape[1]  # prompts are one token long, so a token is predicted from its own offset
    states_N = STATES_YC[batch.predicted_from_N // width, batch.predicted_from_N % width]
    table = STUDENT.T.clone().requires_grad_()
    loss, _ = objective.sum(
        functional.one_hot(states_N, len(PREFIXES)).double(),
        OutputHead(table),
        batch,
        torch.ones(1, dtype=torch.float64),
        {"teacher": OutputHead(TEACHER.T)},
    )
    return torch.autograd.grad(loss, table)[0].T


# The named objectives, written out ----------------------------------------------------------------------------------


def gradient_of(loss: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = STUDENT.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def token_level(name: Divergence, behaviour: Tensor = OWN, temperature: float = 1.0, **parameter: float) -> Tensor:
    """Gradient of the divergence at each state, states visited as the behaviour does and not differentiated."""
    divergence = divergence_fn(name, **parameter)
    visits_YC = probabilities(behaviour)[:, None].expand(-1, LENGTH)

    def loss(student: Tensor) -> Tensor:
        values_S = divergence(
            student_logprobs=(student / temperature).log_softmax(-1),
            teacher_logprobs=(TEACHER / temperature).log_softmax(-1),
        )
        return (visits_YC * values_S[STATES_YC]).sum()

    return gradient_of(loss)


def sequence_level(temperature: float = 1.0) -> Tensor:
    """Gradient of KL(student || teacher) between distributions over whole completions."""

    def loss(student: Tensor) -> Tensor:
        q = token_logprobs(student, temperature).sum(-1)
        return (q.exp() * (q - token_logprobs(TEACHER, temperature).sum(-1))).sum()

    return gradient_of(loss)


def weighted_scores(coefficients_YC: Tensor, behaviour: Tensor = OWN) -> Tensor:
    """sum_y P(y) sum_t coefficient grad log q(y_t)."""
    return gradient_of(lambda q: (probabilities(behaviour)[:, None] * coefficients_YC * token_logprobs(q)).sum())


REVERSE, FORWARD = token_level(Divergence.REVERSE_KL), token_level(Divergence.FORWARD_KL)
LOG_RATIOS = OWN - token_logprobs(TEACHER)


def same(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-6)


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


@pytest.mark.parametrize("term", [SAMPLED, POLICY, POLICY | {"importance": Importance.RATIO}])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_drawn_tokens_equal_the_whole_vocabulary(term: dict[str, object], temperature: float) -> None:
    objective = legal("exact", Sampling(temperature=temperature), temperature, **term)
    own = token_logprobs(STUDENT, temperature)
    assert same(expected_gradient(objective, own), token_level(Divergence.REVERSE_KL, own, temperature))


@pytest.mark.parametrize(("sampling_temperature", "loss_temperature"), [(0.5, 1.0), (1.5, 1.0), (1.0, 2.0)])
def test_ratio_corrects_another_sampling_temperature(sampling_temperature: float, loss_temperature: float) -> None:
    sampling = Sampling(temperature=sampling_temperature)
    objective = legal("exact", sampling, loss_temperature, **POLICY, importance=Importance.RATIO)
    behaviour = token_logprobs(STUDENT, sampling_temperature)
    expected = token_level(Divergence.REVERSE_KL, behaviour, loss_temperature)
    assert same(expected_gradient(objective, behaviour), expected)


@pytest.mark.parametrize("importance", [Importance.NONE, Importance.RATIO])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_discount_one_is_the_sequence_level_kl(importance: Importance, temperature: float) -> None:
    objective = legal(
        "exact", Sampling(temperature=temperature), temperature, **POLICY, discount=1.0, importance=importance
    )
    own = token_logprobs(STUDENT, temperature)
    assert same(expected_gradient(objective, own), sequence_level(temperature))


@pytest.mark.parametrize("writer", [Source.DATASET, Source.TEACHER])
def test_label_is_the_cross_entropy_of_what_was_written(writer: Source) -> None:
    behaviour = token_logprobs(TEACHER)
    sampling = Sampling(rows=frozenset({writer}))
    objective = legal("exact", sampling, teacher="label", divergence=Divergence.FORWARD_KL)
    expected = weighted_scores(-torch.ones(27, 3), behaviour)
    assert same(expected_gradient(objective, behaviour, source=writer), expected)


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
    assert not same(found, REVERSE)
    assert not same(found, sequence_level())


def test_single_token_ratio_of_returns() -> None:
    sampling = Sampling(temperature=0.5)
    behaviour = token_logprobs(STUDENT, 0.5)
    objective = legal("surrogate", sampling, **POLICY, importance=Importance.RATIO, discount=1.0)
    found = expected_gradient(objective, behaviour)
    coefficients = (OWN - behaviour).exp() * returns_by_hand(LOG_RATIOS, 1.0)
    assert same(found, weighted_scores(coefficients, behaviour))
    assert not same(found, sequence_level())


def test_advantages_of_the_first_step_lag_behind() -> None:
    """In a round's second step: written and valued by the older student, differentiated at today's."""
    behaviour = token_logprobs(OLDER)
    objective = legal("surrogate", Sampling(steps_per_round=2), **POLICY, importance=Importance.RATIO)
    found = expected_gradient(objective, behaviour, first_step=OLDER)
    coefficients = (OWN - behaviour).exp() * (behaviour - token_logprobs(TEACHER))
    assert same(found, weighted_scores(coefficients, behaviour))
    assert not same(found, token_level(Divergence.REVERSE_KL, behaviour))
    # With today's log-probabilities in the advantage nothing would lag.
    assert same(expected_gradient(objective, behaviour), token_level(Divergence.REVERSE_KL, behaviour))


def test_ppo_clip() -> None:
    clip, behaviour = 0.2, token_logprobs(OLDER)
    objective = legal("surrogate", **POLICY, importance=Importance.PPO_CLIP, clip=clip)
    found = expected_gradient(objective, behaviour)
    ratio, advantages = (OWN - behaviour).exp(), -LOG_RATIOS
    held = ((advantages > 0) & (ratio > 1 + clip)) | ((advantages < 0) & (ratio < 1 - clip))
    assert held.any()
    assert same(found, weighted_scores(torch.where(held, 0.0, -advantages * ratio), behaviour))
    # Where nothing is clipped it is the exact one.
    assert same(expected_gradient(objective), REVERSE)


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

    def of_jsd(student: Tensor) -> Tensor:
        values = jsd(student_logprobs=student.log_softmax(-1)[STATES_YC], teacher_logprobs=label_YCV, beta=0.5)
        return (probabilities(behaviour)[:, None] * values).sum()

    assert not same(cross_entropy, gradient_of(of_jsd))
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


def state_value_advantage() -> None:
    logprobs, teacher = STUDENT.log_softmax(-1), TEACHER.log_softmax(-1)
    state_kl = reverse_kl(student_logprobs=logprobs, teacher_logprobs=teacher)[STATES_YC]
    assert is_zero(expected_gradient(unjudged(**POLICY), advantages=-state_kl))


def sampled_divergence() -> None:
    for name, parameter in FULL[:1] + FULL[2:6] + FULL[7:]:
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


def uncorrected_steps() -> None:
    behaviour = token_logprobs(OLDER)
    for term in (SAMPLED, POLICY):
        found = expected_gradient(unjudged(**term), behaviour, first_step=OLDER)
        assert not same(found, token_level(Divergence.REVERSE_KL, behaviour))


DEMONSTRATIONS: Sequence[Callable[[], None]] = (
    no_rows,
    label_divergence,
    label_support,
    label_estimator,
    label_own_rows,
    state_value_advantage,
    sampled_divergence,
    k1_loss,
    k3_loss,
    k2_reward,
    k3_reward,
    sampled_rows,
    truncated_sampling,
    uncorrected_temperature,
    uncorrected_steps,
)


@pytest.mark.parametrize("demonstration", DEMONSTRATIONS, ids=lambda function: function.__name__)
def test_refused(demonstration: Callable[[], None]) -> None:
    demonstration()


def test_every_refusal_is_demonstrated() -> None:
    shown = [demonstration.__name__.replace("_", "-") for demonstration in DEMONSTRATIONS]
    assert shown == [rule.name for rule in RULES if rule.kind == "refused"]
