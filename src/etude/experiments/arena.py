"""The maze as a place where ways to train are compared: the same prompts, start, updates and rows for each of them.

An arena is one seed's world: which routes are trained on, what the teacher wrote there, and the judge of the others. It
trains through the ordinary Python door, `etude.train`, one recipe a way. The quickstart and its relatives call it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.axes.names import Source
from etude.config.load import load_recipe
from etude.core.records import Prompt
from etude.data.examples import Example, example_from_row
from etude.data.maze import MAX_MOVES, ROUTES, maze_task, read_route
from etude.data.maze_picture import Footprint, footprint
from etude.data.prompts import PromptSource
from etude.models.backbone import TransformersBackbone, load_backbone
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.models.student import Student
from etude.models.teachers import FrozenTeacher
from etude.recipes.record import record
from etude.recipes.run import Summary, train
from etude.runtime.seeds import Key
from etude.runtime.world import World
from etude.text.chat import PromptEncoder
from etude.text.vocabulary import stop_ids
from etude.training.evaluation import Evaluation

TEACHER, BASE = "etude:maze-teacher", "etude:maze-student"
TRAINING_ROUTES = 24  # of 396: the teacher's routes cover part of the map only, which is the point
WARM_START_STEPS = 15
UPDATES, ROWS = 200, 64  # of each of the four runs: optimiser steps, and walks a step
TEMPERATURE = 1.3  # of every walk that is trained on, whoever writes it: a little loose, to meet more of the map
WALKS = 4  # sampled for each held-out route
MAX_NEW_TOKENS = MAX_MOVES + 1  # the moves and the end
TOKENS_PER_BATCH = 16384

FIXED = {"student_fraction": 0.0, "other": "dataset"}
FRESH = {"student_fraction": 0.0, "other": "teacher"}
OWN = {"student_fraction": 1.0}
SILENT = {"every": 0, "prompts": 1, "greedy": False, "show": 0}  # the arena judges; a run need not


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train the warm-started student."""

    title: str
    divergence: str
    sampler: Mapping[str, Any]  # who writes the rows
    learning_rate: float  # the best of `quickstart_tune.RATES` on held-out routes for a control; see there


@dataclass(frozen=True, slots=True)
class Score:
    """One model on the held-out routes."""

    accuracy: float  # share of sampled walks (temperature 1) that arrive
    accuracy_greedy: float  # share of routes on which the likeliest walk arrives
    reverse_kl: float  # KL(student || teacher) a token on its own sampled walks, in nats
    entropy: float  # of the student's next-token distribution on those walks, in nats


class Arena:
    """One seed's world: which routes are trained on, what the teacher wrote there, and the judge.

    Args:
        folder: everything of this seed goes below it.
        seed: draws the training routes, the teacher's walks, the warm start, the order and the samples.
        training_routes: how many of the 396 routes are trained on.
        unseen: whether the other routes are held out; False judges on the training routes themselves.
    """

    def __init__(self, folder: Path, seed: int, training_routes: int = TRAINING_ROUTES, *, unseen: bool = True) -> None:
        self.folder = folder
        self.seed = seed
        self._teacher = load_backbone(TEACHER)
        rows, self._verify = maze_task(count=len(ROUTES), seed=seed)
        examples = [example_from_row(row, {}, f"maze route {number}") for number, row in enumerate(rows)]
        self.training = self._prompts(examples[:training_routes], samples=1)
        self.held_out = self._prompts(
            examples[training_routes:] if unseen else examples[:training_routes], samples=WALKS
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.teacher_walks = self._sampled(self._teacher, self.training, TEMPERATURE, purpose="teacher's routes")
        self._write_rows("routes.jsonl", self.teacher_walks)
        self._write_rows("held-out.jsonl", [(prompt, "") for prompt in self.held_out[::WALKS]])

    def train(self, name: str, settings: Mapping[str, Any], *, quiet: bool = True) -> str:
        """One training run; returns the folder of its student."""
        return self.run(name, settings, quiet=quiet).student

    def run(self, name: str, settings: Mapping[str, Any], *, quiet: bool = True) -> Summary:
        """One training run of these settings on the arena's routes; dotted keys change those of the arena."""
        recipe: dict[str, Any] = {
            "name": name,
            "output": str(self.folder / name),
            "seed": self.seed,
            "data": {
                "prompts": str(self.folder / "routes.jsonl"),
                "eval_prompts": str(self.folder / "held-out.jsonl"),
                "verifier": "etude.data.maze:verify",
            },
            "evaluation": {"every": 50, "prompts": 64, "greedy": False, "show": 4} if not quiet else SILENT,
            "checkpoint": {"every": 0, "keep": 1},
            "device": {"device": "cpu", "threads": 1},
        }
        checked = load_recipe(recipe | dict(settings))
        if checked.sampler.recorded is not None:  # into the arena's folder, whatever the method calls it
            place = json.dumps(str(self.folder / f"{name}-recording"))
            places = [f"sampler.recorded={place}", f"teacher.scores={place}"]
            checked = load_recipe(recipe | dict(settings), places)
            shutil.rmtree(self.folder / f"{name}-recording", ignore_errors=True)  # of an earlier run, as below
            record(checked, quiet=quiet)
        return train(checked, fresh=True, quiet=quiet)

    def warm_start(self) -> str:
        """The base student after a few steps of cross-entropy on the teacher's routes."""
        return self.train(
            "warm-start",
            {
                "student": {"model": BASE},
                "sampler": {**FIXED, "max_new_tokens": MAX_NEW_TOKENS},
                "terms": [{"teacher": "label", "divergence": "forward_kl"}],
                "train": {
                    "steps": WARM_START_STEPS,
                    "prompts_per_round": ROWS,
                    "tokens_per_micro_batch": TOKENS_PER_BATCH,
                },
                "optim": {"learning_rate": 2e-3, "schedule": "constant"},
            },
        )

    def teach(self, name: str, student: str, way: Way, *, updates: int = UPDATES, quiet: bool = True) -> str:
        """Train the warm-started student one way; the four differ in who writes and what is minimised."""
        return self.train(
            name,
            {
                "student": {"model": student},
                "teacher": {"model": TEACHER},
                "sampler": {**way.sampler, "temperature": TEMPERATURE, "max_new_tokens": MAX_NEW_TOKENS},
                "terms": [{"divergence": way.divergence}],
                "train": {"steps": updates, "prompts_per_round": ROWS, "tokens_per_micro_batch": TOKENS_PER_BATCH},
                "optim": {"learning_rate": way.learning_rate, "warmup_steps": 10},
            },
            quiet=quiet,
        )

    def score(self, model: str) -> Score:
        """Judge a model on the held-out routes."""
        student = Student(load_backbone(model))
        evaluation = Evaluation(
            self.held_out,
            sampler=InProcessSampler(student.backbone, self._settings(1.0), rows_per_batch=512),
            greedy_sampler=InProcessSampler(student.backbone, self._settings(0.0), rows_per_batch=512),
            teacher=FrozenTeacher("teacher", self._teacher, tokens_per_batch=TOKENS_PER_BATCH),
            verify=self._verify,
            decode=self._decode,
            seed=self.seed,
            world=World(),
            tokens_per_batch=TOKENS_PER_BATCH,
            show=0,
        )
        metrics = evaluation.run(student, version=0).metrics
        names = ("heldout/accuracy", "heldout/accuracy_greedy", "heldout/reverse_kl", "heldout/entropy")
        return Score(*(metrics[name] for name in names))

    def footprint(self, title: str, model: str) -> Footprint:
        """Where a model goes on the held-out routes, one sampled walk each."""
        walks = self._sampled(load_backbone(model), self.held_out[::WALKS], 1.0, purpose="picture")
        return _footprint(title, walks)

    def teacher_footprint(self, title: str) -> Footprint:
        """The cells the teacher's training routes cover."""
        return _footprint(title, self.teacher_walks)

    def _prompts(self, examples: Sequence[Example], samples: int) -> list[Prompt]:
        encoder = PromptEncoder(self._teacher.tokenizer)
        source = PromptSource(examples, encoder.encode, seed=self.seed, max_prompt_tokens=8)
        return source.fixed(len(examples), samples)

    def _settings(self, temperature: float) -> SamplingSettings:
        tokenizer = self._teacher.tokenizer
        return SamplingSettings(temperature, 1.0, 0, MAX_NEW_TOKENS, stop_ids(tokenizer))

    def _sampled(
        self, backbone: TransformersBackbone, prompts: Sequence[Prompt], temperature: float, purpose: str
    ) -> list[tuple[Prompt, str]]:
        sampler = InProcessSampler(backbone, self._settings(temperature), source=Source.TEACHER, rows_per_batch=512)
        rollouts = sampler.sample(prompts, Key(self.seed, purpose, stage=0, round=0))
        return [(rollout.prompt, self._decode(rollout.completion_ids.tolist())) for rollout in rollouts]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._teacher.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _write_rows(self, name: str, rows: Sequence[tuple[Prompt, str]]) -> None:
        lines = [
            json.dumps(
                {"prompt": prompt.example["prompt"], "answer": "arrives"} | ({"completion": text} if text else {})
            )
            for prompt, text in rows
        ]
        (self.folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _footprint(title: str, walks: Sequence[tuple[Prompt, str]]) -> Footprint:
    return footprint(title, [(read_route(prompt.example["prompt"]), text) for prompt, text in walks])
