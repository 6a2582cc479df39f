"""What a run tells about itself: one line of metrics a step, timing spans, and what the person sees.

`metrics.jsonl` is the record: strict JSON, flushed line by line, so that nothing is lost when the process is. A value
that is not finite keeps its true value, as a string. Every name has a row in `METRICS`; a name without one is refused,
so that table and emission cannot drift apart. Knows no model and no batch; the loop calls it.

    >>> describe("divergence/reverse_kl")
    'mean of the term over the tokens it trains, at the loss temperature; divergences in nats'
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, TextIO, TypeVar, cast

from etude.errors import CheckpointError, RecordError
from etude.runtime.progress import Progress

METRICS_FILE = "metrics.jsonl"

T = TypeVar("T")

# {term} is the name of a term in the recipe, {span} that of a timing span in the loop.
METRICS: Mapping[str, str] = {
    "divergence/{term}": "mean of the term over the tokens it trains, at the loss temperature; divergences in nats",
    "reward/{term}": "mean reward of the round's rows that the term trains, as the verifier gave them",
    "clipped/{term}": "share of the term's tokens whose importance ratio was clipped, held at a bound or left out",
    "teacher_mass/{term}": "top_k, renormalise: mean probability of the teacher on the kept ids",
    "student_mass/{term}": "top_k, renormalise: mean probability of the student on the kept ids",
    "overlap/{term}": "top_k: mean share of the student's own likeliest k among the teacher's",
    "uncertain/{term}": "share of the term's tokens at which the teacher's entropy was above teacher_entropy",
    "selected/{term}": "share of its tokens that a term chose to train by entropy_share or confident_wrong_share",
    "tokens/{term}": "tokens the term trained in this step",
    "tokens/scored": "tokens some term trained in this step",
    "tokens/written": "of those, the tokens the student wrote in this round, log-probs at hand",
    "tokens/per_second": "tokens/scored over time/step_s",
    "student/entropy": "mean entropy of the student's next-token distribution at the scored tokens, in nats",
    "student/logprob": "mean log-prob the student gives the scored tokens, in nats",
    "sampler/logprob_gap": "mean absolute gap between sampler's and trainer's log-probs on the student's rows, in nats",
    "gradient/norm": "global gradient norm before clipping",
    "gradient/skipped": "1 where the step left the weights alone: gradient not finite, or no token to train; else 0",
    "learning_rate": "of this step",
    "rollout/length": "mean completion tokens of the round's rows, the stop id included",
    "rollout/truncated": "share of the round's rows cut at max_new_tokens",
    "rollout/tokens": "completion tokens of the round",
    "rollout/student": "share of the round's rows that the student wrote",
    "rollout/replayed": "share of the round's rows that an earlier student wrote",
    "rollout/age": "mean optimiser steps from the writing of the student's rows to the round's first step",
    "heldout/reverse_kl": "mean KL(student || teacher) per token of fresh student samples on held-out prompts, in nats",
    "heldout/entropy": "mean entropy of the student's next-token distribution at those tokens, in nats",
    "heldout/accuracy": "mean score the verifier gives those samples",
    "heldout/accuracy_greedy": "the same for greedy answers",
    "heldout/length": "mean completion tokens of those samples",
    "heldout/truncated": "share of those samples cut at max_new_tokens",
    "time/step_s": "seconds since the line before",
    "time/{span}_s": "seconds in one part of the loop since the line before",
}

_PATTERNS = {re.compile(re.sub(r"{\w+}", "[^/]+", name)): text for name, text in METRICS.items()}


def describe(name: str) -> str:
    """What a metric means. Raises `RecordError` for a name without a row in `METRICS`."""
    matching = (text for pattern, text in _PATTERNS.items() if pattern.fullmatch(name))
    text = METRICS.get(name) or next(matching, None)
    if text is None:
        raise RecordError(f"metric '{name}' has no row in METRICS; add one that says what it means")
    return text


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a `metrics.jsonl`, `step` among the values; a line cut off by a kill at its end is left out.

    Raises `CheckpointError` for any other line that is not one of ours.
    """
    return [{name: float(value) for name, value in _parse(line).items()} for line in _whole_lines(path)]


class Tracker:
    """Records metrics in a run's folder and shows the progress; used in a `with` statement."""

    def __init__(self, folder: Path | None, *, console: bool, total_steps: int) -> None:
        """Record in `folder` (None: nowhere, as on the ranks that do not write); `console` False says nothing."""
        self.path = None if folder is None else folder / METRICS_FILE
        self._file: TextIO | None = None
        self._progress = Progress(total_steps) if console else None
        self._spans: dict[str, float] = {}  # seconds by metric name, since the line before
        self._open_span: str | None = None
        self._mark: float | None = None  # when the line before was recorded, or the first span began

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and leave the terminal as it was."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._progress is not None:
            self._progress.close()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the loop; the next line holds it as `time/NAME_s`, summed where it came more than once."""
        if self._open_span is not None:
            raise RecordError(f"span '{name}' inside span '{self._open_span}' would be counted twice")
        began = perf_counter()
        self._mark = began if self._mark is None else self._mark
        self._open_span = name
        try:
            yield
        finally:
            self._open_span = None
            metric = f"time/{name}_s"
            self._spans[metric] = self._spans.get(metric, 0.0) + perf_counter() - began

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """The items of an iterator, the making of each in a span of this name."""
        done = object()
        while True:
            with self.span(name):
                item = next(items, done)
            if item is done:
                return
            yield cast(T, item)

    def record(self, step: int, metrics: Mapping[str, float], *, more: bool = False) -> None:
        """Append one line: `step`, `metrics`, and the spans since the line before.

        A line with `tokens/scored` also gets the time of the step and its tokens a second. `more`: another line of the
        same step follows, which the progress then shows with this one.
        """
        line = {name: float(value) for name, value in metrics.items()} | self._timing(metrics)
        for name in line:
            describe(name)
        if self.path is not None:
            self._append(json.dumps({"step": step} | {name: _strict(value) for name, value in line.items()}))
        if self._progress is not None:
            self._progress.show(step, line, more=more)

    def say(self, message: str) -> None:
        """Tell the person something, above the live progress."""
        if self._progress is not None:
            self._progress.say(message)

    def truncate_after(self, step: int) -> None:
        """Go on after `step`, as a resumed run does: what was recorded beyond it will be recorded again (-1: all)."""
        if self._progress is not None:
            self._progress.begin(max(step, 0))
        if self.path is None or not self.path.exists():
            return
        kept = [line for line in _whole_lines(self.path) if _parse(line)["step"] <= step]
        aside = self.path.with_name(f".{METRICS_FILE}")
        aside.write_text("".join(kept), encoding="utf-8")
        os.replace(aside, self.path)

    def _timing(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The spans since the line before; begins the next line's."""
        now, timing = perf_counter(), self._spans
        if "tokens/scored" in metrics and self._mark is not None and now > self._mark:
            timing["time/step_s"] = now - self._mark
            timing["tokens/per_second"] = metrics["tokens/scored"] / timing["time/step_s"]
        self._spans, self._mark = {}, now
        return timing

    def _append(self, line: str) -> None:
        if self._file is None:
            assert self.path is not None
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(line + "\n")
        self._file.flush()


def _strict(value: float) -> float | str:
    """JSON has no NaN and no infinity: a string that `float` reads again."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _whole_lines(path: Path) -> list[str]:
    """The file's lines, each checked; the last one only where it was written to its end."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            whole = isinstance(_parse(line)["step"], int)
        except (ValueError, TypeError, KeyError):
            whole = False
        if not whole:
            raise CheckpointError(
                f"{path}:{number} is not a line of metrics; mend or remove it, then start the same command again"
            )
    return lines


def _parse(line: str) -> dict[str, Any]:
    return json.loads(line)
