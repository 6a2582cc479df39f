"""Which updates are compared, by hand."""

from __future__ import annotations

from etude.experiments.against_rl import Curve, fastest, reached, rows

SLOW: Curve = [(0, 0.1), (100, 0.22), (200, 0.21), (300, 0.7)]
STUCK: Curve = [(0, 0.1), (100, 0.1), (200, 0.26), (300, 0.2)]
QUICK: Curve = [(0, 0.1), (5, 0.21), (10, 0.31), (15, 0.31), (20, 0.9)]


def test_the_first_time_counts() -> None:
    assert reached(QUICK, 0.31) == 10
    assert reached(STUCK, 0.3) is None


def test_the_learning_rate_is_the_best_for_each_accuracy() -> None:
    assert fastest([SLOW, STUCK], 0.2) == 100
    assert fastest([SLOW, STUCK], 0.25) == 200  # of the one that stalls later
    assert fastest([STUCK], 0.65) is None


def test_a_row_an_accuracy() -> None:
    # Two seeds: the second one's grpo never sees 0.3, so that 300, the updates it was given, is a lower bound.
    found = rows([QUICK, QUICK], [[SLOW, STUCK], [STUCK, STUCK]], updates=300)
    assert found == [
        ("0.2", "5", "150", "30"),
        ("0.25", "10", "200", "20"),
        ("0.3", "10", "over 300 (1 of 2 never)", "over 30"),
        ("0.5", "20", "over 300 (1 of 2 never)", "over 15"),
        ("0.65", "20", "over 300 (1 of 2 never)", "over 15"),
        ("0.8", "20", "over 300 (2 of 2 never)", "over 15"),
    ]


def test_what_on_policy_never_reached_is_not_compared() -> None:
    assert rows([STUCK], [[SLOW]], updates=300)[-1] == ("0.8", "not reached", "", "")
