"""What a run remembers, and how it is put down and taken up again.

A checkpoint holds the student as a folder its own library loads, the optimiser, the loss scale, the counters, what
sampler and teachers remember, and, inside a round, the round's scored rows. No random state is kept: every random
number follows from the seed and the step.

`runtime.checkpoints` knows how a folder becomes whole; this file knows what goes into it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from etude.core.records import Scored
from etude.models.roles import AbstractSampler, AbstractStudent, AbstractTeacher
from etude.runtime.checkpoints import (
    Checkpoint,
    CheckpointStore,
    load_tensors,
    pack_optimizer,
    save_tensors,
    unpack_optimizer,
)
from etude.runtime.world import World
from etude.training.buffers import load_round, save_round
from etude.training.evaluation import Answer
from etude.training.learner import Learner

CHECKPOINTS_FOLDER, STUDENT_FOLDER, SAMPLES_FOLDER = "checkpoints", "student", "samples"
TEACHERS_FOLDER = "teachers"
STATE_FILE = "state.json"
_ROUND, _SAMPLER = "round-of-rank-", "sampler-of-rank-"  # each process's own part


@dataclass(slots=True)
class State:
    """Where a run is. Everything else follows from the step."""

    step: int = 0  # optimiser steps taken
    pending: list[Scored] | None = None  # prepared rows of an unfinished round, this rank's
    before: dict[str, float] = field(default_factory=dict)  # held-out metrics before the first step
    after: dict[str, float] = field(default_factory=dict)  # and after the latest evaluation
    seconds: float = 0.0  # spent so far, over all sittings


class Saver:
    """Checkpoints and sample answers of one run folder. Only the main process writes what all ranks share."""

    def __init__(self, folder: Path, *, keep: int, world: World, info: Mapping[str, Any]) -> None:
        self.folder = folder
        self.store = CheckpointStore(folder / CHECKPOINTS_FOLDER, keep=keep)
        self.world = world
        self.info = info
        self.clock: Callable[[], float] = lambda: 0.0  # seconds the run has taken so far, over all sittings

    def save(
        self,
        state: State,
        student: AbstractStudent,
        learner: Learner,
        sampler: AbstractSampler | None = None,
        teachers: Mapping[str, AbstractTeacher] | None = None,
    ) -> None:
        """Put everything down; returns when the checkpoint is whole on disk. None: nobody with a memory."""
        kinds: list[str] = []
        if state.pending is not None:
            save_round(self._empty_aside(_ROUND), state.pending)
            kinds.append(_ROUND)
        if sampler is not None:
            sampler.save(self._empty_aside(_SAMPLER))
            kinds.append(_SAMPLER)
        self.world.barrier()
        if self.world.is_main:
            self.store.save(
                state.step,
                lambda folder: self._write(folder, state, student, learner, kinds, teachers or {}),
                self.info,
                needed_bytes=_least_bytes(student, learner),
            )
        self.world.barrier()

    def _empty_aside(self, what: str) -> Path:
        """Where this process puts its own part, for the main one to gather."""
        aside = self.store.folder / f".{what}{self.world.rank}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def _write(
        self,
        folder: Path,
        state: State,
        student: AbstractStudent,
        learner: Learner,
        kinds: Sequence[str],
        teachers: Mapping[str, AbstractTeacher],
    ) -> None:
        student.save(folder / STUDENT_FOLDER)
        for name, teacher in teachers.items():
            (folder / TEACHERS_FOLDER / name).mkdir(parents=True)
            teacher.save(folder / TEACHERS_FOLDER / name)
        if not any(path.is_file() for path in (folder / TEACHERS_FOLDER).rglob("*")):  # as of most teachers
            shutil.rmtree(folder / TEACHERS_FOLDER, ignore_errors=True)
        tensors, settings = pack_optimizer(learner.optimizer, student.trainable_parameters())
        save_tensors(folder / "optimizer.safetensors", tensors)
        facts = {
            "optimizer": settings,
            "step": state.step,
            "processes": self.world.size,
            "before": state.before,
            "after": state.after,
            "seconds": self.clock(),
            "skipped_in_a_row": learner.skipped_in_a_row,
            "empty_in_a_row": learner.empty_in_a_row,
            "scaler": learner.scaler.state_dict(),
        }
        (folder / STATE_FILE).write_text(json.dumps(facts, indent=2), encoding="utf-8")
        for what in kinds:
            for rank in range(self.world.size):
                aside = self.store.folder / f".{what}{rank}"
                if any(path.is_file() for path in aside.rglob("*")):
                    shutil.move(aside, folder / f"{what}{rank}")
                else:  # most samplers remember nothing
                    shutil.rmtree(aside)

    def restore(
        self,
        checkpoint: Checkpoint,
        student: AbstractStudent,
        learner: Learner,
        sampler: AbstractSampler | None = None,
        teachers: Mapping[str, AbstractTeacher] | None = None,
    ) -> State:
        """Take everything up again, bit for bit where as many processes saved it as there are now."""
        student.load(checkpoint.path / STUDENT_FOLDER)
        for name, teacher in (teachers or {}).items():
            teacher.load(checkpoint.path / TEACHERS_FOLDER / name, student)
        facts = _facts(checkpoint)
        tensors = load_tensors(checkpoint.path / "optimizer.safetensors")
        unpack_optimizer(learner.optimizer, student.trainable_parameters(), tensors, facts["optimizer"])
        learner.skipped_in_a_row = facts["skipped_in_a_row"]
        learner.empty_in_a_row = facts["empty_in_a_row"]
        learner.scaler.load_state_dict(facts["scaler"])
        state = read_state(checkpoint)
        state.pending = self._pending(checkpoint, facts["processes"])
        if sampler is not None:
            folders = [checkpoint.path / f"{_SAMPLER}{rank}" for rank in range(facts["processes"])]
            sampler.load(folders, lambda row: row % self.world.size == self.world.rank)
        return state

    def _pending(self, checkpoint: Checkpoint, saved_by: int) -> list[Scored] | None:
        """This rank's rows of an unfinished round, dealt out anew where another number of processes saved them."""
        ranks = [self.world.rank] if saved_by == self.world.size else range(saved_by)
        rounds = [load_round(checkpoint.path / f"{_ROUND}{rank}") for rank in ranks]
        if saved_by == self.world.size or rounds[0] is None:
            return rounds[0]
        rows = sorted((row for round in rounds for row in round or []), key=lambda row: row.rollout.prompt.row)
        return [row for row in rows if row.rollout.prompt.row % self.world.size == self.world.rank]

    def keep_answers(self, name: str, step: int, answers: Sequence[Answer]) -> None:
        """Write `samples/<name>.jsonl`, one answer a line."""
        if self.world.is_main and answers:
            folder = self.folder / SAMPLES_FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps({"step": step, **asdict(answer)}, ensure_ascii=False) + "\n" for answer in answers]
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _least_bytes(student: AbstractStudent, learner: Learner) -> int:
    """What the trained weights and the optimiser's tensors take on disk; a checkpoint is never smaller."""
    kept = [value for values in learner.optimizer.state.values() for value in values.values()]
    tensors = [*student.trainable_parameters().values(), *(value for value in kept if isinstance(value, Tensor))]
    return sum(tensor.nbytes for tensor in tensors)


def read_state(checkpoint: Checkpoint) -> State:
    """Where the run was, without student, optimiser and pending rows."""
    facts = _facts(checkpoint)
    return State(facts["step"], before=facts["before"], after=facts["after"], seconds=facts["seconds"])


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    return json.loads((checkpoint.path / STATE_FILE).read_text(encoding="utf-8"))
