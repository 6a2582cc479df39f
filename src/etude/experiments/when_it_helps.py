"""When on-policy distillation helps, and when it does not: the maze with more training routes, and with nothing unseen.

The gap to off-policy training closes as the fixed routes cover the world; where training and test routes are the same,
off-policy wins. Both are shown, for docs/when-it-helps.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table

from etude.experiments.arena import Arena, Score
from etude.experiments.quickstart import WAYS

ROUTES = (24, 36, 60)  # training routes of 396
NAMES = ("offpolicy_forward_kl", "offpolicy_reverse_kl", "onpolicy")


def scores(arena: Arena) -> dict[str, Score]:
    """Warm start, then each way, judged on what the arena holds out."""
    start = arena.warm_start()
    return {name: arena.score(arena.teach(name, start, WAYS[name])) for name in NAMES}


def main(words: Sequence[str]) -> int:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(prog="etude experiment when-it-helps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds averaged over, from 0 (default 3)")
    parser.add_argument("--output", type=Path, default=Path("runs/when-it-helps"))
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    shown = Table(title=f"accuracy at T = 1, mean of {options.seeds} seeds", title_justify="left")
    for heading in ("training routes", "judged on", "off-policy, FKL", "off-policy, RKL", "on-policy, RKL"):
        shown.add_column(heading, justify="left" if heading == "judged on" else "right")

    def row(label: str, judged_on: str, found: Sequence[dict[str, Score]]) -> None:
        shown.add_row(label, judged_on, *(f"{mean(f[name].accuracy for f in found):.2f}" for name in NAMES))

    for count in ROUTES:
        places = [options.output / f"{count}-routes" / f"seed-{seed}" for seed in range(options.seeds)]
        row(str(count), "the others", [scores(Arena(place, seed, count)) for seed, place in enumerate(places)])
    places = [options.output / "nothing-unseen" / f"seed-{seed}" for seed in range(options.seeds)]
    row("24", "the same 24", [scores(Arena(place, seed, unseen=False)) for seed, place in enumerate(places)])
    Console().print(shown)
    return 0
