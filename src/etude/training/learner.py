"""Optimiser steps from the scored rollouts of a round.

The order that keeps the denominators right: prepare the round once; for each step count the trainable tokens of all its
rows over all ranks; then run the micro-batches, whose losses are already divided. Head and objective run inside the
wrapped module's forward, so that data-parallel wrappers see them.

It knows no sampler and no teacher, only their records; the loop calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from etude.core.collate import collate
from etude.core.linear import OutputHead
from etude.core.objective import Objective
from etude.core.records import Batch, Scored
from etude.core.term import ALL_SOURCES, Term
from etude.errors import NonFiniteError, RecipeError
from etude.models.forward import batches_by_length
from etude.models.roles import AbstractBackbone, AbstractStudent
from etude.runtime.seeds import derive
from etude.runtime.world import World
from etude.training.stages import Plan

# How a generator's state is read, how it is put back, and how it is seeded.
_Generator = tuple[Callable[[], Tensor], Callable[[Tensor], object], Callable[[int], object]]

MAX_SKIPPED_IN_A_ROW = 3  # a run whose steps keep being non-finite is stopped rather than idled
MAX_EMPTY_ROUNDS = 3  # and so is one whose rounds keep having nothing to train; one of them may be chance


class Marked(nn.Module):
    """Backbone and objective as one module: the forward pass a data-parallel wrapper sees."""

    def __init__(self, backbone: AbstractBackbone, objective: Objective) -> None:
        super().__init__()
        self.backbone = backbone
        self.objective = objective

    def forward(self, batch: Batch, scales_J: Tensor, heads: Mapping[str, OutputHead]) -> tuple[Tensor, Tensor]:
        """The scaled loss of a micro-batch and its metric sums."""
        hidden_BTD = self.backbone.hidden_states(batch.token_ids_BT, batch.attention_mask_BT, batch.position_ids_BT)
        hidden_ND = hidden_BTD.flatten(0, 1)[batch.predicted_from_N]
        return self.objective.sum(hidden_ND, self.backbone.head(), batch, scales_J, heads)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did."""

    step: int  # steps taken, this one included
    metrics: dict[str, float]
    skipped: bool  # the gradient was not finite, or nothing was trained: weights and optimiser are as before


def micro_batches(rows: Sequence[Scored], token_budget: int) -> list[list[Scored]]:
    """Rows of similar length together, each group's padded size within the budget (a longer row stands alone)."""
    lengths = [row.rollout.token_ids.shape[0] for row in rows]
    return [[rows[index] for index in indices] for indices in batches_by_length(lengths, token_budget)]


class Learner:
    """Takes optimiser steps on a student.

    Args:
        student: who learns.
        objective: what the loss is.
        optimizer: over `student.trainable_parameters()`, at peak learning rate.
        heads: by teacher name, the heads that belong to scored hidden states.
        plan: how a round's rows become steps.
        rate: learning-rate factor of a step (from 0); see `stages.learning_rate_factor`.
        tokens_per_micro_batch: padded tokens of one forward and backward.
        clip_norm: largest global gradient norm; 0 leaves it as it is.
        seed: the recipe's; decides dropout where the student has any.
        scaler: loss scaling for float16.
    """

    def __init__(
        self,
        student: AbstractStudent,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        *,
        heads: Mapping[str, OutputHead],
        plan: Plan,
        rate: Callable[[int], float],
        world: World,
        tokens_per_micro_batch: int,
        clip_norm: float,
        seed: int,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.student = student
        self.objective = objective
        self.optimizer = optimizer
        self.heads = heads
        self.plan = plan
        self.rate = rate
        self.world = world
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.clip_norm = clip_norm
        self.seed = seed
        self.scaler = scaler or torch.amp.GradScaler(student.backbone.device.type, enabled=False)
        self.skipped_in_a_row = 0  # steps whose gradient was not finite
        self.empty_in_a_row = 0  # steps in which no token was trained
        self._peak_rates = [group["lr"] for group in optimizer.param_groups]
        self._module = world.wrap(Marked(student.backbone, objective))

    def prepare(self, scored: Sequence[Scored], step: int) -> list[Scored]:
        """Weights, masks and advantages of a round, fixed before its first step, which is number `step`."""
        if self.objective.needs_student_entropy:
            marks = self.student.logprobs_and_entropies([row.rollout for row in scored], self.objective.temperature)
            scored = [
                row.with_prepared(student_logprobs=logprobs_C, student_entropy=entropy_C)
                for row, (logprobs_C, entropy_C) in zip(scored, marks, strict=True)
            ]
        elif self.objective.needs_student_logprobs:
            logprobs = self.student.logprobs([row.rollout for row in scored], self.objective.temperature)
            scored = [row.with_prepared(student_logprobs=lp) for row, lp in zip(scored, logprobs, strict=True)]
        return self.objective.prepare(scored, step=step, total=self.world.sum, gather=self.world.gather)

    def learn(self, prepared: Sequence[Scored], step: int, num_rows: int) -> Iterator[StepReport]:
        """The steps of a round from number `step` (from 0) on; `num_rows` counts the round's rows over all ranks."""
        last = min(self.plan.steps, (self.plan.round_of(step) + 1) * self.plan.steps_per_round)
        for number in range(step, last):
            update = self.plan.place_of(number) % self.plan.updates_per_round
            rows = [row for row in prepared if self.plan.update_of(row.rollout.prompt.row, num_rows) == update]
            yield self._step(rows, number, spare=prepared[0])

    def _step(self, rows: Sequence[Scored], number: int, spare: Scored) -> StepReport:
        counts_J = self.world.sum(self.objective.counts(rows))
        factor = self.rate(number)
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = peak * factor
        if counts_J.any():
            self.empty_in_a_row = 0
            scales_J = self.objective.scales(counts_J, step=number, world_size=self.world.size)
            sums_M = self.world.sum(self._accumulate(rows, scales_J, number, spare))
            norm, skipped = self._clip_and_step()
        else:  # with a gradient of zero the optimiser would still move the weights, by momentum and decay
            self._count_empty(rows, number)
            sums_M = torch.zeros(len(self.objective.metric_names), dtype=torch.float64)
            norm, skipped = 0.0, True
        metrics = self.objective.summarise(sums_M) | {
            "gradient/norm": norm,
            "gradient/skipped": float(skipped),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }
        if self.objective.chooses:
            metrics |= self.objective.selected(self.world.sum(self.objective.choices(rows)))
        return StepReport(step=number + 1, metrics=metrics, skipped=skipped)

    def _accumulate(self, rows: Sequence[Scored], scales_J: Tensor, number: int, spare: Scored) -> Tensor:
        """Forward and backward of every micro-batch; returns the metric sums of this rank."""
        groups = micro_batches(rows, self.tokens_per_micro_batch)
        # Ranks must take part in the same number of backward passes: those with fewer add rows that train nothing.
        for _ in range(max(self.world.gather_objects([len(groups)])) - len(groups)):
            groups.append([without_weight(spare)])
        device = self.student.backbone.device
        sums_M = torch.zeros(len(self.objective.metric_names), dtype=torch.float64)
        version = self.plan.first_step(self.plan.round_of(number))  # of what the round's own rows were written with
        self.optimizer.zero_grad(set_to_none=True)
        self._module.train()
        try:
            for i, group in enumerate(groups):
                more = i + 1 < len(groups)
                with self._dropout_of(number, i), self._unsynchronised() if more else nullcontext():
                    loss, sums = self._module(collate(group, version=version).to(device), scales_J, self.heads)
                    self.scaler.scale(loss).backward()
                sums_M += sums.cpu()
        finally:
            self._module.eval()
        return sums_M

    def _dropout_of(self, number: int, micro_batch: int) -> AbstractContextManager[None]:
        """Dropout depends on the place in the run, not on the past."""
        place = derive(self.seed, "dropout", self.plan.stage, number, micro_batch, self.world.rank)
        return seeded(self.student.backbone.device, place)

    def _unsynchronised(self) -> AbstractContextManager[Any]:
        """Gradients of all micro-batches but the last stay on their rank."""
        return (
            self._module.no_sync() if isinstance(self._module, nn.parallel.DistributedDataParallel) else nullcontext()
        )

    def _clip_and_step(self) -> tuple[float, bool]:
        """The global gradient norm before clipping, and whether the step was skipped because it is not finite."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, self.clip_norm or float("inf")).item()
        skipped = not torch.isfinite(torch.tensor(norm)).item()
        if not skipped:  # gradients that are finite one by one may still have no finite norm, and a scaler would step
            self.scaler.step(self.optimizer)
        self.scaler.update()  # looks for a scale that fits
        self.optimizer.zero_grad(set_to_none=True)
        self._count_skipped(skipped, norm)
        return norm, skipped

    def _count_empty(self, rows: Sequence[Scored], number: int) -> None:
        self.empty_in_a_row += 1
        if self.empty_in_a_row >= min(MAX_EMPTY_ROUNDS * self.plan.steps_per_round, self.plan.steps):
            found = self.world.gather_objects([_found(row) for row in rows])
            first_step = self.plan.first_step(self.plan.round_of(number))
            left_out = (f"term '{term.name}' has {_leaving_out(term, first_step)}" for term in self.objective.terms)
            raise RecipeError(
                f"no token was trained in {self.empty_in_a_row} steps in a row; the last one had {_in_words(found)}, "
                f"and {'; '.join(left_out)}: change what leaves all of them out"
            )

    def _count_skipped(self, skipped: bool, norm: float) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        # A float16 scale starts high on purpose and needs some overflowing steps to settle.
        allowed = MAX_SKIPPED_IN_A_ROW if not self.scaler.is_enabled() else 10 * MAX_SKIPPED_IN_A_ROW
        if self.skipped_in_a_row >= allowed:
            raise NonFiniteError(
                f"the gradient norm was {norm} in {self.skipped_in_a_row} steps in a row; weights are as they were "
                'before the first of them; lower optim.learning_rate or use compute_dtype = "float32"'
            )


def _found(row: Scored) -> tuple[int, bool, str]:
    """Of a row what decides whether any of it is trained: tokens, whether it was cut, and who wrote it."""
    return row.rollout.num_completion_tokens, row.rollout.truncated, str(row.rollout.source)


def _in_words(found: Sequence[tuple[int, bool, str]]) -> str:
    writers = ", ".join(sorted({writer for *_, writer in found})) or "nobody"
    longest, cut = max((length for length, *_ in found), default=0), sum(cut for _, cut, _ in found)
    return f"{len(found)} rows by {writers}, the longest of {longest} tokens, {cut} of them cut at max_new_tokens"


def _leaving_out(term: Term, first_step: int) -> str:
    """The settings by which a term may train nothing of a row, as a recipe spells them.

    `teacher_entropy` is none of them: what its gate shuts out is counted all the same.
    """
    sources = ", ".join(f'"{source}"' for source in sorted(term.sources))
    said = {
        f"sources = [{sources}]": term.sources != ALL_SOURCES,
        "train_truncated = false": not term.train_truncated,
        f"skip_first = {term.skip_first}": term.skip_first > 0,
        f"first_tokens = {term.horizon_at(first_step)}": term.first_tokens is not None,
        f"entropy_share = {term.entropy_share}": term.entropy_share is not None,
        f"confident_wrong_share = {term.confident_wrong_share}": term.confident_wrong_share is not None,
    }
    return ", ".join(key for key, holds in said.items() if holds) or "nothing to train in what a tool wrote"


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers drawn inside, on the CPU and this device, follow from the seed; outside nobody notices.

    Dropout draws from torch's own generators, one for each device. That of mps is reached through its module alone.
    """
    cpu = torch.default_generator
    ways: list[_Generator] = [(cpu.get_state, cpu.set_state, cpu.manual_seed)]
    if device.type == "cuda":
        card = torch.cuda.default_generators[device.index]
        ways.append((card.get_state, card.set_state, card.manual_seed))
    if device.type == "mps":
        ways.append((torch.mps.get_rng_state, torch.mps.set_rng_state, torch.mps.manual_seed))
    states = [get() for get, _, _ in ways]
    for _, _, begin in ways:
        begin(seed)
    try:
        yield
    finally:
        for (_, put_back, _), state in zip(ways, states, strict=True):
            put_back(state)


def without_weight(row: Scored) -> Scored:
    """The same row, training nothing."""
    assert row.weights is not None
    return replace(row, weights=torch.zeros_like(row.weights))
