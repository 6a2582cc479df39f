"""Teachers made of the student: what they mark with, when that changes, and that the student is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from etude.axes.names import Gives
from etude.core.linear import OutputHead
from etude.core.records import Rollout
from etude.errors import CheckpointError, ModelError, PairError
from etude.models.backbone import load_backbone
from etude.models.lora import LoraSettings
from etude.models.own_teachers import BaseTeacher, EmaTeacher, LiveTeacher
from etude.models.roles import AbstractTeacher
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher, InProcessTeacher
from etude.testing import counting_logits, rollout_of, tiny_backbone, tiny_folder

ROWS = [rollout_of([7, 11, 2], [30, 9, 2]), rollout_of([5], [6], row=1)]
TABLE_ROWS = [rollout_of([3], [4, 5, 6])]
LORA = LoraSettings(rank=2, alpha=4.0)  # a scale of 2


def sampled(teacher: AbstractTeacher, rows: list[Rollout] = ROWS) -> Tensor:
    marks = teacher.score(rows, frozenset({Gives.SAMPLED_LOGPROBS}), 1.0)
    return torch.cat([mark.sampled_logprobs for mark in marks if mark.sampled_logprobs is not None])


def moved(student: Student, seed: int = 1) -> Student:
    """Every trained weight somewhere else."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in student.trainable_parameters().values():
            weight.add_(0.3 * torch.randn(weight.shape, generator=draws))
    return student


@pytest.fixture
def adapted(tmp_path: Path) -> Student:
    return Student(load_backbone(tiny_folder(tmp_path / "model"), lora=LORA))


class TestBase:
    def test_it_is_the_model_underneath_whatever_the_adapters_do(self, adapted: Student, tmp_path: Path) -> None:
        teacher = BaseTeacher("base", adapted)
        before = sampled(teacher)
        assert before.equal(sampled(FrozenTeacher("plain", load_backbone(str(tmp_path / "model")))))
        assert (sampled(LiveTeacher("live", moved(adapted))) - before).abs().max() > 0.01  # they do something
        assert sampled(teacher).equal(before)

    def test_adapters_learn_on_as_before(self, adapted: Student) -> None:
        names = list(adapted.trainable_parameters())
        weights = list(adapted.backbone.parameters())
        frozen_by_hand = next(weight for weight in weights if weight.requires_grad)
        frozen_by_hand.requires_grad_(False)
        own = torch.cat(moved(adapted).logprobs(ROWS, 1.0))
        sampled(BaseTeacher("base", adapted))
        assert torch.cat(adapted.logprobs(ROWS, 1.0)).equal(own)
        assert list(adapted.trainable_parameters()) == names[1:]

    @pytest.mark.parametrize("kind", [BaseTeacher, LiveTeacher])
    def test_after_an_exception_the_student_is_as_it_was(
        self, adapted: Student, kind: Callable[[str, Student], InProcessTeacher], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        teacher = kind("teacher", adapted)
        own = torch.cat(moved(adapted).logprobs(ROWS, 1.0))
        learning = list(adapted.trainable_parameters())
        adapted.backbone.train()
        with monkeypatch.context() as patched:
            patched.setattr(OutputHead, "logits", None)
            with pytest.raises(TypeError):
                sampled(teacher)
        assert all(part.training for part in adapted.backbone.modules())
        assert list(adapted.trainable_parameters()) == learning
        assert torch.cat(adapted.logprobs(ROWS, 1.0)).equal(own)

    @pytest.mark.parametrize("name", ["embed_tokens", "lm_head", "norm", "q_proj"])
    def test_weights_of_its_own_that_are_trained_are_refused(self, adapted: Student, name: str) -> None:
        weight = next(w for key, w in adapted.backbone.named_parameters() if name in key and ".lora_" not in key)
        weight.requires_grad_(True)
        with pytest.raises(ModelError, match=rf"1 of its own weights are trained \(.*{name}.* first\); train adapters"):
            BaseTeacher("base", adapted)

    def test_a_bias_too_and_a_student_without_adapters(self, tmp_path: Path) -> None:
        student = Student(load_backbone(tiny_folder(tmp_path, "gpt2"), lora=LORA))
        next(w for key, w in student.backbone.named_parameters() if key.endswith(".bias")).requires_grad_(True)
        with pytest.raises(ModelError, match="of its own weights are trained"):
            BaseTeacher("base", student)
        with pytest.raises(ModelError, match="of its own weights are trained"):
            BaseTeacher("base", Student(tiny_backbone()))

    def test_there_is_nothing_to_switch_off_in_a_table(self) -> None:
        with pytest.raises(ModelError, match="TableBackbone has no adapters"):
            TableBackbone(counting_logits()).without_adapters()


class TestLive:
    @pytest.mark.parametrize("adapters", [True, False])
    def test_it_stays_what_it_was_until_the_round_is_over(self, adapted: Student, adapters: bool) -> None:
        student = adapted if adapters else Student(tiny_backbone())
        teacher = LiveTeacher("live", student)
        first, head = sampled(teacher), teacher.head()
        assert first.equal(torch.cat(student.logprobs(ROWS, 1.0)))
        moved(student)
        teacher.follow(student, 1, round_over=False)
        assert sampled(teacher).equal(first)
        moved(student)
        teacher.follow(student, 2, round_over=True)
        assert sampled(teacher).equal(torch.cat(student.logprobs(ROWS, 1.0)))
        assert not sampled(teacher).equal(first)
        # The learner holds the head that it was given once.
        now = teacher.head()
        assert head.weight_VD.data_ptr() == now.weight_VD.data_ptr()
        assert not head.weight_VD.requires_grad
        assert adapters or head.weight_VD.equal(student.backbone.head().weight_VD)
        assert adapters or head.weight_VD.data_ptr() != student.backbone.head().weight_VD.data_ptr()

    def test_it_begins_with_the_student_a_stage_begins_with(self, adapted: Student) -> None:
        teacher = LiveTeacher("live", adapted)
        moved(adapted)
        teacher.begin(adapted)
        assert sampled(teacher).equal(torch.cat(adapted.logprobs(ROWS, 1.0)))

    def test_saved_inside_a_round_it_comes_back(self, adapted: Student, tmp_path: Path) -> None:
        teacher = LiveTeacher("live", adapted)
        teacher.save(tmp_path)
        assert list(tmp_path.glob("*.safetensors")) == []  # between rounds there is nothing to remember
        first = sampled(teacher)
        moved(adapted)
        teacher.follow(adapted, 1, round_over=False)
        teacher.save(tmp_path)
        other = LiveTeacher("live", adapted)
        assert not sampled(other).equal(first)
        other.load(tmp_path, adapted)
        assert sampled(other).equal(first)
        (tmp_path / "again").mkdir()
        other.save(tmp_path / "again")
        assert (tmp_path / "again" / "marking.safetensors").exists()


class TestEma:
    def test_the_average_by_hand(self) -> None:
        """From 4, towards 8, 0 and 2, a quarter of the way each time: 5, 3.75, 3.3125."""
        table = TableBackbone(torch.full((3, 3), 4.0))
        student = Student(table)
        teacher = EmaTeacher("average", student, rate=0.25)
        for step, (value, expected) in enumerate([(8.0, 5.0), (0.0, 3.75), (2.0, 3.3125)], start=1):
            with torch.no_grad():
                table.weight_VS.fill_(value)
            teacher.follow(student, step, round_over=True)
            assert teacher.backbone.get_parameter("weight_VS").equal(torch.full((3, 3), expected))

    def test_every_so_many_steps(self) -> None:
        table = TableBackbone(torch.zeros(2, 2))
        student = Student(table)
        teacher = EmaTeacher("average", student, rate=0.5, every=2)
        found: list[float] = []
        for step in range(1, 5):
            with torch.no_grad():
                table.weight_VS.fill_(float(step))
            teacher.follow(student, step, round_over=True)
            found.append(teacher.backbone.get_parameter("weight_VS")[0, 0].item())
        assert found == [0.0, 1.0, 1.0, 2.5]  # half of 2, then half of the way from 1 to 4

    def test_marks_and_head_change_with_the_round_and_the_average_with_each_step(self) -> None:
        table = TableBackbone(counting_logits())
        student = Student(table)
        teacher = EmaTeacher("average", student, rate=0.5)
        first, head = sampled(teacher, TABLE_ROWS), teacher.head()
        with torch.no_grad():
            table.weight_VS.zero_()
        teacher.follow(student, 1, round_over=False)
        assert sampled(teacher, TABLE_ROWS).equal(first)
        teacher.follow(student, 2, round_over=True)
        expected = FrozenTeacher("quarter", TableBackbone(counting_logits() / 4))  # halved twice
        torch.testing.assert_close(sampled(teacher, TABLE_ROWS), sampled(expected, TABLE_ROWS), atol=1e-6, rtol=0)
        torch.testing.assert_close(head.weight_VD, counting_logits().T / 4, atol=1e-6, rtol=0)

    def test_of_adapters_it_averages_what_they_do(self, adapted: Student) -> None:
        """W + 2 B A at each step; the product of averaged factors is another thing."""
        layer = next(key for key in adapted.trainable_parameters() if "q_proj.lora_A" in key).removesuffix(
            "lora_A.default.weight"
        )
        weights = dict(adapted.backbone.named_parameters())
        own_WW, a_RW, b_WR = (
            weights[layer + key] for key in ("base_layer.weight", *(f"lora_{factor}.default.weight" for factor in "AB"))
        )
        average = own_WW + 2.0 * b_WR @ a_RW
        average_a, average_b = a_RW.clone(), b_WR.clone()
        teacher = EmaTeacher("average", adapted, rate=0.25)
        for step in (1, 2, 3):
            moved(adapted, seed=step)
            teacher.follow(adapted, step, round_over=True)
            average = 0.75 * average + 0.25 * (own_WW + 2.0 * b_WR @ a_RW)
            average_a, average_b = 0.75 * average_a + 0.25 * a_RW, 0.75 * average_b + 0.25 * b_WR
        [found] = [
            w for key, w in teacher.backbone.named_parameters() if key.endswith("layers.0.self_attn.q_proj.weight")
        ]
        torch.testing.assert_close(found, average.detach(), atol=1e-6, rtol=0)
        assert (found - (own_WW + 2.0 * average_b @ average_a)).abs().max() > 1e-2

    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    def test_at_first_it_is_the_student(self, tmp_path: Path, kind: str) -> None:
        folder = tiny_folder(tmp_path / "tied", kind, tied=True)  # pyright: ignore[reportArgumentType]
        for student in (Student(load_backbone(folder)), moved(Student(load_backbone(folder, lora=LORA)))):
            teacher = EmaTeacher("average", student, rate=0.05)
            torch.testing.assert_close(sampled(teacher), torch.cat(student.logprobs(ROWS, 1.0)), atol=1e-5, rtol=0)
            moved(student)
            teacher.begin(student)
            torch.testing.assert_close(sampled(teacher), torch.cat(student.logprobs(ROWS, 1.0)), atol=1e-5, rtol=0)

    def test_in_bfloat16_it_moves_where_its_marks_cannot(self) -> None:
        """From 1, 0.001 of the way to 2: bfloat16 knows nothing between 1 and 1.0078."""
        table = TableBackbone(torch.ones(2, 2))
        student = Student(table)
        teacher = EmaTeacher("average", student, rate=0.001, dtype="bfloat16")
        with torch.no_grad():
            table.weight_VS.fill_(2.0)
        found: list[float] = []
        for step in range(1, 11):
            teacher.follow(student, step, round_over=True)
            found.append(teacher.backbone.get_parameter("weight_VS")[0, 0].item())
        assert found[0] == 1.0
        assert found[-1] == pytest.approx(2.0 - 0.999**10, abs=0.004)
        assert found[-1] > 1.0

    def test_saved_inside_a_round_it_comes_back(self, tmp_path: Path) -> None:
        student = Student(tiny_backbone())
        teacher = EmaTeacher("average", student, rate=0.3)
        teacher.follow(moved(student, 1), 1, round_over=True)
        teacher.follow(moved(student, 2), 2, round_over=False)
        teacher.save(tmp_path)
        other = EmaTeacher("average", student, rate=0.3)
        other.load(tmp_path, student)
        assert sampled(other).equal(sampled(teacher))
        for average in (teacher, other):
            average.follow(student, 3, round_over=True)
        assert sampled(other).equal(sampled(teacher))
        (tmp_path / "between").mkdir()
        teacher.save(tmp_path / "between")
        assert [path.name for path in (tmp_path / "between").iterdir()] == ["average.safetensors"]

    def test_a_checkpoint_without_an_average_is_refused(self, tmp_path: Path) -> None:
        student = Student(TableBackbone(counting_logits()))
        with pytest.raises(CheckpointError, match="step-000003 holds no average for the teacher 'average'"):
            EmaTeacher("average", student, rate=0.3).load(tmp_path / "step-000003" / "teachers" / "average", student)

    @pytest.mark.parametrize(("rate", "every"), [(0.0, 1), (1.5, 1), (0.5, 0)])
    def test_what_averages_nothing_is_refused(self, rate: float, every: int) -> None:
        with pytest.raises(PairError, match="expected a rate above 0 and at most 1, and 1 step or more"):
            EmaTeacher("average", Student(TableBackbone(counting_logits())), rate=rate, every=every)
