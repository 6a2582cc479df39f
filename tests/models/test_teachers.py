import math
from pathlib import Path

import pytest
import torch
from torch import nn

from etude.axes.names import Gives
from etude.core.linear import OutputHead
from etude.core.logprobs import next_token_logprobs
from etude.core.records import Rollout
from etude.errors import PairError
from etude.models.backbone import TransformersBackbone, load_backbone
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.testing import Kind, counting_logits, rollout_of, tiny_backbone, tiny_folder, tiny_model, word_tokenizer

SAMPLED = frozenset({Gives.SAMPLED_LOGPROBS})
HIDDEN = frozenset({Gives.HIDDEN_STATES})
ROWS = [
    rollout_of([7, 11, 2], [30, 9, 2]),
    rollout_of([5], [6], row=1),
    rollout_of([8, 9, 10, 11, 12, 13, 14, 15], [16, 17, 18, 19, 2], row=2),
]


def sampled(teacher: FrozenTeacher, rows: list[Rollout], temperature: float = 1.0) -> list[torch.Tensor]:
    return [
        marks.sampled_logprobs
        for marks in teacher.score(rows, SAMPLED, temperature)
        if marks.sampled_logprobs is not None
    ]


@pytest.mark.parametrize("tokens_per_batch", [1, 8, 1000])
def test_each_token_is_marked_by_the_place_before_it(tokens_per_batch: int) -> None:
    """Off by one would read ln(0.1 / 9) = -4.49981; in a ragged batch, a neighbour's column."""
    teacher = FrozenTeacher("counting", TableBackbone(counting_logits()), tokens_per_batch=tokens_per_batch)
    rows = [rollout_of([3], [4, 5, 6]), rollout_of([1, 2, 3], [4], row=1)]
    marks = sampled(teacher, rows)
    assert [len(mark) for mark in marks] == [3, 1]
    torch.testing.assert_close(torch.cat(marks), torch.full((4,), -0.10536), atol=1e-5, rtol=0)
    assert math.log(0.1 / 9) == pytest.approx(-4.49981, abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_row_is_marked_the_same_in_any_company(kind: Kind) -> None:
    teacher = FrozenTeacher("teacher", tiny_backbone(kind))
    alone = [sampled(teacher, [row])[0] for row in ROWS]
    together = sampled(teacher, [*ROWS[::-1], *ROWS])
    for expected, found in zip([*alone[::-1], *alone], together, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_marks_are_the_models_own_log_probabilities(kind: Kind, temperature: float) -> None:
    model = tiny_model(kind)
    marks = sampled(FrozenTeacher("teacher", TransformersBackbone(model, word_tokenizer())), ROWS, temperature)
    for row, mark in zip(ROWS, marks, strict=True):
        with torch.no_grad():
            logprobs = (model(input_ids=row.token_ids[None]).logits[0] / temperature).log_softmax(-1)
        expected = [
            logprobs[row.num_prompt_tokens + place - 1, id_] for place, id_ in enumerate(row.completion_ids.tolist())
        ]
        torch.testing.assert_close(mark, torch.stack(expected), atol=1e-5, rtol=0)


def test_states_and_head_give_the_whole_distribution() -> None:
    teacher = FrozenTeacher("teacher", tiny_backbone())
    marks = teacher.score(ROWS, HIDDEN | SAMPLED, 1.0)
    for row, mark in zip(ROWS, marks, strict=True):
        assert mark.hidden is not None
        logprobs = next_token_logprobs(teacher.head().logits(mark.hidden))
        picked = logprobs.gather(-1, row.completion_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(picked, mark.sampled_logprobs, atol=1e-6, rtol=0)


def test_filler_rows_take_no_probability() -> None:
    """261 real ids, heads of 261, 264 and 320 rows whose fillers are far too likely: the same marks."""
    heads: list[torch.Tensor] = []
    for rows in (261, 264, 320):
        backbone = tiny_backbone(tokenizer=word_tokenizer(254), rows=rows)
        reference = tiny_backbone(tokenizer=word_tokenizer(254), rows=261)
        with torch.no_grad():
            for name, weight in backbone.named_parameters():
                weight[:261].copy_(reference.get_parameter(name)[:261])
                weight[261:] = 5 * torch.randn_like(weight[261:])
        heads.append(torch.cat(sampled(FrozenTeacher("teacher", backbone), ROWS)))
    assert heads[0].equal(heads[1])
    assert heads[0].equal(heads[2])


def test_a_student_with_dropout_agrees_with_the_teacher_it_was_copied_from(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    model.config.update({"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5})
    TransformersBackbone(model, word_tokenizer()).save(tmp_path)
    teacher = FrozenTeacher("teacher", load_backbone(str(tmp_path), dropout=True))
    student = Student(load_backbone(str(tmp_path), dropout=True))
    assert {part.p for part in student.backbone.modules() if isinstance(part, nn.Dropout)} == {0.5}
    for backbone in (teacher.backbone, student.backbone):
        backbone.train()
    marks, again = sampled(teacher, ROWS), sampled(teacher, ROWS)
    own = student.logprobs(ROWS, 1.0)
    for first, second, mine in zip(marks, again, own, strict=True):
        assert first.equal(second)
        assert (mine - first).abs().max() < 1e-7


def test_modes_are_restored_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = FrozenTeacher("teacher", tiny_backbone())
    teacher.backbone.train()
    monkeypatch.setattr(OutputHead, "logits", None)
    with pytest.raises(TypeError):
        teacher.score(ROWS, SAMPLED, 1.0)
    assert all(part.training for part in teacher.backbone.modules())


def test_is_frozen_from_the_start() -> None:
    teacher = FrozenTeacher("teacher", tiny_backbone().train())
    assert not teacher.backbone.training
    assert not any(weight.requires_grad for weight in teacher.backbone.parameters())


def test_half_precision_states_stay_so(tmp_path: Path) -> None:
    teacher = FrozenTeacher("teacher", load_backbone(tiny_folder(tmp_path), dtype="bfloat16"))
    [marks, *_] = teacher.score(ROWS, HIDDEN | SAMPLED, 1.0)
    assert marks.hidden is not None
    assert marks.hidden.dtype == torch.bfloat16
    assert marks.sampled_logprobs is not None
    assert marks.sampled_logprobs.dtype == torch.float32


def test_what_it_does_not_give_is_refused() -> None:
    with pytest.raises(PairError, match=r"'marker' gives hidden_states, sampled_logprobs, and a term needs labels"):
        FrozenTeacher("marker", tiny_backbone()).score(ROWS, frozenset({Gives.LABELS}), 1.0)


def test_a_row_beyond_its_window_is_named() -> None:
    teacher = FrozenTeacher("marker", tiny_backbone(window=12))
    with pytest.raises(PairError, match=r"row 2 has 13 tokens, and the teacher 'marker' reads at most 12"):
        teacher.score(ROWS, SAMPLED, 1.0)
