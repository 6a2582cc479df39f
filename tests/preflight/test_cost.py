"""Tokens and operations of a run, counted by hand beside each test."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from etude.models.lora import LoraSettings, add_adapters
from etude.models.table import TableBackbone
from etude.preflight.cost import Amounts, Weights, at_length, cost, in_short, operations, weights_of
from etude.preflight.findings import Verdict
from etude.testing import tiny_backbone, tiny_model, word_tokenizer

# Of one layer of the tiny llama, hidden 16, two heads of 8, one of keys and values, inner 32:
# q 16 x 16, k and v 8 x 16, o 16 x 16, gate, up and down 32 x 16, two norms of 16.
LAYER = 256 + 2 * 128 + 256 + 3 * 512 + 2 * 16
FINAL_NORM, HEAD, EMBEDDING = 16, 32 * 16, 32 * 16

SMALL = Amounts(rounds=5, rows=4, prompt=3.0, completion=2.0)
STUDENT, TEACHER = Weights(body=100, head=10), Weights(body=1000, head=50)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_looked_up_and_the_head_is_multiplied_with(tied: bool) -> None:
    assert weights_of(tiny_backbone(tied=tied)) == Weights(body=2 * LAYER + FINAL_NORM, head=HEAD)


def test_rows_of_filler_are_cut_from_the_head_and_counted_nowhere() -> None:
    assert weights_of(tiny_backbone(rows=40)) == Weights(body=2 * LAYER + FINAL_NORM, head=HEAD)


def test_a_table_is_all_head() -> None:
    assert weights_of(TableBackbone(torch.zeros(5, 3))) == Weights(body=0, head=15)


def test_of_adapters_only_they_are_trained() -> None:
    """Rank 2 on q and v: (16 + 16) x 2 and (16 + 8) x 2, in two layers."""
    settings = LoraSettings(rank=2, alpha=4, target_modules=["q_proj", "v_proj"])
    pytest.importorskip("peft")
    from etude.models.backbone import TransformersBackbone

    backbone = TransformersBackbone(add_adapters(tiny_model(), settings), word_tokenizer())
    assert weights_of(backbone, trained_only=True) == Weights(body=2 * (64 + 48), head=0)
    assert weights_of(backbone) == Weights(body=2 * LAYER + FINAL_NORM + 2 * (64 + 48), head=HEAD)


def test_operations_of_a_run_by_hand() -> None:
    """20 rows of 3 + 2 tokens: 60 prompt tokens and 40 completion tokens.

    One pass of the student: 2 (100 x 100 + 10 x 40) = 20,800; of the teacher: 2 (1000 x 100 + 50 x 40) = 204,000.
    """
    assert operations(SMALL, STUDENT, STUDENT, {"teacher": TEACHER}) == {
        "sampling": 20_800,
        "scoring": 204_000,
        "student_marks": 0,
        "learning": 3 * 20_800,
        "evaluating": 0,
    }


def test_learning_goes_by_epochs_and_frozen_weights_have_no_gradient() -> None:
    """Adapters of 5 weights a token: forward and backward through all, and their own gradient 2 x 5 x 100."""
    found = operations(replace(SMALL, epochs=3), STUDENT, Weights(5, 0), {})
    assert found["learning"] == 3 * (2 * 20_800 + 1_000)


def test_who_writes_pays_for_it() -> None:
    """Half of the rows by the student, half by the teacher; or all of them by both, token by token."""
    half = replace(SMALL, student_writes=0.5, teacher_writes=0.5)
    assert operations(half, STUDENT, STUDENT, {"teacher": TEACHER})["sampling"] == 10_400 + 102_000
    both = replace(SMALL, teacher_writes=1.0)
    assert operations(both, STUDENT, STUDENT, {"teacher": TEACHER})["sampling"] == 20_800 + 204_000


def test_a_term_that_needs_the_students_marks_adds_a_pass() -> None:
    assert operations(replace(SMALL, student_marks=True), STUDENT, STUDENT, {})["student_marks"] == 20_800


def test_every_evaluation_writes_and_both_models_read() -> None:
    """Two evaluations of 10 rows (1,040 operations a row and student, 10,200 a row and teacher) and 4 greedy ones."""
    amounts = replace(SMALL, evaluations=2, evaluation_rows=10, evaluation_greedy_rows=4)
    found = operations(amounts, STUDENT, STUDENT, {"teacher": TEACHER})["evaluating"]
    assert found == 2 * (14 * 1_040 + 10 * 1_040 + 10 * 10_200)


def test_tokens_by_what_is_done_with_them() -> None:
    amounts = replace(SMALL, epochs=2, student_writes=0.75, teacher_writes=0.25)
    assert amounts.counted == {
        "sampled_by_student": 30,
        "sampled_by_teacher": 10,
        "scored": 40,
        "trained": 80,
        "evaluated": 0,
        "prompt": 60,
    }
    assert at_length(amounts, 4.0).counted["trained"] == 160


def test_the_finding_shows_totals_formula_and_worst_case() -> None:
    """A table of 3 x 2 weights on both sides: 2 x 6 x (written + scored + 3 x trained) tokens = 60 a token."""
    table = TableBackbone(torch.zeros(3, 2))
    found = cost(SMALL, table, {"teacher": table}, longest=4, elsewhere=("served",))
    assert found.verdict is Verdict.PASS
    assert found.figures["total_flops"] == 60 * 40
    assert found.figures["worst_flops"] == 60 * 80
    assert "2.4e+03 FLOPs, and 4.8e+03 if every answer had 4 tokens" in found.evidence
    assert "6 P_S trained" in found.evidence
    assert "not counted: served" in found.evidence
    assert in_short(found.figures["tokens"]["trained"]) == "40"
