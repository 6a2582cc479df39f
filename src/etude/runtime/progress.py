"""What a person sees while a run goes on: a live line in a terminal, a few dozen plain lines anywhere else.

Speaks on standard error, so that standard output stays the result's. Shows the latest value of a handful of metrics;
knows neither the run nor its files. `tracking.py` calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import monotonic
from typing import TextIO

from rich import progress as rich_progress
from rich.console import Console

PLAIN_LINES = 25  # about so many in a whole run, and always the last


class Progress:
    """The progress of one run of `total_steps` optimiser steps."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        out: TextIO = sys.stderr if stream is None else stream
        self._console = Console(file=out, highlight=False, markup=False, soft_wrap=True)
        self._live: rich_progress.Progress | None = None
        if out.isatty() and not self._console.is_dumb_terminal:
            # Redrawn when there is news: no thread of its own beside the training.
            columns = (
                rich_progress.BarColumn(bar_width=20),
                rich_progress.TextColumn("{task.description}", markup=False),
            )
            self._live = rich_progress.Progress(*columns, console=self._console, auto_refresh=False)
            self._task = self._live.add_task("", total=total_steps)
        self._total = total_steps
        self._every = -(-total_steps // PLAIN_LINES)
        self._latest: dict[str, float] = {}
        self._shown: int | None = None  # the step of the last plain line
        self.begin(0)

    def begin(self, step: int) -> None:
        """The steps to come are counted, and timed, from here."""
        self._first, self._began = step, monotonic()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show where the run is; of `metrics`, what a person follows."""
        if step == self._first:  # the evaluation before the first step: it says nothing about the pace
            self.begin(step)
        self._latest |= metrics
        if self._live is not None:
            self._live.start()
            self._live.update(self._task, completed=step, description=self._line(step))
            self._live.refresh()
        elif step == self._total or (step % self._every == 0 and step != self._shown):
            self._console.print(self._line(step))
            self._shown = step

    def say(self, message: str) -> None:
        """Print a line, above the live one where there is one."""
        self._console.print(message)

    def close(self) -> None:
        """Leave the last line standing and the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    def _line(self, step: int) -> str:
        """`step 20/200  1:05 left  reverse_kl 0.812  held-out 0.97  accuracy 0.45  length 15.2  1,234 tokens/s`."""
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
        if self._first < step < self._total:
            seconds_a_step = (monotonic() - self._began) / (step - self._first)
            parts.append(f"{duration(seconds_a_step * (self._total - step))} left")
        terms = {name: value for name, value in self._latest.items() if name.startswith(("divergence/", "reward/"))}
        parts += [f"{name.partition('/')[2]} {value:.3f}" for name, value in terms.items()]
        for name, words in {
            "heldout/reverse_kl": "held-out {:.3f}",
            "heldout/accuracy": "accuracy {:.2f}",
            "rollout/length": "length {:.1f}",
            "tokens/per_second": "{:,.0f} tokens/s",
        }.items():
            if name in self._latest:
                parts.append(words.format(self._latest[name]))
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """Minutes and seconds, and hours where there are any.

    >>> duration(65.2), duration(3 * 3600 + 62)
    ('1:05', '3:01:02')
    """
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"
