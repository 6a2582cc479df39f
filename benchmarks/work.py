"""The work that is timed, stated once: both sides import it, and nothing else of each other.

Plain standard library, since the two sides live in different environments. A side is a script
that takes `--model`, `--threads` and `--steps`, does `WARM_UP_STEPS` and then that many optimiser steps of this work,
and prints one line of JSON made by `report`; `against_trl.py` reads that line.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NUM_PROMPTS = 8  # rows a step
PROMPT_TOKENS = 32
NEW_TOKENS = 64  # every row writes exactly these: stopping is off on both sides
LEARNING_RATE = 1e-6  # small, so that the model written with stays the model loaded
WARM_UP_STEPS = 1  # the first step also pays for the allocator, the primitives' caches and the optimiser's state

TEXT = """\
A teacher sits beside a pupil at the piano. The pupil plays, and the teacher marks each note where it falls: this one a
little early, that one too loud, here the left hand lost the beat and found it again two bars later. Nobody plays the
piece for the pupil from beginning to end and asks for a copy, for a copy teaches only the notes that were played and
never the way back from a wrong one. So the pupil goes wrong in the pupil's own way, at the pupil's own speed, and
learns just there what should have come next. After some weeks the wrong turns grow rare, and those that remain are
short. Then they take a harder piece. Good teachers speak seldom of the whole and often of the next note; they know
that a piece is made of such moments, and that each of them can be put right on its own, as long as the mark comes from
somebody who has stood at the same place and knows how to go on. The room is small, the lamp is low, and outside the
window a tram goes by every ten minutes, which both of them have long since stopped hearing while they count aloud, one
and two and three and four, and the pupil smiles because for once the last bar came out right. Next week they will
begin again at the top of the page, a little faster, and the wrong turns will be new ones, which is the best that can
be said of anybody who is learning something."""


def prompt_texts(tokenizer: Any) -> list[str]:
    """`NUM_PROMPTS` pieces of `TEXT` that the tokenizer turns into exactly `PROMPT_TOKENS` ids each."""
    ids = tokenizer(TEXT.replace("\n", " "))["input_ids"]
    starts = range(0, NUM_PROMPTS * PROMPT_TOKENS, PROMPT_TOKENS)
    texts = [tokenizer.decode(ids[start : start + PROMPT_TOKENS]) for start in starts]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    if lengths != [PROMPT_TOKENS] * NUM_PROMPTS:
        raise SystemExit(f"the prompts have {lengths} tokens with this tokenizer; expected {PROMPT_TOKENS} each")
    return texts


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="folder of the model that is both student and teacher")
    parser.add_argument("--threads", type=int, required=True, help="torch threads")
    parser.add_argument("--steps", type=int, required=True, help="steps that are timed, after the warm-up")
    return parser


class Stopwatch:
    """Seconds by step, and within the steps by span."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        self.steps.append(defaultdict(float))
        with self.span("step"):
            yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.steps[-1][name] += time.perf_counter() - start


def report(steps: list[dict[str, float]], **facts: Any) -> None:
    """Print the side's line: the timed steps, the peak of the whole process, and what else is worth knowing."""
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # ru_maxrss is in KiB on Linux
    print(json.dumps({"steps": steps[WARM_UP_STEPS:], "peak_mib": round(peak_mib), **facts}), flush=True)
