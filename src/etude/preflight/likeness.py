"""Is the student itself where it should be, and somebody else where a teacher should be? And is the writer the learner?

The student's own weights, read a second time through the teacher's door, must give no divergence beyond rounding: then
loading, precision, padding, head and vocabulary are the same on both ways. The real teacher must give more than that,
or there is nothing to learn. It knows no recipe.

Legend: C completion tokens of a row, N of several rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from etude.axes.names import Check, Gives, Source
from etude.core.divergences import reverse_kl
from etude.core.linear import OutputHead
from etude.core.logprobs import next_token_logprobs
from etude.core.records import Rollout
from etude.models.forward import completion_states, evaluating
from etude.models.roles import AbstractBackbone, AbstractStudent, AbstractTeacher
from etude.preflight.findings import Finding, passed, refused, warned
from etude.preflight.tolerance import Tolerance, size_of

_NOISE = 4.0  # times the student's divergence from itself, read alone, which is still called noise
_GRAVE = 10.0  # times the tolerance of the sampler's gap that no precision explains


@torch.no_grad()
def own_states(backbone: AbstractBackbone, rollouts: Sequence[Rollout], tokens_per_batch: int) -> list[Tensor]:
    """[C, D] of each row: the states that predict its completion."""
    states: dict[int, Tensor] = {}
    with evaluating(backbone):
        for indices, found in completion_states(backbone, rollouts, tokens_per_batch):
            states.update(zip(indices, found, strict=True))
    return [states[index] for index in range(len(rollouts))]


def divergence(ours: Sequence[Tensor], head: OutputHead, theirs: Sequence[Tensor], their_head: OutputHead) -> float:
    """Mean KL(ours || theirs) a token over the whole vocabulary, in nats."""
    total, count = 0.0, 0
    with torch.no_grad():
        for own_CD, other_CD in zip(ours, theirs, strict=True):
            own_CV = next_token_logprobs(head.logits(own_CD))
            other_CV = next_token_logprobs(their_head.logits(other_CD.to(their_head.weight_VD.device))).to(own_CV)
            total += reverse_kl(student_logprobs=own_CV, teacher_logprobs=other_CV).double().sum().item()
            count += own_CV.shape[0]
    return total / count


def noise_of(student: AbstractStudent, rollouts: Sequence[Rollout]) -> float:
    """The student's divergence from itself: rows read side by side against each read alone."""
    together = own_states(student.backbone, rollouts, tokens_per_batch=1 << 30)
    alone = [own_states(student.backbone, [rollout], tokens_per_batch=1)[0] for rollout in rollouts]
    head = student.backbone.head()
    return divergence(together, head, alone, head)


def from_teacher(student: AbstractStudent, teacher: AbstractTeacher, rollouts: Sequence[Rollout]) -> float:
    """Mean KL(student || teacher) a token; of a teacher without hidden states the mean log-ratio of the ids, its size.

    The latter is no estimate of the divergence on rows that somebody else wrote; it is zero for the same model, and
    for no other.
    """
    if Gives.HIDDEN_STATES in teacher.gives:
        scores = teacher.score(rollouts, frozenset({Gives.HIDDEN_STATES}), 1.0)
        theirs = [score.hidden for score in scores if score.hidden is not None]
        head = teacher.head()
        assert head is not None  # it gives hidden states
        ours = own_states(student.backbone, rollouts, tokens_per_batch=1 << 30)
        return divergence(ours, student.backbone.head(), theirs, head)
    scores = teacher.score(rollouts, frozenset({Gives.SAMPLED_LOGPROBS}), 1.0)
    theirs_N = torch.cat([score.sampled_logprobs for score in scores if score.sampled_logprobs is not None])
    return (torch.cat(student.logprobs(rollouts, 1.0)) - theirs_N).abs().double().mean().item()


def same(found: float, noise: float, tolerance: Tolerance) -> Finding:
    """Whether the student's weights, loaded a second time through the teacher's door, are the student.

    Args:
        found: `from_teacher` of that second model.
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
        found: `from_teacher` of the real teacher.
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


def same_writer(student: AbstractStudent, rollouts: Sequence[Rollout], tolerance: Tolerance) -> Finding:
    """Whether the trainer gives the tokens the probability that the sampler says it drew them with.

    A gap means that rows are not on-policy although everybody believes they are: another precision, another mask, other
    weights than the student's. Mean and largest gap over tokens at temperature 1.
    """
    rows = [rollout for rollout in rollouts if rollout.source is Source.STUDENT and rollout.raw_logprobs is not None]
    if not rows:
        return passed(Check.SAMPLER, "the student writes no row")
    theirs_N = torch.cat([rollout.raw_logprobs for rollout in rows if rollout.raw_logprobs is not None])
    gaps_N = torch.cat(student.logprobs(rows, 1.0)) - theirs_N
    size = size_of(gaps_N) | {"tokens": len(gaps_N)}
    said = (
        f"sampler and trainer are {size['mean']:.1e} nats apart on {len(gaps_N)} tokens (largest {size['largest']:.1e})"
    )
    if tolerance.holds(gaps_N):
        return passed(Check.SAMPLER, said, **size)
    cure = "write in the trainer's precision (sampler.dtype), or correct with importance weights"
    grave = not size["mean"] <= _GRAVE * tolerance.mean
    return (refused if grave else warned)(Check.SAMPLER, said, cure, **size)
