from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from etude.axes.legality import Sampling
from etude.axes.names import Divergence, Source
from etude.core.objective import Objective, Term
from etude.core.records import Scored
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.runtime.world import World
from etude.testing import ScriptedSampler, counting_logits, rollout_of
from etude.training.evaluation import Answer
from etude.training.learner import Learner
from etude.training.stages import Plan
from etude.training.state import Saver, State, read_state

GOLD = Objective(
    [Term("gold", teacher="label", divergence=Divergence.FORWARD_KL)],
    sampling=Sampling(rows=frozenset({Source.DATASET})),
)


@dataclass(frozen=True)
class Apart(World):
    """One of several processes that does not wait for the others."""

    def barrier(self) -> None:
        pass


def learner_of(certainty: float = 0.9) -> Learner:
    student = Student(TableBackbone(counting_logits(certainty=certainty)))
    return Learner(
        student,
        GOLD,
        torch.optim.AdamW(student.trainable_parameters().values(), lr=0.1),
        heads={},
        plan=Plan(steps=9),
        rate=lambda step: 1.0,
        world=World(),
        tokens_per_micro_batch=100,
        clip_norm=0.0,
        seed=0,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10),
    )


def rows_of(learner: Learner, first: int = 0) -> list[Scored]:
    rollouts = [rollout_of([3 + row], [row, 7], row=row, source=Source.DATASET) for row in range(first, first + 2)]
    return learner.prepare([Scored(rollout, {}) for rollout in rollouts], step=0)


def take_steps(learner: Learner, steps: range) -> None:
    for step in steps:
        next(iter(learner.learn(rows_of(learner), step, 2)))


def saver_of(folder: Path, world: World | None = None) -> Saver:
    return Saver(folder, keep=2, world=world or World(), info={"threads": 1})


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    learner, saver = learner_of(), saver_of(tmp_path)
    take_steps(learner, range(3))
    learner.skipped_in_a_row, learner.empty_in_a_row = 2, 1
    learner.scaler.update(2.0**7)
    saver.clock = lambda: 12.5
    pending = rows_of(learner, first=4)
    state = State(3, pending, before={"heldout/reverse_kl": 0.1}, after={"heldout/reverse_kl": 1 / 3})
    saver.save(state, learner.student, learner)

    other, again = learner_of(certainty=0.5), saver_of(tmp_path)
    checkpoint = again.store.newest()
    assert checkpoint is not None
    assert checkpoint.info == {"threads": 1}
    restored = again.restore(checkpoint, other.student, other)
    assert (restored.step, restored.before, restored.after, restored.seconds) == (3, state.before, state.after, 12.5)
    assert [row.rollout.prompt.row for row in restored.pending or []] == [4, 5]
    assert (other.skipped_in_a_row, other.empty_in_a_row, other.scaler.get_scale()) == (2, 1, 2.0**7)

    take_steps(learner, range(3, 5))
    take_steps(other, range(3, 5))
    ours, theirs = (made.student.backbone.get_parameter("weight_VS") for made in (learner, other))
    assert ours.equal(theirs)
    mine, its = (made.optimizer.state_dict()["state"][0] for made in (learner, other))
    assert mine.keys() == its.keys()
    assert all(its[name].equal(value) for name, value in mine.items())


def test_where_a_run_was_can_be_read_without_its_models(tmp_path: Path) -> None:
    learner, saver = learner_of(), saver_of(tmp_path)
    saver.clock = lambda: 2.0
    saver.save(State(5, rows_of(learner), {"a": 1.0}, {"b": 2.0}), learner.student, learner)
    checkpoint = saver.store.newest()
    assert checkpoint is not None
    assert read_state(checkpoint) == State(5, None, {"a": 1.0}, {"b": 2.0}, 2.0)


def test_between_two_rounds_there_are_no_rows(tmp_path: Path) -> None:
    learner, saver = learner_of(), saver_of(tmp_path)
    saver.save(State(1), learner.student, learner)
    checkpoint = saver.store.newest()
    assert checkpoint is not None
    assert sorted(path.name for path in checkpoint.path.iterdir()) == [
        "manifest.json",
        "optimizer.safetensors",
        "state.json",
        "student",
    ]
    assert saver.restore(checkpoint, learner.student, learner).pending is None


class Noting(ScriptedSampler):
    """Remembers the rows it was given, or nothing at all."""

    def __init__(self, rows: Sequence[int] | None) -> None:
        super().__init__(lambda prompt: [1])
        self.rows = rows

    def save(self, folder: Path) -> None:
        assert not list(folder.iterdir())
        if self.rows is not None:
            (folder / "inner").mkdir()
            (folder / "inner" / "rows.json").write_text(json.dumps(self.rows))

    def load(self, folders: Sequence[Path], mine: Callable[[int], bool]) -> None:
        saved = [json.loads((folder / "inner" / "rows.json").read_text()) for folder in folders]
        self.rows = [row for rows in saved for row in rows if mine(row)]


@pytest.mark.parametrize(("before", "now"), [(1, 1), (2, 2), (2, 1), (1, 2), (2, 3)])
def test_what_the_samplers_remember_is_dealt_out_by_rows(tmp_path: Path, before: int, now: int) -> None:
    learner, whole = learner_of(), list(range(7))
    for rank in reversed(range(before)):  # the main one last: it gathers
        saver = saver_of(tmp_path, Apart(rank, size=before, local_rank=rank))
        saver.save(State(1), learner.student, learner, Noting(whole[rank::before]))
    for rank in range(now):
        saver, sampler = saver_of(tmp_path, Apart(rank, size=now, local_rank=rank)), Noting([9])
        checkpoint = saver.store.newest()
        assert checkpoint is not None
        saver.restore(checkpoint, learner.student, learner, sampler)
        assert sorted(sampler.rows or []) == whole[rank::now]


def test_a_sampler_that_remembers_nothing_leaves_nothing(tmp_path: Path) -> None:
    learner, saver = learner_of(), saver_of(tmp_path)
    saver.save(State(1), learner.student, learner, Noting(None))
    checkpoint = saver.store.newest()
    assert checkpoint is not None
    assert not list(checkpoint.path.glob("sampler*"))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_each_rank_puts_down_its_own_rows_and_the_main_one_gathers_them(tmp_path: Path) -> None:
    learners = [learner_of(), learner_of()]
    savers = [saver_of(tmp_path, Apart(rank, size=2, local_rank=rank)) for rank in range(2)]
    states = [State(2, rows_of(learner, first=10 * rank)) for rank, learner in enumerate(learners)]
    savers[1].save(states[1], learners[1].student, learners[1])
    assert savers[1].store.newest() is None
    savers[0].save(states[0], learners[0].student, learners[0])
    for rank in range(2):
        checkpoint = savers[rank].store.newest()
        assert checkpoint is not None
        restored = savers[rank].restore(checkpoint, learners[rank].student, learners[rank])
        assert [row.rollout.prompt.row for row in restored.pending or []] == [10 * rank, 10 * rank + 1]


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (2, 3)])
def test_another_number_of_processes_deals_the_rows_out_anew(tmp_path: Path, before: int, now: int) -> None:
    learner, whole = learner_of(), rows_of(learner_of()) + rows_of(learner_of(), first=2)
    for rank in reversed(range(before)):  # the main one last: it gathers
        state = State(2, whole[rank::before])
        saver_of(tmp_path, Apart(rank, size=before, local_rank=rank)).save(state, learner.student, learner)
    for rank in range(now):
        saver = saver_of(tmp_path, Apart(rank, size=now, local_rank=rank))
        checkpoint = saver.store.newest()
        assert checkpoint is not None
        pending = saver.restore(checkpoint, learner.student, learner).pending or []
        expected = whole[rank::now]
        assert [row.rollout.prompt.row for row in pending] == [row.rollout.prompt.row for row in expected]
        for ours, theirs in zip(pending, expected, strict=True):
            assert ours.rollout.completion_ids.equal(theirs.rollout.completion_ids)


def test_what_a_killed_save_left_behind_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    learner, saver = learner_of(), saver_of(tmp_path)
    left_behind = tmp_path / "checkpoints" / ".round-of-rank-0"
    left_behind.mkdir(parents=True)
    (left_behind / "round.json").write_text("[")
    (left_behind / "another file").touch()
    saver.save(State(1, rows_of(learner)), learner.student, learner)
    checkpoint = saver.store.newest()
    assert checkpoint is not None
    assert {path.name for path in (checkpoint.path / "round-of-rank-0").iterdir()} == {
        "round.json",
        "round.safetensors",
    }


ANSWERS = [Answer(0, "2 + 2 =", "4", "stop", 1.0), Answer(1, "ß?", "é", "length", None)]


@pytest.mark.parametrize(
    ("world", "answers", "lines"),
    [(World, ANSWERS, 2), (World, [], None), (lambda: Apart(rank=1, size=2, local_rank=1), ANSWERS, None)],
    ids=["the main process", "nothing to keep", "another process"],
)
def test_answers_are_kept_one_a_line(
    tmp_path: Path, world: Callable[[], World], answers: list[Answer], lines: int | None
) -> None:
    saver_of(tmp_path, world()).keep_answers("after", 7, answers)
    file = tmp_path / "samples" / "after.jsonl"
    assert file.exists() == (lines is not None)
    if lines is not None:
        text = file.read_text(encoding="utf-8")
        assert "é" in text
        assert [json.loads(line) for line in text.splitlines()] == [
            {
                "step": 7,
                "row": 0,
                "prompt": "2 + 2 =",
                "completion": "4",
                "finish_reason": "stop",
                "correct": 1.0,
            },
            {"step": 7, "row": 1, "prompt": "ß?", "completion": "é", "finish_reason": "length", "correct": None},
        ]
