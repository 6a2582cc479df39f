"""etude's side: a recipe built and run as `etude train` does it, on the work of `work.py`.

The recipe is the ordinary one for this work. Three parts are exchanged before the run, because the work asks for what
no recipe does: prompts of exact length (no chat template), a sampler that never stops early, and a saver that saves
nothing (TRL's side saves nothing either). Seconds are those the run itself records in its metrics.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
import work
from transformers import AutoTokenizer

import etude
from etude.core.records import Prompt, as_ids
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.recipes.build import build
from etude.runtime.memory import keep_freed_memory
from etude.runtime.tracking import METRICS_FILE, Tracker
from etude.runtime.world import World
from etude.training.loop import Parts, train
from etude.training.state import Saver, State

PRECISION = "bfloat16"  # of the student's products, the teacher, and the copy that writes; master weights are float32


def recipe(options: argparse.Namespace, folder: Path) -> etude.Recipe:
    """Reverse KL over the full vocabulary, on-policy: all of that is the default."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in work.TEXT.splitlines()), "utf-8")
    return etude.load_recipe(
        {
            "output": str(folder / "run"),
            "student": {"model": options.model, "compute_dtype": PRECISION},
            "teacher": {"model": options.model},
            "data": {"prompts": str(prompts), "eval_size": 1},
            "sampler": {"max_new_tokens": work.NEW_TOKENS},
            "train": {"steps": work.WARM_UP_STEPS + options.steps, "prompts_per_round": work.NUM_PROMPTS},
            "optim": {"learning_rate": work.LEARNING_RATE, "schedule": "constant"},
            "evaluation": {"every": 0},
            "device": {"device": "cpu", "threads": options.threads},
        }
    )


class NothingSaved(Saver):
    """A saver that keeps nothing."""

    def save(self, *args: Any, **kwargs: Any) -> None:
        pass


def parts_of(recipe: etude.Recipe, folder: Path, tracker: Tracker, texts: Sequence[str]) -> Parts:
    """The recipe's parts, three of them exchanged for what the work asks."""
    world = World.current()
    tokenizer = AutoTokenizer.from_pretrained(recipe.student.model)
    prompts = [Prompt(as_ids(tokenizer(text)["input_ids"]), row) for row, text in enumerate(texts)]
    never_stop = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=work.NEW_TOKENS, stop_ids=())
    parts = build(recipe, folder=folder, world=world, tracker=tracker)
    return replace(
        parts,
        prompts=lambda number: prompts,
        sampler=InProcessSampler(parts.student.backbone, never_stop, dtype=PRECISION),
        saver=NothingSaved(folder, keep=1, world=world, info={}),
        evaluation=None,
    )


def seconds(line: dict[str, float]) -> dict[str, float]:
    """The spans of one line of metrics, by their bare names."""
    return {
        name.removeprefix("time/").removesuffix("_s"): value for name, value in line.items() if name.startswith("time/")
    }


def main() -> None:
    options = work.arguments(__doc__ or "").parse_args()
    keep_freed_memory()  # as `etude train` does
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = work.prompt_texts(AutoTokenizer.from_pretrained(options.model))
        asked = recipe(options, folder)
        with Tracker(folder, console=False, total_steps=asked.train.steps) as tracker:
            train(parts_of(asked, folder, tracker, texts), State())
        lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    work.report(
        [seconds(line) for line in lines],
        written_tokens=round(lines[-1]["rollout/tokens"]),
        versions=f"etude {etude.__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
    )


if __name__ == "__main__":
    main()
