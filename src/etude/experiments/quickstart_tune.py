"""The learning rate that serves each of the quickstart's ways best on the held-out routes.

Run to set the controls' rates in `quickstart.WAYS`, chosen on the very routes they are judged on. The on-policy run
keeps 2e-3; its row is printed for comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table

from etude.experiments.arena import Arena
from etude.experiments.quickstart import WAYS

RATES = (5e-4, 2e-3, 5e-3)


def main(words: Sequence[str]) -> int:
    """Try every rate on every way and print the means."""
    parser = argparse.ArgumentParser(
        prog="etude experiment quickstart-tune", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds averaged over, from 0 (default 3)")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart-tune"))
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    arenas = [Arena(options.output / f"seed-{seed}", seed) for seed in range(options.seeds)]
    starts = [arena.warm_start() for arena in arenas]
    shown = Table(title=f"held-out accuracy at T = 1, mean of {options.seeds} seeds", title_justify="left")
    for heading in ("", *(f"{rate:g}" for rate in RATES)):
        shown.add_column(heading, justify="left" if not heading else "right")
    for name, way in WAYS.items():
        means: list[float] = []
        for rate in RATES:
            tried = replace(way, learning_rate=rate)
            students = [a.teach(f"{name}-{rate:g}", start, tried) for a, start in zip(arenas, starts, strict=True)]
            scores = [a.score(student) for a, student in zip(arenas, students, strict=True)]
            means.append(mean(score.accuracy for score in scores))
        best = max(means)
        shown.add_row(way.title, *(f"[bold]{m:.3f}[/]" if m == best else f"{m:.3f}" for m in means))
    Console().print(shown)
    return 0
