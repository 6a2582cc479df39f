"""Seconds of a whole run, from made-up seconds of its parts, and what is timed where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etude.core.records import Scored
from etude.preflight.duration import Times, Tried, save_seconds, spoken, try_out, wall_time
from etude.preflight.rehearsal import Rehearsal, Stopwatch
from etude.testing import rollout_of
from etude.training.loop import Parts

Built = Callable[..., Parts]


ROUND = {"prompts": 0.0, "sample": 2.0, "score": 1.0, "prepare": 0.0, "learn": 3.0, "refresh": 0.0}


def tried(round_s: dict[str, float]) -> Tried:
    """One row of 4 + 6 tokens."""
    row = Scored(rollout_of([1] * 4, [2] * 6), {})
    return Tried(Rehearsal(round_s, [row], []), round_s, evaluation=5.0, save=0.5)


def test_the_sum_by_hand() -> None:
    """10 + 20 x 6 + 3 x 5 + 2 x 0.5."""
    found = wall_time(Times(rounds=20, evaluations=3, saves=2), tried(ROUND), start_s=10.0, longest=6)
    assert found.figures["seconds"] == 146.0
    assert found.figures["worst_seconds"] == 146.0
    assert "10 + 20 x (prompts 0, sample 2, score 1, prepare 0, learn 3, refresh 0) + 3 x 5 + 2 x 0.5" in found.evidence


def test_the_worst_case_by_hand() -> None:
    """Answers of 12 tokens, not 6: twice the sampling and evaluating, 16/10 of scoring and learning."""
    found = wall_time(Times(rounds=20, evaluations=3, saves=2), tried(ROUND), start_s=10.0, longest=12)
    assert found.figures["worst_seconds"] == pytest.approx(10 + 20 * (2 * 2 + 1.6 * 4) + 3 * 10 + 1)
    assert "up to 4.2 min if all had 12" in found.evidence


def test_what_is_done_how_often(built: Built) -> None:
    """10 steps in 5 rounds; evaluated before, after 4, 8 and 10; saved after 3, 6, 9 and 10."""
    parts = built("train.steps=10", "train.epochs=2", "evaluation.every=4", "checkpoint.every=3")
    assert Times.of(parts) == Times(rounds=5, evaluations=4, saves=4)


def test_a_tiny_run_is_tried_out_and_its_folder_left_alone(built: Built, tmp_path: Path) -> None:
    parts = built()
    found = try_out(parts, max_new_tokens=6, checkpoint_bytes=1000)
    assert all(seconds >= 0.0 for seconds in found.round.values())
    assert found.evaluation > 0.0 < found.save
    assert not parts.saver.folder.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl", "student", "teacher"]


def test_a_large_checkpoint_is_taken_in_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by one second at each look; 32 MiB are written for 320."""
    monkeypatch.setattr(Stopwatch, "clock", staticmethod(_ticks().__next__))
    monkeypatch.setattr("etude.preflight.duration.WRITTEN_BYTES", 1000)
    assert save_seconds(tmp_path / "not" / "there", 10_000) == 10.0


def _ticks() -> Iterator[float]:
    second = 0.0
    while True:
        second += 1.0
        yield second


def test_durations_are_spoken() -> None:
    assert [spoken(s) for s in (0.25, 119, 120, 7_200)] == ["0.25 s", "1.2e+02 s", "2 min", "2 h"]
