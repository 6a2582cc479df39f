"""The main job on the embedded world: one student, taught off-policy three ways and on-policy once.

A teacher knows the way through a maze from everywhere. A student knows the maze, not the way. It is warm-started on the
teacher's 24 routes and then trained four times from there, on the same prompts, updates and rows: on those fixed routes
(forward KL, reverse KL), on routes the teacher writes afresh each update, and on its own walks, marked by the teacher.
All are judged on the 372 other routes at temperature 1.

What was tuned for whom: each control runs at the rate, of those in `quickstart_tune.RATES`, that serves it best
on the very routes it is judged on (within noise, where two are alike); the sampling temperature of training walks was
found for the on-policy run, on seeds 0 to 2, and then given to everyone. docs/LOG.md has the figures.
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

from etude.data.maze_picture import draw, save_image
from etude.experiments.arena import FIXED, FRESH, OWN, TEACHER, WALKS, WARM_START_STEPS, Arena, Score, Way

WAYS: Mapping[str, Way] = {
    "offpolicy_forward_kl": Way("off-policy on the 24 routes, forward KL", "forward_kl", FIXED, 5e-3),
    "offpolicy_reverse_kl": Way("off-policy on the 24 routes, reverse KL", "reverse_kl", FIXED, 5e-3),
    "fresh_teacher": Way("off-policy, written afresh, forward KL", "forward_kl", FRESH, 5e-3),
    "onpolicy": Way("on-policy on its own walks, reverse KL", "reverse_kl", OWN, 2e-3),
}
EXPLANATION = """
The controls on fixed routes learn where the teacher went; the on-policy student
learns where it goes itself. A teacher that writes afresh at every update, just
as loosely, does as well in this small world, at the price of writing all day.
docs/when-it-helps.md says more, and where off-policy is enough.
"""

CONTROLS = ("offpolicy_forward_kl", "offpolicy_reverse_kl")  # on fixed data: what the gap is claimed against


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
    console.print(EXPLANATION)
    console.print(f"trained student   {result.students['onpolicy']}")
    console.print(f"numbers           {options.output / 'summary.json'}")
    console.print(f"picture           {options.output / 'maze.png'}")
    console.print(f"seconds           {result.seconds:.0f}")
    return 0
