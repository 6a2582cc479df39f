"""What terms make of the logits of a few tokens: values and logged shares by hand, and nothing that is not a number.

The running example: student q = (1/8, 1/2, 1/4, 1/8) and teacher p = (1/2, 1/4, 1/8, 1/8) at the first token; at the
second both are (7/10, 1/10, 1/10, 1/10) and agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from etude.axes.legality import Rule, Sampling
from etude.axes.names import (
    REFERENCE,
    Baseline,
    Divergence,
    Estimator,
    FinishReason,
    Importance,
    Owner,
    Reduction,
    Source,
    Support,
    Tail,
)
from etude.core.collate import collate
from etude.core.linear import OutputHead
from etude.core.objective import Objective
from etude.core.records import Prompt, Rollout, Scored, Scores, as_ids
from etude.core.term import Term
from etude.core.tile import shares_of
from etude.errors import PairError

VOCAB = 4
IDENTITY = OutputHead(torch.eye(VOCAB, dtype=torch.float64))  # hidden states are the logits themselves
STUDENT = [[0.125, 0.5, 0.25, 0.125], [0.7, 0.1, 0.1, 0.1]]
TEACHER = [[0.5, 0.25, 0.125, 0.125], [0.7, 0.1, 0.1, 0.1]]
REVERSE = 0.5 * math.log(2)  # of the first token
POLICY = {"support": Support.SAMPLED, "estimator": Estimator.POLICY_GRADIENT}


class Unjudged(Objective):
    """Without the legality check: what is measured here is arithmetic alone."""

    def _judge(self, sampling: Sampling) -> tuple[Rule, ...]:
        return ()


def logs(probabilities: Sequence[Sequence[float]]) -> Tensor:
    """Logits; of probability 0 a number so low that its softmax is exactly 0 (the head multiplies, so no infinity)."""
    return torch.tensor(probabilities, dtype=torch.float64).log().clamp(min=-1e6)


def run(
    *terms: Term,
    drawn: Sequence[int] = (0, 0),
    student: Sequence[Sequence[float]] = STUDENT,
    teacher: Sequence[Sequence[float]] = TEACHER,
    behaviour: Sequence[float] | None = None,
    reference: Sequence[Sequence[float]] | None = None,
    chunk_bytes: int = 2**20,
) -> tuple[float, dict[str, float], Tensor]:
    """Loss (a mean over the row's tokens), metrics, and the gradient on the logits; one row."""
    q, p, ids = logs(student), logs(teacher), as_ids(list(drawn))
    chosen_q, chosen_p = (x.gather(-1, ids[:, None]).squeeze(-1) for x in (q, p))
    sampled = chosen_q if behaviour is None else torch.tensor(behaviour, dtype=torch.float64).log()
    rollout = Rollout(
        Prompt(as_ids([0]), row=0), ids, Source.STUDENT, FinishReason.STOP, version=0, behaviour_logprobs=sampled
    )
    marks, heads = {"teacher": Scores("teacher", chosen_p, p)}, {"teacher": IDENTITY}
    if reference is not None:
        ref = logs(reference)
        marks[REFERENCE] = Scores(REFERENCE, ref.gather(-1, ids[:, None]).squeeze(-1), ref)
        heads[REFERENCE] = IDENTITY
    row = Scored(rollout, marks, student_logprobs=chosen_q)
    objective = Unjudged(terms, chunk_bytes=chunk_bytes)
    prepared = objective.prepare([row])
    batch = collate(prepared)
    hidden = q.clone().requires_grad_()
    scales = objective.scales(objective.counts(prepared))
    loss, sums = objective.sum(hidden[batch.predicted_from_N], IDENTITY, batch, scales, heads)
    return loss.item(), objective.summarise(sums), torch.autograd.grad(loss, hidden)[0]


# Top-k --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "teacher_mass", "student_mass"),
    [(Owner.TEACHER, 0.75, 0.625), (Owner.STUDENT, 0.375, 0.75), (Owner.UNION, 0.875, 0.875)],
)
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_masses_and_overlap(owner: Owner, teacher_mass: float, student_mass: float, chunk_bytes: int) -> None:
    """Of the first token: the teacher keeps {0, 1}, the student {1, 2}."""
    term = Term("kept", support=Support.TOP_K, top_k=2, owner=owner, first_tokens=1)
    _, metrics, _ = run(term, Term("all"), chunk_bytes=chunk_bytes)
    assert metrics["tokens/kept"] == 1
    assert metrics["teacher_mass/kept"] == pytest.approx(teacher_mass)
    assert metrics["student_mass/kept"] == pytest.approx(student_mass)
    assert metrics["overlap/kept"] == 0.5


def test_more_ids_than_there_are_is_refused() -> None:
    assert run(Term("kept", support=Support.TOP_K, top_k=VOCAB))[0] == pytest.approx(REVERSE / 2)
    with pytest.raises(PairError, match="term 'kept' keeps 5 ids a side and there are 4; lower its top_k"):
        run(Term("kept", support=Support.TOP_K, top_k=VOCAB + 1))


def test_shares_are_means_over_the_trained_tokens() -> None:
    term = Term("kept", support=Support.TOP_K, top_k=1, owner=Owner.TEACHER)
    _, metrics, _ = run(term)
    assert metrics["teacher_mass/kept"] == pytest.approx((0.5 + 0.7) / 2)
    assert metrics["student_mass/kept"] == pytest.approx((0.125 + 0.7) / 2)
    assert metrics["overlap/kept"] == 0.5  # 0 and 1
    _, metrics, _ = run(Term("kept", support=Support.TOP_K, top_k=1, skip_first=1))
    assert (metrics["overlap/kept"], metrics["tokens/kept"]) == (1.0, 1)
    # Rows that weigh less count as much: a share is about tokens.
    _, metrics, _ = run(Term("kept", support=Support.TOP_K, top_k=1, reduction=Reduction.SEQUENCE_MEAN))
    assert metrics["teacher_mass/kept"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("tail", "drawn", "expected"),
    [
        (Tail.BUCKET, 0, 0.325336),
        (Tail.TRUNCATE, 0, 0.173287),
        (Tail.RENORMALISE, 0, 0.459580),
        (Tail.SAMPLED, 0, 0.173287),  # the head's sum; the drawn id is in the head
        (Tail.SAMPLED, 2, 0.173287 + math.log(2)),  # and c of id 2, log(1/4) - log(1/8)
        (Tail.SAMPLED, 3, 0.173287),  # c of id 3 is 0
    ],
)
def test_values_of_the_teachers_top_2(tail: Tail, drawn: int, expected: float) -> None:
    term = Term("kept", support=Support.TOP_K, top_k=2, tail=tail, first_tokens=1)
    loss, metrics, _ = run(term, drawn=(drawn, 0))
    assert loss == pytest.approx(expected, abs=1e-5)
    assert metrics["divergence/kept"] == pytest.approx(expected, abs=1e-5)


# The gate -----------------------------------------------------------------------------------------------------------


def test_an_uncertain_teacher() -> None:
    """Entropies 1.75 ln 2 = 1.213 and 0.940: of two tokens one is let through, and the mean is over both."""
    for term in (
        Term("gated", teacher_entropy=1.0),
        Term("gated", support=Support.TOP_K, top_k=4, teacher_entropy=1.0),
    ):
        loss, metrics, gradient = run(term, student=[STUDENT[0], STUDENT[0]])
        assert loss == pytest.approx(REVERSE / 2, abs=1e-6)
        assert metrics["uncertain/gated"] == 0.5
        assert metrics["tokens/gated"] == 2
        assert not gradient[1].any()
    _, open_gate, _ = run(Term("gated", teacher_entropy=0.5))
    _, shut_gate, gradient = run(Term("gated", teacher_entropy=2.0))
    assert (open_gate["uncertain/gated"], shut_gate["uncertain/gated"]) == (1.0, 0.0)
    assert not gradient.any()
    # What is logged as divergence is that of every trained token, gated or not.
    assert open_gate["divergence/gated"] == shut_gate["divergence/gated"] == pytest.approx(REVERSE / 2)


# Targets of two models ----------------------------------------------------------------------------------------------

EVEN = [[0.25] * 4] * 2
OPTIMUM = [0.563697, 0.237006, 0.099649, 0.099649]  # of 1.25 away from an even reference, at the first token


def test_over_the_whole_vocabulary_the_target_is_a_distribution() -> None:
    loss, metrics, gradient = run(Term("beyond", extrapolation=1.25, first_tokens=1), reference=EVEN)
    expected = sum(q * math.log(q / p) for q, p in zip(STUDENT[0], OPTIMUM, strict=True))
    assert loss == pytest.approx(expected, abs=1e-5)
    assert metrics["divergence/beyond"] == pytest.approx(expected, abs=1e-5)
    forces = [q * (math.log(q / p) - expected) for q, p in zip(STUDENT[0], OPTIMUM, strict=True)]
    assert gradient[0].tolist() == pytest.approx(forces, abs=1e-5)
    # Where the student is the target, nothing moves.
    loss, _, gradient = run(Term("beyond", extrapolation=1.25, first_tokens=1), student=[OPTIMUM] * 2, reference=EVEN)
    assert abs(loss) < 1e-6
    assert gradient.abs().max() < 1e-5


def test_the_kept_ids_are_the_targets() -> None:
    term = Term("beyond", support=Support.TOP_K, top_k=2, extrapolation=1.25, first_tokens=1)
    _, metrics, _ = run(term, reference=EVEN)
    assert metrics["teacher_mass/beyond"] == pytest.approx(OPTIMUM[0] + OPTIMUM[1], abs=1e-5)
    # A reference that says what the teacher says most leaves the others: p^2 / ref is (1/4, 1/2, 1/2, 1/2) / 1.75.
    term = Term("beyond", support=Support.TOP_K, top_k=3, extrapolation=2.0, first_tokens=1)
    _, metrics, _ = run(term, reference=[[1.0, 0.125, 0.03125, 0.03125]] * 2)
    assert metrics["teacher_mass/beyond"] == pytest.approx(1.5 / 1.75, abs=1e-5)


def test_the_gate_asks_the_target() -> None:
    """Entropy of the optimum: 1.126 nats, of the teacher 1.213."""
    for threshold, share in ((1.1, 1.0), (1.15, 0.0)):
        term = Term("beyond", extrapolation=1.25, first_tokens=1, teacher_entropy=threshold)
        assert run(term, reference=EVEN)[1]["uncertain/beyond"] == share


@pytest.mark.parametrize(("drawn", "advantage"), [(0, 1.559581), (1, -0.693147), (2, -0.866434), (3, -0.173287)])
def test_advantages_of_an_extrapolated_teacher(drawn: int, advantage: float) -> None:
    plain = Term("plain", **POLICY, extrapolation=1.25, first_tokens=1)
    loss, metrics, gradient = run(plain, drawn=(drawn, 0), reference=EVEN)
    assert loss == pytest.approx(-advantage * math.log(STUDENT[0][drawn]), abs=1e-5)
    assert metrics["divergence/plain"] == pytest.approx(-advantage, abs=1e-5)
    forces = [-advantage * (float(v == drawn) - q) for v, q in enumerate(STUDENT[0])]
    assert gradient[0].tolist() == pytest.approx(forces, abs=1e-5)
    # k2 has the same update, and the state's mean as a baseline is the mean of these four numbers.
    k2 = Term("k2", support=Support.SAMPLED, extrapolation=1.25, first_tokens=1)
    torch.testing.assert_close(run(k2, drawn=(drawn, 0), reference=EVEN)[2], gradient, atol=1e-6, rtol=0)
    mean = 0.125 * 1.559581 + 0.5 * -0.693147 + 0.25 * -0.866434 + 0.125 * -0.173287
    centred = Term("centred", **POLICY, extrapolation=1.25, first_tokens=1, baseline=Baseline.STATE_KL)
    loss, _, _ = run(centred, drawn=(drawn, 0), reference=EVEN)
    assert loss == pytest.approx(-(advantage - mean) * math.log(STUDENT[0][drawn]), abs=1e-5)


def test_a_target_without_its_reference_is_refused() -> None:
    with pytest.raises(PairError, match="teacher 'reference' gave no hidden states with a head"):
        run(Term(extrapolation=1.25))
    with pytest.raises(PairError, match="teacher 'reference' gave no log-probabilities of the drawn ids"):
        run(Term(support=Support.SAMPLED, extrapolation=1.25))


# Drawn tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage_clip", [None, 1.0])
def test_the_state_kl_as_a_baseline(advantage_clip: float | None) -> None:
    """Id 0 has c = -2 ln 2, so A = 2 ln 2 + ln 2 / 2; at the second token c and KL are 0."""
    term = Term("policy", **POLICY, baseline=Baseline.STATE_KL, advantage_clip=advantage_clip)
    loss, metrics, gradient = run(term)
    advantage = 2 * math.log(2) + REVERSE
    assert advantage > 1.0
    advantage = advantage if advantage_clip is None else advantage_clip
    assert loss == pytest.approx(-advantage * math.log(0.125) / 2)
    assert metrics["divergence/policy"] == pytest.approx(-2 * math.log(2) / 2)  # c, whatever the baseline
    expected = torch.tensor([-advantage / 2 * (float(v == 0) - q) for v, q in enumerate(STUDENT[0])])
    torch.testing.assert_close(gradient[0], expected.double(), atol=1e-6, rtol=0)
    assert gradient[1].abs().max() < 1e-6


@pytest.mark.parametrize("importance", [Importance.NONE, Importance.RATIO, Importance.PPO_CLIP])
@pytest.mark.parametrize("baseline", [Baseline.NONE, Baseline.STATE_KL])
def test_clipped_and_then_weighed_whatever_the_baseline(baseline: Baseline, importance: Importance) -> None:
    """No disagreement lies before the first token, so it weighs 1.5; that comes after the clip at 1."""
    term = {"baseline": baseline, "advantage_clip": 1.0, "importance": importance}
    term |= {"clip": 0.2} if importance is Importance.PPO_CLIP else {}
    _, metrics, gradient = run(Term("policy", **POLICY, **term, disagreement_weight=1.5))
    expected = torch.tensor([-1.5 * 1.0 / 2 * (float(v == 0) - q) for v, q in enumerate(STUDENT[0])])
    torch.testing.assert_close(gradient[0], expected.double(), atol=1e-6, rtol=0)
    assert metrics["tokens/policy"] == 2  # a weight does not change what is divided by
    assert metrics["divergence/policy"] == pytest.approx(-2 * math.log(2) / 2)


@pytest.mark.parametrize(
    ("term", "clipped"),
    [
        ({"importance": Importance.TRUNCATED, "bounds": (0.5, 2.0)}, 0.5),
        ({"importance": Importance.MASKED, "bounds": (0.5, 2.0)}, 0.5),
        ({"importance": Importance.MASKED, "bounds": (0.0, 9.0)}, 0.0),
        ({"importance": Importance.MASKED, "bounds": (1.5, 2.0)}, 1.0),
        ({"importance": Importance.PPO_CLIP, "clip": 0.2}, 0.5),
    ],
)
def test_the_share_of_cut_tokens(term: dict[str, object], clipped: float) -> None:
    """Ratios 4 and 1."""
    _, metrics, _ = run(Term("policy", **POLICY, **term), drawn=(0, 0), behaviour=(0.03125, 0.7))
    assert metrics["clipped/policy"] == clipped


@pytest.mark.parametrize(
    ("term", "weight"),
    [
        ({"importance": Importance.TRUNCATED, "bounds": (0.5, 2.0)}, 2.0),
        ({"importance": Importance.MASKED, "bounds": (0.5, 2.0)}, 0.0),
        ({"importance": Importance.MASKED, "bounds": (0.5, 4.5)}, 4.0),
        ({"importance": Importance.RATIO}, 4.0),
    ],
)
def test_weighted_by_the_bounded_ratio(term: dict[str, object], weight: float) -> None:
    _, _, gradient = run(Term("policy", **POLICY, **term), behaviour=(0.03125, 0.7))
    advantage = 2 * math.log(2)
    expected = [-weight * advantage / 2 * (float(v == 0) - q) for v, q in enumerate(STUDENT[0])]
    assert gradient[0].tolist() == pytest.approx(expected, abs=1e-6)


# What is reported, what is missing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "names"),
    [
        (Term(), ()),
        (Term(**POLICY, importance=Importance.RATIO), ()),
        (Term(**POLICY, importance=Importance.PPO_CLIP, clip=0.2), ("clipped",)),
        (
            Term(**POLICY, importance=Importance.MASKED, bounds=(0.5, 2.0), teacher_entropy=0.1),
            ("clipped", "uncertain"),
        ),
        (Term(support=Support.TOP_K, top_k=2), ("teacher_mass", "student_mass", "overlap")),
    ],
)
def test_shares(term: Term, names: tuple[str, ...]) -> None:
    assert shares_of(term) == names
    _, metrics, _ = run(term)
    for name in ("clipped", "uncertain", "teacher_mass", "student_mass", "overlap"):
        assert (f"{name}/{term.name}" in metrics) == (name in names)


@pytest.mark.parametrize(
    "term",
    [
        Term(**POLICY, baseline=Baseline.STATE_KL),
        Term(support=Support.SAMPLED, teacher_entropy=0.1),
        Term(support=Support.TOP_K, top_k=2),
    ],
    ids=["state_kl", "teacher_entropy", "top_k"],
)
def test_a_teacher_without_hidden_states_is_refused(term: Term) -> None:
    rollout = Rollout(
        Prompt(as_ids([0]), row=0), as_ids([1]), Source.STUDENT, FinishReason.STOP, 0, behaviour_logprobs=torch.zeros(1)
    )
    row = Scored(rollout, {"teacher": Scores("teacher", torch.zeros(1))}, student_logprobs=torch.zeros(1))
    objective = Objective([term])
    batch = collate(objective.prepare([row]))
    with pytest.raises(PairError, match="teacher 'teacher' gave no hidden states with a head"):
        objective.sum(torch.zeros(1, VOCAB).double(), IDENTITY, batch, torch.ones(1), {"teacher": IDENTITY})


# Probabilities of exactly zero ---------------------------------------------------------------------------------------

EVERY_KIND = [
    *(Term(str(name), divergence=name) for name in (Divergence.FORWARD_KL, Divergence.REVERSE_KL)),
    Term("jsd", divergence=Divergence.JSD, beta=0.3, rescale=True),
    Term("skewed", divergence=Divergence.SKEW_REVERSE_KL, alpha=0.1, detach_mixture=True),
    Term("skewed_forward", divergence=Divergence.SKEW_FORWARD_KL, alpha=0.1),
    Term("alpha_beta", divergence=Divergence.ALPHA_BETA, alpha=0.2, beta=0.7),
    Term("adaptive", divergence=Divergence.ADAPTIVE_KL, head_mass=0.5),
    Term("total_variation", divergence=Divergence.TOTAL_VARIATION),
    *(
        Term(f"{tail}_{owner}", support=Support.TOP_K, top_k=2, owner=owner, tail=tail)
        for tail in Tail
        for owner in Owner
    ),
    Term("gated", divergence=Divergence.FORWARD_KL, teacher_entropy=0.1),
    Term("k2", support=Support.SAMPLED),
    Term("state_kl", **POLICY, baseline=Baseline.STATE_KL),
    Term("masked", **POLICY, importance=Importance.MASKED, bounds=(0.5, 2.0)),
    Term("whitened", **POLICY, whiten=True, disagreement_weight=1.5),
]


EVERY_KIND += [replace(term, name=f"beyond_{term.name}", extrapolation=1.25) for term in EVERY_KIND]


@pytest.mark.parametrize("term", EVERY_KIND, ids=lambda term: term.name)
@pytest.mark.parametrize("sides", ["student", "teacher", "both", "teacher is sure"])
def test_zeros_give_no_nan(term: Term, sides: str) -> None:
    hole, sure = [[0.5, 0.25, 0.25, 0.0]] * 2, [[1.0, 0.0, 0.0, 0.0]] * 2
    student = hole if sides in ("student", "both") else STUDENT
    teacher = {"teacher": hole, "both": hole, "teacher is sure": sure}.get(sides, TEACHER)
    loss, metrics, gradient = run(term, student=student, teacher=teacher, reference=hole)
    assert math.isfinite(loss)
    assert all(math.isfinite(value) for value in metrics.values())
    assert gradient.isfinite().all()
