"""The tutorial runs, and what it says is true: what it prints, what it derives, and that etude computes the same."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from etude.core.divergences import reverse_kl

TUTORIAL = Path(__file__).parents[2] / "tutorial" / "on_policy_distillation.py"


@pytest.fixture(scope="module")
def tutorial() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(TUTORIAL)))


def printed_numbers(text: str, name: str) -> list[float]:
    """All numbers on the lines that begin with this name."""
    lines = [line.removeprefix(name) for line in text.splitlines() if line.startswith(name)]
    return [float(number) for line in lines for number in re.findall(r"-?\d+\.\d+", line)]


def test_it_prints_what_it_claims(tutorial: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    tutorial.main()
    printed = capsys.readouterr().out
    (before,) = printed_numbers(printed, "before")
    value, norm, difference, after = printed_numbers(printed, "full vocabulary")
    sampled_value, sampled_norm, sampled_difference, sampled_after = printed_numbers(printed, "sampled note")
    popular_value, popular_norm, _, popular_after = printed_numbers(printed, "popular")
    batch_norm, batch_difference = printed_numbers(printed, "|gradient|")

    # The right value with no gradient, and the right gradient with a value that means nothing.
    assert popular_value == value == before
    assert sampled_value < 0.0
    assert sampled_norm == norm > 1.0
    assert difference == sampled_difference == popular_norm == 0.0
    # On one batch the popular loss has a gradient, and there is no teacher in it.
    assert batch_norm > 1.0
    assert batch_difference == 0.0
    # Two learn; the third wanders, and gets nowhere.
    assert max(after, sampled_after) < 0.01
    assert popular_after > 0.9 * before
    assert printed.count("re mi fa stop") == printed.count("do do do do") == 2


def test_the_enumeration_is_the_whole_of_what_the_student_can_play(tutorial: SimpleNamespace) -> None:
    ids = tutorial.every_tune()
    chances, _ = tutorial.per_note(lambda q, p, ids: tutorial.of_played(q, ids), tutorial.NOVICE, tutorial.TEACHER, ids)
    assert len(ids) == len(torch.unique(ids, dim=0)) == 4**4 + 4**3 + 4**2 + 4 + 1
    torch.testing.assert_close(chances.sum(1).exp().sum().item(), 1.0)


def test_the_expected_gradient_is_the_closed_form(tutorial: SimpleNamespace) -> None:
    """Expected visits of each state times q (c - KL), by multiplying the transition matrix: no tune is listed."""
    q, p = tutorial.NOVICE, tutorial.TEACHER
    visits = torch.zeros(len(q), dtype=q.dtype)
    here = torch.eye(len(q), dtype=q.dtype)[tutorial.DO]
    for _ in range(tutorial.MAX_NEW_NOTES):
        here[tutorial.STOP] = 0.0
        visits += here
        here = here @ q.exp()
    kl = (q.exp() * (q - p)).sum(1)
    gradient = visits[:, None] * q.exp() * (q - p - kl[:, None])
    for name in ("full vocabulary", "sampled note"):
        torch.testing.assert_close(tutorial.expected(tutorial.LOSSES[name], q)[1], gradient)
    torch.testing.assert_close(tutorial.expected(tutorial.full_vocabulary, q)[0], (visits * kl).sum().item())


def test_the_sampled_note_is_noisier_than_the_full_vocabulary(tutorial: SimpleNamespace) -> None:
    torch.manual_seed(1)
    squared_error = {}
    for name in ("full vocabulary", "sampled note"):
        loss, exact = tutorial.LOSSES[name], tutorial.expected(tutorial.LOSSES[name], tutorial.NOVICE)[1]
        errors = []
        for _ in range(100):
            student = tutorial.NOVICE.clone().requires_grad_()
            losses, _ = tutorial.per_note(loss, student, tutorial.TEACHER, tutorial.play(student, 8))
            errors.append(torch.autograd.grad(losses.sum() / 8, student)[0] - exact)
        squared_error[name] = torch.stack(errors).square().sum((1, 2)).mean().item()
    assert squared_error["sampled note"] > 1.5 * squared_error["full vocabulary"]


def test_stops_are_trained_and_filling_is_not(tutorial: SimpleNamespace) -> None:
    completion = torch.tensor([[1, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]])
    assert tutorial.trained(completion).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


def test_etude_computes_the_same_divergence(tutorial: SimpleNamespace) -> None:
    q, p = tutorial.NOVICE, tutorial.TEACHER
    by_hand = tutorial.full_vocabulary(q, p, torch.zeros(len(q), dtype=torch.int64))
    torch.testing.assert_close(reverse_kl(student_logprobs=q, teacher_logprobs=p), by_hand)
