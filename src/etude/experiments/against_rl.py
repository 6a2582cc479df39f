"""The teacher's marks against the verifier's verdict: updates to the same accuracy on the maze.

Reinforcement learning from the verifier alone (`grpo`) is given the learning rate that serves it best at each accuracy,
on-policy distillation (`opd`) the quickstart's. Same start, same number of rows an update, rates held constant. Two
worlds: the quickstart's, where most routes are unseen, and one in which every route is trained on, so that reward alone
could teach all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table

from etude.data.maze import ROUTES
from etude.experiments.arena import ROWS, TRAINING_ROUTES, Arena
from etude.experiments.methods_table import looks, maze_settings
from etude.recipes.folder import write_json
from etude.runtime.tracking import METRICS_FILE, read_metrics

RATES = (2e-4, 5e-4, 1e-3)  # of grpo; above, it stalls early
ON_POLICY_RATE = 2e-3
LEVELS = (0.2, 0.25, 0.3, 0.5, 0.65, 0.8)  # accuracies, one sampled walk a route
LOOK_EVERY = 5  # updates between two looks
ON_POLICY_UPDATES = 200
WORLDS: Mapping[str, tuple[int, bool]] = {  # training routes, and whether the others are judged
    f"{TRAINING_ROUTES} routes, judged on the others": (TRAINING_ROUTES, True),
    f"all {len(ROUTES)} routes, judged on the same": (len(ROUTES), False),
}

Curve = list[tuple[int, float]]  # updates, accuracy


def curve(arena: Arena, start: str, method: str, learning_rate: float, updates: int) -> Curve:
    """The accuracy of the warm-started student, looked at every few updates of a method."""
    summary = arena.run(
        f"{method}-{learning_rate:g}",
        {
            "student": {"model": start},
            **maze_settings(method, updates),
            "optim.learning_rate": learning_rate,
            "optim.schedule": "constant",
            "evaluation.every": LOOK_EVERY,
            "evaluation.prompts": len(ROUTES),
        },
    )
    return looks(read_metrics(Path(summary.run) / METRICS_FILE))


def reached(found: Curve, level: float) -> int | None:
    """Updates after which an accuracy was first seen; None: never.

    >>> reached([(0, 0.1), (5, 0.3), (10, 0.2)], 0.25)
    5
    """
    return next((updates for updates, accuracy in found if accuracy >= level), None)


def fastest(curves: Sequence[Curve], level: float) -> int | None:
    """The least updates any of the curves needed.

    >>> fastest([[(0, 0.1), (5, 0.3)], [(0, 0.1), (5, 0.2)]], 0.25)
    5
    """
    return min((updates for found in curves if (updates := reached(found, level)) is not None), default=None)


def rows(own: Sequence[Curve], rewarded: Sequence[Sequence[Curve]], updates: int) -> list[tuple[str, str, str, str]]:
    """A row an accuracy: mean updates of both over the seeds, and their ratio; a lower bound where some seed never did.

    Args:
        own: of on-policy distillation, one curve a seed.
        rewarded: of grpo, for each seed one curve a learning rate.
        updates: of grpo at most, counted where it did not get there.
    """
    shown: list[tuple[str, str, str, str]] = []
    for level in LEVELS:
        needed = [reached(found, level) for found in own]
        if None in needed:
            shown.append((f"{level:g}", "not reached", "", ""))
            continue
        mine = mean(number for number in needed if number is not None)
        theirs = [fastest(curves, level) for curves in rewarded]
        least = mean(updates if number is None else number for number in theirs)
        over = "over " if None in theirs else ""
        missed = f" ({theirs.count(None)} of {len(theirs)} never)" if over else ""
        ratio = f"{over}{least / mine:.0f}" if mine else ""
        shown.append((f"{level:g}", f"{mine:.0f}", f"{over}{least:.0f}{missed}", ratio))
    return shown


def main(words: Sequence[str]) -> int:
    """Run both worlds and print a table of each."""
    parser = argparse.ArgumentParser(prog="etude experiment against-rl", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1 (default 3)")
    parser.add_argument("--updates", type=int, default=800, metavar="N", help="of grpo at each rate (default 800)")
    parser.add_argument("--output", type=Path, default=Path("runs/against-rl"))
    options = parser.parse_args(words)
    torch.set_num_threads(1)  # models this small lose more to waiting for a second thread than they gain
    console = Console()
    numbers: dict[str, object] = {}
    for place, (title, (count, unseen)) in enumerate(WORLDS.items()):
        own: list[Curve] = []
        rewarded: list[list[Curve]] = []
        for seed in range(options.seeds):
            arena = Arena(options.output / f"world-{place}" / f"seed-{seed}", seed, count, unseen=unseen)
            start = arena.warm_start()
            own.append(curve(arena, start, "opd", ON_POLICY_RATE, ON_POLICY_UPDATES))
            rewarded.append([curve(arena, start, "grpo", rate, options.updates) for rate in RATES])
            best = max(accuracy for found in rewarded[-1] for _, accuracy in found)
            console.print(f"[dim]{title}, seed {seed}: grpo's best look {best:.2f}[/]")
        numbers[title] = {"opd": own, "grpo": rewarded}
        console.print(_table(title, own, rewarded, options.updates))
    write_json(options.output / "results.json", numbers)
    console.print(
        f"Updates of {ROWS} rows, mean of seeds 0 to {options.seeds - 1}; grpo at the best of {len(RATES)} learning "
        f"rates for each accuracy\n({', '.join(f'{rate:g}' for rate in RATES)}), at most {options.updates}; opd at "
        f"{ON_POLICY_RATE:g}. Looked at every {LOOK_EVERY}.\nnumbers  {options.output / 'results.json'}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _table(title: str, own: Sequence[Curve], rewarded: Sequence[Sequence[Curve]], updates: int) -> Table:
    shown = Table(title=title, title_justify="left")
    for heading in ("accuracy at T = 1", "teacher's marks (opd)", "verdict alone (grpo)", "times"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows(own, rewarded, updates):
        shown.add_row(*row)
    return shown
