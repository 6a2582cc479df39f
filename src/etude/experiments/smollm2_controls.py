"""The pruned SmolLM2 healed on-policy, and by its two off-policy controls: three runs, one table, the answers beside.

The three shipped recipes `smollm2-prune`, `smollm2-prune-forward-kd` and `smollm2-prune-reverse-kd` differ in who
writes the rows and in the divergence. What is printed is what was seen, whichever way it falls.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etude.config.load import load_recipe
from etude.recipes.run import Summary, train

RECIPES = {
    "smollm2-prune": "on-policy, reverse KL: the student's own text",
    "smollm2-prune-forward-kd": "off-policy, forward KL: the teacher's text",
    "smollm2-prune-reverse-kd": "off-policy, reverse KL: the teacher's text",
}


def table(summaries: Sequence[tuple[str, Summary]]) -> Table:
    """Held-out reverse KL on the student's own fresh text, before and after."""
    shown = Table(title="held-out reverse KL on the student's fresh answers, nats a token", title_justify="left")
    for heading in ("", "before", "after", "after / before", "seconds"):
        shown.add_column(heading, justify="left" if not heading else "right")
    for title, summary in summaries:
        before, after = summary.before["heldout/reverse_kl"], summary.after["heldout/reverse_kl"]
        shown.add_row(title, f"{before:.3f}", f"{after:.3f}", f"{after / before:.2f}", f"{summary.seconds:.0f}")
    return shown


def answers(run: Path) -> str:
    """The same prompts before and after, as the run kept them."""
    kept = [
        (run / "samples" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in ("before", "after")
    ]
    pairs = [tuple(json.loads(line) for line in lines) for lines in zip(*kept, strict=True)]
    return "\n\n".join(
        f"> {before['prompt'].strip()}\n\n"
        f"before: {before['completion'].strip()}\n\n"
        f"after:  {after['completion'].strip()}"
        for before, after in pairs
    )


def main(words: Sequence[str]) -> int:
    """Run the three recipes and print table and answers."""
    parser = argparse.ArgumentParser(
        prog="etude experiment smollm2-controls", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--output", type=Path, default=Path("runs"))
    options = parser.parse_args(words)
    console = Console()
    summaries: list[tuple[str, Summary]] = []
    for name, title in RECIPES.items():
        console.print(f"\n[bold]{name}[/]")
        summaries.append((title, train(load_recipe(name, [f"output={options.output / name}"]))))
    console.print(table(summaries))
    console.print(answers(options.output / "smollm2-prune"), markup=False, highlight=False)
    return 0
