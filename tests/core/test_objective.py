"""Prepare, count, sum: masks, counts, scores and metrics of whole rows, against values made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from etude.axes.legality import Sampling
from etude.axes.names import (
    Baseline,
    Divergence,
    Estimator,
    FinishReason,
    Gives,
    Importance,
    Owner,
    Reduction,
    Source,
    Support,
    Tail,
)
from etude.axes.schedules import Ramp
from etude.core.collate import collate
from etude.core.linear import OutputHead
from etude.core.logprobs import predicted_from
from etude.core.objective import Objective, Term
from etude.core.records import Batch, Prompt, Rollout, Scored, Scores, as_ids
from etude.errors import PairError, RecordError

VOCAB = 10
IDENTITY = OutputHead(torch.eye(VOCAB, dtype=torch.float64))  # hidden states are the logits themselves

SAMPLED = Term("sampled", support=Support.SAMPLED)
POLICY = Term("policy", support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT)
RATIO = Term("ratio", support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT, importance=Importance.RATIO)
PPO = Term(
    "ppo", support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT, importance=Importance.PPO_CLIP, clip=0.2
)
LABEL = Term("label", teacher="label", divergence=Divergence.FORWARD_KL)
FULL_TERMS = [
    Term("reverse_kl"),
    Term("forward_kl", divergence=Divergence.FORWARD_KL),
    *(Term(f"jsd_{beta}", divergence=Divergence.JSD, beta=beta) for beta in (0.0, 0.1, 0.5, 0.9, 1.0)),
    Term("skew_forward_kl", divergence=Divergence.SKEW_FORWARD_KL, alpha=0.1),
    Term("skew_reverse_kl", divergence=Divergence.SKEW_REVERSE_KL, alpha=0.1),
    Term("detached", divergence=Divergence.SKEW_REVERSE_KL, alpha=0.1, detach_mixture=True),
    Term("rescaled", divergence=Divergence.JSD, beta=0.1, rescale=True),
    Term("alpha_beta", divergence=Divergence.ALPHA_BETA, alpha=0.2, beta=0.7),
    Term("adaptive_kl", divergence=Divergence.ADAPTIVE_KL, head_mass=0.5),
    Term("total_variation", divergence=Divergence.TOTAL_VARIATION),
    Term("gated", divergence=Divergence.FORWARD_KL, teacher_entropy=0.1),
    *(
        Term(f"{tail}_{owner}", support=Support.TOP_K, top_k=3, owner=owner, tail=tail)
        for tail in (Tail.BUCKET, Tail.TRUNCATE, Tail.RENORMALISE)
        for owner in Owner
    ),
]
TAIL = Term("tail", support=Support.TOP_K, top_k=3, tail=Tail.SAMPLED)
SAMPLED_TERMS = [
    SAMPLED,
    POLICY,
    RATIO,
    PPO,
    replace(RATIO, name="truncated", importance=Importance.TRUNCATED, bounds=(0.5, 2.0)),
    replace(RATIO, name="masked", importance=Importance.MASKED, bounds=(0.5, 2.0)),
    replace(POLICY, name="state_kl", baseline=Baseline.STATE_KL),
    replace(POLICY, name="batch", baseline=Baseline.BATCH, discount=0.5, length_normalise=True),
    replace(POLICY, name="whitened", whiten=True, advantage_clip=3.0, disagreement_weight=1.5),
]


def rollout(
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    row: int = 0,
    source: Source = Source.STUDENT,
    reason: FinishReason = FinishReason.STOP,
    logprobs: Tensor | None = None,
) -> Rollout:
    return Rollout(
        Prompt(as_ids(list(prompt)), row=row),
        as_ids(list(completion)),
        source,
        reason,
        version=0,
        behaviour_logprobs=logprobs,
        raw_logprobs=logprobs,
    )


def marked(row: Rollout, student_TV: Tensor, teacher_TV: Tensor, name: str = "teacher") -> Scored:
    """The row with what both models say about it, given their logits at each of its own (unpadded) positions."""
    where = predicted_from(row.num_prompt_tokens, row.num_completion_tokens)
    ids = row.completion_ids[:, None]
    teacher_C, student_C = (
        x[where].log_softmax(-1).gather(-1, ids).squeeze(-1).float() for x in (teacher_TV, student_TV)
    )
    written = rollout(
        row.prompt.token_ids.tolist(),
        row.completion_ids.tolist(),
        row=row.prompt.row,
        source=row.source,
        reason=row.finish_reason,
        logprobs=student_C,
    )
    scores = Scores(name, sampled_logprobs=teacher_C, hidden=teacher_TV[where])
    return Scored(written, {name: scores}, student_logprobs=student_C)


def padded(values: Sequence[Tensor], width: int) -> Tensor:
    return torch.stack([functional.pad(value, (0, 0, 0, width - value.shape[0])) for value in values])


def total(objective: Objective, rows: Sequence[Scored], logits_BTV: Tensor) -> tuple[Tensor, dict[str, float], Batch]:
    """Loss over all rows as one step, from student logits at every padded place; with its metrics."""
    prepared = objective.prepare(rows)
    batch = collate(prepared)
    scales = objective.scales(objective.counts(prepared))
    hidden = logits_BTV.flatten(0, 1)[batch.predicted_from_N]
    loss, sums = objective.sum(hidden, IDENTITY, batch, scales, {"teacher": IDENTITY})
    return loss, objective.summarise(sums), batch


# Masks --------------------------------------------------------------------------------------------------------------

PROMPTS, ANSWERS = [[1, 2, 3], [4]], [[5, 6, 2], [7, 2]]


def disagreement_outside_the_answers() -> tuple[list[Scored], Tensor]:
    """Teacher = student wherever an answer token is predicted, and +50 on a random id at every other place."""
    generator = torch.Generator().manual_seed(7)
    rows, logits = list[Scored](), list[Tensor]()
    for b, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        row = rollout(prompt, answer, row=b)
        student = torch.randn(len(prompt) + len(answer), VOCAB, generator=generator, dtype=torch.float64)
        teacher = student.clone()
        for place in set(range(student.shape[0])) - set(predicted_from(len(prompt), len(answer)).tolist()):
            teacher[place, torch.randint(VOCAB, (), generator=generator)] += 50.0
        rows.append(marked(row, student, teacher))
        logits.append(student)
    wide = padded(logits, 6)
    wide[1, 3:] = 50.0 * torch.randn(3, VOCAB, generator=generator, dtype=torch.float64)  # at the pad places too
    return rows, wide


@pytest.mark.parametrize("term", [*FULL_TERMS, TAIL, *SAMPLED_TERMS], ids=lambda term: term.name)
@pytest.mark.parametrize("chunk_bytes", [1, 2**28], ids=["a token a tile", "one tile"])
def test_outside_the_answers_nothing_counts(term: Term, chunk_bytes: int) -> None:
    rows, logits = disagreement_outside_the_answers()
    logits.requires_grad_()
    loss, _, _ = total(Objective([term], chunk_bytes=chunk_bytes), rows, logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    if term in SAMPLED_TERMS:  # scores of drawn tokens travel in float32, the student's logits here are float64
        assert loss.abs() <= 1e-7
        assert gradient.abs().max() <= 1e-7
    elif term.name in ("reverse_kl", "jsd_1.0"):
        assert loss.item() == 0.0
        assert not gradient.any()
    else:
        assert loss.abs() <= 1e-7
        assert gradient.abs().max() <= 1e-7
    outside = torch.ones(2, 6, dtype=torch.bool)
    outside[0, 2:5], outside[1, 0:2] = False, False
    assert not gradient[outside].any()  # exactly, whatever the term


@pytest.mark.parametrize("term", [FULL_TERMS[0], TAIL, *SAMPLED_TERMS], ids=lambda term: term.name)
def test_in_float32_reverse_kl_of_equal_models_is_exactly_nothing(term: Term) -> None:
    rows, logits = disagreement_outside_the_answers()
    logits = logits.float()
    rows = [
        marked(row.rollout, logits[b], logits[b] + 0.0)  # scores from the very same float32 logits
        for b, row in enumerate(rows)
    ]
    logits.requires_grad_()
    objective = Objective([term])
    batch = collate(objective.prepare(rows))
    hidden = logits.flatten(0, 1)[batch.predicted_from_N]
    head = OutputHead(torch.eye(VOCAB))
    loss, _ = objective.sum(hidden, head, batch, torch.tensor([0.2]), {"teacher": head})
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("term", [FULL_TERMS[0], FULL_TERMS[1], SAMPLED, POLICY], ids=lambda term: term.name)
def test_a_difference_at_one_answer_place_is_worth_its_hand_value_over_the_count(term: Term) -> None:
    """Student (1/2, 1/4, 1/8, 1/8), teacher (1/8, 1/2, 1/4, 1/8) at one of five places; token 7 is drawn there."""
    rows, logits = disagreement_outside_the_answers()
    ids = [7, 0, 1, 2]
    student, teacher = (torch.full((VOCAB,), -1e9, dtype=torch.float64) for _ in range(2))
    student[ids] = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    teacher[ids] = torch.tensor([0.125, 0.5, 0.25, 0.125], dtype=torch.float64).log()
    logits[1, 0] = student
    changed = logits[1, :3].clone()
    changed[0] = teacher
    rows[1] = marked(rows[1].rollout, logits[1, :3], changed)
    loss, metrics, _ = total(Objective([term]), rows, logits)
    c = math.log(0.5 / 0.125)  # of the drawn token
    hand = {
        "reverse_kl": 0.5 * c + 0.25 * math.log(0.25 / 0.5) + 0.125 * math.log(0.125 / 0.25),
        "forward_kl": 0.125 * -c + 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.125),
        "sampled": c * c / 2,
        "policy": c * math.log(0.5),  # -A log q with A = -c
    }[term.name]
    assert loss.item() == pytest.approx(hand / 5, abs=1e-6)
    shown = c if term in SAMPLED_TERMS else hand
    assert metrics[f"divergence/{term.name}"] == pytest.approx(shown / 5, abs=1e-6)
    assert metrics[f"tokens/{term.name}"] == 5


def test_ragged_rows_each_read_their_own_scores() -> None:
    """Counting teacher and student, next = previous + 1 mod 10 with p = 0.9; answers of 3 and 1 token in one batch."""
    table = torch.full((VOCAB, VOCAB), 0.1 / 9, dtype=torch.float64)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 0.9
    rows, logits = list[Scored](), list[Tensor]()
    for prompt, answer in (([3], [4, 5, 6]), ([1, 2, 3], [4])):
        logits.append(table[as_ids([*prompt, *answer])].log())
        rows.append(marked(rollout(prompt, answer), logits[-1], logits[-1]))
    loss, metrics, batch = total(Objective([Term(), POLICY]), rows, padded(logits, 4))
    marks = batch.teachers["teacher"].sampled_logprobs_N
    assert marks is not None
    assert marks.tolist() == pytest.approx([-0.10536] * 4, abs=1e-5)  # shifted by one: -4.49981
    assert metrics["student/logprob"] == pytest.approx(-0.10536, abs=1e-5)
    assert metrics["divergence/reverse_kl"] == 0.0
    assert metrics["divergence/policy"] == pytest.approx(0.0, abs=1e-6)
    assert loss.abs() < 1e-6


# Counts -------------------------------------------------------------------------------------------------------------


def logits_of_loss(losses: Sequence[float], ids: Sequence[int]) -> Tensor:
    """Logits with -log softmax = loss at each id."""
    logits = torch.zeros(len(losses), VOCAB, dtype=torch.float64)
    for t, (loss, token) in enumerate(zip(losses, ids, strict=True)):
        probability = math.exp(-loss)
        logits[t, token] = math.log(probability / ((1 - probability) / (VOCAB - 1)))
    return logits


def row_of_losses(losses: Sequence[float], reason: FinishReason = FinishReason.STOP) -> tuple[Scored, Tensor]:
    """A row with one prompt token whose cross-entropy is `losses`, and its student logits."""
    ids = [3] * len(losses)
    written = rollout([1], ids, reason=reason, source=Source.DATASET)
    return Scored(written, {}), functional.pad(logits_of_loss(losses, ids), (0, 0, 0, 1))


DATASET = Sampling(rows=frozenset({Source.DATASET}))


@pytest.mark.parametrize(("train_truncated", "tokens"), [(False, 25), (True, 30)])
def test_cut_rows_leave_numerator_divisor_and_metrics_together(train_truncated: bool, tokens: int) -> None:
    finished, cut = row_of_losses([1.0] * 25), row_of_losses([1.0] * 5, FinishReason.LENGTH)
    term = Term(teacher="label", divergence=Divergence.FORWARD_KL, train_truncated=train_truncated)
    objective = Objective([term], sampling=DATASET)
    loss, metrics, _ = total(objective, [finished[0], cut[0]], padded([finished[1], cut[1]], 26))
    assert loss.item() == pytest.approx(1.0)
    assert objective.counts(objective.prepare([finished[0], cut[0]])).tolist() == [tokens]
    assert metrics["tokens/reverse_kl"] == tokens
    assert metrics["divergence/reverse_kl"] == pytest.approx(1.0)
    assert metrics["tokens/scored"] == tokens


@pytest.mark.parametrize(
    ("reduction", "expected"), [(Reduction.TOKEN_MEAN, 1.75), (Reduction.SEQUENCE_MEAN, 2.5), (Reduction.SUM, 7.0)]
)
def test_reductions(reduction: Reduction, expected: float) -> None:
    """Token losses (4) and (1, 1, 1): 7 / 4 over tokens, (4 + 1) / 2 over rows, and 7."""
    rows = [row_of_losses([4.0]), row_of_losses([1.0, 1.0, 1.0])]
    term = Term(teacher="label", divergence=Divergence.FORWARD_KL, reduction=reduction)
    loss, metrics, _ = total(
        Objective([term], sampling=DATASET), [row for row, _ in rows], padded([logits for _, logits in rows], 4)
    )
    assert loss.item() == pytest.approx(expected)
    assert metrics["divergence/reverse_kl"] == pytest.approx(1.75)  # the log shows the mean over tokens either way


def test_terms_keep_their_own_rows_counts_and_coefficients() -> None:
    student_rows, dataset_rows = row_of_losses([2.0, 2.0]), row_of_losses([4.0])
    own = Scored(rollout([1], [3, 3]), {"teacher": Scores("teacher", sampled_logprobs=torch.tensor([-3.0, -5.0]))})
    gold = Scored(dataset_rows[0].rollout, {"teacher": Scores("teacher", sampled_logprobs=torch.tensor([-9.0]))})
    objective = Objective(
        [
            Term("gold", teacher="label", divergence=Divergence.FORWARD_KL, sources={Source.DATASET}, coefficient=0.5),
            Term("own", support=Support.SAMPLED, sources={Source.STUDENT}),
        ],
        sampling=Sampling(rows=frozenset({Source.STUDENT, Source.DATASET})),
    )
    loss, metrics, batch = total(objective, [own, gold], padded([student_rows[1], dataset_rows[1]], 3))
    assert batch.weights_JN.tolist() == [[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    assert loss.item() == pytest.approx(0.5 * 4.0 + (1.0**2 / 2 + 3.0**2 / 2) / 2)  # log-ratios 1 and 3
    assert metrics["divergence/gold"] == pytest.approx(4.0)
    assert metrics["divergence/own"] == pytest.approx(2.0)
    assert (metrics["tokens/gold"], metrics["tokens/own"], metrics["tokens/scored"]) == (1, 2, 3)


def test_a_term_without_tokens_is_nothing_and_not_a_number_either() -> None:
    row, logits = row_of_losses([1.0], FinishReason.LENGTH)
    term = Term(teacher="label", divergence=Divergence.FORWARD_KL, train_truncated=False)
    logits.requires_grad_()
    loss, metrics, batch = total(Objective([term], sampling=DATASET), [row], logits[None])
    assert batch.num_scored_tokens == 1
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, logits)[0].any()
    assert metrics == {"tokens/reverse_kl": 0.0, "tokens/scored": 0.0, "tokens/written": 0.0}


def test_coefficients_move_with_the_step() -> None:
    terms = [
        Term("falling", coefficient=Ramp(2.0, 0.0, kind="linear", last=4)),
        Term("jumping", coefficient=Ramp(0.0, 0.5, kind="step", last=3), reduction=Reduction.SUM),
        Term("constant", coefficient=3.0, reduction=Reduction.SEQUENCE_MEAN),
    ]
    objective = Objective(terms)
    counts = torch.tensor([10.0, 10.0, 2.0], dtype=torch.float64)
    for step, expected in ((0, [0.2, 0.0, 1.5]), (2, [0.1, 0.0, 1.5]), (3, [0.05, 0.5, 1.5]), (9, [0.0, 0.5, 1.5])):
        assert objective.scales(counts, step=step).tolist() == pytest.approx(expected)
        twice = objective.scales(counts, step=step, world_size=2)
        assert twice.tolist() == pytest.approx([2 * scale for scale in expected])
    assert objective.scales(torch.zeros(3, dtype=torch.float64)).tolist() == [0.0, 0.0, 0.0]


def test_the_horizon_is_that_of_the_rounds_first_step() -> None:
    term = Term(teacher="label", divergence=Divergence.FORWARD_KL, first_tokens=Ramp(1, 3, kind="linear", last=4))
    objective = Objective([term], sampling=DATASET)
    row, _ = row_of_losses([1.0] * 5)
    for step, tokens in ((0, 1), (2, 2), (4, 3), (99, 3)):
        assert objective.counts(objective.prepare([row], step=step)).tolist() == [tokens]


# Temperatures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "forward", "reverse"), [(1.0, 1.905177, 1.992436), (2.0, 0.617025, 0.569304)])
@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
def test_loss_temperature(temperature: float, forward: float, reverse: float, chunk_bytes: int) -> None:
    head = OutputHead(torch.eye(3))
    student, teacher = torch.tensor([[2.0, 1.0, 0.0]] * 2), torch.tensor([[0.0, 0.0, 3.0]] * 2)
    row = Scored(rollout([1], [2, 2]), {"teacher": Scores("teacher", hidden=teacher)})
    for divergence, expected in ((Divergence.FORWARD_KL, forward), (Divergence.REVERSE_KL, reverse)):
        objective = Objective([Term(divergence=divergence)], temperature=temperature, chunk_bytes=chunk_bytes)
        batch = collate(objective.prepare([row]))
        loss, _ = objective.sum(student, head, batch, torch.tensor([0.5]), {"teacher": head})
        assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_the_sampling_temperature_of_given_tokens_changes_nothing() -> None:
    rows, logits = disagreement_outside_the_answers()
    teacher = [
        Scored(row.rollout, {"teacher": Scores("teacher", hidden=torch.randn(3 - b, VOCAB))})
        for b, row in enumerate(rows)
    ]
    losses = [
        total(Objective(FULL_TERMS, sampling=Sampling(temperature=temperature)), teacher, logits)[0].item()
        for temperature in (0.5, 1.0, 1.5)
    ]
    assert losses[0] == losses[1] == losses[2] != 0.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_equal_models_are_at_zero_at_every_temperature(temperature: float) -> None:
    rows, logits = disagreement_outside_the_answers()
    loss, _, _ = total(Objective(FULL_TERMS, temperature=temperature), rows, logits)
    assert loss.abs() < 1e-14


# Advantages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("discount", "expected"), [(0.0, [0.0, -1.386294, 0.693147]), (1.0, [-0.693147, -0.693147, 0.693147])]
)
def test_advantages_are_returns_of_the_log_ratio(discount: float, expected: list[float]) -> None:
    written = rollout([1], [4, 5, 2])
    row = Scored(
        written,
        {"teacher": Scores("teacher", sampled_logprobs=torch.tensor([0.5, 0.1, 0.6]).log())},
        student_logprobs=torch.tensor([0.5, 0.4, 0.3]).log(),
    )
    term = Term(support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT, discount=discount)
    (prepared,) = Objective([term]).prepare([row])
    assert prepared.advantages is not None
    torch.testing.assert_close(prepared.advantages, torch.tensor([expected]), atol=1e-6, rtol=0)


def test_a_row_that_a_term_does_not_train_needs_nothing_from_anybody() -> None:
    objective = Objective(
        [Term(support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT, sources={Source.STUDENT})],
        sampling=Sampling(rows=frozenset({Source.STUDENT, Source.DATASET})),
    )
    (prepared,) = objective.prepare([Scored(rollout([1], [2, 3], source=Source.DATASET), {})])
    assert prepared.weights is not None
    assert not prepared.weights.any()


def test_missing_scores_are_refused_and_never_filled_in() -> None:
    bare = Scored(rollout([1], [2], row=8), {})
    with pytest.raises(RecordError, match=r"student and teacher 'teacher' for row 8; the row has scores of \[\]"):
        Objective([POLICY]).prepare([bare])
    scores = {"teacher": Scores("teacher", sampled_logprobs=torch.zeros(1))}
    with pytest.raises(RecordError, match="needs the log-probabilities of student and teacher"):
        Objective([POLICY]).prepare([Scored(bare.rollout, scores)])
    with pytest.raises(RecordError, match="weighs row 8 by student / behaviour, and the row carries no"):
        Objective([RATIO]).prepare([Scored(bare.rollout, scores, student_logprobs=torch.zeros(1))])

    hidden = torch.zeros(1, VOCAB)
    for term, message in (
        (SAMPLED, "gave no log-probabilities of the drawn ids; term 'sampled' needs them"),
        (Term(), "gave no hidden states with a head"),
    ):
        objective = Objective([term])
        for given in ({}, {"teacher": Scores("teacher")}):
            batch = collate(objective.prepare([Scored(bare.rollout, given)]))
            with pytest.raises(PairError, match=message):
                objective.sum(hidden, IDENTITY, batch, torch.ones(1), {"teacher": IDENTITY})
    batch = collate(Objective([Term()]).prepare([Scored(bare.rollout, {"teacher": Scores("teacher", hidden=hidden)})]))
    with pytest.raises(PairError, match="gave no hidden states with a head"):
        Objective([Term()]).sum(hidden, IDENTITY, batch, torch.ones(1), {})
    with pytest.raises(PairError, match="has 9 ids and the student 10; full support compares the same ids"):
        Objective([Term()]).sum(hidden, IDENTITY, batch, torch.ones(1), {"teacher": OutputHead(torch.zeros(9, VOCAB))})


# What it asks for, and what it tells --------------------------------------------------------------------------------


def test_needs() -> None:
    objective = Objective(
        [
            Term("a", teacher="big"),
            Term("b", teacher="big", support=Support.SAMPLED),
            Term("c", teacher="small", support=Support.SAMPLED),
        ]
    )
    assert objective.teachers == ("big", "small")
    assert objective.needs("big") == {Gives.HIDDEN_STATES, Gives.SAMPLED_LOGPROBS}
    assert objective.needs("small") == {Gives.SAMPLED_LOGPROBS}
    assert objective.needs("nobody") == frozenset()
    assert not objective.needs_student_logprobs
    assert Objective([POLICY]).needs_student_logprobs
    assert Objective([LABEL], sampling=DATASET).teachers == ()
    assert Objective([TAIL]).needs("teacher") == {Gives.HIDDEN_STATES}
    assert not Objective([TAIL]).needs_student_logprobs
    state_kl = Objective([replace(POLICY, baseline=Baseline.STATE_KL)])
    assert state_kl.needs("teacher") == {Gives.HIDDEN_STATES, Gives.SAMPLED_LOGPROBS}
    gated = Objective([replace(SAMPLED, teacher_entropy=0.5)])
    assert gated.needs("teacher") == {Gives.HIDDEN_STATES, Gives.SAMPLED_LOGPROBS}


def test_needs_of_the_reference() -> None:
    beyond = Objective([Term("a"), replace(SAMPLED, extrapolation=1.25), Term("b", teacher="reference")])
    assert beyond.teachers == ("teacher", "reference")
    assert beyond.needs("teacher") == {Gives.HIDDEN_STATES, Gives.SAMPLED_LOGPROBS}
    assert beyond.needs("reference") == {Gives.HIDDEN_STATES, Gives.SAMPLED_LOGPROBS}
    drawn = Objective([Term("a"), replace(SAMPLED, extrapolation=1.25)])
    assert drawn.needs("reference") == {Gives.SAMPLED_LOGPROBS}  # not what another term needs of the teacher
    assert Objective([Term(extrapolation=1.0)]).teachers == ("teacher",)
    assert Objective([Term(extrapolation=1.0)]).needs("reference") == frozenset()


def test_needs_of_terms_that_choose() -> None:
    uncertain, wrong = Objective([Term(entropy_share=0.5)]), Objective([Term(confident_wrong_share=0.5)])
    assert (uncertain.chooses, uncertain.needs_student_entropy, uncertain.needs_student_logprobs) == (True, True, False)
    assert (wrong.chooses, wrong.needs_student_entropy, wrong.needs_student_logprobs) == (True, False, True)
    assert not Objective([POLICY]).chooses
    assert not Objective([POLICY]).needs_student_entropy


def test_chosen_tokens_alone_are_counted() -> None:
    """Two of four tokens are the least certain; the mean over a row counts the row's own chosen tokens."""
    row = Scored(rollout([1], [2, 3, 4, 5]), {}, student_entropy=torch.tensor([0.1, 2.0, 1.0, 0.5]))
    terms = [
        Term("half", entropy_share=0.5),
        Term("rows", entropy_share=0.5, reduction=Reduction.SEQUENCE_MEAN),
        Term("tail", entropy_share=0.5, skip_first=2),
        Term("idle", entropy_share=0.5, sources={Source.DATASET}),
        Term("all"),
    ]
    objective = Objective(terms, sampling=Sampling(rows=frozenset(Source)))
    [prepared] = objective.prepare([row])
    assert prepared.weights is not None
    assert prepared.weights.tolist() == [[0, 1, 1, 0], [0, 0.5, 0.5, 0], [0, 0, 1, 0], [0] * 4, [1] * 4]
    assert objective.counts([prepared]).tolist() == [2, 1, 1, 0, 4]
    choices = objective.choices([prepared, prepared])
    assert choices.tolist() == [[4, 4, 2, 0, 8], [8, 8, 4, 0, 8]]
    assert objective.selected(choices) == {"selected/half": 0.5, "selected/rows": 0.5, "selected/tail": 0.5}
    with pytest.raises(RecordError, match="was not prepared: call Objective.prepare before choices"):
        objective.choices([row])


def test_metrics_of_a_batch_by_hand() -> None:
    """Two drawn tokens of probability 1/2 and 1/8 under a student of entropies ln 2 and 1.75 ln 2."""
    logits = torch.full((3, VOCAB), -1e9, dtype=torch.float64)
    logits[0, [4, 5]] = math.log(0.5)
    logits[1, [4, 5, 6, 7]] = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    written = rollout([1], [4, 6], logprobs=torch.tensor([0.5, 0.25]).log())
    marks = Scores("teacher", sampled_logprobs=torch.tensor([0.25, 0.5]).log())
    row = Scored(written, {"teacher": marks}, student_logprobs=torch.tensor([0.5, 0.125]).log())
    _, metrics, _ = total(Objective([PPO]), [row], logits[None])
    assert metrics == pytest.approx(
        {
            "divergence/ppo": (math.log(2) - math.log(4)) / 2,
            "clipped/ppo": 0.0,  # ratio 1 with advantage < 0, ratio 1/2 with advantage > 0: both still move
            "tokens/ppo": 2,
            "tokens/scored": 2,
            "tokens/written": 2,
            "student/entropy": (1 + 1.75) * math.log(2) / 2,
            "student/logprob": -math.log(16) / 2,
            "sampler/logprob_gap": math.log(2) / 2,
        }
    )


def test_the_share_of_held_tokens() -> None:
    written = rollout([1], [4, 4, 4, 4], logprobs=torch.tensor([0.05, 0.05, 0.2, 0.1]).log())
    marks = Scores("teacher", sampled_logprobs=torch.tensor([0.5, 0.01, 0.01, 0.5]).log())
    row = Scored(written, {"teacher": marks}, student_logprobs=torch.full((4,), 0.1).log())
    _, metrics, _ = total(Objective([PPO]), [row], torch.zeros(1, 5, VOCAB, dtype=torch.float64))
    # ratios 2, 2, .5, 1 with advantages +, -, -, +: the first and the third are held.
    assert metrics["clipped/ppo"] == 0.5


def test_the_gap_to_the_sampler_is_left_out_where_it_would_compare_two_temperatures() -> None:
    rows, logits = disagreement_outside_the_answers()
    _, metrics, _ = total(Objective([Term()]), rows, logits)
    assert metrics["sampler/logprob_gap"] == pytest.approx(0.0, abs=1e-6)
    _, metrics, _ = total(Objective([Term()], temperature=2.0), rows, logits)
    assert "sampler/logprob_gap" not in metrics
    assert metrics["tokens/written"] == 0


def test_sums_add_up_over_micro_batches() -> None:
    rows, logits = disagreement_outside_the_answers()
    objective = Objective([*FULL_TERMS, TAIL, *SAMPLED_TERMS])
    prepared = objective.prepare(rows)
    scales = torch.ones(len(objective.terms), dtype=torch.float64)

    def sums(rows: list[Scored], logits_BTV: Tensor) -> Tensor:
        batch = collate(rows)
        logits_BTV = logits_BTV[:, : batch.token_ids_BT.shape[1]]
        hidden = logits_BTV.flatten(0, 1)[batch.predicted_from_N]
        return objective.sum(hidden, IDENTITY, batch, scales, {"teacher": IDENTITY})[1]

    together = sums(prepared, logits)
    apart = sums(prepared[:1], logits[:1]) + sums(prepared[1:], logits[1:])
    assert together.shape == (len(objective.metric_names),)
    assert together.dtype is torch.float64
    assert objective.summarise(together) == pytest.approx(objective.summarise(apart), abs=1e-6)


# Construction -------------------------------------------------------------------------------------------------------


def test_an_objective_needs_terms_with_names_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"terms with different names, got \[\]"):
        Objective([])
    with pytest.raises(ValueError, match="terms with different names"):
        Objective([Term(), Term()])
    with pytest.raises(ValueError, match="loss temperature is 0"):
        Objective([Term()], temperature=0.0)


@pytest.mark.parametrize(("beta", "warned"), [(0.0, 0), (0.01, 1), (0.05, 0), (0.5, 0), (0.99, 1), (1.0, 0)])
def test_a_beta_next_to_an_end_is_warned_about(beta: float, warned: int) -> None:
    warnings = Objective([Term(), Term("near", divergence=Divergence.JSD, beta=beta)]).warnings
    assert len(warnings) == warned
    assert all(f"term 'near': jsd with beta = {beta} has about 0.01 times" in warning for warning in warnings)


# Rewards ------------------------------------------------------------------------------------------------------------


def test_a_reward_beside_a_divergence() -> None:
    """Rewards 1 and -2 for answers of three and two tokens, one count each term; a reward shows no divergence."""
    rows, logits = disagreement_outside_the_answers()
    rows = [replace(row, reward=reward) for row, reward in zip(rows, (1.0, -2.0), strict=True)]
    judged = replace(PPO, name="judged", teacher="reward", discount=1.0, importance=Importance.NONE, clip=None)
    logprobs = [row.student_logprobs for row in rows if row.student_logprobs is not None]
    expected = -(1.0 * logprobs[0].sum() - 2.0 * logprobs[1].sum()) / 5
    objective = Objective([judged])
    assert (objective.teachers, objective.needs_student_logprobs, objective.needs_rewards) == ((), False, True)
    loss, metrics, _ = total(objective, rows, logits)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["tokens/judged"] == 5
    assert "divergence/judged" not in metrics
    both = Objective([replace(judged, coefficient=0.25), Term("kl", coefficient=0.75)])
    together, metrics, _ = total(both, rows, logits)
    (kl, _, _) = total(Objective([Term("kl")]), rows, logits)
    assert together.item() == pytest.approx(0.25 * loss.item() + 0.75 * kl.item(), abs=1e-9)
    assert "divergence/kl" in metrics
    clipping = Objective([replace(PPO, name="judged", teacher="reward", discount=1.0)])
    assert [name for name in clipping.metric_names if "judged" in name] == ["tokens/judged", "clipped/judged"]


# Devices ------------------------------------------------------------------------------------------------------------


def test_every_new_tensor_lies_beside_the_students() -> None:
    """Without a GPU at hand: a tensor that is made without saying where would go astray here, to the device `meta`."""
    rows, logits = disagreement_outside_the_answers()
    sampling = Sampling(temperature=0.5)
    objective = Objective([*FULL_TERMS, TAIL, *SAMPLED_TERMS], sampling=sampling, temperature=0.5)
    batch = collate(objective.prepare(rows))
    hidden = logits.flatten(0, 1)[batch.predicted_from_N].requires_grad_()
    scales = torch.ones(len(objective.terms))

    def run() -> list[Tensor]:
        loss, sums = objective.sum(hidden, IDENTITY, batch, scales, {"teacher": IDENTITY})
        return [*torch.autograd.grad(loss, hidden), loss.detach(), sums]

    here = run()
    with torch.device("meta"):
        astray = run()
    assert all(a.equal(b) for a, b in zip(here, astray, strict=True))
