"""The quickstart's machinery at a fraction of its size: every way trains, is judged, and is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from etude.data.maze import ROUTES
from etude.experiments import arena, quickstart, quickstart_seeds
from etude.experiments.arena import Arena, Score
from etude.experiments.quickstart import WAYS, Result


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates of eight walks each, one walk a held-out route."""
    monkeypatch.setattr(arena, "WARM_START_STEPS", 1)
    monkeypatch.setattr(arena, "ROWS", 8)
    monkeypatch.setattr(arena, "WALKS", 1)
    teach = Arena.teach
    monkeypatch.setattr(Arena, "teach", lambda *a, **k: teach(*a, **{**k, "updates": 2}))


def test_training_and_held_out_routes_are_all_routes_and_share_none(tmp_path: Path) -> None:
    made = Arena(tmp_path, seed=3)
    training = {prompt.example["prompt"] for prompt in made.training}
    held_out = {prompt.example["prompt"] for prompt in made.held_out}
    assert len(training) == 24
    assert len(held_out) == 372
    assert len(training | held_out) == len(ROUTES)
    assert len(made.held_out) == 372 * arena.WALKS
    rows = [json.loads(line) for line in (tmp_path / "routes.jsonl").read_text().splitlines()]
    assert {row["prompt"] for row in rows} == training
    assert all(row["completion"] for row in rows)


def test_another_seed_draws_other_routes(tmp_path: Path) -> None:
    first, second = (Arena(tmp_path / str(seed), seed) for seed in (0, 1))
    assert {p.example["prompt"] for p in first.training} != {p.example["prompt"] for p in second.training}


def test_nothing_unseen_judges_on_the_training_routes(tmp_path: Path) -> None:
    made = Arena(tmp_path, seed=0, unseen=False)
    assert {p.example["prompt"] for p in made.held_out} == {p.example["prompt"] for p in made.training}


def test_the_shipped_teacher_knows_the_way(tmp_path: Path) -> None:
    score = Arena(tmp_path, seed=0).score(arena.TEACHER)
    assert score.accuracy >= 0.96
    assert score.accuracy_greedy == 1.0
    assert abs(score.reverse_kl) < 1e-6


@pytest.mark.usefixtures("small")
def test_a_whole_quickstart_in_small(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    result = quickstart.run(tmp_path, seed=0, console=Console(quiet=True))
    torch.set_num_threads(before)

    summary = json.loads((tmp_path / "summary.json").read_text())
    for key in (
        "teacher_accuracy",
        "student_accuracy_before",
        "offpolicy_accuracy",
        "onpolicy_accuracy",
        "heldout_reverse_kl_before",
        "heldout_reverse_kl_after",
        "seconds",
    ):
        assert isinstance(summary[key], float), key
    assert set(result.scores) == {"teacher", "before", *WAYS}
    assert all(Path(student).is_dir() for student in result.students.values())
    assert (tmp_path / "maze.png").stat().st_size > 10_000


def result_of(accuracy: float, control: float) -> Result:
    scores = {name: Score(control, control, 2.0, 1.0) for name in ("teacher", "before", *WAYS)}
    return Result(0, 1.0, scores | {"onpolicy": Score(accuracy, accuracy, 0.5, 1.0)}, dict.fromkeys(WAYS, "nowhere"))


def test_gap_and_ratio_are_against_the_better_fixed_control() -> None:
    result = result_of(0.8, 0.5)
    better = result.scores | {
        "offpolicy_reverse_kl": Score(0.6, 0.6, 1.0, 1.0),
        "fresh_teacher": Score(0.9, 0.9, 0.1, 1.0),
    }
    result = Result(0, 1.0, better, result.students)
    assert result.best_control == "offpolicy_reverse_kl"
    assert result.gap == pytest.approx(0.2)
    assert result.kl_ratio == pytest.approx(0.5)


def test_half_width_by_hand() -> None:
    # values 1, 2, 3: standard deviation 1, so 4.303 / sqrt(3)
    assert quickstart_seeds.half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
