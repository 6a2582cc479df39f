"""A round tried out on the parts of a run, to be measured: nothing learned, nothing saved, nothing recorded.

Everything is done as the loop does it, at a learning rate of zero: the work is the same and the weights stay as they
are, bit for bit. Who writes how many of the rows is taken as a mean over the run. `preflight/duration.py`,
`preflight/footprint.py` and `preflight/determinism.py` measure it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from etude.axes.names import FinishReason, Source
from etude.core.records import Prompt, Rollout, Scored
from etude.models.joint import JointSampler
from etude.models.mixture import DatasetSampler, MixtureSampler
from etude.models.replay import ReplaySampler
from etude.models.roles import AbstractSampler
from etude.models.sampling import InProcessSampler
from etude.runtime.seeds import Key
from etude.training.evaluation import score_rows
from etude.training.learner import Learner
from etude.training.loop import Parts

PURPOSE = "preflight"
_PLACES = 32  # of a run, at which a share that moves is looked at


@dataclass(frozen=True, slots=True)
class Writer:
    """Somebody who writes rows, and the share of them, as a mean over the run."""

    sampler: AbstractSampler
    share: float

    @property
    def source(self) -> Source:
        """Whose rows they are."""
        if isinstance(self.sampler, DatasetSampler):
            return Source.DATASET
        return self.sampler.source if isinstance(self.sampler, InProcessSampler) else Source.STUDENT


def writers_of(sampler: AbstractSampler, steps: int, share: float = 1.0) -> list[Writer]:
    """Those who write rows themselves; what their shares lack to 1 is handed out again from earlier rounds.

    Args:
        sampler: the run's.
        steps: optimiser steps of the run, over which a share may move.
        share: of the rows that are this sampler's.
    """
    places = [steps * place // _PLACES for place in range(_PLACES)]
    if isinstance(sampler, MixtureSampler):
        own = share * sum(sampler.student_fraction.value(place) for place in places) / _PLACES
        found = [*writers_of(sampler.student, steps, own), *writers_of(sampler.other, steps, share - own)]
        return [writer for writer in found if writer.share > 0.0]
    if isinstance(sampler, ReplaySampler):
        replayed = sum(sampler.replay_fraction.value(place) for place in places) / _PLACES
        return writers_of(sampler.student, steps, share * (1.0 - replayed))
    return [Writer(sampler, share)]


def writing(sampler: AbstractSampler, *, max_new_tokens: int, never_stop: bool = False) -> AbstractSampler:
    """The same writer with answers up to this length, or of exactly this length; a dataset's are what they are."""
    if isinstance(sampler, JointSampler):
        together = copy(sampler)
        student = writing(sampler.student, max_new_tokens=max_new_tokens, never_stop=never_stop)
        assert isinstance(student, InProcessSampler)  # as it was
        together.student = student
        return together
    if not isinstance(sampler, InProcessSampler):
        return sampler
    stop_ids = () if never_stop else sampler.settings.stop_ids
    return sampler.with_settings(replace(sampler.settings, max_new_tokens=max_new_tokens, stop_ids=stop_ids))


def idle(learner: Learner) -> Learner:
    """The same learner at a learning rate of zero: it works and does not learn."""
    other = copy(learner)
    other.rate = lambda step: 0.0
    return other


def allocate_state(learner: Learner) -> None:
    """Let the optimiser make its state, by a step with gradients of zero at a learning rate of zero."""
    optimizer = learner.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def key_of(parts: Parts) -> Key:
    """What a rehearsal draws with: no key of the run itself."""
    return Key(parts.seed, PURPOSE, parts.plan.stage, 0)


def own_prompts(parts: Parts, number: int = 0) -> list[Prompt]:
    """This process's prompts of a round."""
    return [prompt for prompt in parts.prompts(number) if prompt.row % parts.world.size == parts.world.rank]


class Stopwatch:
    """Seconds by name, of work that may run on a card."""

    clock = staticmethod(perf_counter)  # a benchmark on a busy machine takes the processor's seconds instead

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time one part, all of what it started included."""
        self._wait()
        began = self.clock()
        yield
        self._wait()
        self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


@dataclass(frozen=True, eq=False, slots=True)
class Rehearsal:
    """One round that was tried out."""

    seconds: Mapping[str, float]  # by part of the loop
    rows: list[Scored]  # prepared, as they were trained
    learned: list[dict[str, float]]  # the metrics of each step

    @property
    def prompt_tokens(self) -> float:
        """Of a row, mean."""
        return sum(row.rollout.num_prompt_tokens for row in self.rows) / len(self.rows)

    @property
    def completion_tokens(self) -> float:
        """Of a row, mean."""
        return sum(row.rollout.num_completion_tokens for row in self.rows) / len(self.rows)


def rehearse(parts: Parts, *, max_new_tokens: int, number: int = 0, rows: int | None = None) -> Rehearsal:
    """A round as the loop does it, on the first `rows` of its prompts (None: all)."""
    watch, learner, first_step = Stopwatch(parts.student.backbone.device), idle(parts.learner), 0
    with watch.span("prompts"):
        prompts = own_prompts(parts, number)[:rows]
    with watch.span("refresh"):
        parts.sampler.refresh(parts.student, version=0)
    writers = [
        Writer(writing(writer.sampler, max_new_tokens=max_new_tokens), writer.share)
        for writer in writers_of(parts.sampler, parts.plan.steps)
    ]
    with watch.span("sample"):
        rollouts = _write(writers, prompts, key_of(parts))
    with watch.span("score"):
        scored = score_rows(rollouts, parts.teachers, parts.objective, parts.reward)
    with watch.span("prepare"):
        prepared = learner.prepare(scored, first_step)
    with watch.span("learn"):
        learned = [report.metrics for report in learner.learn(prepared, first_step, len(prompts) * parts.world.size)]
    return Rehearsal(watch.seconds, prepared, learned)


def _write(writers: Sequence[Writer], prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
    """Each writer's share of the rows, one after the other; what is left over repeats them, as a store would."""
    rows: list[Rollout] = []
    share = 0.0
    for writer in writers:
        share += writer.share
        end = round(share * len(prompts)) if rows else max(1, round(share * len(prompts)))  # somebody must have written
        rows += writer.sampler.sample(prompts[len(rows) : end], key)
    for place in range(len(rows), len(prompts)):
        earlier = rows[place % len(rows)]
        rows.append(replace(earlier, prompt=replace(earlier.prompt, row=prompts[place].row)))
    return rows


def invented_prompts(prompts: Sequence[Prompt], length: int, vocab_size: int) -> list[Prompt]:
    """The same rows and groups with prompts of this length, their ids from all over the vocabulary."""
    ids = torch.arange(length) * 7919 % vocab_size  # a prime, so that neighbours differ
    return [replace(prompt, token_ids=(ids + prompt.row) % vocab_size, completion_ids=None) for prompt in prompts]


def invented_rollout(prompt: Prompt, length: int, vocab_size: int, source: Source) -> Rollout:
    """A row of this length that nobody wrote; it counts as ended, so that every term of its source trains it."""
    ids = (torch.arange(length) * 7907 + prompt.row) % vocab_size
    even = None if source is Source.DATASET else torch.full((length,), -torch.tensor(float(vocab_size)).log().item())
    return Rollout(
        prompt=prompt,
        completion_ids=ids,
        source=source,
        finish_reason=FinishReason.STOP,
        version=0,
        behaviour_logprobs=even,
        raw_logprobs=even,
    )
