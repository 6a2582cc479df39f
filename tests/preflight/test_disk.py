"""Checkpoints against free space, with the space made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from etude.preflight.disk import checkpoint_bytes, disk, existing, gigabytes
from etude.preflight.findings import Verdict
from etude.training.loop import Parts
from etude.training.state import State

Built = Callable[..., Parts]


@pytest.mark.parametrize(("free_bytes", "verdict"), [(299, Verdict.REFUSE), (300, Verdict.WARN), (334, Verdict.PASS)])
def test_those_kept_and_the_one_being_written_must_fit(tmp_path: Path, free_bytes: int, verdict: Verdict) -> None:
    """Three checkpoints of 100 bytes at a time; 300 is more than nine tenths of 333."""
    found = disk(tmp_path, 100, keep=2, saves=50, free_bytes=free_bytes)
    assert found.verdict is verdict
    assert found.figures["needed_bytes"] == 300
    assert bool(found.cure) == (verdict is not Verdict.PASS)


def test_no_more_are_counted_than_are_written(tmp_path: Path) -> None:
    assert disk(tmp_path, 100, keep=2, saves=1, free_bytes=1000).figures["needed_bytes"] == 100


def test_free_space_is_asked_of_the_nearest_folder_there_is(tmp_path: Path) -> None:
    assert existing(tmp_path / "not" / "there") == tmp_path
    assert disk(tmp_path / "not" / "there", 1, keep=1, saves=1).figures["free_bytes"] > 0


@pytest.mark.parametrize("changes", [[], ["student.lora.rank=8", "student.lora.alpha=8"]])
def test_the_size_is_that_of_a_real_checkpoint(built: Built, changes: list[str]) -> None:
    """But for tokenizer, settings and headers, which weigh more than such tiny weights do."""
    if changes:
        pytest.importorskip("peft")
    parts = built(*changes)
    for weight in parts.student.trainable_parameters().values():
        weight.grad = weight.detach().clone()
    parts.learner.optimizer.step()
    parts.saver.save(State(step=1), parts.student, parts.learner)
    tensors = sum(path.stat().st_size for path in parts.saver.store.path_of(1).rglob("*.safetensors"))
    headers = 20_000
    assert checkpoint_bytes(parts) <= tensors <= checkpoint_bytes(parts) + headers


def test_bytes_are_spoken() -> None:
    assert gigabytes(16e9) == "16 GB"
