"""Masks from recorded facts."""

from __future__ import annotations

import pytest

from etude.axes.names import FinishReason, Source
from etude.core.records import Prompt, Rollout, as_ids
from etude.core.weighting import row_mask

EVERYBODY = frozenset(Source)


def written(ids: list[int], finish_reason: FinishReason, source: Source = Source.STUDENT) -> Rollout:
    return Rollout(Prompt(as_ids([7, 2, 7]), row=0), as_ids(ids), source, finish_reason, version=0)


@pytest.mark.parametrize(
    ("sampled", "finish_reason", "trained"),
    [([5, 6, 2], FinishReason.STOP, 3), ([5, 6, 7, 8, 9], FinishReason.LENGTH, 5), ([2], FinishReason.STOP, 1)],
)
def test_stop_id_is_trained_and_none_is_invented(sampled: list[int], finish_reason: FinishReason, trained: int) -> None:
    """Pad and stop share id 2, here and inside the prompt: what was written is what is trained, whatever its ids."""
    mask = row_mask(written(sampled, finish_reason), sources=EVERYBODY, train_truncated=True)
    assert mask.tolist() == [True] * trained


def test_cut_rows_are_left_out_on_request() -> None:
    cut, stopped = written([5, 6, 7, 8], FinishReason.LENGTH), written([5, 6, 2], FinishReason.STOP)
    assert row_mask(cut, sources=EVERYBODY, train_truncated=False).tolist() == [False] * 4
    assert row_mask(stopped, sources=EVERYBODY, train_truncated=False).tolist() == [True] * 3


@pytest.mark.parametrize("source", list(Source))
def test_only_the_named_sources_are_trained(source: Source) -> None:
    row = written([5, 2], FinishReason.STOP, source)
    assert row_mask(row, sources={source}, train_truncated=True).all()
    assert not row_mask(row, sources=EVERYBODY - {source}, train_truncated=True).any()
