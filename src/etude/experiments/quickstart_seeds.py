"""The quickstart over several seeds: each seed, the mean, and how far it may be off.

The seed draws training routes, the teacher's walks, warm start, order and samples; the shipped models are the same. No
seed is chosen: 0 to 4 are run and all are printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from math import nan, sqrt
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from etude.experiments import quickstart
from etude.experiments.quickstart import WAYS, Result

T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's t


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of the mean, by Student's t; NaN for a single value.

    >>> round(half_width([0.6, 0.7, 0.8]), 2)
    0.25
    """
    return T_975[len(values) - 1] * stdev(values) / sqrt(len(values)) if len(values) > 1 else nan


def table(results: Sequence[Result]) -> Table:
    """One row a seed, and the means."""
    names = ("teacher", "before", *WAYS)
    shown = Table(title="sampled accuracy on held-out routes, T = 1", title_justify="left")
    for heading in (
        "seed",
        "teacher",
        "before",
        "fixed, FKL",
        "fixed, RKL",
        "fresh, FKL",
        "on-policy",
        "gap",
        "RKL ratio",
    ):
        shown.add_column(heading, justify="right")
    for r in results:
        shown.add_row(str(r.seed), *(f"{r.scores[n].accuracy:.2f}" for n in names), f"{r.gap:.2f}", f"{r.kl_ratio:.2f}")
    shown.add_section()
    columns = [[r.scores[name].accuracy for r in results] for name in names]
    columns += [[r.gap for r in results], [r.kl_ratio for r in results]]
    shown.add_row("mean", *(f"{mean(values):.2f}" for values in columns))
    shown.add_row("±", *(f"{half_width(values):.2f}" for values in columns))
    return shown


def main(words: Sequence[str]) -> int:
    """Run the seeds and print them all."""
    parser = argparse.ArgumentParser(
        prog="etude experiment quickstart-seeds", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds, from 0 (default 5)")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart-seeds"))
    options = parser.parse_args(words)
    console = Console()
    results: list[Result] = []
    for seed in range(options.seeds):
        results.append(quickstart.run(options.output / f"seed-{seed}", seed))
        console.print(f"seed {seed}: {results[-1].seconds:.0f} s", style="dim")
    console.print(table(results))
    console.print(
        "FKL, RKL: off-policy on the fixed routes, forward and reverse KL.  fresh: the teacher writes afresh.\n"
        "gap: on-policy minus the better fixed-data control of the same seed.  RKL ratio: held-out reverse KL of the\n"
        "on-policy student over that control's.  ±: 95 % interval of the mean."
    )
    summaries = [result.summary() for result in results]
    (options.output / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    return 0
