import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from etude.axes.names import Gives
from etude.core.linear import OutputHead
from etude.core.logprobs import next_token_logprobs
from etude.core.records import Rollout
from etude.errors import PairError
from etude.models.backbone import TransformersBackbone, load_backbone
from etude.models.own_teachers import EmaTeacher
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.models.teachers import EnsembleTeacher, FrozenTeacher, OffloadedTeacher
from etude.testing import (
    CountingTeacher,
    Kind,
    counting_logits,
    rollout_of,
    tiny_backbone,
    tiny_folder,
    tiny_model,
    word_tokenizer,
)

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


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_masses_of_kept_ids(temperature: float) -> None:
    """Beside a row that no sampler cut, and alone in its batch, too."""
    kept = replace(
        ROWS[0],
        kept_ids=torch.cat([torch.tensor([int(y), 0 if y else 1]) for y in ROWS[0].completion_ids]).int(),
        kept_lengths=torch.full((ROWS[0].num_completion_tokens,), 2, dtype=torch.int32),
    )
    teacher = FrozenTeacher("teacher", tiny_backbone(), tokens_per_batch=1000)
    masses, needs = frozenset({Gives.KEPT_MASS}), HIDDEN | SAMPLED | {Gives.KEPT_MASS}
    for rows in ([kept, ROWS[1]], [ROWS[1], kept], [kept], [ROWS[1]]):
        for row, mark, alone in zip(
            rows, teacher.score(rows, needs, temperature), teacher.score(rows, masses, temperature), strict=True
        ):
            assert mark.hidden is not None
            assert mark.kept_mass is not None
            assert alone.sampled_logprobs is None
            torch.testing.assert_close(alone.kept_mass, mark.kept_mass, atol=1e-6, rtol=0)
            probabilities = next_token_logprobs(teacher.head().logits(mark.hidden), temperature).exp()
            expected = [
                p[int(y)] + p[0 if y else 1] if row is kept else torch.tensor(1.0)
                for p, y in zip(probabilities, row.completion_ids, strict=True)
            ]
            torch.testing.assert_close(mark.kept_mass.exp(), torch.stack(expected), atol=1e-6, rtol=0)


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
    with pytest.raises(
        PairError, match=r"'marker' gives hidden_states, kept_mass, sampled_logprobs, and a term needs labels"
    ):
        FrozenTeacher("marker", tiny_backbone()).score(ROWS, frozenset({Gives.LABELS}), 1.0)


def test_a_row_beyond_its_window_is_named() -> None:
    teacher = FrozenTeacher("marker", tiny_backbone(window=12))
    with pytest.raises(PairError, match=r"row 2 has 13 tokens, and the teacher 'marker' reads at most 12"):
        teacher.score(ROWS, SAMPLED, 1.0)


class TestOffloaded:
    def test_its_weights_are_on_the_device_only_while_it_marks(self) -> None:
        """Here the device is the CPU too, where a copy stands for it."""
        backbone = tiny_backbone("gpt2", tied=True)
        expected = sampled(FrozenTeacher("teacher", tiny_backbone("gpt2", tied=True)), ROWS)
        teacher = OffloadedTeacher("teacher", backbone, device="cpu")
        home = {key: weight.data_ptr() for key, weight in backbone.named_parameters()}
        head = teacher.head()
        with teacher.marking():
            away = {key: weight.data_ptr() for key, weight in backbone.named_parameters()}
        assert not set(home.values()) & set(away.values())
        assert {key: weight.data_ptr() for key, weight in backbone.named_parameters()} == home
        assert all(a.equal(b) for a, b in zip(sampled(teacher, ROWS), expected, strict=True))
        assert {key: weight.data_ptr() for key, weight in backbone.named_parameters()} == home
        assert head.weight_VD.data_ptr() not in {*home.values(), *away.values()}  # it stays on the device
        assert head.weight_VD.equal(backbone.head().weight_VD)

    def test_they_go_where_they_are_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        places: list[str] = []

        def moved(self: torch.Tensor, device: torch.device, **how: Any) -> torch.Tensor:
            assert how["copy"]
            places.append(str(device))
            return self.clone()

        teacher = OffloadedTeacher("teacher", tiny_backbone(), device="cpu")
        teacher.device = torch.device("cuda:3")
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "to", moved)
            with teacher.marking():
                pass
        held = [*teacher.backbone.parameters(), *teacher.backbone.buffers()]
        assert places == ["cuda:3"] * len(held)
        assert {weight.device.type for weight in held} == {"cpu"}

    def test_after_an_exception_they_are_home_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        teacher = OffloadedTeacher("teacher", tiny_backbone(), device="cpu")
        home = [weight.data_ptr() for weight in teacher.backbone.parameters()]
        monkeypatch.setattr(OutputHead, "logits", None)
        with pytest.raises(TypeError):
            sampled(teacher, ROWS)
        assert [weight.data_ptr() for weight in teacher.backbone.parameters()] == home

    def test_nothing_is_moved_for_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        teacher = OffloadedTeacher("teacher", tiny_backbone(), device="cpu")
        monkeypatch.setattr(teacher, "marking", None)
        assert teacher.score([], HIDDEN, 1.0) == []
        assert len(teacher.score(ROWS, frozenset(), 1.0)) == 3


def test_the_head_is_where_the_student_learns() -> None:
    """On the meta device, which holds shapes and no numbers, in the place of a second card."""
    teacher = FrozenTeacher("teacher", tiny_backbone("gpt2"), learns_on="meta")
    assert teacher.head().weight_VD.device.type == "meta"
    assert teacher.backbone.head().weight_VD.device.type == "cpu"
    here = FrozenTeacher("teacher", tiny_backbone("gpt2"), learns_on="cpu")
    assert here.head().weight_VD.data_ptr() == here.backbone.head().weight_VD.data_ptr()


class TestEnsemble:
    def test_the_mixture_of_probabilities_by_hand(self) -> None:
        """0.25 x 0.9 + 0.75 x 0.5 = 0.6, whose logarithm is -0.51083."""
        members = {f"p{p}": (CountingTeacher(f"p{p}", certainty=p), w) for p, w in ((0.9, 0.25), (0.5, 0.75))}
        [marks] = EnsembleTeacher("both", members).score([rollout_of([3], [4, 5])], SAMPLED, 1.0)
        assert marks.teacher == "both"
        torch.testing.assert_close(marks.sampled_logprobs, torch.full((2,), -0.51083), atol=1e-5, rtol=0)

    def test_one_alone_and_twice_the_same(self) -> None:
        teacher = FrozenTeacher("teacher", tiny_backbone())
        expected = torch.cat(sampled(teacher, ROWS))
        for members in ({"a": (teacher, 1.0)}, {"a": (teacher, 0.3), "b": (teacher, 0.7)}):
            marks = EnsembleTeacher("ensemble", members).score(ROWS, SAMPLED, 1.0)
            found = torch.cat([mark.sampled_logprobs for mark in marks if mark.sampled_logprobs is not None])
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)

    @pytest.mark.parametrize("weights", [(), (0.5, 0.4), (1.5, -0.5), (1.0, 0.0)])
    def test_weights_that_are_no_mixture(self, weights: tuple[float, ...]) -> None:
        members = {str(place): (CountingTeacher(), weight) for place, weight in enumerate(weights)}
        with pytest.raises(PairError, match="expected numbers above 0 that sum to 1"):
            EnsembleTeacher("ensemble", members)

    def test_it_gives_no_hidden_states(self) -> None:
        teacher = EnsembleTeacher("both", {"a": (CountingTeacher(), 1.0)})
        with pytest.raises(PairError, match="gives sampled_logprobs, and a term needs hidden_states"):
            teacher.score(ROWS, HIDDEN, 1.0)
        assert teacher.head() is None

    def test_its_members_follow_the_student(self, tmp_path: Path) -> None:
        """A wrapper names its parts, and what they remember is kept in folders of their own."""
        table = TableBackbone(torch.zeros(3, 3))
        student = Student(table)
        average = EmaTeacher("average", student, rate=0.5)
        teacher = EnsembleTeacher("both", {"ema": (average, 0.5), "counting": (CountingTeacher(), 0.5)})
        teacher.begin(student)
        with torch.no_grad():
            table.weight_VS.fill_(2.0)
        teacher.follow(student, 1, round_over=True)
        assert average.backbone.get_parameter("weight_VS").equal(torch.ones(3, 3))
        teacher.save(tmp_path)
        assert (tmp_path / "ema" / "average.safetensors").exists()
        teacher.begin(student)
        assert average.backbone.get_parameter("weight_VS").equal(torch.full((3, 3), 2.0))
        teacher.load(tmp_path, student)
        assert average.backbone.get_parameter("weight_VS").equal(torch.ones(3, 3))
