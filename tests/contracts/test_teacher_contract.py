"""What every teacher promises, whoever judges: a class of one's own passes the same tests by joining `TEACHERS`."""

from collections.abc import Callable, Sequence

import pytest
import torch

from etude.axes.names import Gives
from etude.core.linear import OutputHead
from etude.core.logprobs import next_token_logprobs
from etude.core.records import Rollout, Scores
from etude.errors import PairError
from etude.models.backbone import TransformersBackbone
from etude.models.lora import LoraSettings, add_adapters
from etude.models.own_teachers import BaseTeacher, EmaTeacher, LiveTeacher
from etude.models.roles import AbstractTeacher
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.models.teachers import EnsembleTeacher, FrozenTeacher, OffloadedTeacher
from etude.testing import (
    CountingTeacher,
    check_teacher,
    counting_logits,
    rollout_of,
    tiny_backbone,
    tiny_model,
    word_tokenizer,
)

FIELDS = {Gives.SAMPLED_LOGPROBS: "sampled_logprobs", Gives.HIDDEN_STATES: "hidden", Gives.KEPT_MASS: "kept_mass"}
ROWS = [  # ids below 10, so that every teacher knows them
    rollout_of([3], [4, 5, 6]),
    rollout_of([1, 2, 3], [4], row=1),
    rollout_of([7, 2, 2, 9, 5, 6], [8, 0, 2, 2], row=2),
]


class OwnTeacher(AbstractTeacher):
    """As a user would write one: every id is equally likely, and more than that it does not say."""

    name = "fair"
    gives = frozenset({Gives.SAMPLED_LOGPROBS})

    def score(self, rollouts: Sequence[Rollout], needs: frozenset[Gives], temperature: float) -> list[Scores]:
        if not needs <= self.gives:
            raise PairError(f"the teacher '{self.name}' gives sampled_logprobs only")
        even = torch.tensor(10.0).log().neg()
        return [
            Scores(self.name, sampled_logprobs=even.repeat(row.num_completion_tokens) if needs else None)
            for row in rollouts
        ]

    def head(self) -> OutputHead | None:
        return None


def adapted() -> Student:
    """A student whose adapters have moved."""
    model = add_adapters(tiny_model(), LoraSettings(rank=2, alpha=4.0))
    student = Student(TransformersBackbone(model, word_tokenizer()).eval())
    with torch.no_grad():
        for weight in student.trainable_parameters().values():
            weight.add_(0.3 * torch.randn_like(weight))
    return student


TEACHERS: dict[str, Callable[[], AbstractTeacher]] = {
    "frozen, rotary positions": lambda: FrozenTeacher("teacher", tiny_backbone("llama")),
    "frozen, learned positions": lambda: FrozenTeacher("teacher", tiny_backbone("gpt2")),
    "frozen, a row at a time": lambda: FrozenTeacher("teacher", tiny_backbone("llama"), tokens_per_batch=1),
    "frozen, low precision": lambda: FrozenTeacher("teacher", tiny_backbone("llama").copy_as("bfloat16")),
    "frozen, a table": lambda: FrozenTeacher("teacher", TableBackbone(counting_logits())),
    "offloaded": lambda: OffloadedTeacher("teacher", tiny_backbone("gpt2", tied=True), device="cpu"),
    "the student without its adapters": lambda: BaseTeacher("teacher", adapted()),
    "the student as the round began": lambda: LiveTeacher("teacher", Student(tiny_backbone())),
    "the adapted student as the round began": lambda: LiveTeacher("teacher", adapted()),
    "an average of the student": lambda: EmaTeacher("teacher", Student(tiny_backbone("gpt2", tied=True)), rate=0.1),
    "an average of the adapted student": lambda: EmaTeacher("teacher", adapted(), rate=0.1),
    "an ensemble": lambda: EnsembleTeacher(
        "teacher", {"one": (FrozenTeacher("one", tiny_backbone()), 0.3), "counting": (CountingTeacher(), 0.7)}
    ),
    "scripted": CountingTeacher,
    "one's own": OwnTeacher,
}


@pytest.fixture(params=list(TEACHERS))
def teacher(request: pytest.FixtureRequest) -> AbstractTeacher:
    return TEACHERS[request.param]()


def tolerance(teacher: AbstractTeacher) -> float:
    """Rounding moves a low-precision state by the company it is in, too."""
    weights = teacher.backbone.parameters() if isinstance(teacher, FrozenTeacher) else iter(())
    return 0.2 if any(weight.dtype == torch.bfloat16 for weight in weights) else 1e-5


def test_the_public_check_says_so_too(teacher: AbstractTeacher) -> None:
    check_teacher(teacher, ROWS, tolerance=tolerance(teacher))


def test_gives_marks_a_term_can_use(teacher: AbstractTeacher) -> None:
    assert teacher.gives
    assert teacher.gives <= set(FIELDS)


def test_exactly_the_needed_fields(teacher: AbstractTeacher) -> None:
    subsets = [frozenset(), *({need} for need in teacher.gives), teacher.gives]
    for needs in subsets:
        for marks in teacher.score(ROWS, frozenset(needs), 1.0):
            given = {need for need, field in FIELDS.items() if getattr(marks, field) is not None}
            assert given == needs


def test_what_it_does_not_give_is_refused(teacher: AbstractTeacher) -> None:
    """Not filled with zeros, and not left out."""
    for need in frozenset(Gives) - teacher.gives:
        with pytest.raises(PairError, match="give"):
            teacher.score(ROWS, teacher.gives | {need}, 1.0)


def test_one_mark_a_completion_token_in_the_rows_order(teacher: AbstractTeacher) -> None:
    for rows in (ROWS, ROWS[::-1], [ROWS[1]] * 3, []):
        scores = teacher.score(rows, teacher.gives, 1.0)
        assert len(scores) == len(rows)
        for marks, row in zip(scores, rows, strict=True):
            assert marks.teacher == teacher.name
            marks.check(row)


def test_a_row_is_marked_the_same_in_any_company(teacher: AbstractTeacher) -> None:
    together = teacher.score(ROWS, teacher.gives, 1.0)
    for row, marks in zip(ROWS, together, strict=True):
        [alone] = teacher.score([row], teacher.gives, 1.0)
        for need in teacher.gives:
            found, expected = getattr(marks, FIELDS[need]), getattr(alone, FIELDS[need])
            torch.testing.assert_close(found, expected, atol=tolerance(teacher), rtol=tolerance(teacher))


def test_marks_lie_on_the_cpu_in_their_types_without_gradient(teacher: AbstractTeacher) -> None:
    for marks in teacher.score(ROWS, teacher.gives, 1.0):
        for field in FIELDS.values():
            tensor = getattr(marks, field)
            if tensor is not None:
                assert tensor.device.type == "cpu"
                assert not tensor.requires_grad
                assert not tensor.is_inference()
                assert tensor.isfinite().all()
        if marks.sampled_logprobs is not None:
            assert marks.sampled_logprobs.dtype == torch.float32
            assert (marks.sampled_logprobs <= 0).all()


def test_states_and_head_agree_with_the_sampled_marks(teacher: AbstractTeacher) -> None:
    head = teacher.head()
    assert (head is None) == (Gives.HIDDEN_STATES not in teacher.gives)
    if head is None:
        return
    for temperature in (1.0, 2.0):
        for row, marks in zip(ROWS, teacher.score(ROWS, teacher.gives, temperature), strict=True):
            assert marks.hidden is not None
            logprobs = next_token_logprobs(head.logits(marks.hidden), temperature)
            picked = logprobs.gather(-1, row.completion_ids[:, None]).squeeze(-1)
            torch.testing.assert_close(marks.sampled_logprobs, picked, atol=1e-5, rtol=1e-5)


def test_the_callers_random_state_and_earlier_marks_are_left_alone(teacher: AbstractTeacher) -> None:
    before = torch.get_rng_state()
    [first, *_] = teacher.score(ROWS, teacher.gives, 1.0)
    kept = {field: tensor.clone() for field in FIELDS.values() if (tensor := getattr(first, field)) is not None}
    teacher.score(ROWS[::-1], teacher.gives, 2.0)
    assert torch.get_rng_state().equal(before)
    assert all(getattr(first, field).equal(tensor) for field, tensor in kept.items())
