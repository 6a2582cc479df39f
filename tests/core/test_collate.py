"""Rows side by side: positions, masks and the columns of scored tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from etude.axes.names import FinishReason, Source
from etude.core.collate import PAD, collate, kept_sets, pad_rows
from etude.core.records import Prompt, Rollout, Scored, Scores, as_ids
from etude.errors import RecordError


def prepared(
    prompt: list[int],
    completion: list[int],
    *,
    weights: list[list[float]] | None = None,
    scores: dict[str, Scores] | None = None,
    behaviour: Tensor | None = None,
    raw: Tensor | None = None,
    source: Source = Source.STUDENT,
) -> Scored:
    rollout = Rollout(
        Prompt(as_ids(prompt), row=0),
        as_ids(completion),
        source,
        FinishReason.STOP,
        version=0,
        behaviour_logprobs=behaviour,
        raw_logprobs=raw,
    )
    weights_JC = torch.ones(1, len(completion)) if weights is None else torch.tensor(weights)
    return Scored(rollout, scores or {}, weights=weights_JC, advantages=torch.zeros_like(weights_JC))


def test_padding_mask_and_positions() -> None:
    ids, mask, positions = pad_rows([as_ids([7, 8]), as_ids([5, 6, 7, 9])])
    assert ids.tolist() == [[7, 8, PAD, PAD], [5, 6, 7, 9]]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]


def test_ids_equal_to_the_pad_id_stay_attended_and_trained() -> None:
    batch = collate([prepared([PAD, 5], [PAD, 6, PAD]), prepared([1], [2, 3, 4, 5, 6, 7])])
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]
    assert batch.position_ids_BT[0].tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert batch.target_ids_N[:3].tolist() == [PAD, 6, PAD]


def test_scored_tokens_of_ragged_rows() -> None:
    batch = collate([prepared([3], [4, 5, 6]), prepared([1, 2, 3], [4])])
    assert batch.token_ids_BT.tolist() == [[3, 4, 5, 6], [1, 2, 3, 4]]
    assert batch.target_ids_N.tolist() == [4, 5, 6, 4]
    assert batch.predicted_from_N.tolist() == [0, 1, 2, 4 + 2]
    # The token that predicts is the one before the token predicted, in the same row.
    assert batch.token_ids_BT.flatten()[batch.predicted_from_N].tolist() == [3, 4, 5, 3]
    assert batch.token_ids_BT.flatten()[batch.predicted_from_N + 1].equal(batch.target_ids_N)


def test_each_token_gets_its_own_score() -> None:
    """Counting teacher, next = previous + 1 mod 10 with p = 0.9: shifted by one it would say ln(0.1 / 9) = -4.49981."""
    table = torch.full((10, 10), 0.1 / 9)
    table[torch.arange(10), (torch.arange(10) + 1) % 10] = 0.9

    def counted(prompt: list[int], completion: list[int]) -> Scored:
        before = as_ids([*prompt, *completion])[len(prompt) - 1 : -1]
        scores = Scores(
            "counting",
            sampled_logprobs=table[before, as_ids(completion)].log(),
            hidden=functional.one_hot(before, 10).float(),
        )
        return prepared(prompt, completion, scores={"counting": scores})

    batch = collate([counted([3], [4, 5, 6]), counted([1, 2, 3], [4])])
    columns = batch.teachers["counting"]
    assert columns.hidden_ND is not None
    assert columns.sampled_logprobs_N is not None
    from_hidden = (columns.hidden_ND @ table).log()[torch.arange(4), batch.target_ids_N]
    student = table[batch.token_ids_BT.flatten()[batch.predicted_from_N], batch.target_ids_N].log()
    for found in (columns.sampled_logprobs_N, from_hidden, student):
        assert found.tolist() == pytest.approx([math.log(0.9)] * 4)
    assert math.log(0.9) == pytest.approx(-0.10536, abs=1e-5)


def test_tokens_no_term_trains_are_not_scored() -> None:
    marks = Scores("t", sampled_logprobs=torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    row = prepared([1], [4, 5, 6, 7], weights=[[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]], scores={"t": marks})
    batch = collate([row])
    assert batch.target_ids_N.tolist() == [4, 6]
    assert batch.predicted_from_N.tolist() == [0, 2]
    assert batch.weights_JN.tolist() == [[1.0, 0.0], [0.0, 0.5]]
    assert batch.teachers["t"].sampled_logprobs_N is not None
    assert batch.teachers["t"].sampled_logprobs_N.tolist() == [-1.0, -3.0]
    assert batch.teachers["t"].hidden_ND is None


def test_a_batch_that_trains_nothing_still_holds_one_token_of_weight_zero() -> None:
    batch = collate([prepared([1, 2], [3, 4], weights=[[0.0, 0.0]]), prepared([1], [5], weights=[[0.0]])])
    assert batch.num_scored_tokens == 1
    assert not batch.weights_JN.any()


def test_missing_logprobs_are_told_from_real_ones() -> None:
    sampled = prepared([1], [4, 5], behaviour=torch.tensor([-0.5, -0.25]), raw=torch.tensor([-0.75, -1.0]))
    batch = collate([sampled, prepared([1], [6])])
    assert batch.behaviour_logprobs_N.tolist() == [-0.5, -0.25, 0.0]
    assert batch.raw_logprobs_N[:2].tolist() == [-0.75, -1.0]
    assert batch.raw_logprobs_N[2].isnan()


def test_the_writers_own_logprobs_count_only_where_the_student_wrote() -> None:
    """A teacher's say of its own rows is no gap between sampler and trainer."""
    rows = [prepared([1], [4], raw=torch.tensor([-0.5]), source=source) for source in (Source.STUDENT, Source.TEACHER)]
    own, others = collate(rows).raw_logprobs_N
    assert own == -0.5
    assert others.isnan()


def test_an_older_students_say_of_a_replayed_row_counts_only_where_nobody_tells_them_apart() -> None:
    row = prepared([1], [4], behaviour=torch.tensor([-0.25]), raw=torch.tensor([-0.5]))
    assert collate([row]).raw_logprobs_N.tolist() == [-0.5]
    assert collate([row], version=0).raw_logprobs_N.tolist() == [-0.5]
    replayed = collate([row], version=3)
    assert replayed.raw_logprobs_N.isnan().all()
    assert replayed.behaviour_logprobs_N.tolist() == [-0.25]  # what the ratio divides by stays


def test_what_cannot_stand_side_by_side_is_refused() -> None:
    some = Scores("t", sampled_logprobs=torch.zeros(1))
    with pytest.raises(RecordError, match="call Objective.prepare before collate"):
        collate([Scored(prepared([1], [2]).rollout, {})])
    with pytest.raises(RecordError, match="gave sampled_logprobs for 1 of a batch's 2 rows"):
        collate([prepared([1], [2], scores={"t": some}), prepared([1], [2], scores={"t": Scores("t")})])
    for rows in ([{"t": some}, {}], [{}, {"t": some}]):
        with pytest.raises(RecordError, match="marked by the same teachers"):
            collate([prepared([1], [2], scores=scores) for scores in rows])


def kept_row(completion: list[int], sets: list[list[int]], weights: list[float]) -> Scored:
    row = prepared([1], completion, weights=[weights])
    rollout = replace(
        row.rollout,
        kept_ids=torch.tensor([v for ids in sets for v in ids], dtype=torch.int32),
        kept_lengths=torch.tensor([len(ids) for ids in sets], dtype=torch.int32),
    )
    return replace(row, rollout=rollout)


def test_kept_sets_follow_the_scored_tokens() -> None:
    """Of three rows, one of which no sampler cut, and of which one token each is not trained."""
    batch = collate(
        [
            kept_row([4, 5, 6], [[4, 9], [5, 1, 2], [6]], [1.0, 0.0, 1.0]),
            prepared([1], [7, 8], weights=[[0.0, 1.0]]),
            kept_row([3, 3], [[2, 3], [3, 4]], [0.0, 1.0]),
        ]
    )
    assert batch.target_ids_N.tolist() == [4, 6, 8, 3]
    assert batch.kept is not None
    assert batch.kept.lengths == (2, 1, 0, 2)
    assert batch.kept.ids_M.tolist() == [4, 9, 6, 3, 4]
    assert collate([prepared([1], [7, 8])]).kept is None


def test_kept_sets_of_whole_rows() -> None:
    rows = [kept_row([4, 5], [[4, 9], [5]], [0.0, 0.0]).rollout, prepared([1], [7]).rollout]
    sets = kept_sets(rows)
    assert sets is not None
    assert (sets.lengths, sets.ids_M.tolist()) == ((2, 1, 0), [4, 9, 5])
    assert kept_sets(rows[1:]) is None
