"""What a person sees while a run goes on: a live line in a terminal, a few dozen plain lines anywhere else.

Speaks on standard error, so that standard output stays the result's. Shows a handful of metrics of the step;
knows neither the run nor its files. `tracking.py` calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import monotonic
from typing import TextIO

from rich import progress as rich_progress
from rich.console import Console

PLAIN_LINES = 25  # about so many in a whole run, beside evaluations, and always the last

TRAINED = {"rollout/length": "length {:.1f}", "tokens/per_second": "{:,.0f} tokens/s"}
MEASURED = {"heldout/reverse_kl": "held-out {:.3f}", "heldout/accuracy": "accuracy {:.2f}"}


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
        self._metrics: dict[str, float] = {}  # of the step they were told of
        self._of_step = 0
        self._measured: dict[str, float] = {}  # held out, of the last evaluation
        self._measured_at = 0
        self._shown: int | None = None  # the step of the last plain line
        self._shown_measured: int | None = None  # of the last one with an evaluation
        self.begin(0)

    def begin(self, step: int) -> None:
        """The steps to come are counted, and timed, from here."""
        self._first, self._began = step, monotonic()

    def show(self, step: int, metrics: Mapping[str, float], *, more: bool = False) -> None:
        """Show where the run is; of `metrics`, what a person follows.

        With `more` of the same step to come, its one plain line waits for that.
        """
        if step == self._first:  # the evaluation before the first step: it says nothing about the pace
            self.begin(step)
        self._metrics = {} if step != self._of_step else self._metrics
        self._metrics |= metrics
        self._of_step = step
        if measured := {name: value for name, value in metrics.items() if name in MEASURED}:
            self._measured, self._measured_at = measured, step
        if self._live is not None:
            self._live.start()
            self._live.update(self._task, completed=step, description=self._line(step))
            self._live.refresh()
        elif not more and step != self._shown and self._is_due(step, bool(measured)):
            self._console.print(self._line(step))
            self._shown = step
            self._shown_measured = step if measured else self._shown_measured

    def _is_due(self, step: int, measured: bool) -> bool:
        """Whether a plain line is worth its place: evaluations are, unless they come in every few steps."""
        if step == self._total or step % self._every == 0:
            return True
        return measured and (self._shown_measured is None or step - self._shown_measured >= self._every)

    def say(self, message: str) -> None:
        """Print a line, above the live one where there is one."""
        self._console.print(message)

    def close(self) -> None:
        """Leave the last line standing and the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    def _line(self, step: int) -> str:
        """`step 20/200  1:05 left  reverse_kl 0.812  length 15.2  1,234 tokens/s  held-out 0.97  accuracy 0.45`.

        Held-out values of an earlier step are there in the live line only, with that step.
        """
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
        if self._first < step < self._total:
            seconds_a_step = (monotonic() - self._began) / (step - self._first)
            parts.append(f"{duration(seconds_a_step * (self._total - step))} left")
        terms = {name: value for name, value in self._metrics.items() if name.startswith(("divergence/", "reward/"))}
        parts += [f"{name.partition('/')[2]} {value:.3f}" for name, value in terms.items()]
        parts += [words.format(self._metrics[name]) for name, words in TRAINED.items() if name in self._metrics]
        if self._measured_at == step or self._live is not None:
            parts += [words.format(self._measured[name]) for name, words in MEASURED.items() if name in self._measured]
            if self._measured and self._measured_at != step:
                parts[-1] += f" (of step {self._measured_at})"
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """Minutes and seconds, and hours where there are any.

    >>> duration(65.2), duration(3 * 3600 + 62)
    ('1:05', '3:01:02')
    """
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"
