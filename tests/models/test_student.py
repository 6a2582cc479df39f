import math
from pathlib import Path

import pytest
import torch

from etude.errors import ModelError
from etude.models.backbone import TransformersBackbone
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.testing import Kind, counting_logits, rollout_of, tiny_backbone

ROWS = [rollout_of([3], [4, 5, 6]), rollout_of([1, 2, 3], [4], row=1)]


def test_marks_each_token_by_the_place_before_it() -> None:
    marks = Student(TableBackbone(counting_logits())).logprobs(ROWS, temperature=1.0)
    assert [len(mark) for mark in marks] == [3, 1]
    torch.testing.assert_close(torch.cat(marks), torch.full((4,), -0.10536), atol=1e-5, rtol=0)


def test_temperature_divides_the_logits() -> None:
    """0.9 against nine times 0.1 / 9, each to the power 1/2 and renormalised."""
    [mark, _] = Student(TableBackbone(counting_logits())).logprobs(ROWS, temperature=2.0)
    expected = 0.9**0.5 / (0.9**0.5 + 9 * (0.1 / 9) ** 0.5)
    torch.testing.assert_close(mark.exp(), torch.full((3,), expected))


def test_entropy_of_what_each_token_was_drawn_from() -> None:
    """0.9 and nine times 0.1 / 9, everywhere."""
    marks = Student(TableBackbone(counting_logits())).logprobs_and_entropies(ROWS, temperature=1.0)
    expected = -0.9 * math.log(0.9) - 0.1 * math.log(0.1 / 9)
    assert [len(entropies) for _, entropies in marks] == [3, 1]
    torch.testing.assert_close(torch.cat([entropies for _, entropies in marks]), torch.full((4,), expected))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_is_trained_once_in_the_order_of_the_modules(kind: Kind, tied: bool) -> None:
    backbone = tiny_backbone(kind, tied=tied)
    weights = Student(backbone).trainable_parameters()
    assert list(weights) == [name for name, _ in backbone.named_parameters()]
    assert len({id(weight) for weight in weights.values()}) == len(weights)
    assert sum("lm_head" in name for name in weights) == (not tied)


def test_frozen_weights_are_left_out() -> None:
    backbone = tiny_backbone()
    backbone.base.get_input_embeddings().requires_grad_(False)
    assert not any("embed_tokens" in name for name in Student(backbone).trainable_parameters())


def test_nothing_to_train_is_refused() -> None:
    backbone = tiny_backbone()
    FrozenTeacher("teacher", backbone)
    with pytest.raises(ModelError, match="no weight of the student requires a gradient"):
        Student(backbone)


def test_a_row_beyond_its_window_is_named() -> None:
    with pytest.raises(ModelError, match="row 1 has 4 tokens, and the student reads at most 3"):
        Student(tiny_backbone(window=3)).logprobs([ROWS[1]], temperature=1.0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_takes_its_saved_weights_back(tmp_path: Path, kind: Kind) -> None:
    student = Student(tiny_backbone(kind))
    before = student.logprobs(ROWS, 1.0)
    student.save(tmp_path)
    with torch.no_grad():
        for weight in student.trainable_parameters().values():
            weight.zero_()
    student.load(tmp_path)
    assert all(mark.equal(earlier) for mark, earlier in zip(student.logprobs(ROWS, 1.0), before, strict=True))


def test_its_marks_carry_no_gradient() -> None:
    student = Student(tiny_backbone())
    assert isinstance(student.backbone, TransformersBackbone)
    assert not any(mark.requires_grad or mark.is_inference() for mark in student.logprobs(ROWS, 1.0))
