"""Whether the same step twice gives the same bits: without that, no resume is the uninterrupted run.

A round is written, marked and trained twice from the same state at a learning rate of zero. Compared are what was
written and what Adam remembers of the gradient, which is the gradient itself up to a factor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import Tensor

from etude.axes.names import Check
from etude.preflight.findings import Finding, passed, refused, warned
from etude.preflight.rehearsal import Rehearsal, rehearse
from etude.training.loop import Parts

ROWS = 4  # of the round tried out
TOKENS = 16  # of an answer, at most


@dataclass(frozen=True, eq=False, slots=True)
class Traces:
    """What one try left behind."""

    written: str  # hash of the ids
    state: dict[str, Tensor]  # what the optimiser remembers, by weight
    metrics: str  # of every step, spelled out: NaN is NaN


def determinism(parts: Parts, *, max_new_tokens: int) -> Finding:
    """Refused on a CPU, where it can be had; a warning elsewhere, with how far the two tries are apart.

    Args:
        parts: of the run; their optimiser begins anew afterwards.
        max_new_tokens: the recipe's; a few of them are written.
    """
    first, second = (_tried(parts, min(TOKENS, max_new_tokens)) for _ in range(2))
    apart = [name for name, value in first.state.items() if not value.equal(second.state[name])]
    same_rows = first.written == second.written
    figures = {"same_rows": same_rows, "weights_apart": len(apart), "weights": len(first.state)}
    if same_rows and not apart and first.metrics == second.metrics:
        evidence = f"the same {ROWS} rows, loss and gradients to the last bit, twice from the same state"
        return passed(Check.DETERMINISM, evidence, **figures)
    figures["relative_difference"] = _difference(first, second) if same_rows else None
    how = (
        f"gradients of {len(apart)} of {len(first.state)} weights differ, by up to "
        f"{figures['relative_difference']:.2g} of the largest"
        if same_rows
        else "other rows were written from the same random numbers"
    )
    said = f"twice the same step from the same state was not the same: {how}"
    if parts.student.backbone.device.type == "cpu":
        cure = "find what draws random numbers of its own in the model, the verifier or the teacher"
        return refused(Check.DETERMINISM, said, cure, **figures)
    cure = "a resumed run will not be bit-identical on this device; torch.use_deterministic_algorithms may help"
    return warned(Check.DETERMINISM, said, cure, **figures)


def _tried(parts: Parts, max_new_tokens: int) -> Traces:
    optimizer = parts.learner.optimizer
    optimizer.state.clear()
    try:
        round_ = rehearse(parts, max_new_tokens=max_new_tokens, rows=ROWS)
        names = {id(weight): name for name, weight in parts.student.trainable_parameters().items()}
        state = {
            f"{names[id(weight)]}/{key}": value.detach().to("cpu", copy=True)
            for weight, values in optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
    finally:
        optimizer.state.clear()
    return Traces(_hash(round_), state, repr(round_.learned))


def _hash(round_: Rehearsal) -> str:
    found = hashlib.sha256()
    for row in round_.rows:
        found.update(row.rollout.completion_ids.numpy().tobytes() + b"\n")
    return found.hexdigest()


def _difference(first: Traces, second: Traces) -> float:
    """The largest difference of what Adam remembers of the gradient, as a share of the largest of them."""
    names = [name for name in first.state if name.endswith("/exp_avg")]
    largest = max((first.state[name].abs().max().item() for name in names), default=0.0)
    apart = max(((first.state[name] - second.state[name]).abs().max().item() for name in names), default=0.0)
    return apart / largest if largest else float(apart > 0)
