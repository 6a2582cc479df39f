"""What travels through a round: Prompt, Rollout, Scores, Scored, and the padded Batch of one micro-step.

Each record is frozen, validates itself, and carries everything that belongs to it, so that nothing is tied together
by its place in a list. Lengths come from here and only from here: no mask is ever made by comparing ids with a pad id.

Legend: B rows, T padded positions, P prompt tokens of a row, C completion tokens of a row, D hidden size of a model,
N scored tokens of a batch (all rows' completion tokens that some term trains, one after the other), J terms, M ids of
all kept sets of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from etude.axes.names import FinishReason, Source
from etude.core.kept import KeptSets
from etude.errors import RecordError


def as_ids(ids: Sequence[int] | Tensor) -> Tensor:
    """A row of token ids as a one-dimensional int64 tensor on the CPU."""
    return torch.as_tensor(ids, dtype=torch.int64, device="cpu").reshape(-1)


def _check_ids(record: str, ids: Tensor, length: str) -> None:
    if ids.ndim != 1 or ids.numel() == 0 or ids.dtype != torch.int64:
        raise RecordError(
            f"{record} has shape {tuple(ids.shape)} and dtype {ids.dtype}; expected [{length}] int64, {length} >= 1 "
            "(as_ids makes it from a list; an answer that stops at once still has its stop id)"
        )


def _check_completion(record: str, values: Tensor | None, expected: int, *, ndim: int = 1, axis: int = 0) -> None:
    """One entry a completion token along `axis`, and no other number of dimensions: what broadcasts, mixes tokens."""
    if values is not None and (values.ndim != ndim or values.shape[axis] != expected):
        raise RecordError(
            f"{record} has shape {tuple(values.shape)} for {expected} completion tokens; expected {ndim} dimension"
            f"{'s' * (ndim > 1)} with exactly one entry a completion token in dimension {axis}"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """One question of a round, already in the student's ids."""

    token_ids: Tensor  # [P] int64: the tokenizer's own template, id for id
    row: int  # global row in the round: with the seed, it alone decides this row's random numbers
    completion_ids: Tensor | None = None  # [C] int64: the dataset's own answer, where it has one
    example: Mapping[str, Any] = field(default_factory=dict[str, Any])  # as loaded; verifiers read their answer here
    group: int | None = (
        None  # which question of the round, from 0, shared by its samples; None: its row, no other has it
    )

    def __post_init__(self) -> None:
        _check_ids(f"the prompt of row {self.row}", self.token_ids, "P")
        if self.completion_ids is not None:
            _check_ids(f"the dataset's answer of row {self.row}", self.completion_ids, "C")
        if self.group is not None and self.group < 0:
            raise RecordError(f"the prompt of row {self.row} has group {self.group}; expected a number from 0 on")

    @property
    def question(self) -> int:
        """The group, which a prompt without one has to itself."""
        return self.row if self.group is None else self.group


@dataclass(frozen=True, eq=False, slots=True)
class Rollout:
    """A prompt and the completion somebody wrote for it. Training ids are prompt ids + completion ids, as they are."""

    prompt: Prompt
    completion_ids: Tensor  # [C] int64: what was written, its stop id included when there is one
    source: Source  # who wrote it
    finish_reason: FinishReason  # why it ended
    version: int  # student weights version (optimiser steps taken) when it was written
    behaviour_logprobs: Tensor | None = None  # [C] float32: under the distribution really sampled from
    raw_logprobs: Tensor | None = None  # [C] float32: the writer's own, at temperature 1 over the real vocabulary
    written: Tensor | None = None  # [C] bool: True where the writer wrote the token, not a tool; None: it wrote all
    kept_ids: Tensor | None = None  # [M] int32: what top-p and top-k left to draw each token from, token after token
    kept_lengths: Tensor | None = None  # [C] int32: how many of the M ids are each token's, M their sum

    def __post_init__(self) -> None:
        row, length = self.prompt.row, self.completion_ids.numel()
        _check_ids(f"the completion of row {row}", self.completion_ids, "C")
        _check_completion(f"behaviour_logprobs of row {row}", self.behaviour_logprobs, length)
        _check_completion(f"raw_logprobs of row {row}", self.raw_logprobs, length)
        _check_completion(f"written of row {row}", self.written, length)
        self._check_kept(row)

    def _check_kept(self, row: int) -> None:
        """Ids and lengths belong together, and each token is one of those it was drawn from."""
        if self.kept_ids is None and self.kept_lengths is None:
            return
        if self.kept_ids is None or self.kept_lengths is None:
            raise RecordError(f"row {row} has one of kept_ids and kept_lengths; expected both, or neither")
        _check_completion(f"kept_lengths of row {row}", self.kept_lengths, self.completion_ids.numel())
        if self.kept_ids.ndim != 1 or int(self.kept_lengths.sum()) != self.kept_ids.numel():
            raise RecordError(
                f"kept_ids of row {row} have shape {tuple(self.kept_ids.shape)} and kept_lengths add up to "
                f"{int(self.kept_lengths.sum())}; expected one dimension of that many ids"
            )
        tokens_M = torch.arange(self.completion_ids.numel()).repeat_interleave(self.kept_lengths.long())
        found = torch.zeros(self.completion_ids.numel(), dtype=torch.bool)
        found[tokens_M[self.kept_ids == self.completion_ids[tokens_M]]] = True
        lost = ~found if self.written is None else ~found & self.written
        if bool(lost.any()):
            raise RecordError(
                f"token {int(lost.nonzero()[0])} of row {row} is none of the ids it was drawn from; kept_ids hold the "
                "drawn id of every token the writer wrote"
            )

    @property
    def token_ids(self) -> Tensor:
        """[P + C] int64: the ids both models are run on."""
        return torch.cat([self.prompt.token_ids, self.completion_ids])

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt.token_ids.shape[0]

    @property
    def num_completion_tokens(self) -> int:
        return self.completion_ids.shape[0]

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, eq=False, slots=True)
class Scores:
    """What one teacher says about one rollout: one entry for each completion token, aligned by that token."""

    teacher: str  # the teacher's name in the recipe
    sampled_logprobs: Tensor | None = (
        None  # [C] float32: log-probability of each completion id, at the loss temperature
    )
    hidden: Tensor | None = None  # [C, D] float32/bfloat16: the state that predicts each completion id
    kept_mass: Tensor | None = None  # [C] float32: log of the probability on each token's kept ids, likewise

    def check(self, rollout: Rollout) -> None:
        """Raise `RecordError` unless every field has one entry a completion token."""
        length, whose = rollout.num_completion_tokens, f"of teacher '{self.teacher}' for row {rollout.prompt.row}"
        _check_completion(f"sampled_logprobs {whose}", self.sampled_logprobs, length)
        _check_completion(f"hidden {whose}", self.hidden, length, ndim=2)
        _check_completion(f"kept_mass {whose}", self.kept_mass, length)


@dataclass(frozen=True, eq=False, slots=True)
class Scored:
    """A rollout with its marks, and what `Objective.prepare` made of them."""

    rollout: Rollout
    scores: Mapping[str, Scores]  # by teacher name
    weights: Tensor | None = None  # [J, C] float32: each term's mask times weight; zero where the term does not train
    advantages: Tensor | None = None  # [J, C] float32, detached; zero for analytic terms
    student_logprobs: Tensor | None = None  # [C] float32: the student before the round's first step, if a term needs it
    student_entropy: Tensor | None = None  # [C] float32, nats, of its distribution there: likewise
    candidates: Tensor | None = None  # [J] int64: tokens each term would train if it chose none of them
    reward: float | None = None  # what a verifier gives the whole row, if a term asks for it
    student_kept_mass: Tensor | None = None  # [C] float32: log of that student's probability on each token's kept ids

    def __post_init__(self) -> None:
        row, length = self.rollout.prompt.row, self.rollout.num_completion_tokens
        for scores in self.scores.values():
            scores.check(self.rollout)
        _check_completion(f"student_logprobs of row {row}", self.student_logprobs, length)
        _check_completion(f"student_entropy of row {row}", self.student_entropy, length)
        _check_completion(f"student_kept_mass of row {row}", self.student_kept_mass, length)
        _check_completion(f"weights of row {row}", self.weights, length, ndim=2, axis=1)
        _check_completion(f"advantages of row {row}", self.advantages, length, ndim=2, axis=1)
        if self.reward is not None and not math.isfinite(self.reward):
            raise RecordError(f"the reward of row {row} is {self.reward}; expected a finite number")

    def with_prepared(self, **fields: Tensor | None) -> Scored:
        """A copy with what the round fixed filled in: weights, advantages, the student's own marks."""
        return replace(self, **fields)


@dataclass(frozen=True, eq=False, slots=True)
class TeacherColumns:
    """One teacher's marks for the N scored tokens of a batch."""

    sampled_logprobs_N: Tensor | None  # [N] float32
    hidden_ND: Tensor | None  # [N, D]
    kept_mass_N: Tensor | None = None  # [N] float32

    def to(self, device: torch.device | str) -> TeacherColumns:
        """The same columns on another device."""
        columns = (self.sampled_logprobs_N, self.hidden_ND, self.kept_mass_N)
        return TeacherColumns(*(None if column is None else column.to(device) for column in columns))


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """The rows of one micro-step: padded ids for the forward pass, flat columns for the scored tokens."""

    token_ids_BT: Tensor  # [B, T] int64, padded on the right
    attention_mask_BT: Tensor  # [B, T] int64: 1 on real tokens, from recorded lengths
    position_ids_BT: Tensor  # [B, T] int64: 0, 1, 2, ... on the real tokens of each row
    predicted_from_N: Tensor  # [N] int64: flat index into B*T of the position whose logits predict the token
    target_ids_N: Tensor  # [N] int64: the scored token itself
    weights_JN: Tensor  # [J, N] float32
    advantages_JN: Tensor  # [J, N] float32
    behaviour_logprobs_N: Tensor  # [N] float32; zero for rows nobody sampled (dataset rows)
    raw_logprobs_N: Tensor  # [N] float32, of rows this round's student wrote; NaN for others
    teachers: Mapping[str, TeacherColumns]  # by teacher name
    kept: KeptSets | None = None  # of the N tokens; None: no row carries any

    @property
    def num_scored_tokens(self) -> int:
        return self.target_ids_N.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name not in ("teachers", "kept")}
        kept = None if self.kept is None else self.kept.to(device)
        return Batch(**moved, teachers={name: columns.to(device) for name, columns in self.teachers.items()}, kept=kept)
