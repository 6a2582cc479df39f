"""One step is one step: the gradient does not depend on how its rows are cut into micro-batches, ranks or tiles.

A small recurrent model reads the padded batch, so that a token's hidden state depends on every token before it, and a
row that looked at its neighbours or at its padding would be noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.axes.legality import Sampling
from etude.axes.names import (
    Baseline,
    Correctness,
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
from etude.axes.schedules import Ramp
from etude.core import linear
from etude.core.collate import collate
from etude.core.divergences import forward_kl, jsd, reverse_kl
from etude.core.linear import OutputHead
from etude.core.objective import Objective, Term
from etude.core.records import Batch, Prompt, Rollout, Scored, Scores, as_ids
from etude.testing import on_ranks

VOCAB, HIDDEN, TEACHER_HIDDEN = 19, 6, 4
Rows = Sequence[Scored]
Gradients = dict[str, Tensor]


class Reader(nn.Module):
    """Hidden states from the ids before and at each place; the head has a bias, a scale and a soft cap."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.mixing = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN))
        self.bias = nn.Parameter(torch.randn(VOCAB))

    def hidden(self, batch: Batch) -> Tensor:
        states_BTD, _ = self.mixing(self.embedding(batch.token_ids_BT))
        return states_BTD.flatten(0, 1)[batch.predicted_from_N]

    def head(self) -> OutputHead:
        return OutputHead(self.weight, self.bias, scale=1.5, softcap=4.0)


@pytest.fixture
def reader() -> Reader:
    return Reader()


TEACHER_HEAD = OutputHead(torch.randn(VOCAB, TEACHER_HIDDEN, generator=torch.Generator().manual_seed(11)))

REWARDS = {
    "support": Support.SAMPLED,
    "estimator": Estimator.POLICY_GRADIENT,
    "sources": {Source.STUDENT},
}
TERMS = [
    Term("reverse_kl"),
    Term("jsd", divergence=Divergence.JSD, beta=0.3, coefficient=0.5),
    Term("by_row", divergence=Divergence.FORWARD_KL, reduction=Reduction.SEQUENCE_MEAN),
    Term("finished", divergence=Divergence.SKEW_REVERSE_KL, alpha=0.1, train_truncated=False),
    Term("gold", teacher="label", divergence=Divergence.FORWARD_KL, sources={Source.DATASET}),
    Term("drawn", support=Support.SAMPLED, sources={Source.STUDENT}),
    Term(
        "policy",
        support=Support.SAMPLED,
        estimator=Estimator.POLICY_GRADIENT,
        importance=Importance.PPO_CLIP,
        clip=0.2,
        discount=0.5,
        sources={Source.STUDENT},
    ),
    *(
        Term(str(divergence), divergence=divergence, **parameters)
        for divergence, parameters in (
            (Divergence.SKEW_FORWARD_KL, {"alpha": 0.1}),
            (Divergence.ALPHA_BETA, {"alpha": 0.2, "beta": 0.7}),
            (Divergence.ADAPTIVE_KL, {"head_mass": 0.5}),
            (Divergence.TOTAL_VARIATION, {}),
        )
    ),
    Term("rescaled", divergence=Divergence.JSD, beta=0.1, rescale=True),
    Term("detached", divergence=Divergence.SKEW_REVERSE_KL, alpha=0.1, detach_mixture=True),
    *(
        Term(f"{tail}_{owner}", support=Support.TOP_K, top_k=3, owner=owner, tail=tail, sources={Source.STUDENT})
        for tail in Tail
        for owner in Owner
    ),
    Term("kept_jsd", support=Support.TOP_K, top_k=4, owner=Owner.UNION, divergence=Divergence.JSD, beta=0.3),
    Term("added_up", reduction=Reduction.SUM, coefficient=0.1),
    Term("middle", skip_first=1, first_tokens=Ramp(2, 4, kind="linear", last=4), reduction=Reduction.SEQUENCE_MEAN),
    Term("gated", divergence=Divergence.FORWARD_KL, teacher_entropy=2.0),
    Term("state_kl", **REWARDS, baseline=Baseline.STATE_KL, advantage_clip=2.0),
    Term("centred", **REWARDS, baseline=Baseline.BATCH, discount=1.0, length_normalise=True),
    Term("whitened", **REWARDS, whiten=True, advantage_clip=1.0, disagreement_weight=1.5),
    Term("truncated", **REWARDS, importance=Importance.TRUNCATED, bounds=(0.1, 2.0)),
    Term("masked", **REWARDS, importance=Importance.MASKED, bounds=(0.01, 2.0)),
    Term("ordinary", left_out_ids={3, 5, 8}),
    Term("by_writer", source_weights={"student": 0.5, "dataset": 2.0}, reduction=Reduction.SEQUENCE_MEAN),
    Term("by_verdict", right_weight=2.0, wrong_weight=0.25),
    Term("right", correctness="right", perplexity_temperature=2.0),
    Term("wrong", correctness="wrong", perplexity_temperature=0.5),
    Term("wrong_drawn", **REWARDS, correctness="wrong", perplexity_temperature=1.0),
    Term("judged", **REWARDS, teacher="reward", baseline=Baseline.GROUP, whiten=True, discount=0.9),
]


def objective_of(*terms: Term, chunk_bytes: int = 2**20) -> Objective:
    sampling = Sampling(rows=frozenset({Source.STUDENT, Source.DATASET}))
    return Objective(terms or TERMS, sampling=sampling, chunk_bytes=chunk_bytes)


def eight_rows(objective: Objective, *, kept: bool = False) -> list[Scored]:
    """Prompts and answers of all lengths, cut and finished, written by student and dataset.

    `kept`: the student's tokens carry sets of one to five ids.
    """
    generator = torch.Generator().manual_seed(3)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def logprobs(length: int) -> Tensor:
        return -3 * torch.rand(length, generator=generator)

    rows = list[Scored]()
    for row in range(8):
        length = number(1, 9)
        source = Source.DATASET if row in (2, 5) else Source.STUDENT
        written = Rollout(
            Prompt(torch.randint(VOCAB, (number(1, 6),), generator=generator), row=row, group=row % 2),
            torch.randint(VOCAB, (length,), generator=generator),
            source,
            FinishReason.LENGTH if row % 3 == 0 else FinishReason.STOP,
            version=0,
            behaviour_logprobs=logprobs(length) if source is Source.STUDENT else None,
            written=torch.arange(length) % 3 != 1 if row in (3, 6) else None,
        )
        hidden = torch.randn(length, TEACHER_HIDDEN, generator=generator)
        marks = Scores("teacher", sampled_logprobs=logprobs(length), hidden=hidden)
        rows.append(
            Scored(written, {"teacher": marks}, student_logprobs=logprobs(length), reward=0.9 if row % 3 == 0 else 0.1)
        )
    if kept:
        rows = [with_kept(row) for row in rows]
    return objective.prepare(rows)


def with_kept(row: Scored) -> Scored:
    generator = torch.Generator().manual_seed(row.rollout.prompt.row)
    ids, length = row.rollout.completion_ids, row.rollout.num_completion_tokens
    lengths = torch.randint(1, 6, (length,), generator=generator, dtype=torch.int32)
    sets = [(ids[t] + torch.arange(int(n))) % VOCAB for t, n in enumerate(lengths)]
    rollout = replace(row.rollout, kept_ids=torch.cat(sets).int(), kept_lengths=lengths)
    if row.rollout.source is Source.DATASET:  # nobody has cut it, and its masses are 1
        return replace(row, scores={"teacher": replace(row.scores["teacher"], kept_mass=torch.zeros(length))})
    marks = replace(row.scores["teacher"], kept_mass=-torch.rand(length, generator=generator))
    mass = -torch.rand(length, generator=generator)
    return replace(row, rollout=rollout, scores={"teacher": marks}, student_kept_mass=mass)


RENORMALISED = [
    Term("within", **REWARDS, renormalise=True, importance=Importance.RATIO),
    Term("later", **REWARDS, renormalise=True, discount=0.5, whiten=True, advantage_clip=1.0),
    Term("kl", **REWARDS, renormalise=True, baseline=Baseline.STATE_KL, advantage_clip=2.0),
    Term("k2", support=Support.SAMPLED, sources={Source.STUDENT}, renormalise=True),
    Term("score", **REWARDS, renormalise=True, teacher="reward", baseline=Baseline.GROUP, discount=1.0),
    Term("gated", support=Support.SAMPLED, sources={Source.STUDENT}, renormalise=True, teacher_entropy=2.0),
]
CUT = Sampling(rows=frozenset({Source.STUDENT, Source.DATASET}), top_p=0.9)


@pytest.mark.parametrize(
    "terms", [[term] for term in RENORMALISED] + [[*RENORMALISED, Term("whole")]], ids=lambda terms: terms[-1].name
)
def test_ragged_sets_are_one_step_in_any_micro_batches_and_tiles(reader: Reader, terms: list[Term]) -> None:
    objective = Objective(terms, sampling=CUT)
    rows = eight_rows(objective, kept=True)
    whole = step(reader, objective, [rows])
    assert any(gradient.abs().max() > 1e-3 for gradient in whole[0].values())
    for size in (4, 2, 1):
        assert_same(step(reader, objective, cut(rows, size)), whole)
    assert_same(step(reader, Objective(terms, sampling=CUT, chunk_bytes=500), [rows]), whole)


def test_within_the_kept_ids_on_whole_tensors(reader: Reader) -> None:
    """k2 written out with an [N, V] mask, all other ids at minus infinity before the softmax."""
    objective = Objective(RENORMALISED[3:4], sampling=CUT)
    batch = collate(eight_rows(objective, kept=True))
    assert batch.kept is not None
    scales = torch.full((1,), 1 / 16, dtype=torch.float64)
    loss, _ = objective.sum(reader.hidden(batch), reader.head(), batch, scales, {"teacher": TEACHER_HEAD})
    affine = functional.linear(reader.hidden(batch), reader.weight, reader.bias)
    inside = torch.zeros(batch.num_scored_tokens, VOCAB, dtype=torch.bool)
    for token, length in enumerate(batch.kept.lengths):
        inside[token, batch.kept.ids_M[batch.kept.starts[token] :][:length].long()] = True
    within = (4.0 * torch.tanh(1.5 * affine / 4.0)).masked_fill(~inside, -1e9).log_softmax(-1)
    columns = batch.teachers["teacher"]
    assert columns.sampled_logprobs_N is not None
    assert columns.kept_mass_N is not None
    drawn = within.gather(-1, batch.target_ids_N[:, None]).squeeze(-1)
    c = drawn - (columns.sampled_logprobs_N - columns.kept_mass_N)
    plain = (batch.weights_JN[0] * 0.5 * c * c).sum() / 16
    assert loss.item() == pytest.approx(plain.item(), abs=1e-5)
    found = torch.autograd.grad(loss, list(reader.parameters()))
    for a, b in zip(found, torch.autograd.grad(plain, list(reader.parameters())), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def backward(reader: Reader, objective: Objective, rows: Rows, scales: Tensor) -> tuple[Gradients, float]:
    """Gradients and loss of one micro-batch."""
    batch = collate(rows)
    loss, _ = objective.sum(reader.hidden(batch), reader.head(), batch, scales, {"teacher": TEACHER_HEAD})
    names = [name for name, _ in reader.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(reader.parameters())), strict=True)), loss.item()


def added(parts: Sequence[tuple[Gradients, float]]) -> tuple[Gradients, float]:
    gradients = {name: sum((g[name] for g, _ in parts), torch.tensor(0.0)) for name in parts[0][0]}
    return gradients, sum(loss for _, loss in parts)


def step(reader: Reader, objective: Objective, micro_batches: Sequence[Rows]) -> tuple[Gradients, float]:
    """One optimiser step: one count over all micro-batches, then each of them backward."""
    counts = objective.counts([row for rows in micro_batches for row in rows])
    scales = objective.scales(counts)
    return added([backward(reader, objective, rows, scales) for rows in micro_batches])


def assert_same(found: tuple[Gradients, float], expected: tuple[Gradients, float], tolerance: float = 1e-6) -> None:
    assert found[1] == pytest.approx(expected[1], abs=tolerance, rel=tolerance)
    for name, gradient in expected[0].items():
        torch.testing.assert_close(
            found[0][name], gradient, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m
        )


def cut(rows: Rows, size: int) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


# Micro-batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "terms", [[term] for term in TERMS] + [TERMS], ids=lambda terms: terms[0].name if len(terms) == 1 else "all"
)
def test_1x8_2x4_4x2_and_8x1_are_one_step(reader: Reader, terms: list[Term]) -> None:
    objective = objective_of(*terms)
    rows = eight_rows(objective)
    whole = step(reader, objective, [rows])
    assert any(gradient.abs().max() > 1e-3 for gradient in whole[0].values())
    for size in (4, 2, 1):
        assert_same(step(reader, objective, cut(rows, size)), whole)
    assert_same(step(reader, objective, [rows[:1], rows[1:6], rows[6:]]), whole)
    assert_same(step(reader, objective, [list(reversed(rows))]), whole)


def test_every_divergence_and_every_support_is_looked_at() -> None:
    assert {term.divergence for term in TERMS} == set(Divergence)
    assert {term.support for term in TERMS} == set(Support)
    assert {(term.tail, term.owner) for term in TERMS if term.tail} == {
        (tail, owner) for tail in Tail for owner in Owner
    }
    assert {term.importance for term in TERMS} >= set(Importance) - {Importance.RATIO}
    assert {term.baseline for term in TERMS} == set(Baseline)
    assert {term.reduction for term in TERMS} == set(Reduction)
    assert {term.correctness for term in TERMS if term.perplexity_temperature} == set(Correctness)


def test_terms_together_are_the_sum_of_each_alone(reader: Reader) -> None:
    objective = objective_of()
    together = step(reader, objective, [eight_rows(objective)])
    parts = list[tuple[Gradients, float]]()
    for term in TERMS:
        alone = objective_of(term)
        parts.append(step(reader, alone, [eight_rows(alone)]))
    assert_same(together, added(parts), tolerance=1e-5)


def test_a_sum_is_divided_by_nothing(reader: Reader) -> None:
    """The gradient of a sum over tokens is their mean's times their number, and twice the rows have twice of it."""
    total, mean = objective_of(Term(reduction=Reduction.SUM)), objective_of(Term())
    rows, same_rows = eight_rows(total), eight_rows(mean)
    count = mean.counts(same_rows).item()
    gradients, loss = step(reader, mean, [same_rows])
    expected = {name: count * gradient for name, gradient in gradients.items()}, count * loss
    assert_same(step(reader, total, [rows]), expected, tolerance=1e-5)
    twice = {name: 2 * gradient for name, gradient in expected[0].items()}, 2 * expected[1]
    assert_same(step(reader, total, [rows, rows]), twice, tolerance=1e-5)
    assert_same(ranks_step(reader, total, [cut(rows, 2), cut(rows, 3)]), twice, tolerance=1e-5)


def row_of_losses(losses: Sequence[float]) -> tuple[Scored, Tensor]:
    """A dataset row with these cross-entropies, and the two-id logits that have them."""
    rollout = Rollout(
        Prompt(as_ids([0]), row=0), as_ids([1] * len(losses)), Source.DATASET, FinishReason.STOP, version=0
    )
    probability = (-torch.tensor(losses, dtype=torch.float64)).exp()
    return Scored(rollout, {}), torch.stack([(1 - probability).log(), probability.log()], dim=-1)


def test_ten_and_nine_times_one_make_1_9_and_not_5_5() -> None:
    objective = objective_of(TERMS[4])
    micro_batches = [row_of_losses([10.0]), row_of_losses([1.0] * 9)]
    head = OutputHead(torch.eye(2, dtype=torch.float64))
    prepared = objective.prepare([row for row, _ in micro_batches])
    scales = objective.scales(objective.counts(prepared))
    losses = [
        objective.sum(logits, head, collate([row]), scales, {})[0].item()
        for row, (_, logits) in zip(prepared, micro_batches, strict=True)
    ]
    assert sum(losses) == pytest.approx(1.9)


def test_an_incomplete_last_step_is_divided_by_its_own_tokens(reader: Reader) -> None:
    """Five micro-batches at four a step: the second step's gradient is that of the fifth alone."""
    objective = objective_of(*TERMS[:4])
    micro_batches = cut(eight_rows(objective)[:5], 1)
    steps = [step(reader, objective, micro_batches[start : start + 4]) for start in range(0, 5, 4)]
    assert len(steps) == 2
    assert_same(steps[1], step(reader, objective, micro_batches[4:]))
    (row,) = micro_batches[4]
    alone = objective_of(TERMS[0])
    (alone_row,) = alone.prepare([row])
    batch = collate([alone_row])
    values = reverse_kl(
        student_logprobs=reader.head().logits(reader.hidden(batch)).log_softmax(-1),
        teacher_logprobs=TEACHER_HEAD.logits(row.scores["teacher"].hidden).log_softmax(-1),
    )
    assert step(reader, alone, [[alone_row]])[1] == pytest.approx(values.mean().item(), abs=1e-6)


# Ranks --------------------------------------------------------------------------------------------------------------


def ranks_step(reader: Reader, objective: Objective, ranks: Sequence[Sequence[Rows]]) -> tuple[Gradients, float]:
    """What a data-parallel wrapper makes of it: counts summed over ranks, gradients averaged over ranks."""
    counts = sum((objective.counts([r for rows in rank for r in rows]) for rank in ranks), torch.zeros(()))
    scales = objective.scales(counts, world_size=len(ranks))
    total, loss = added([added([backward(reader, objective, rows, scales) for rows in rank]) for rank in ranks])
    return {name: gradient / len(ranks) for name, gradient in total.items()}, loss / len(ranks)


@pytest.mark.parametrize("share", [4, 1, 7])
def test_two_ranks_are_one_step(reader: Reader, share: int) -> None:
    objective = objective_of()
    rows = eight_rows(objective)
    assert_same(
        ranks_step(reader, objective, [cut(rows[:share], 2), cut(rows[share:], 2)]), step(reader, objective, [rows])
    )


def test_a_rank_without_tokens_takes_part_and_adds_nothing(reader: Reader) -> None:
    objective = objective_of(TERMS[3])  # trains finished rows only
    rows = eight_rows(objective)
    finished = [row for row in rows if not row.rollout.truncated]
    idle = [row for row in rows if row.rollout.truncated]
    assert finished
    assert idle
    idle_gradients, idle_loss = ranks_step(reader, objective, [[idle], [idle]])
    assert idle_loss == 0.0
    assert not any(gradient.any() for gradient in idle_gradients.values())
    assert_same(ranks_step(reader, objective, [[finished], [idle]]), step(reader, objective, [finished]))


def prepared_on_ranks(objective: Objective, ranks: Sequence[Rows]) -> list[list[Scored]]:
    """Each rank's rows, prepared with sums over all ranks."""
    return on_ranks(lambda rank, total, gather: objective.prepare(ranks[rank], total=total, gather=gather), len(ranks))


@pytest.mark.parametrize("share", [0, 3, 7])
def test_a_round_prepared_on_two_ranks_is_the_round(reader: Reader, share: int) -> None:
    objective = objective_of()
    rows = eight_rows(objective)
    here, there = prepared_on_ranks(objective, [rows[:share], rows[share:]])
    ranks = [cut(here, 3), cut(there, 3)] if here else [cut(there[:4], 3), cut(there[4:], 3)]
    assert_same(ranks_step(reader, objective, ranks), step(reader, objective, [rows]), tolerance=1e-5)


# Padding ------------------------------------------------------------------------------------------------------------


def test_a_row_alone_equals_the_row_in_any_batch(reader: Reader) -> None:
    objective = objective_of()
    rows = eight_rows(objective)
    scales = torch.full((len(objective.terms),), 0.02, dtype=torch.float64)
    for row in rows:
        idle = [other.with_prepared(weights=torch.zeros_like(other.weights)) for other in rows if other is not row]
        assert_same(
            backward(reader, objective, [*idle[:3], row, *idle[3:]], scales), backward(reader, objective, [row], scales)
        )


# Tiles --------------------------------------------------------------------------------------------------------------


def plain_loss(reader: Reader, objective: Objective, batch: Batch, scales: Tensor) -> Tensor:
    """The first two terms written out on whole [N, V] tensors."""
    columns = batch.teachers["teacher"]
    assert columns.hidden_ND is not None
    affine = functional.linear(reader.hidden(batch), reader.weight, reader.bias)
    student = (4.0 * torch.tanh(1.5 * affine / 4.0)).log_softmax(-1)
    teacher = (columns.hidden_ND @ TEACHER_HEAD.weight_VD.T).log_softmax(-1)
    values = (
        reverse_kl(student_logprobs=student, teacher_logprobs=teacher),
        jsd(student_logprobs=student, teacher_logprobs=teacher, beta=0.3),
    )
    total = sum(s * (w * v).sum() for s, w, v in zip(scales.float(), batch.weights_JN, values, strict=True))
    assert isinstance(total, Tensor)
    return total


@pytest.mark.parametrize("tiles", [(7, 3), (7, 7), (1, 1), (100, 100)])
def test_tiles_are_one_loss(reader: Reader, tiles: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """23 tokens, in tiles of 7 one of which no term trains, against the plain path; the head's gradient included."""

    def cut_to(*_: object, **__: object) -> tuple[int, int]:
        return tiles

    monkeypatch.setattr(linear, "tile_sizes", cut_to)
    objective = objective_of(*TERMS[:2])
    batch = collate(eight_rows(objective))
    batch = first_tokens(batch, 23)
    batch.weights_JN[:, 7:14] = 0.0
    scales = torch.tensor([1 / 16, 0.5 / 16], dtype=torch.float64)
    loss, _ = objective.sum(reader.hidden(batch), reader.head(), batch, scales, {"teacher": TEACHER_HEAD})
    plain = plain_loss(reader, objective, batch, scales)
    found = torch.autograd.grad(loss, list(reader.parameters()))
    expected = torch.autograd.grad(plain, list(reader.parameters()))
    assert loss.item() == pytest.approx(plain.item(), abs=1e-6)
    for (name, _), a, b in zip(reader.named_parameters(), found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: n + m)
        assert b.any(), name


def first_tokens(batch: Batch, count: int) -> Batch:
    """The batch with its first `count` scored tokens only."""
    assert batch.num_scored_tokens >= count
    columns = {f.name: getattr(batch, f.name)[..., :count] for f in fields(batch) if f.name.endswith("N")}
    teacher = batch.teachers["teacher"]
    assert teacher.hidden_ND is not None
    assert teacher.sampled_logprobs_N is not None
    cut_teacher = replace(
        teacher, hidden_ND=teacher.hidden_ND[:count], sampled_logprobs_N=teacher.sampled_logprobs_N[:count]
    )
    return replace(batch, **columns, teachers={"teacher": cut_teacher})


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_the_budget_changes_no_term(reader: Reader, term: Term) -> None:
    roomy, tight = objective_of(term), objective_of(term, chunk_bytes=500)
    rows = eight_rows(roomy)
    assert_same(step(reader, tight, [rows]), step(reader, roomy, [rows]))


@pytest.mark.parametrize("chunk_bytes", [1, 2_000, 20_000, 2**28])
def test_the_budget_changes_nothing(reader: Reader, chunk_bytes: int) -> None:
    roomy, tight = objective_of(), objective_of(chunk_bytes=chunk_bytes)
    rows = eight_rows(roomy)
    assert_same(step(reader, tight, [rows]), step(reader, roomy, [rows]), tolerance=1e-5)


# Support ------------------------------------------------------------------------------------------------------------


def test_jsd_at_its_ends_is_the_two_kls(reader: Reader) -> None:
    for beta, divergence in ((0.0, Divergence.FORWARD_KL), (1.0, Divergence.REVERSE_KL)):
        end, plain = objective_of(Term(divergence=Divergence.JSD, beta=beta)), objective_of(Term(divergence=divergence))
        assert_same(step(reader, end, [eight_rows(end)]), step(reader, plain, [eight_rows(plain)]), tolerance=0.0)


def test_cross_entropy_is_forward_kl_to_a_one_hot_teacher(reader: Reader) -> None:
    objective = objective_of(TERMS[4])
    rows = [row for row in eight_rows(objective) if row.rollout.source is Source.DATASET]
    batch = collate(rows)
    student = reader.head().logits(reader.hidden(batch)).log_softmax(-1)
    label = functional.one_hot(batch.target_ids_N, VOCAB).float().log()
    expected = forward_kl(student_logprobs=student, teacher_logprobs=label).mean()
    gradients, loss = step(reader, objective, [rows])
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    (by_hand,) = torch.autograd.grad(expected, reader.weight)
    torch.testing.assert_close(gradients["weight"], by_hand, atol=1e-6, rtol=1e-6)
