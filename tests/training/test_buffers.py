from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
import torch

from etude.axes.names import FinishReason, Source
from etude.core.records import Prompt, Rollout, Scored, Scores, as_ids
from etude.training.buffers import load_round, save_round

UGLY = torch.tensor([-0.1, torch.finfo(torch.float32).tiny / 8])  # a subnormal number loses its bits to any rounding

SAMPLED = Scored(
    Rollout(
        Prompt(as_ids([5, 6, 7]), row=3, group=1, example={"answer": "42", "day": date(2026, 1, 1)}),
        as_ids([8, 2]),
        Source.STUDENT,
        FinishReason.STOP,
        version=7,
        behaviour_logprobs=UGLY,
        raw_logprobs=UGLY * 3,
        kept_ids=torch.tensor([8, 3, 2], dtype=torch.int32),
        kept_lengths=torch.tensor([2, 1], dtype=torch.int32),
    ),
    {
        "teacher": Scores("teacher", sampled_logprobs=UGLY, hidden=torch.randn(2, 4).bfloat16(), kept_mass=UGLY / 3),
        "other": Scores("other", sampled_logprobs=UGLY / 7),
    },
    weights=torch.tensor([[1.0, 1.0], [0.0, 1 / 3]]),
    advantages=torch.tensor([[0.0, 0.0], [0.0, -2.5]]),
    student_logprobs=UGLY * 5,
    student_entropy=UGLY * -7,
    student_kept_mass=UGLY / 5,
    candidates=torch.tensor([2, 1]),
    reward=0.1,
)
ANSWER = as_ids([9])
FROM_THE_DATASET = Scored(  # its completion is the very tensor its prompt carries
    Rollout(Prompt(as_ids([4]), row=4, completion_ids=ANSWER), ANSWER, Source.DATASET, FinishReason.LENGTH, version=0),
    {},
    weights=torch.ones(2, 1),
    advantages=torch.zeros(2, 1),
)


def tensors(row: Scored) -> dict[str, torch.Tensor | None]:
    rollout = row.rollout
    found = {
        "prompt": rollout.prompt.token_ids,
        "answer": rollout.prompt.completion_ids,
        "completion": rollout.completion_ids,
        "behaviour": rollout.behaviour_logprobs,
        "raw": rollout.raw_logprobs,
        "kept": rollout.kept_ids,
        "kept lengths": rollout.kept_lengths,
        "kept mass": row.student_kept_mass,
        "weights": row.weights,
        "advantages": row.advantages,
        "student": row.student_logprobs,
        "entropy": row.student_entropy,
        "candidates": row.candidates,
    }
    for name, scores in row.scores.items():
        found |= {f"{name} sampled": scores.sampled_logprobs, f"{name} hidden": scores.hidden}
        found[f"{name} mass"] = scores.kept_mass
    return found


@pytest.mark.parametrize("row", [SAMPLED, FROM_THE_DATASET], ids=["sampled", "dataset"])
def test_a_row_comes_back_bit_for_bit(row: Scored, tmp_path: Path) -> None:
    save_round(tmp_path, [row])
    loaded = load_round(tmp_path)
    assert loaded is not None
    [again] = loaded
    before, after = tensors(row), tensors(again)
    assert list(before) == list(after)
    for name, value in before.items():
        other = after[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            assert (value.dtype, value.tolist()) == (other.dtype, other.tolist()), name
    for field in ("source", "finish_reason", "version", "truncated"):
        assert getattr(row.rollout, field) == getattr(again.rollout, field)
    assert row.rollout.prompt.row == again.rollout.prompt.row
    assert row.rollout.prompt.group == again.rollout.prompt.group
    assert row.reward == again.reward
    assert {name: scores.teacher for name, scores in again.scores.items()} == {name: name for name in row.scores}


def test_rows_keep_their_order(tmp_path: Path) -> None:
    save_round(tmp_path, [FROM_THE_DATASET, SAMPLED, FROM_THE_DATASET])
    assert [row.rollout.prompt.row for row in load_round(tmp_path) or []] == [4, 3, 4]


def test_between_two_rounds_there_is_nothing(tmp_path: Path) -> None:
    assert load_round(tmp_path) is None
    assert load_round(tmp_path / "never there") is None
