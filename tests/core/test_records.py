"""Records refuse what contradicts itself, before anything is computed from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from etude.axes.names import FinishReason, Source
from etude.core.kept import KeptSets
from etude.core.records import Batch, Prompt, Rollout, Scored, Scores, TeacherColumns, as_ids
from etude.errors import RecordError


def rollout(prompt: list[int], completion: list[int], *, reason: FinishReason = FinishReason.STOP) -> Rollout:
    return Rollout(Prompt(as_ids(prompt), row=3), as_ids(completion), Source.STUDENT, reason, version=0)


def test_training_ids_are_prompt_and_completion_as_they_are() -> None:
    row = rollout([1, 2, 3], [4, 5], reason=FinishReason.LENGTH)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert (row.num_prompt_tokens, row.num_completion_tokens, row.truncated) == (3, 2, True)
    assert not rollout([1], [2]).truncated


def test_a_prompt_without_a_group_is_a_question_of_its_own() -> None:
    assert Prompt(as_ids([1]), row=3).question == 3
    assert replace(Prompt(as_ids([1]), row=3), row=4).question == 4
    assert Prompt(as_ids([1]), row=3, group=0).question == 0
    with pytest.raises(RecordError, match="row 3 has group -1; expected a number from 0 on"):
        Prompt(as_ids([1]), row=3, group=-1)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_is_finite(reward: float) -> None:
    with pytest.raises(RecordError, match="reward of row 3 is .* expected a finite number"):
        Scored(rollout([1], [2]), {}, reward=reward)
    assert Scored(rollout([1], [2]), {}, reward=-0.5).reward == -0.5


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(0, dtype=torch.int64),
        torch.zeros((1, 2), dtype=torch.int64),
        torch.tensor(5),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int32),
    ],
    ids=["empty", "two dimensions", "no dimension", "float", "int32"],
)
def test_ids_are_one_row_of_int64(ids: Tensor) -> None:
    with pytest.raises(RecordError, match=r"prompt of row 3 has shape .* expected \[P\] int64"):
        Prompt(ids, row=3)
    with pytest.raises(RecordError, match=r"answer of row 3 has shape .* expected \[C\] int64"):
        Prompt(as_ids([1]), row=3, completion_ids=ids)
    with pytest.raises(RecordError, match=r"completion of row 3 has shape .* expected \[C\] int64"):
        Rollout(Prompt(as_ids([1]), row=3), ids, Source.STUDENT, FinishReason.STOP, version=0)


@pytest.mark.parametrize("field", ["behaviour_logprobs", "raw_logprobs"])
@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), (1, 3)])
def test_a_rollouts_logprobs_have_one_entry_a_token(field: str, shape: tuple[int, ...]) -> None:
    """[3, 1] has three entries too, and would be broadcast against [3] into nine pairs of tokens."""
    with pytest.raises(RecordError, match=f"{field} of row 3 .* for 3 completion tokens"):
        Rollout(
            Prompt(as_ids([1]), row=3),
            as_ids([4, 5, 6]),
            Source.STUDENT,
            FinishReason.STOP,
            version=0,
            **{field: torch.zeros(shape)},
        )


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([4, 1, 5], None, "one of kept_ids and kept_lengths"),
        (None, [2, 1], "one of kept_ids and kept_lengths"),
        ([4, 1, 5], [3], "kept_lengths of row 3 .* for 2 completion tokens"),
        ([4, 1, 5], [2, 2], "add up to 4"),
        ([[4, 1, 5]], [2, 1], "one dimension of that many ids"),
        ([4, 1, 5], [1, 2], None),
        ([1, 5, 5], [2, 1], "token 0 of row 3 is none of the ids it was drawn from"),
        ([4, 5, 4], [2, 1], "token 1 of row 3 is none of the ids it was drawn from"),
        ([4], [1, 0], "token 1 of row 3"),
    ],
)
def test_each_token_is_one_of_its_kept_ids(
    ids: list[int] | None, lengths: list[int] | None, message: str | None
) -> None:
    def row(written: Tensor | None = None) -> Rollout:
        return Rollout(
            Prompt(as_ids([1]), row=3),
            as_ids([4, 5]),
            Source.STUDENT,
            FinishReason.STOP,
            version=0,
            written=written,
            kept_ids=None if ids is None else torch.tensor(ids, dtype=torch.int32),
            kept_lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
        )

    if message is None:
        row()
        return
    with pytest.raises(RecordError, match=message):
        row()
    if ids == [4]:  # what a tool wrote was drawn from nothing
        row(torch.tensor([True, False]))


def test_scores_are_aligned_by_token() -> None:
    row = rollout([1, 2], [4, 5, 6])
    Scored(row, {"big": Scores("big", sampled_logprobs=torch.zeros(3), hidden=torch.zeros(3, 8))})
    for scores in (
        Scores("big", sampled_logprobs=torch.zeros(2)),
        Scores("big", sampled_logprobs=torch.zeros(3, 1)),
        Scores("big", hidden=torch.zeros(5, 8)),  # the whole row's, prompt included
        Scores("big", hidden=torch.zeros(3)),
        Scores("big", kept_mass=torch.zeros(4)),
    ):
        with pytest.raises(RecordError, match="of teacher 'big' for row 3 .* for 3 completion tokens"):
            Scored(row, {"big": scores})


@pytest.mark.parametrize("field", ["weights", "advantages"])
def test_what_was_prepared_has_a_row_a_term_and_an_entry_a_token(field: str) -> None:
    scored = Scored(rollout([1, 2], [4, 5, 6]), {})
    scored.with_prepared(**{field: torch.zeros(2, 3)})
    for shape in ((3,), (3, 2), (1, 4)):
        with pytest.raises(RecordError, match=f"{field} of row 3 .* for 3 completion tokens"):
            scored.with_prepared(**{field: torch.zeros(shape)})
    with pytest.raises(RecordError, match="student_logprobs of row 3"):
        scored.with_prepared(student_logprobs=torch.zeros(2))


def test_records_are_frozen() -> None:
    row = rollout([1], [2])
    with pytest.raises(AttributeError):
        row.version = 1


def test_a_batch_moves_whole() -> None:
    columns = {
        "a": TeacherColumns(torch.zeros(2), None, torch.zeros(2)),
        "b": TeacherColumns(None, torch.zeros(2, 4)),
    }
    kept = KeptSets.of(torch.zeros(3, dtype=torch.int32), [1, 2])
    ids, floats = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2)
    batch = Batch(ids, ids, ids, ids[0, :2], ids[0, :2], floats, floats, floats[0], floats[0], columns, kept)
    moved = batch.to("meta")
    assert moved.num_scored_tokens == 2
    tensors = [getattr(moved, name) for name in Batch.__slots__ if name not in ("teachers", "kept")]
    teachers = moved.teachers
    assert teachers["a"].hidden_ND is None
    assert teachers["b"].sampled_logprobs_N is None
    tensors += [teachers["a"].sampled_logprobs_N, teachers["a"].kept_mass_N, teachers["b"].hidden_ND]
    assert moved.kept is not None
    tensors.append(moved.kept.ids_M)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert batch.to("cpu").token_ids_BT.equal(batch.token_ids_BT)


def test_ids_from_anything_list_like() -> None:
    assert as_ids([1, 2]).dtype is torch.int64
    assert as_ids(torch.tensor([[1, 2]], dtype=torch.int32)).tolist() == [1, 2]
