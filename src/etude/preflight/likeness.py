"""Is the student itself where it should be, and somebody else where a teacher should be? And is the writer the learner?

The student's own weights, read a second time through the teacher's door, must give no divergence beyond rounding: then
loading, precision, padding, head and vocabulary are the same on both ways. The real teacher must give more than that,
or there is nothing to learn. It knows no recipe.

Legend: C completion tokens of a row, N of several rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.axes.names import Check, Source
from etude.core.divergences import reverse_kl
from etude.core.linear import OutputHead
from etude.core.logprobs import next_token_logprobs
from etude.core.records import Rollout, Scores
from etude.models.forward import completion_states, evaluating, token_logprobs
from etude.models.roles import AbstractBackbone
from etude.preflight.findings import Finding, passed, refused, warned
from etude.preflight.tolerance import Tolerance, size_of

_ALL = 1 << 30  # tokens of a batch: all rows side by side
_NOISE = 4.0  # times the student's divergence from itself, read alone, which is still called noise
_GRAVE = 10.0  # times the tolerance of the sampler's gap that no precision explains


@dataclass(frozen=True, eq=False, slots=True)
class Reading:
    """What a model of this process makes of some rows, read once."""

    rollouts: Sequence[Rollout]
    states: Sequence[Tensor]  # [C, D] of each row: what predicts its completion
    head: OutputHead

    @classmethod
    @torch.no_grad()
    def of(cls, backbone: AbstractBackbone, rollouts: Sequence[Rollout], *, together: bool = True) -> Reading:
        """Rows read side by side, or each alone."""
        states: dict[int, Tensor] = {}
        with evaluating(backbone):
            for indices, found in completion_states(backbone, rollouts, _ALL if together else 1):
                states.update(zip(indices, found, strict=True))
        head = backbone.head().in_logits_dtype(states[0])
        return cls(rollouts, [states[index] for index in range(len(rollouts))], head)

    @torch.no_grad()
    def logprobs(self) -> list[Tensor]:
        """[C] of each row, on the CPU: what it expects of the row's ids, at temperature 1."""
        pairs = zip(self.states, self.rollouts, strict=True)
        return [token_logprobs(states_CD, self.head, _ids(row, states_CD), 1.0).cpu() for states_CD, row in pairs]

    def first(self, count: int) -> Reading:
        """Of the first rows only."""
        return Reading(self.rollouts[:count], self.states[:count], self.head)


def _ids(rollout: Rollout, states_CD: Tensor) -> Tensor:
    return rollout.completion_ids.to(states_CD.device)


@torch.no_grad()
def divergence(ours: Reading, theirs: Sequence[Tensor], head: OutputHead) -> float:
    """Mean KL(ours || theirs) a token over the whole vocabulary, in nats."""
    total, count = 0.0, 0
    head = head.in_logits_dtype(theirs[0])
    for own_CD, other_CD in zip(ours.states, theirs, strict=True):
        own_CV = next_token_logprobs(ours.head.logits(own_CD))
        other_CV = next_token_logprobs(head.logits(other_CD.to(head.weight_VD.device))).to(own_CV)
        total += reverse_kl(student_logprobs=own_CV, teacher_logprobs=other_CV).double().sum().item()
        count += own_CV.shape[0]
    return total / count


def noise_of(backbone: AbstractBackbone, reading: Reading) -> float:
    """A model's divergence from itself: rows read side by side against each read alone."""
    alone = Reading.of(backbone, reading.rollouts, together=False)
    return divergence(reading, alone.states, alone.head)


def distance(reading: Reading, scores: Sequence[Scores], head: OutputHead | None) -> float:
    """Mean KL(student || teacher) a token; of a teacher without hidden states the mean log-ratio of the ids, its size.

    The latter is no estimate of the divergence on rows that somebody else wrote; it is zero for the same model, and
    hardly ever for another.
    """
    hidden = [score.hidden for score in scores if score.hidden is not None]
    if hidden and head is not None:
        return divergence(reading, hidden, head)
    theirs_N = torch.cat([score.sampled_logprobs for score in scores if score.sampled_logprobs is not None])
    return (torch.cat(reading.logprobs()) - theirs_N).abs().double().mean().item()


def same(found: float, noise: float, tolerance: Tolerance) -> Finding:
    """Whether the student's weights, loaded a second time through the teacher's door, are the student.

    Args:
        found: `distance` of that second model.
        noise: `noise_of` the student.
        tolerance: of the coarser of both precisions.
    """
    floor = max(tolerance.divergence, _NOISE * noise)
    figures = {"divergence": found, "noise": noise, "floor": floor}
    if found <= floor:
        return passed(
            Check.IDENTITY,
            f"the student through the teacher's door is {found:.1e} nats a token from itself (read alone instead of "
            f"side by side: {noise:.1e})",
            **figures,
        )
    return refused(
        Check.IDENTITY,
        f"the student's own weights, loaded through the teacher's door, are {found:.2g} nats a token from the student; "
        f"rounding explains {floor:.1e}",
        "see that both doors load the same weights: tied or untied head, adapters, dtype, a template of layers",
        **figures,
    )


def different(found: float, noise: float, tolerance: Tolerance, *, self_teacher: bool, at_floor: str = "") -> Finding:
    """Whether the teacher is somebody else than the student.

    Args:
        found: `distance` of the real teacher.
        noise: `noise_of` the student.
        tolerance: of the coarser of both precisions.
        self_teacher: the recipe says that the teacher is the student itself, asked otherwise or at another time.
        at_floor: what to say of the teacher beside.
    """
    floor = max(tolerance.divergence, _NOISE * noise)
    figures = {"divergence": found, "noise": noise, "floor": floor}
    if found > floor:
        return passed(Check.DIFFERENCE, f"the teacher is {found:.2g} nats a token from the student", **figures)
    said = f"the teacher is the student, {found:.1e} nats a token apart{at_floor}"
    if self_teacher:
        return warned(
            Check.DIFFERENCE, said, "as long as they are asked the same, there is nothing to learn", **figures
        )
    return refused(Check.DIFFERENCE, said, "name another model in teacher.model", **figures)


def same_writer(reading: Reading, tolerance: Tolerance) -> Finding:
    """Whether the trainer gives the tokens the probability that the sampler says it drew them with.

    A gap means that rows are not on-policy although everybody believes they are: another precision, another mask, other
    weights than the student's. Mean and largest gap over tokens at temperature 1.
    """
    pairs = [
        (row.raw_logprobs, logprobs_C)
        for row, logprobs_C in zip(reading.rollouts, reading.logprobs(), strict=True)
        if row.source is Source.STUDENT and row.raw_logprobs is not None
    ]
    if not pairs:
        return passed(Check.SAMPLER, "the student writes no row")
    gaps_N = torch.cat([theirs_C - ours_C for theirs_C, ours_C in pairs])
    size = size_of(gaps_N) | {"tokens": len(gaps_N)}
    said = (
        f"sampler and trainer are {size['mean']:.1e} nats apart on {len(gaps_N)} tokens (largest {size['largest']:.1e})"
    )
    if tolerance.holds(gaps_N):
        return passed(Check.SAMPLER, said, **size)
    cure = "write in the trainer's precision (sampler.dtype), or correct with importance weights"
    grave = not size["mean"] <= _GRAVE * tolerance.mean
    return (refused if grave else warned)(Check.SAMPLER, said, cure, **size)
