"""Every named method on the maze: one student, one start, the same updates and rows, and one table.

A recipe here is `method = NAME` and the maze's common settings, the same for all; what the maze needs beside them
stands in `FITTED` and is printed under the table. Walks are sampled at the quickstart's temperature unless the method
fixes its own. Each method and seed is written down as it ends, so the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from etude.axes.names import Source, Support
from etude.config.load import load_recipe
from etude.config.methods import METHODS
from etude.config.schema import Recipe
from etude.experiments.arena import (
    BASE,
    MAX_NEW_TOKENS,
    ROWS,
    TEACHER,
    TEMPERATURE,
    TOKENS_PER_BATCH,
    WALKS,
    Arena,
    Score,
)
from etude.recipes.folder import write_json
from etude.runtime.tracking import METRICS_FILE, read_metrics

UPDATES = 300
LEARNING_RATE = 2e-3  # the quickstart's for on-policy, here everybody's
GOOD = 0.65  # held-out accuracy asked of every method that sees the whole vocabulary on the student's rows
LOOK_EVERY = 25  # updates between two looks at the held-out routes
WIDTH = 156  # of the table, which a narrower terminal must not squeeze

# What the maze asks of a method beside the common settings, by its dotted key; everything here is printed.
FITTED: Mapping[str, Mapping[str, Any]] = {
    # Its note says to end at max_new_tokens; most of these walks are shorter than the 32 tokens it starts from.
    "prefix": {"terms.0.first_tokens.start": 8, "terms.0.first_tokens.end": MAX_NEW_TOKENS},
    # At 0.8, the paper's, the student hardly leaves the routes it knows.
    "distillm2": {"sampler.temperature": TEMPERATURE},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One method trained from one seed."""

    score: Score
    reached: int | None  # updates after which GOOD was first seen, looking every LOOK_EVERY; None: never
    tokens: float  # trained, over all updates
    seconds: float  # of training, without the looks at the held-out routes
    own_rows: float  # share of the rows trained on that the student wrote

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Cell:
        """The cell that was written down."""
        return cls(**{**found, "score": Score(**found["score"])})


class Book:
    """The file of what has been found, one entry for each method, seed and settings; rewritten after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def get(self, asked: Mapping[str, Any]) -> Cell | None:
        """What was found under exactly these settings."""
        return next((Cell.of(entry["found"]) for entry in self._entries if entry["asked"] == asked), None)

    def add(self, asked: Mapping[str, Any], cell: Cell) -> None:
        """Write it down."""
        self._entries.append({"asked": asked, "found": asdict(cell)})
        write_json(self.path, self._entries)


def maze_settings(name: str, updates: int) -> dict[str, Any]:
    """The recipe of a method on the maze, but for where the student and the routes lie."""
    sampler = METHODS[name].settings["sampler"]
    return {
        "method": name,
        "teacher": {"model": TEACHER},
        "sampler": {"max_new_tokens": MAX_NEW_TOKENS, "temperature": sampler.get("temperature", TEMPERATURE)},
        "train": {
            "steps": updates,
            "prompts_per_round": ROWS // sampler.get("samples_per_prompt", 1),
            "tokens_per_micro_batch": TOKENS_PER_BATCH,
        },
        "optim": {"learning_rate": LEARNING_RATE, "warmup_steps": 10},
        "evaluation": {"every": LOOK_EVERY, "prompts": 372, "greedy": False, "show": 0},
        **FITTED.get(name, {}),
    }


def recipe_of(name: str, updates: int) -> Recipe:
    """The same, checked: what cannot run on the maze is refused before anything is trained."""
    data = {"prompts": "routes.jsonl", "verifier": "etude.data.maze:verify"}
    return load_recipe({"student": {"model": BASE}, "data": data, **maze_settings(name, updates)})


def must_be_good(recipe: Recipe) -> bool:
    """Whether every term sees the whole vocabulary and the student's own rows are sure to be among those trained on.

    An adaptive share (DistiLLM) that begins at 0 may stay there.
    """
    student_rows = recipe.sampler.fraction.highest > 0 and any(Source.STUDENT in t.sources for t in recipe.terms)
    return student_rows and all(term.support is Support.FULL for term in recipe.terms)


def looks(lines: Sequence[Mapping[str, float]]) -> list[tuple[int, float]]:
    """Updates and held-out accuracy, wherever a run's metrics have it."""
    return [(int(line["step"]), line["heldout/accuracy"]) for line in lines if "heldout/accuracy" in line]


def train_one(arena: Arena, start: str, name: str, updates: int) -> Cell:
    """Train the warm-started student by one method, and judge it."""
    summary = arena.run(name, {"student": {"model": start}, **maze_settings(name, updates)})
    lines = read_metrics(Path(summary.run) / METRICS_FILE)
    return Cell(
        score=arena.score(summary.student),
        reached=next((step for step, accuracy in looks(lines) if accuracy >= GOOD), None),
        tokens=sum(line.get("tokens/scored", 0.0) for line in lines),
        seconds=summary.seconds - sum(line.get("time/evaluate_s", 0.0) for line in lines),
        own_rows=mean(line["rollout/student"] for line in lines if "rollout/student" in line),
    )


def run(folder: Path, names: Sequence[str], seeds: int, updates: int, console: Console) -> dict[str, list[Cell]]:
    """Every method from every seed; what the folder's results.json has is not trained again."""
    for name in names:
        recipe_of(name, updates)
    book = Book(folder / "results.json")
    found: dict[str, list[Cell]] = {name: [] for name in names}
    for seed in range(seeds):
        world: tuple[Arena, str] | None = None
        for name in names:
            point = {"seed": seed, "point": METHODS[name].settings, "maze": maze_settings(name, updates)}
            asked = json.loads(json.dumps(point))  # as it is read back
            cell = book.get(asked)
            if cell is None:
                world = world or _world(folder / f"seed-{seed}", seed)
                cell = train_one(*world, name, updates)
                book.add(asked, cell)
                console.print(f"[dim]seed {seed}  {name:<18} {cell.score.accuracy:.2f}  {cell.seconds:4.0f} s[/]")
            found[name].append(cell)
    return found


def _world(folder: Path, seed: int) -> tuple[Arena, str]:
    arena = Arena(folder, seed)
    return arena, arena.warm_start()


def table(found: Mapping[str, Sequence[Cell]], updates: int) -> Table:
    """One row a method, best first; those of which GOOD is asked above the others."""
    seeds = len(next(iter(found.values())))
    shown = Table(
        title=f"372 held-out routes, {WALKS} walks each; {updates} updates of {ROWS} rows; seeds 0 to {seeds - 1}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("method", "divergence", "support", "estimator"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("walked at", "own", "T = 1", "range", "greedy", "entropy", f"to {GOOD}", "k tokens", "seconds"):
        shown.add_column(heading, justify="right", no_wrap=True)
    asked, others = _parted(found, updates)
    for part in (asked, others):
        for name in part:
            shown.add_row(*_row(name, found[name], updates))
        shown.add_section()
    return shown


def _parted(found: Mapping[str, Sequence[Cell]], updates: int) -> tuple[list[str], list[str]]:
    """The methods of which GOOD is asked, and the others; best first."""
    names = sorted(found, key=lambda name: -mean(cell.score.accuracy for cell in found[name]))
    asked = [name for name in names if must_be_good(recipe_of(name, updates))]
    return asked, [name for name in names if name not in asked]


def _row(name: str, cells: Sequence[Cell], updates: int) -> list[str]:
    scores = [cell.score for cell in cells]
    accuracies = [score.accuracy for score in scores]
    reached = [cell.reached for cell in cells if cell.reached is not None]
    axes = METHODS[name].axes
    return [
        name,
        *(axes[axis].replace(" + ", "\n") for axis in ("divergence", "support", "estimator")),
        f"{recipe_of(name, updates).sampler.temperature:g}",
        f"{mean(cell.own_rows for cell in cells):.0%}",
        f"{mean(accuracies):.2f}",
        f"{min(accuracies):.2f}-{max(accuracies):.2f}",
        f"{mean(score.accuracy_greedy for score in scores):.2f}",
        f"{mean(score.entropy for score in scores):.2f}",
        str(max(reached)) if len(reached) == len(cells) else "never",
        f"{mean(cell.tokens for cell in cells) / 1000:.0f}",
        f"{mean(cell.seconds for cell in cells):.0f}",
    ]


def explanation(found: Mapping[str, Sequence[Cell]], updates: int) -> str:
    """What stands under the table."""
    asked, _ = _parted(found, updates)
    below = [name for name in asked if mean(cell.score.accuracy for cell in found[name]) < GOOD]
    fitted = [f"{name}: {key} = {value}" for name in found for key, value in FITTED.get(name, {}).items()] or [
        "nothing"
    ]
    return (
        "walked at: sampling temperature of the training walks.  own: share of them that the student wrote.\n"
        "T = 1, range: share of sampled held-out walks that arrive, mean and extremes of the seeds.\n"
        "entropy: of the student's next move on those walks, in nats.\n"
        f"to {GOOD}: updates until the slowest seed was there, looking every {LOOK_EVERY} on one walk a route.\n"
        "k tokens: thousands trained on.  seconds: of training, without the looks.\n"
        f"Learning rate {LEARNING_RATE:g} for all.  Set for the maze alone: {'; '.join(fitted)}.\n"
        f"Whole vocabulary on the student's rows (upper part): {len(asked) - len(below)} of {len(asked)} reach {GOOD}"
        f"{'; below: ' + ', '.join(below) if below else ''}."
    )


def main(words: Sequence[str]) -> int:
    """Train what is not trained yet and print the table."""
    parser = argparse.ArgumentParser(prog="etude experiment methods-table", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1 (default 3)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME", help="left out: all")
    parser.add_argument("--steps", type=int, default=UPDATES, help=f"updates of each (default {UPDATES})")
    parser.add_argument("--output", type=Path, default=Path("runs/methods-table"))
    options = parser.parse_args(words)
    torch.set_num_threads(1)  # models this small lose more to waiting for a second thread than they gain
    console = Console(width=max(Console().width, WIDTH))
    names = list(dict.fromkeys(options.methods or METHODS))
    found = run(options.output, names, options.seeds, options.steps, console)
    console.print(table(found, options.steps))
    console.print(explanation(found, options.steps), highlight=False, soft_wrap=True)
    console.print(f"numbers  {options.output / 'results.json'}", highlight=False, soft_wrap=True)
    return 0
