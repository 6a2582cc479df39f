"""What the teacher makes of answers, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.preflight.answers import stop_probabilities, stop_token, warm_start
from etude.preflight.findings import Finding, Verdict
from etude.testing import rollout_of

ENDED = rollout_of([5], [6, 7, 2], stop_ids=(2,))
CUT = rollout_of([5], [6, 7, 8], row=1, stop_ids=(2,))


def judged(at_end: float, elsewhere: float = 0.0, rows: int = 2) -> Finding:
    """Stop ids 2 and 3; the one row that ended did so with 2."""
    of_row = torch.tensor([[elsewhere, 0.5], [elsewhere, 0.5], [at_end, 0.5]])
    return stop_token(
        [ENDED, CUT][:rows],
        [of_row, torch.full((3, 2), elsewhere)][:rows],
        (2, 3),
        names=["</s>", "<|end|>"],
        likeliest=["<|end|>", "w1"],
    )


class TestStopToken:
    @pytest.mark.parametrize(
        ("at_end", "elsewhere", "verdict"),
        [(0.8, 0.0, "pass"), (0.05, 0.0, "pass"), (0.01, 0.0, "warn"), (1e-6, 0.3, "warn"), (1e-6, 1e-6, "refuse")],
    )
    def test_thresholds(self, at_end: float, elsewhere: float, verdict: str) -> None:
        assert judged(at_end, elsewhere).verdict == verdict

    def test_case_13(self) -> None:
        """The teacher gives the student's stop token 1e-6 and ends with another."""
        found = judged(1e-6)
        assert found.evidence == (
            "at 1 ends of the student's greedy answers (</s>) the teacher's probability of it is 1e-06, at most "
            "1.0e-06 anywhere in them; it would write '<|end|>' there"
        )
        assert found.figures["rows"] == 2

    def test_nothing_ended(self) -> None:
        found = stop_token([CUT], [torch.full((3, 1), 0.1)], (2,), names=["</s>"], likeliest=["w1"])
        assert (found.verdict, found.figures) == (Verdict.PASS, {"ended": 0, "anywhere": pytest.approx(0.1)})

    def test_probabilities_are_the_teachers(self) -> None:
        """A table of which every row is (1/2, 1/4, 1/8, 1/8), but that after 1 comes 3."""
        logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 4).log()
        logits[1] = torch.tensor([0.1, 0.1, 0.1, 0.7]).log()
        rows = [rollout_of([0], [1, 3]), rollout_of([0], [2], row=1)]
        found, likeliest = stop_probabilities(FrozenTeacher("t", TableBackbone(logits)), rows, (2, 3))
        torch.testing.assert_close(found[0].float(), torch.tensor([[0.125, 0.125], [0.1, 0.7]]))
        torch.testing.assert_close(found[1].float(), torch.tensor([[0.125, 0.125]]))
        assert likeliest == [3, 0]


class TestWarmStart:
    def of(self, own: float, other: float, vocab_size: int = 1000) -> Finding:
        return warm_start([torch.full((4,), own)], [torch.full((4,), other)], vocab_size)

    @pytest.mark.parametrize(
        ("own", "other", "verdict"),
        [
            (-4.7, -6.2, "pass"),  # a pruned SmolLM2
            (-1.1, -6.2, "pass"),  # the maze's student: sure of its steps, and wrong
            (-6.5, -8.0, "warn"),  # random weights: dice expect -6.9
            (-1.0, -7.5, "warn"),  # sure of something else
        ],
    )
    def test_thresholds(self, own: float, other: float, verdict: str) -> None:
        found = self.of(own, other)
        assert found.verdict == verdict
        assert found.figures["uniform"] == pytest.approx(-math.log(1000))

    def test_by_position(self) -> None:
        """Six tokens in three thirds, and a row of one, which is its last."""
        theirs = [torch.tensor([-1.0, -1.0, -2.0, -2.0, -3.0, -3.0]), torch.tensor([-6.0])]
        found = warm_start([torch.zeros(6), torch.zeros(1)], theirs, 10)
        assert found.figures["by_third"] == pytest.approx([-1.0, -2.0, -4.0])
        assert found.figures["teacher"] == pytest.approx(-18 / 7)
