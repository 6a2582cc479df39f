from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
import torch

from etude.axes.names import FinishReason, Source
from etude.core.records import Prompt, Rollout, as_ids
from etude.models.rollout_files import load_rollouts, save_rollouts, tensors_of, without_what_json_cannot

UGLY = torch.tensor([-0.1, torch.finfo(torch.float32).tiny / 8])  # a subnormal number loses its bits to any rounding
SAMPLED = Rollout(
    Prompt(as_ids([5, 6, 7]), row=3, group=1, example={"answer": "42", "levels": [1, 2.5, None]}),
    as_ids([8, 2]),
    Source.STUDENT,
    FinishReason.LENGTH,
    version=7,
    behaviour_logprobs=UGLY,
    raw_logprobs=UGLY * 3,
    written=torch.tensor([True, False]),
    kept_ids=torch.tensor([3, 8, 5], dtype=torch.int32),
    kept_lengths=torch.tensor([3, 0], dtype=torch.int32),
)
ANSWER = as_ids([9])
FROM_THE_DATASET = Rollout(  # its completion is the very tensor its prompt carries
    Prompt(as_ids([4]), row=4, completion_ids=ANSWER), ANSWER, Source.DATASET, FinishReason.STOP, version=0
)


def test_rollouts_come_back_bit_for_bit_and_in_order(tmp_path: Path) -> None:
    before = [FROM_THE_DATASET, SAMPLED, FROM_THE_DATASET]
    save_rollouts(tmp_path, before)
    for old, new in zip(before, load_rollouts(tmp_path), strict=True):
        for name, value in tensors_of(old).items():
            other = tensors_of(new)[name]
            assert (value is None) == (other is None), name
            if value is not None and other is not None:
                assert (value.dtype, value.tolist()) == (other.dtype, other.tolist()), name
        for field in ("source", "finish_reason", "version"):
            assert getattr(old, field) == getattr(new, field)
        for field in ("row", "group", "example"):
            assert getattr(old.prompt, field) == getattr(new.prompt, field)


def test_nothing(tmp_path: Path) -> None:
    save_rollouts(tmp_path, [])
    assert load_rollouts(tmp_path) == []


@pytest.mark.parametrize("value", [date(2026, 1, 1), b"png", (1, 2), float("nan"), {1: "a"}, object()])
def test_what_json_cannot_hold_is_taken_off(value: object) -> None:
    example = {"answer": "42", "levels": [1, 2.5, None], "it": value}
    rollout = Rollout(
        Prompt(as_ids([1]), row=0, completion_ids=ANSWER, example=example),
        as_ids([2]),
        Source.STUDENT,
        FinishReason.STOP,
        version=0,
    )
    kept = without_what_json_cannot(rollout)
    assert kept.prompt.example == {"answer": "42", "levels": [1, 2.5, None]}
    assert kept.prompt.completion_ids is ANSWER
    assert kept.completion_ids is rollout.completion_ids
    assert rollout.prompt.example is example
