"""A round's scored rows on disk, for a checkpoint that falls inside a round.

One safetensors file with every row's tensors one after the other, and the rest as JSON. A row comes back with the same
bits, so that the steps still to be taken are the ones that would have been taken. Its example stays behind: no step
reads it, and a dataset's row may hold what JSON cannot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from etude.axes.names import FinishReason, Source
from etude.core.records import Prompt, Rollout, Scored, Scores
from etude.runtime.checkpoints import load_tensors, save_tensors

_TENSORS, _FACTS = "round.safetensors", "round.json"


def save_round(folder: Path, rows: Sequence[Scored]) -> None:
    """Write prepared rows into an existing folder."""
    tensors: dict[str, Tensor] = {}
    facts: list[dict[str, Any]] = []
    for i, row in enumerate(rows):
        rollout = row.rollout
        named = {
            "prompt.token_ids": rollout.prompt.token_ids,
            "prompt.completion_ids": rollout.prompt.completion_ids,
            "completion_ids": rollout.completion_ids,
            "behaviour_logprobs": rollout.behaviour_logprobs,
            "raw_logprobs": rollout.raw_logprobs,
            "written": rollout.written,
            "weights": row.weights,
            "advantages": row.advantages,
            "student_logprobs": row.student_logprobs,
            "student_entropy": row.student_entropy,
            "candidates": row.candidates,
        }
        for name, scores in row.scores.items():
            named[f"scores.{name}.sampled_logprobs"] = scores.sampled_logprobs
            named[f"scores.{name}.hidden"] = scores.hidden
        # cloned, because a dataset row shares its completion with its prompt, and safetensors stores no tensor twice
        tensors |= {f"{i}.{name}": value.clone() for name, value in named.items() if value is not None}
        facts.append(
            {
                "row": rollout.prompt.row,
                "group": rollout.prompt.group,
                "source": rollout.source.value,
                "finish_reason": rollout.finish_reason.value,
                "version": rollout.version,
                "teachers": list(row.scores),
                "reward": row.reward,
            }
        )
    save_tensors(folder / _TENSORS, tensors)
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def load_round(folder: Path) -> list[Scored] | None:
    """The rows saved there, or None where the checkpoint fell between two rounds."""
    if not (folder / _FACTS).exists():
        return None
    tensors = load_tensors(folder / _TENSORS)
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    return [_row(fact, tensors, f"{i}.") for i, fact in enumerate(facts)]


def _row(fact: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> Scored:
    prompt = Prompt(
        token_ids=tensors[prefix + "prompt.token_ids"],
        row=fact["row"],
        completion_ids=tensors.get(prefix + "prompt.completion_ids"),
        group=fact["group"],
    )
    rollout = Rollout(
        prompt=prompt,
        completion_ids=tensors[prefix + "completion_ids"],
        source=Source(fact["source"]),
        finish_reason=FinishReason(fact["finish_reason"]),
        version=fact["version"],
        behaviour_logprobs=tensors.get(prefix + "behaviour_logprobs"),
        raw_logprobs=tensors.get(prefix + "raw_logprobs"),
        written=tensors.get(prefix + "written"),
    )
    scores = {
        name: Scores(
            teacher=name,
            sampled_logprobs=tensors.get(f"{prefix}scores.{name}.sampled_logprobs"),
            hidden=tensors.get(f"{prefix}scores.{name}.hidden"),
        )
        for name in fact["teachers"]
    }
    return Scored(
        rollout=rollout,
        scores=scores,
        weights=tensors.get(prefix + "weights"),
        advantages=tensors.get(prefix + "advantages"),
        student_logprobs=tensors.get(prefix + "student_logprobs"),
        student_entropy=tensors.get(prefix + "student_entropy"),
        candidates=tensors.get(prefix + "candidates"),
        reward=fact["reward"],
    )
