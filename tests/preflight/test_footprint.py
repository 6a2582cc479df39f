"""The worst batch: its rows, what is measured, and the verdict against a limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from etude.preflight.findings import Verdict
from etude.preflight.footprint import (
    Footprint,
    allocate_state,
    compared,
    footprint,
    least_bytes,
    memory,
    worst_rows,
)
from etude.preflight.rehearsal import own_prompts, writers_of
from etude.training.loop import Parts

Built = Callable[..., Parts]


MIB = 2**20
FOUND = Footprint({"a": 100, "b": 50}, {"write": 20, "learn": 30}, 5, 3, 4, {"write": 2, "learn": 1})


def test_the_peak_is_what_lasts_and_the_greediest_part_of_a_round() -> None:
    assert FOUND.peak == 100 + 50 + 30 + 5


@pytest.mark.parametrize(("room", "verdict"), [(184, Verdict.REFUSE), (185, Verdict.WARN), (206, Verdict.PASS)])
def test_the_verdict_compares_with_the_room_there_is(room: int, verdict: Verdict) -> None:
    found = compared(FOUND, room)
    assert found.verdict is verdict
    assert found.figures["peak_bytes"] == 185
    assert bool(found.cure) == (verdict is not Verdict.PASS)


def test_nothing_is_tried_that_certainly_does_not_fit(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.preflight.footprint.footprint", None)
    parts = built()
    found = memory(parts, longest_prompt=5, longest_completion=6, room_bytes=1000)
    assert found.verdict is Verdict.REFUSE
    assert "a gradient and Adam's two numbers for each weight that learns" in found.evidence
    trained = sum(weight.numel() for weight in parts.student.trainable_parameters().values())
    assert least_bytes(parts) == 3 * 4 * trained


def test_a_tiny_run_fits_and_leaves_no_trace(built: Built) -> None:
    parts = built("sampler.student_fraction=0.5")
    before = {name: weight.clone() for name, weight in parts.student.trainable_parameters().items()}
    found = memory(parts, longest_prompt=5, longest_completion=6, room_bytes=100 * 2**30)
    assert found.verdict is Verdict.PASS
    assert found.figures["rows"] == {"write": 4, "score": 4, "learn": 4}
    assert all(weight.equal(before[name]) for name, weight in parts.student.trainable_parameters().items())
    assert not parts.learner.optimizer.state


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ([], 4),  # all of the round
        (["train.updates_per_round=2"], 2),  # all of a step
        (["train.tokens_per_micro_batch=11"], 2),  # two micro-batches of one row
        (["train.tokens_per_micro_batch=5"], 2),  # a row longer than the budget stands alone
    ],
)
def test_as_many_rows_as_a_step_holds_at_a_time(built: Built, changes: list[str], count: int) -> None:
    parts = built(*changes)
    writers, prompts = writers_of(parts.sampler, parts.plan.steps), own_prompts(parts)
    rows = worst_rows(parts, writers, prompts, longest_prompt=5, longest_completion=6)
    assert [row.token_ids.shape[0] for row in rows] == [11] * count


def test_the_optimiser_gets_a_state_and_moves_nothing(built: Built) -> None:
    parts = built()
    before = {name: weight.clone() for name, weight in parts.student.trainable_parameters().items()}
    allocate_state(parts.learner)
    assert len(parts.learner.optimizer.state) == len(before)
    assert all(weight.equal(before[name]) for name, weight in parts.student.trainable_parameters().items())
    assert parts.learner.optimizer.param_groups[0]["lr"] > 0.0


class Hungry(nn.Module):
    """Fills 200 MiB in every pass and lets go of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.empty(200 * MIB, dtype=torch.uint8).fill_(1)
        return self.inner(x)


def test_what_a_pass_takes_is_seen(built: Built) -> None:
    parts = built()
    model: nn.Module = parts.student.backbone.model  # pyright: ignore[reportAssignmentType]
    layer = model.get_submodule("model.layers.0.mlp")
    layer.down_proj = Hungry(layer.down_proj)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    found = footprint(parts, longest_prompt=5, longest_completion=6)
    if not found.apart:
        pytest.skip("this system does not let a process forget its peak")
    assert 195 * MIB < found.phases["learn"] < 260 * MIB
    assert found.phases["score"] < 50 * MIB  # the teacher's layers are as they were
