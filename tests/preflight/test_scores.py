"""Alignment and repetition of teachers whose every number is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.axes.names import Gives
from etude.core.records import Prompt, Rollout, Scores, as_ids
from etude.errors import PairError
from etude.models.table import TableBackbone
from etude.preflight.findings import Verdict
from etude.preflight.scores import Plain, aligned, echo, marks_of, repeated, uneven
from etude.preflight.tolerance import TOLERANCE
from etude.testing import CountingTeacher, counting_logits, rollout_of, tiny_backbone

EXACT = TOLERANCE[torch.float32]
SAMPLED, HIDDEN = frozenset({Gives.SAMPLED_LOGPROBS}), frozenset({Gives.HIDDEN_STATES})
RIGHT, WRONG = math.log(0.9), math.log(0.1 / 9)  # -0.10536 and -4.49981
ROWS = [rollout_of([3], [4, 5, 9, 0]), rollout_of([1, 2, 3], [4], row=1)]  # counts on but for one token


def plain(rows: Sequence[Rollout] = ROWS) -> list[Plain]:
    table = TableBackbone(counting_logits())
    return [Plain.of(table, row.prompt.token_ids, row.completion_ids) for row in rows]


def test_a_plain_reading_by_hand() -> None:
    [long, short] = plain()
    torch.testing.assert_close(long.right_C.tolist(), [RIGHT, RIGHT, WRONG, RIGHT], atol=1e-6, rtol=0)
    # From the state before: 3 4 5 9 expects 4 (there is none before 3, so 3 itself), 4, 5 and 6 in their places.
    torch.testing.assert_close(long.late_C.tolist(), [RIGHT, WRONG, WRONG, WRONG], atol=1e-6, rtol=0)
    torch.testing.assert_close(long.early_C.tolist(), [WRONG] * 4, atol=1e-6, rtol=0)
    torch.testing.assert_close(short.right_C.tolist(), [RIGHT], atol=1e-6, rtol=0)


def test_a_plain_reading_is_a_models_own() -> None:
    backbone = tiny_backbone("gpt2")
    ids = torch.tensor([[5, 7, 8, 30, 11]])
    with torch.no_grad():
        logprobs = backbone.base(input_ids=ids).logits[0, :, :32].log_softmax(-1)
    found = Plain.of(backbone, ids[0, :3], ids[0, 3:]).right_C
    torch.testing.assert_close(found.float(), torch.stack([logprobs[2, 30], logprobs[3, 11]]), atol=1e-5, rtol=0)


class Changed(CountingTeacher):
    """A counting teacher whose marks go through a change."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def score(self, rollouts: Sequence[Rollout], needs: frozenset[Gives], temperature: float) -> list[Scores]:
        marks = super().score(rollouts, needs, temperature)
        return [
            replace(
                mark,
                sampled_logprobs=None if mark.sampled_logprobs is None else self.change(mark.sampled_logprobs, place),
                hidden=None if mark.hidden is None else self.change(mark.hidden, place),
            )
            for place, mark in enumerate(marks)
        ]


def judged(teacher: CountingTeacher, needs: frozenset[Gives]) -> Any:
    return aligned("teacher", marks_of(teacher, ROWS, needs), plain(), EXACT)


class TestAlignment:
    @pytest.mark.parametrize("needs", [SAMPLED, HIDDEN, SAMPLED | HIDDEN], ids=["log-probs", "states", "both"])
    def test_a_counting_teacher_is(self, needs: frozenset[Gives]) -> None:
        found = judged(CountingTeacher(), needs)
        assert found.verdict is Verdict.PASS, found
        assert found.figures["largest"] < 1e-6
        assert found.figures["shifted"] > 1.0

    def test_the_figure_of_a_shift(self) -> None:
        """Four tokens in a row: two of three neighbours differ by 4.39445, whichever way they are moved."""
        assert judged(CountingTeacher(), SAMPLED).figures["shifted"] == pytest.approx((RIGHT - WRONG) * 2 / 3, abs=1e-5)

    @pytest.mark.parametrize("needs", [SAMPLED, HIDDEN], ids=["log-probs", "states"])
    @pytest.mark.parametrize(("by", "name"), [(1, "before"), (-1, "after")])
    def test_a_shift_by_one_is_named(self, needs: frozenset[Gives], by: int, name: str) -> None:
        """Case 6. Hidden states of later words mistake every word of these rows, so that both ways look the same."""
        found = judged(Changed(lambda mark, _: mark.roll(by, 0)), needs)
        assert found.verdict is Verdict.REFUSE
        expected = name if needs == SAMPLED or by == 1 else "before"
        assert f"are shifted by one: each is that of the token {expected}" in found.evidence
        assert found.figures["shifted"] < 1e-6

    def test_another_offset_for_one_row_is_refused(self) -> None:
        found = judged(Changed(lambda mark, place: mark - 0.5 * place), SAMPLED)
        assert found.verdict is Verdict.REFUSE
        assert "no shift by one explains it" in found.evidence
        assert found.figures["largest"] == pytest.approx(0.5, abs=1e-6)

    def test_scores_that_are_no_numbers(self) -> None:
        assert judged(Changed(lambda mark, _: mark * float("nan")), SAMPLED).verdict is Verdict.REFUSE

    def test_where_a_shift_would_not_show(self) -> None:
        teacher = CountingTeacher(certainty=0.1)  # every id as likely as any other
        table = TableBackbone(counting_logits(certainty=0.1))
        rows = [Plain.of(table, row.prompt.token_ids, row.completion_ids) for row in ROWS]
        found = aligned("teacher", marks_of(teacher, ROWS, SAMPLED), rows, EXACT)
        assert found.verdict is Verdict.WARN
        assert "too little to tell it from rounding" in found.evidence


class TestRepetition:
    def test_a_counting_teacher_says_the_same(self) -> None:
        found = repeated(CountingTeacher(), ROWS, SAMPLED | HIDDEN, EXACT)
        assert (found.verdict, found.figures["largest"]) == (Verdict.PASS, 0.0)

    @pytest.mark.parametrize("needs", [SAMPLED, HIDDEN], ids=["log-probs", "states"])
    def test_noise(self, needs: frozenset[Gives]) -> None:
        """Case 22."""
        found = repeated(Changed(lambda mark, _: mark * (1.0 + 0.1 * torch.rand(1))), ROWS, needs, EXACT)
        assert found.verdict is Verdict.REFUSE

    def test_a_teacher_that_answers_by_place(self) -> None:
        """Case 27: the batch's order decides."""
        found = repeated(Changed(lambda mark, place: mark - place), ROWS, SAMPLED, EXACT)
        assert found.verdict is Verdict.REFUSE
        assert "in another order" in found.evidence

    def test_zeros_on_a_second_call(self) -> None:
        """Case 27: a cached prefix has no scores left."""
        calls: list[int] = []

        def cached(mark: Tensor, place: int) -> Tensor:
            calls.append(place)
            return mark if len(calls) <= len(ROWS) else mark * 0.0

        assert repeated(Changed(cached), ROWS, SAMPLED, EXACT).verdict is Verdict.REFUSE

    def test_too_few_scores(self) -> None:
        class Short(CountingTeacher):
            def score(self, *args: Any) -> list[Scores]:
                return super().score(*args)[:1]

        with pytest.raises(PairError, match="gave 1 scores for 2 rows"):
            repeated(Short(), ROWS, SAMPLED, EXACT)


def test_rows_without_a_sampler() -> None:
    """Ids of all prompts, each once before one comes again, another one first in each row."""
    prompts = [Prompt(as_ids([5, 7, 5]), 0), Prompt(as_ids([9]), 1)]
    rows = echo(prompts, 4)
    assert [row.completion_ids.tolist() for row in rows] == [[5, 7, 9, 5], [7, 9, 5, 7]]
    assert [row.num_completion_tokens for row in uneven(rows)] == [2, 4]
    assert [row.num_completion_tokens for row in uneven(rows[:1])] == [2, 4]
