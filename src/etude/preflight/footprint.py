"""How much memory a run will take: its worst batch tried out, and the peak measured.

Rows are as long as they can be, their ids invented; writing, scoring and learning are done on them as in a round, the
optimiser's state in place, at a learning rate of zero. As many rows are tried as lie in memory at a time while a step
is taken: those of two micro-batches, the second of which finds the gradients of the first. What grows with further rows
is counted in proportion. Nothing is tried where weights, gradients and optimiser alone would not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.axes.names import Check, Source
from etude.core.records import Prompt, Rollout, Scored
from etude.models.sampling import InProcessSampler
from etude.preflight.disk import gigabytes
from etude.preflight.duration import side_by_side
from etude.preflight.findings import Finding, passed, refused, warned
from etude.preflight.rehearsal import (
    Writer,
    allocate_state,
    idle,
    invented_prompts,
    invented_rollout,
    key_of,
    own_prompts,
    writers_of,
    writing,
)
from etude.runtime import resident
from etude.training.evaluation import score_rows
from etude.training.loop import Parts

WRITTEN_ROWS, WRITTEN_TOKENS = 16, 32  # written on trial; keys and values grow in proportion to both
CLOSE = 0.9  # of the room: other programs and longer answers elsewhere want some as well


class Meter:
    """Bytes on the device a run computes on: the card's as torch counts them, otherwise this process's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_card = device.type == "cuda"

    def restart(self) -> bool:
        """Count the peak from now on; False: the process's whole peak is all that can be had."""
        if not self.on_card:
            return resident.restart_peak()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return True

    def now(self) -> int:
        """Bytes taken at this moment."""
        return torch.cuda.memory_allocated(self.device) if self.on_card else resident.resident_bytes()

    def peak(self) -> int:
        """The most since `restart`."""
        return torch.cuda.max_memory_allocated(self.device) if self.on_card else resident.peak_bytes()

    def room(self) -> int:
        """The most there could be."""
        if not self.on_card:
            return resident.room_bytes()
        return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What was measured, in bytes."""

    lasting: Mapping[str, int]  # what is there all the time, by what it is
    phases: Mapping[str, int]  # what each part of a round takes on top at its peak
    kept: int  # rows of a round that were not tried out: their marks, in proportion
    prompt: int  # tokens of the rows tried out
    completion: int
    rows: Mapping[str, int]  # how many of them, by phase
    apart: bool = True  # False: peaks could not be told apart, so each phase has that of all before it

    @property
    def peak(self) -> int:
        """Of the whole run."""
        return sum(self.lasting.values()) + max(self.phases.values(), default=0) + self.kept


def footprint(parts: Parts, *, longest_prompt: int, longest_completion: int) -> Footprint:
    """Try out the worst batch and measure it; leaves the student's weights as they are.

    Args:
        parts: of the run; their optimiser begins anew afterwards.
        longest_prompt: tokens.
        longest_completion: tokens of the longest answer there can be, written or given.
    """
    meter = Meter(parts.student.backbone.device)
    parts.sampler.refresh(parts.student, version=0)
    allocate_state(parts.learner)
    apart = meter.restart()
    lasting = _lasting(parts, meter.now())
    before = sum(lasting.values())
    writers = writers_of(parts.sampler, parts.plan.steps)
    prompts = own_prompts(parts)
    phases, tried = dict[str, int](), dict[str, int]()

    phases["write"], tried["write"] = _write(parts, writers, prompts, meter, longest_prompt, longest_completion)

    meter.restart()
    rows = worst_rows(parts, writers, prompts, longest_prompt, longest_completion)
    scored = score_rows(rows, parts.teachers, parts.objective, lambda row: row.prompt.row % 2)
    learner = idle(parts.learner)
    prepared = learner.prepare(scored, 0)
    phases["score"] = max(0, meter.peak() - before)
    meter.restart()
    next(learner.learn(prepared, 0, len(rows) * parts.plan.updates_per_round))  # as if the others were other updates'
    phases["learn"] = max(0, meter.peak() - before)
    tried["score"] = tried["learn"] = len(rows)
    kept = 0 if meter.on_card else (len(prompts) - len(rows)) * sum(map(_bytes_of, prepared)) // len(rows)
    parts.learner.optimizer.state.clear()  # it holds gradients of rows that nobody wrote
    return Footprint(lasting, phases, kept, longest_prompt, longest_completion, tried, apart)


def _write(
    parts: Parts,
    writers: Sequence[Writer],
    prompts: Sequence[Prompt],
    meter: Meter,
    longest_prompt: int,
    longest_completion: int,
) -> tuple[int, int]:
    """What writing takes on top, in proportion to what was written on trial, and the rows in hand at a time."""
    before = meter.now()
    few = invented_prompts(prompts[:WRITTEN_ROWS], longest_prompt, parts.student.backbone.vocab_size)
    tokens = min(longest_completion, WRITTEN_TOKENS)
    held_out = [] if parts.evaluation is None else [Writer(parts.evaluation.sampler, 0.0)]
    # Evaluations go by the student's writing, which is tried out already unless all rows are given.
    writing_ones = [writer for writer in writers if writer.source is not Source.DATASET] or held_out
    for writer in writing_ones:
        writing(writer.sampler, max_new_tokens=tokens, never_stop=True).sample(few, key_of(parts))
    most = max((_side_by_side(parts, writer, len(prompts)) for writer in writing_ones), default=0)
    longer = (longest_prompt + longest_completion) / (longest_prompt + tokens)
    return round(max(0, meter.peak() - before) * most / len(few) * longer), most


def worst_rows(
    parts: Parts, writers: Sequence[Writer], prompts: Sequence[Prompt], longest_prompt: int, longest_completion: int
) -> list[Rollout]:
    """Rows of greatest length, by every writer in turn: as many as a step has, and no more than two micro-batches."""
    vocab_size = parts.student.backbone.vocab_size
    a_step = -(-len(prompts) // parts.plan.updates_per_round)
    micro_batch = max(1, parts.learner.tokens_per_micro_batch // (longest_prompt + longest_completion))
    invented = invented_prompts(prompts[: min(a_step, 2 * micro_batch)], longest_prompt, vocab_size)
    sources = [writer.source for writer in writers]
    return [
        invented_rollout(prompt, longest_completion, vocab_size, sources[place % len(sources)])
        for place, prompt in enumerate(invented)
    ]


def _side_by_side(parts: Parts, writer: Writer, rows: int) -> int:
    """The most rows a writer has in hand at a time, in a round or an evaluation."""
    sampler = getattr(writer.sampler, "student", writer.sampler)  # who writes together goes by the student's batches
    held_out = 0
    if parts.evaluation is not None and isinstance(parts.evaluation.sampler, InProcessSampler):
        held_out = side_by_side(parts.evaluation.sampler, len(parts.evaluation.prompts))
    return max(side_by_side(sampler, rows), held_out)


def _lasting(parts: Parts, now: int) -> dict[str, int]:
    """What is there between two rounds, by what it is; the process is what remains."""
    states = [value for values in parts.learner.optimizer.state.values() for value in values.values()]
    counted = {
        "the student's weights": sum(weight.nbytes for weight in parts.student.backbone.parameters()),
        "the optimiser's state": sum(value.nbytes for value in states if isinstance(value, Tensor)),
    }
    counted["other models and the process itself"] = max(0, now - sum(counted.values()))
    return counted  # gradients come and go within a step, and so are a part of what learning takes


def _bytes_of(row: Scored) -> int:
    """Of the tensors a row keeps until it is trained."""
    held = [row.weights, row.advantages, row.student_logprobs, row.student_entropy]
    held += [value for scores in row.scores.values() for value in (scores.hidden, scores.sampled_logprobs)]
    return sum(value.nbytes for value in held if value is not None)


def least_bytes(parts: Parts) -> int:
    """What learning adds to the loaded models: a gradient and Adam's two numbers for each trained weight."""
    return 3 * sum(weight.nbytes for weight in parts.student.trainable_parameters().values())


def memory(parts: Parts, *, longest_prompt: int, longest_completion: int, room_bytes: int | None = None) -> Finding:
    """Whether the worst batch fits; measured unless it certainly does not.

    Args:
        parts: of the run.
        longest_prompt: tokens.
        longest_completion: tokens of the longest answer there can be.
        room_bytes: the most there is for this process; None: asked.
    """
    meter = Meter(parts.student.backbone.device)
    room = meter.room() if room_bytes is None else room_bytes
    least = meter.now() + least_bytes(parts)
    if least > room:
        evidence = (
            f"{gigabytes(least)} before any row (what is loaded, and a gradient and Adam's two numbers for each weight "
            f"that learns), and there are {gigabytes(room)}"
        )
        return refused(Check.MEMORY, evidence, CURE, least_bytes=least, room_bytes=room)
    try:
        found = footprint(parts, longest_prompt=longest_prompt, longest_completion=longest_completion)
    except torch.OutOfMemoryError:
        evidence = f"the worst batch did not fit when it was tried out, and there are {gigabytes(room)}"
        return refused(Check.MEMORY, evidence, CURE, least_bytes=least, room_bytes=room)
    return compared(found, room)


CURE = (
    "lower train.tokens_per_micro_batch, sampler.rows_per_batch, sampler.max_new_tokens or data.max_prompt_tokens, "
    "write student.activation_checkpointing = true, or train adapters with [student.lora]"
)


def compared(found: Footprint, room: int) -> Finding:
    """The verdict on a footprint."""
    phases = ", ".join(
        f"{phase} {gigabytes(count)} on {found.rows[phase]} rows" for phase, count in found.phases.items()
    )
    lasting = " + ".join(f"{what} {gigabytes(count)}" for what, count in found.lasting.items())
    others = f" + {gigabytes(found.kept)} of marks of the rows not tried out" if found.kept else ""
    blurred = "" if found.apart else "; the parts of a round could not be told apart here"
    evidence = (
        f"{gigabytes(found.peak)} at most of {gigabytes(room)}: {lasting}{others} + the largest of what a round takes "
        f"with rows of {found.prompt} + {found.completion} tokens, measured: {phases}{blurred}"
    )
    figures = {
        "peak_bytes": found.peak,
        "room_bytes": room,
        "lasting": dict(found.lasting),
        "phases": dict(found.phases),
        "kept": found.kept,
        "rows": dict(found.rows),
    }
    if found.peak > room:
        return refused(Check.MEMORY, evidence, CURE, **figures)
    if found.peak > CLOSE * room:
        return warned(Check.MEMORY, evidence, CURE, **figures)
    return passed(Check.MEMORY, evidence, **figures)
