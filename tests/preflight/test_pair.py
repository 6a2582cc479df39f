"""Tokenizers and lists of ids by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from etude.preflight.findings import Verdict
from etude.preflight.pair import one_bos, same_template, same_thinking, vocabulary
from etude.testing import word_tokenizer

WORDS = word_tokenizer()
ROWS = {"student": None, "teacher": None}
THINKING = word_tokenizer()
THINKING.add_tokens(["<think>", "</think>", "[THINK]"])


class TestVocabulary:
    def test_the_same(self) -> None:
        same, special = vocabulary(WORDS, word_tokenizer(), rows=ROWS)
        assert (same.verdict, same.figures) == (Verdict.PASS, {"ids": 32, "filler": {}})
        assert (special.verdict, special.figures) == (
            Verdict.PASS,
            {"bos": "<s>", "eos": "</s>", "pad": "<pad>"},
        )

    def test_filler_on_either_side(self) -> None:
        """Case 14: what lies beyond the tokenizer's ids is told, and is no difference."""
        same, _ = vocabulary(WORDS, word_tokenizer(), rows={"student": 64, "teacher": 80})
        assert same.evidence.endswith(
            "the student's head has 32 rows of filler, which are cut; the teacher's head has 48 rows of filler, "
            "which are cut"
        )

    def test_other_ids(self) -> None:
        [refusal] = vocabulary(WORDS, word_tokenizer(24), rows=ROWS)
        assert refusal.verdict is Verdict.REFUSE
        assert "id 31 is 'w24' / missing" in refusal.evidence

    def test_other_special_tokens(self) -> None:
        _, special = vocabulary(WORDS, word_tokenizer(pad_is_eos=True), rows=ROWS, role="reference")
        assert special.verdict is Verdict.WARN
        assert special.evidence == "the pad_token of the student is '<pad>', of the reference '</s>'"


@pytest.mark.parametrize(
    ("student", "teacher", "verdict"),
    [([1, 5], [1, 5], "pass"), ([5], [1, 5], "pass"), ([1, 1, 5], [1, 5], "refuse"), ([1, 5], [1, 1], "refuse")],
)
def test_one_bos(student: list[int], teacher: list[int], verdict: str) -> None:
    found = one_bos({"student": student, "teacher": teacher}, {"student": WORDS, "teacher": WORDS})
    assert found.verdict == verdict


def test_no_bos_where_a_tokenizer_has_none() -> None:
    tokenizer = word_tokenizer()
    tokenizer.bos_token = None
    assert one_bos({"student": [5, 5]}, {"student": tokenizer}).figures == {"student": 0}


class TestTemplate:
    def test_the_same_ids(self) -> None:
        found = same_template([5, 7], [5, 7], WORDS, where="a:1")
        assert (found.verdict, found.evidence) == (Verdict.PASS, "a:1 is the same 2 ids by both templates")
        assert found.figures == {"row": "a:1", "student": ["user", "w0"], "teacher": ["user", "w0"]}

    @pytest.mark.parametrize(
        ("teacher", "place", "shown"),
        [
            ([5, 7, 8, 9, 10, 2, 6], 5, "'w1 w2 w3 </s> assistant' / 'w1 w2 w3 assistant'"),
            ([2], 0, "'</s>' / 'user w0 w1 w2'"),
            ([5, 7, 8], 3, "'user w0 w1' / 'user w0 w1 w2 w3 assistant'"),
        ],
        ids=["a token more", "all other", "cut short"],
    )
    def test_where_they_part(self, teacher: list[int], place: int, shown: str) -> None:
        ours = [5, 7, 8, 9, 10, 6]
        found = same_template(ours, teacher, WORDS, where="a:1")
        assert (found.verdict, found.figures["parting"]) == (Verdict.REFUSE, place)
        assert found.evidence.endswith(f"they part at token {place}: {_swapped(shown)}")
        assert same_template(ours, teacher, WORDS, where="a:1", declared=True).verdict is Verdict.PASS


def _swapped(shown: str) -> str:
    theirs, ours = shown.split(" / ")
    return f"{ours} / {theirs}"


@pytest.mark.parametrize(
    ("student", "teacher", "verdict"),
    [
        ([5, 7], [5, 7], "pass"),
        ([5, 32], [5, 32], "pass"),
        ([5, 7], [5, 32], "refuse"),
        ([5, 32], [5, 32, 33], "refuse"),  # Qwen's empty block, thinking off
        ([5, 34], [5, 32], "refuse"),
    ],
)
def test_thinking(student: Sequence[int], teacher: Sequence[int], verdict: str) -> None:
    assert same_thinking(student, teacher, THINKING).verdict == verdict
    assert same_thinking(student, teacher, THINKING, declared=True).verdict is Verdict.PASS
