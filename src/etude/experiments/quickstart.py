"""The main job on the embedded world: one student, taught off-policy three ways and on-policy once.

A teacher knows the way through a maze from everywhere. A student knows the maze, not the way. It is warm-started on the
teacher's 24 routes and then trained four times from there, on the same prompts, updates and rows: on those fixed routes
(forward KL, reverse KL), on routes the teacher writes afresh each update, and on its own walks, marked by the teacher.
All are judged on the 372 other routes. Each control runs at the learning rate that serves it best on the held-out
routes (`make quickstart-tune`), so the comparison leans towards the controls.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from etude.axes.names import Source
from etude.config.load import load_recipe
from etude.core.records import Prompt, Rollout
from etude.data.examples import Example, example_from_row
from etude.data.maze import MAX_MOVES, ROUTES, maze_task, read_route
from etude.data.maze_picture import Footprint, draw, footprint, save_image
from etude.data.prompts import PromptSource
from etude.models.backbone import TransformersBackbone, load_backbone
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.models.student import Student
from etude.models.teachers import FrozenTeacher
from etude.recipes.run import train
from etude.runtime.seeds import Key
from etude.runtime.world import World
from etude.text.chat import PromptEncoder
from etude.text.vocabulary import stop_ids
from etude.training.evaluation import Evaluation

TEACHER, BASE = "etude:maze-teacher", "etude:maze-student"
TRAINING_ROUTES = 24  # of 396: the teacher's routes cover part of the map only, which is the point
WARM_START_STEPS = 15
UPDATES, ROWS = 200, 64  # of each of the four runs: optimiser steps, and walks a step
WALKS = 4  # sampled for each held-out route
MAX_NEW_TOKENS = MAX_MOVES + 1  # the moves and the end
TOKENS_PER_BATCH = 16384


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train the warm-started student."""

    title: str
    divergence: str
    sampler: Mapping[str, Any]  # who writes the rows
    learning_rate: float  # the best of `quickstart_tune.RATES` on held-out routes for a control; see there


FIXED = {"student_fraction": 0.0, "other": "dataset"}
FRESH = {"student_fraction": 0.0, "other": "teacher"}

WAYS: Mapping[str, Way] = {
    "offpolicy_forward_kl": Way("off-policy, forward KL: the teacher's 24 routes", "forward_kl", FIXED, 2e-3),
    "offpolicy_reverse_kl": Way("off-policy, reverse KL: the teacher's 24 routes", "reverse_kl", FIXED, 2e-3),
    "fresh_teacher": Way("off-policy, forward KL: the teacher writes afresh", "forward_kl", FRESH, 2e-3),
    "onpolicy": Way("on-policy, reverse KL: the student's own walks", "reverse_kl", {"student_fraction": 1.0}, 2e-3),
}
CONTROLS = ("offpolicy_forward_kl", "offpolicy_reverse_kl")  # on fixed data: what the gap is claimed against


@dataclass(frozen=True, slots=True)
class Score:
    """One model on the held-out routes."""

    accuracy: float  # share of sampled walks (temperature 1) that arrive
    accuracy_greedy: float  # share of routes on which the likeliest walk arrives
    reverse_kl: float  # KL(student || teacher) a token on its own sampled walks, in nats


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
        self.teacher_walks = self._sampled(self._teacher, self.training, purpose="teacher's routes")
        self._write_rows("routes.jsonl", self.teacher_walks)
        self._write_rows("held-out.jsonl", [(prompt, "") for prompt in self.held_out[::WALKS]])

    def train(self, name: str, settings: dict[str, Any], *, quiet: bool = True) -> str:
        """One training run; returns the folder of its student."""
        recipe: dict[str, Any] = {
            "name": name,
            "output": str(self.folder / name),
            "seed": self.seed,
            "data": {
                "prompts": str(self.folder / "routes.jsonl"),
                "eval_prompts": str(self.folder / "held-out.jsonl"),
                "verifier": "etude.experiments.quickstart:arrives",
            },
            "evaluation": {"every": 50, "prompts": 64, "greedy": False, "show": 4} if not quiet else SILENT,
            "checkpoint": {"every": 0, "keep": 1},
            "device": {"device": "cpu", "threads": 1},
        }
        return train(load_recipe(recipe | settings), fresh=True, quiet=quiet).student

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
                "sampler": {**way.sampler, "max_new_tokens": MAX_NEW_TOKENS},
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
        return Score(metrics["heldout/accuracy"], metrics["heldout/accuracy_greedy"], metrics["heldout/reverse_kl"])

    def footprint(self, title: str, model: str) -> Footprint:
        """Where a model goes on the held-out routes, one sampled walk each."""
        walks = self._sampled(load_backbone(model), self.held_out[::WALKS], purpose="picture")
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
        self, backbone: TransformersBackbone, prompts: Sequence[Prompt], purpose: str
    ) -> list[tuple[Prompt, str]]:
        sampler = InProcessSampler(backbone, self._settings(1.0), source=Source.TEACHER, rows_per_batch=512)
        rollouts: list[Rollout] = sampler.sample(prompts, Key(self.seed, purpose, stage=0, round=0))
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


SILENT = {"every": 0, "prompts": 1, "greedy": False, "show": 0}


def arrives(fields: Mapping[str, Any], text: str) -> float:
    """The maze's verifier, as a recipe names it."""
    from etude.data.maze import verify

    return verify(fields, text)


def _footprint(title: str, walks: Sequence[tuple[Prompt, str]]) -> Footprint:
    return footprint(title, [(read_route(prompt.example["prompt"]), text) for prompt, text in walks])


@dataclass(frozen=True, slots=True)
class Result:
    """What one seed's quickstart found."""

    seed: int
    seconds: float
    scores: dict[str, Score]  # "teacher", "before", and one for each way
    students: dict[str, str]  # by way: the folder of the trained student

    @property
    def best_control(self) -> str:
        """The fixed-data control with the higher sampled accuracy."""
        return max(CONTROLS, key=lambda name: self.scores[name].accuracy)

    @property
    def gap(self) -> float:
        """On-policy accuracy minus that of the better fixed-data control."""
        return self.scores["onpolicy"].accuracy - self.scores[self.best_control].accuracy

    @property
    def kl_ratio(self) -> float:
        """Held-out reverse KL of the on-policy student over that control's."""
        return self.scores["onpolicy"].reverse_kl / self.scores[self.best_control].reverse_kl

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        control, on_policy = self.scores[self.best_control], self.scores["onpolicy"]
        return {
            "seed": self.seed,
            "teacher_accuracy": self.scores["teacher"].accuracy,
            "student_accuracy_before": self.scores["before"].accuracy,
            "offpolicy_accuracy": control.accuracy,
            "onpolicy_accuracy": on_policy.accuracy,
            "heldout_reverse_kl_before": self.scores["before"].reverse_kl,
            "heldout_reverse_kl_offpolicy": control.reverse_kl,
            "heldout_reverse_kl_after": on_policy.reverse_kl,
            "seconds": self.seconds,
            "student": self.students["onpolicy"],
            "scores": {name: asdict(score) for name, score in self.scores.items()},
        }


def run(folder: Path, seed: int, console: Console | None = None, *, picture: bool = True) -> Result:
    """One seed's quickstart, in `folder`; with a console it says what it does."""
    began = time.monotonic()
    torch.set_num_threads(1)  # models this small lose more to waiting for a second thread than they gain

    def say(text: str) -> None:
        if console is not None:
            console.print(f"[dim]{time.monotonic() - began:4.0f} s[/]  {text}")

    say("the teacher writes its routes for 24 training prompts")
    arena = Arena(folder, seed)
    scores = {"teacher": arena.score(TEACHER)}
    say(f"the base student is warm-started on them ({WARM_START_STEPS} steps of cross-entropy)")
    student = arena.warm_start()
    scores["before"] = arena.score(student)
    students: dict[str, str] = {}
    for name, way in WAYS.items():
        say(way.title)
        students[name] = arena.teach(name, student, way, quiet=console is None or name != "onpolicy")
        scores[name] = arena.score(students[name])
    result = Result(seed, time.monotonic() - began, scores, students)
    (folder / "summary.json").write_text(json.dumps(result.summary(), indent=2) + "\n", encoding="utf-8")
    if picture and console is not None:
        _draw(arena, result, console)
    return result


def table(result: Result) -> Table:
    """The result as it is printed."""
    rows = [("teacher", "teacher"), ("before", "student, warm-started")]
    rows += [(name, way.title) for name, way in WAYS.items()]
    shown = Table(title=f"372 held-out routes, {WALKS} walks each (seed {result.seed})", title_justify="left")
    for heading, justify in (("", "left"), ("T = 1", "right"), ("greedy", "right"), ("reverse KL", "right")):
        shown.add_column(heading, justify=justify)  # pyright: ignore[reportArgumentType]
    for name, title in rows:
        score = result.scores[name]
        shown.add_row(
            title,
            f"{score.accuracy:.2f}",
            f"{score.accuracy_greedy:.2f}",
            f"{score.reverse_kl:.2f}",
            style="bold" if name == "onpolicy" else "",
        )
    return shown


def _draw(arena: Arena, result: Result, console: Console) -> None:
    footprints = [
        arena.teacher_footprint("the teacher's routes"),
        arena.footprint("off-policy student", result.students[result.best_control]),
        arena.footprint("on-policy student", result.students["onpolicy"]),
    ]
    console.print()
    console.print(draw(footprints), highlight=False, markup=False)
    console.print("[dim]darker: visited oftener   ×: most moves from here are wrong   ←: the goals[/]\n")
    save_image(footprints, arena.folder / "maze.png")


def main(words: Sequence[str]) -> int:
    """Run one seed and print its picture and table."""
    parser = argparse.ArgumentParser(prog="etude quickstart", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="draws routes, warm start, order and samples (default 0)")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="folder (default runs/quickstart)")
    options = parser.parse_args(words)
    console = Console()
    result = run(options.output, options.seed, console)
    console.print(table(result))
    console.print(
        "\nThe controls learn where the teacher goes; the on-policy student learns where it goes itself. A teacher "
        "that writes afresh\nclings less to 24 routes, at the price of writing all day; docs/when-it-helps.md says when "
        "off-policy is enough.\n"
    )
    console.print(f"trained student   {result.students['onpolicy']}")
    console.print(f"numbers           {options.output / 'summary.json'}")
    console.print(f"picture           {options.output / 'maze.png'}")
    console.print(f"seconds           {result.seconds:.0f}")
    return 0
