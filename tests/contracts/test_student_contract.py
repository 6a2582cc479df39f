"""What every student promises, whoever learns: a class of one's own passes the same tests by joining `STUDENTS`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from etude.core.collate import pad_rows
from etude.core.records import Rollout
from etude.models.backbone import load_backbone
from etude.models.lora import LoraSettings
from etude.models.roles import AbstractStudent
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.testing import counting_logits, rollout_of, tiny_folder

ROWS = [  # ids below 10, so that every student knows them
    rollout_of([3], [4, 5, 6]),
    rollout_of([1, 2, 3], [4], row=1),
    rollout_of([7, 2, 2, 9, 5, 6], [8, 0, 2, 2], row=2),
]


class OwnStudent(AbstractStudent):
    """As a user would write one: a table of which some states are not trained, marked without batches."""

    def __init__(self) -> None:
        self.backbone = TableBackbone(counting_logits())
        self.backbone.weight_VS.register_hook(lambda gradient: gradient * (torch.arange(10) != 9))

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.backbone.named_parameters())

    def logprobs(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        return [logprobs_C for logprobs_C, _ in self.logprobs_and_entropies(rollouts, temperature)]

    @torch.no_grad()
    def logprobs_and_entropies(self, rollouts: Sequence[Rollout], temperature: float) -> list[tuple[Tensor, Tensor]]:
        assert isinstance(self.backbone, TableBackbone)
        marks: list[tuple[Tensor, Tensor]] = []
        for row in rollouts:
            before = row.token_ids[row.num_prompt_tokens - 1 : -1]
            logprobs = (self.backbone.next_logits(before) / temperature).log_softmax(-1)
            drawn_C = logprobs.gather(-1, row.completion_ids[:, None]).squeeze(-1)
            marks.append((drawn_C, -(logprobs.exp() * logprobs).sum(-1)))
        return marks

    @torch.no_grad()
    def logprobs_and_kept_masses(self, rollouts: Sequence[Rollout], temperature: float) -> list[tuple[Tensor, Tensor]]:
        assert isinstance(self.backbone, TableBackbone)
        marks: list[tuple[Tensor, Tensor]] = []
        for row, drawn_C in zip(rollouts, self.logprobs(rollouts, temperature), strict=True):
            before = row.token_ids[row.num_prompt_tokens - 1 : -1]
            probabilities = (self.backbone.next_logits(before) / temperature).softmax(-1)
            assert row.kept_ids is not None
            assert row.kept_lengths is not None
            sets = row.kept_ids.long().split(row.kept_lengths.tolist())
            masses = [of_token[ids].sum() for of_token, ids in zip(probabilities, sets, strict=True)]
            marks.append((drawn_C, torch.stack(masses).log()))
        return marks

    def save(self, folder: Path) -> None:
        self.backbone.save(folder)

    def load(self, folder: Path) -> None:
        self.backbone.restore(folder)


STUDENTS: dict[str, Callable[[Path], AbstractStudent]] = {
    "rotary positions": lambda folder: Student(load_backbone(tiny_folder(folder, "llama"))),
    "learned positions, tied": lambda folder: Student(load_backbone(tiny_folder(folder, "gpt2", tied=True))),
    "a row at a time": lambda folder: Student(load_backbone(tiny_folder(folder)), tokens_per_batch=1),
    "adapters": lambda folder: Student(load_backbone(tiny_folder(folder), lora=LoraSettings(rank=2, alpha=4.0))),
    "shortened": lambda folder: Student(load_backbone(tiny_folder(folder, layers=3), keep_layers=[0, 2])),
    "dropout": lambda folder: Student(load_backbone(tiny_folder(folder, "gpt2"), dropout=True)),
    "recomputed activations": lambda folder: Student(load_backbone(tiny_folder(folder), activation_checkpointing=True)),
    "a table": lambda _: Student(TableBackbone(counting_logits())),
    "one's own": lambda _: OwnStudent(),
}


@pytest.fixture(params=list(STUDENTS))
def student(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractStudent:
    return STUDENTS[request.param](tmp_path / "model")


def take_a_step(student: AbstractStudent, rate: float = 0.1) -> None:
    """Up the log-probability of the first row's last token."""
    backbone = student.backbone.train()
    hidden_BTD = backbone.hidden_states(*pad_rows([ROWS[0].token_ids]))
    backbone.head().logits(hidden_BTD[0, -2]).log_softmax(-1)[ROWS[0].completion_ids[-1]].backward()
    backbone.eval()
    with torch.no_grad():
        for weight in student.trainable_parameters().values():
            if weight.grad is not None:
                weight.add_(weight.grad, alpha=rate)
                weight.grad = None


def test_the_weights_it_trains_require_a_gradient_and_are_its_own(student: AbstractStudent) -> None:
    weights = student.trainable_parameters()
    assert weights
    assert all(weight.requires_grad and weight.is_leaf for weight in weights.values())
    assert {id(weight) for weight in weights.values()} <= {id(weight) for weight in student.backbone.parameters()}
    assert len({id(weight) for weight in weights.values()}) == len(weights)


def test_names_and_order_are_fixed(student: AbstractStudent) -> None:
    before = list(student.trainable_parameters().items())
    take_a_step(student)
    after = list(student.trainable_parameters().items())
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(was is now for (_, was), (_, now) in zip(before, after, strict=True))


def test_a_gradient_step_does_what_it_should(student: AbstractStudent) -> None:
    [before, *_] = student.logprobs(ROWS, 1.0)
    take_a_step(student, rate=0.01)
    [after, *_] = student.logprobs(ROWS, 1.0)
    assert after[-1] > before[-1]


def test_one_mark_a_completion_token_in_the_rows_order(student: AbstractStudent) -> None:
    for rows in (ROWS, ROWS[::-1], []):
        marks = student.logprobs(rows, 1.0)
        assert [len(mark) for mark in marks] == [row.num_completion_tokens for row in rows]
    for mark in student.logprobs(ROWS, 1.0):
        assert (mark.dtype, mark.device.type) == (torch.float32, "cpu")
        assert not mark.requires_grad
        assert not mark.is_inference()
        assert (mark <= 0).all()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_entropies_beside_the_same_marks(student: AbstractStudent, temperature: float) -> None:
    for rows in (ROWS, ROWS[::-1], []):
        alone = student.logprobs(rows, temperature)
        both = student.logprobs_and_entropies(rows, temperature)
        assert all(mark.equal(other) for mark, (other, _) in zip(alone, both, strict=True))
        for row, (_, entropies) in zip(rows, both, strict=True):
            assert (entropies.dtype, entropies.device.type) == (torch.float32, "cpu")
            assert entropies.shape == (row.num_completion_tokens,)
            assert not entropies.requires_grad
            with torch.no_grad():  # of every state but the last, read alone
                hidden_BTD = student.backbone.hidden_states(*pad_rows([row.token_ids]))
                states = hidden_BTD[0, row.num_prompt_tokens - 1 : -1]
                probabilities = (student.backbone.head().logits(states) / temperature).softmax(-1)
            by_hand = -(probabilities * probabilities.log()).sum(-1)
            torch.testing.assert_close(entropies, by_hand.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_masses_of_kept_ids_beside_the_same_marks(student: AbstractStudent, temperature: float) -> None:
    rows = [with_kept(row) for row in ROWS]
    for some in (rows, rows[::-1], rows[1:2], []):
        both = student.logprobs_and_kept_masses(some, temperature)
        for drawn, (other, _) in zip(student.logprobs(some, temperature), both, strict=True):
            assert drawn.equal(other)
        for row, (_, masses) in zip(some, both, strict=True):
            assert (masses.dtype, masses.device.type) == (torch.float32, "cpu")
            assert not masses.requires_grad
            with torch.no_grad():
                hidden_BTD = student.backbone.hidden_states(*pad_rows([row.token_ids]))
                states = hidden_BTD[0, row.num_prompt_tokens - 1 : -1]
                probabilities = (student.backbone.head().logits(states) / temperature).softmax(-1)
            by_hand = [probabilities[t, sorted({int(y), 0, t})].sum() for t, y in enumerate(row.completion_ids)]
            torch.testing.assert_close(masses.exp(), torch.stack(by_hand).float(), atol=1e-5, rtol=1e-5)


def with_kept(row: Rollout) -> Rollout:
    """The drawn id, id 0 and the id that is the token's own place: one to three of them."""
    sets = [sorted({int(y), 0, t}) for t, y in enumerate(row.completion_ids)]
    ids, lengths = [v for kept in sets for v in kept], [len(kept) for kept in sets]
    return replace(
        row,
        kept_ids=torch.tensor(ids, dtype=torch.int32),
        kept_lengths=torch.tensor(lengths, dtype=torch.int32),
    )


def test_a_row_is_marked_the_same_in_any_company(student: AbstractStudent) -> None:
    together = student.logprobs(ROWS, 1.0)
    for row, mark in zip(ROWS, together, strict=True):
        torch.testing.assert_close(student.logprobs([row], 1.0)[0], mark, atol=1e-5, rtol=0)


def test_two_readings_are_the_same_bits_in_either_mode(student: AbstractStudent) -> None:
    readings: list[list[Tensor]] = []
    for training in (False, True, True):
        student.backbone.train(training)
        readings.append(student.logprobs(ROWS, 1.0))
        assert all(part.training == training for part in student.backbone.modules())
    for first, second, third in zip(*readings, strict=True):
        assert first.equal(second)
        assert first.equal(third)


def test_its_saved_weights_come_back_bit_for_bit(student: AbstractStudent, tmp_path: Path) -> None:
    take_a_step(student)
    before = {name: weight.detach().clone() for name, weight in student.trainable_parameters().items()}
    marks = student.logprobs(ROWS, 1.0)
    student.save(tmp_path / "saved")
    take_a_step(student)
    student.load(tmp_path / "saved")
    after = student.trainable_parameters()
    assert all(after[name].equal(weight) for name, weight in before.items())
    assert all(mark.equal(earlier) for mark, earlier in zip(student.logprobs(ROWS, 1.0), marks, strict=True))


def test_a_copy_to_write_with_has_the_present_weights(student: AbstractStudent) -> None:
    copy = student.backbone.copy_as("float32")
    take_a_step(student)
    copy.load_weights_from(student.backbone)
    prompt = [ROWS[2].token_ids]
    with torch.no_grad():
        torch.testing.assert_close(
            copy.decoding(prompt).next_logits(),
            student.backbone.decoding(prompt).next_logits(),
            atol=1e-5,
            rtol=1e-5,
        )
    assert not any(weight.requires_grad for weight in copy.parameters())
