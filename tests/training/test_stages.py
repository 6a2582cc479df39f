from __future__ import annotations

import math
from itertools import pairwise

import pytest

from etude.axes.names import Schedule
from etude.training.stages import Plan, learning_rate_factor


class TestPlan:
    def test_one_step_a_round_by_default(self) -> None:
        plan = Plan(steps=3)
        assert [(plan.round_of(step), plan.place_of(step)) for step in range(3)] == [(0, 0), (1, 0), (2, 0)]
        assert list(plan.rounds(after=0)) == [0, 1, 2]

    def test_updates_times_epochs(self) -> None:
        plan = Plan(steps=7, updates_per_round=3, epochs=2)
        assert plan.steps_per_round == 6
        assert [plan.first_step(number) for number in range(3)] == [0, 6, 12]
        assert [(plan.round_of(step), plan.place_of(step)) for step in (0, 5, 6)] == [(0, 0), (0, 5), (1, 0)]

    @pytest.mark.parametrize(
        ("after", "rounds"), [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [1, 2]), (3, [1, 2]), (4, [2]), (5, []), (6, [])]
    )
    def test_the_unfinished_round_comes_first(self, after: int, rounds: list[int]) -> None:
        assert list(Plan(steps=5, updates_per_round=2).rounds(after)) == rounds

    @pytest.mark.parametrize(
        ("rows", "updates", "expected"),
        [
            (4, 2, [0, 0, 1, 1]),
            (5, 2, [0, 0, 0, 1, 1]),
            (3, 3, [0, 1, 2]),
            (7, 3, [0, 0, 0, 1, 1, 2, 2]),
        ],
    )
    def test_rows_fall_into_updates_side_by_side(self, rows: int, updates: int, expected: list[int]) -> None:
        plan = Plan(steps=9, updates_per_round=updates)
        assert [plan.update_of(row, rows) for row in range(rows)] == expected

    def test_every_update_has_rows_and_sizes_differ_by_one_at_most(self) -> None:
        for rows in range(1, 20):
            for updates in range(1, rows + 1):
                plan = Plan(steps=1, updates_per_round=updates)
                found = [plan.update_of(row, rows) for row in range(rows)]
                sizes = [found.count(update) for update in range(updates)]
                assert found == sorted(found)
                assert max(sizes) - min(sizes) <= 1
                assert sum(sizes) == rows


class TestLearningRateFactor:
    @pytest.mark.parametrize(
        ("schedule", "warmup", "final", "expected"),
        [
            (Schedule.CONSTANT, 0, 1.0, [1, 1, 1, 1, 1]),
            (Schedule.CONSTANT, 2, 1.0, [1 / 2, 1, 1, 1, 1]),
            (Schedule.LINEAR, 0, 0.0, [1, 3 / 4, 1 / 2, 1 / 4, 0]),
            (Schedule.LINEAR, 0, 0.2, [1, 0.8, 0.6, 0.4, 0.2]),
            (Schedule.LINEAR, 1, 0.2, [1, 0.8, 0.6, 0.4, 0.2]),
            (Schedule.LINEAR, 3, 0.5, [1 / 3, 2 / 3, 1, 3 / 4, 1 / 2]),
            # half a cosine over four equal parts: (1 + cos 45 degrees) / 2 after the first
            (Schedule.COSINE, 0, 0.0, [1, (1 + math.sqrt(0.5)) / 2, 1 / 2, (1 - math.sqrt(0.5)) / 2, 0]),
            (Schedule.COSINE, 3, 0.5, [1 / 3, 2 / 3, 1, 3 / 4, 1 / 2]),
        ],
    )
    def test_by_hand(self, schedule: Schedule, warmup: int, final: float, expected: list[float]) -> None:
        found = [
            learning_rate_factor(step, steps=5, warmup_steps=warmup, schedule=schedule, final_fraction=final)
            for step in range(5)
        ]
        assert found == pytest.approx(expected)

    @pytest.mark.parametrize("schedule", Schedule)
    @pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 2), (3, 5), (10, 9)])
    def test_short_runs_and_long_warm_ups_stay_within_zero_and_one(
        self, schedule: Schedule, steps: int, warmup: int
    ) -> None:
        factors = [
            learning_rate_factor(step, steps=steps, warmup_steps=warmup, schedule=schedule, final_fraction=0.1)
            for step in range(steps)
        ]
        assert all(0 < factor <= 1 for factor in factors)
        assert all(later > earlier for earlier, later in pairwise(factors[: min(warmup, steps)]))

    def test_a_run_of_one_step_takes_it_at_the_peak(self) -> None:
        for schedule in Schedule:
            assert learning_rate_factor(0, steps=1, schedule=schedule, final_fraction=0.0) == 1.0
