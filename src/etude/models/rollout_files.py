"""Rollouts on disk: one safetensors file with every row's tensors one after the other, and the rest as JSON.

A row comes back with the same bits. What an example holds that JSON cannot, such as a date or a picture, stays behind;
`without_what_json_cannot` takes it off a rollout beforehand, so that what is kept in memory and what comes back from
the disk are the same. Knows no scores: a round's scored rows are `training/buffers.py`'s, which writes them with this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from etude.axes.names import FinishReason, Source
from etude.core.records import Prompt, Rollout
from etude.runtime.checkpoints import load_tensors, save_tensors

_TENSORS, _FACTS = "rollouts.safetensors", "rollouts.json"


def save_rollouts(folder: Path, rollouts: Sequence[Rollout]) -> None:
    """Write rollouts into an existing folder, their examples included."""
    tensors: dict[str, Tensor] = {}
    for i, rollout in enumerate(rollouts):
        tensors |= packed(f"{i}.", tensors_of(rollout))
    facts = [facts_of(rollout) | {"example": dict(rollout.prompt.example)} for rollout in rollouts]
    save_tensors(folder / _TENSORS, tensors)
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def load_rollouts(folder: Path) -> list[Rollout]:
    """The rollouts saved there, in their order."""
    tensors = load_tensors(folder / _TENSORS)
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    return [rollout_of(fact, tensors, f"{i}.") for i, fact in enumerate(facts)]


def without_what_json_cannot(rollout: Rollout) -> Rollout:
    """The rollout with those columns of its example that come back from JSON as they were."""
    example = {name: value for name, value in rollout.prompt.example.items() if _survives(value)}
    return replace(rollout, prompt=replace(rollout.prompt, example=example))


def _survives(value: object) -> bool:
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        return False


# One rollout among others ---------------------------------------------------------------------------------------------


def tensors_of(rollout: Rollout) -> dict[str, Tensor | None]:
    """By name, everything of a rollout that is a tensor."""
    return {
        "prompt.token_ids": rollout.prompt.token_ids,
        "prompt.completion_ids": rollout.prompt.completion_ids,
        "completion_ids": rollout.completion_ids,
        "behaviour_logprobs": rollout.behaviour_logprobs,
        "raw_logprobs": rollout.raw_logprobs,
        "written": rollout.written,
        "kept_ids": rollout.kept_ids,
        "kept_lengths": rollout.kept_lengths,
    }


def facts_of(rollout: Rollout) -> dict[str, Any]:
    """Everything of a rollout that is a number or a word, but for its example."""
    return {
        "row": rollout.prompt.row,
        "group": rollout.prompt.group,
        "source": rollout.source.value,
        "finish_reason": rollout.finish_reason.value,
        "version": rollout.version,
    }


def packed(prefix: str, named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The tensors there are, under their names in a file of many rows."""
    # cloned, because a dataset row shares its completion with its prompt, and safetensors stores no tensor twice
    return {prefix + name: value.clone() for name, value in named.items() if value is not None}


def rollout_of(fact: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Rollout:
    """What `facts_of` and `tensors_of` were taken from."""
    prompt = Prompt(
        token_ids=tensors[prefix + "prompt.token_ids"],
        row=fact["row"],
        group=fact["group"],
        completion_ids=tensors.get(prefix + "prompt.completion_ids"),
        example=fact.get("example", {}),
    )
    return Rollout(
        prompt=prompt,
        completion_ids=tensors[prefix + "completion_ids"],
        source=Source(fact["source"]),
        finish_reason=FinishReason(fact["finish_reason"]),
        version=fact["version"],
        behaviour_logprobs=tensors.get(prefix + "behaviour_logprobs"),
        raw_logprobs=tensors.get(prefix + "raw_logprobs"),
        written=tensors.get(prefix + "written"),
        kept_ids=tensors.get(prefix + "kept_ids"),
        kept_lengths=tensors.get(prefix + "kept_lengths"),
    )
