"""Are a teacher's scores those of its own model, each at its own token, whatever stands around the row?

The checks take any teacher through its door (`score`) and compare what comes out with other answers of the same door
and with a plain reading of the model behind it, where that is in this process. They know no recipe and no loss.

Legend: C completion tokens of a row, N completion tokens of several rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from etude.axes.names import Check, FinishReason, Gives, Source
from etude.core.linear import OutputHead
from etude.core.logprobs import next_token_logprobs, pick
from etude.core.records import Prompt, Rollout, Scores
from etude.errors import PairError
from etude.models.forward import evaluating
from etude.models.roles import AbstractBackbone, AbstractTeacher
from etude.preflight.findings import Finding, passed, refused, warned
from etude.preflight.tolerance import Tolerance, size_of

Marks = Mapping[Gives, Sequence[Tensor]]  # [C] log-probabilities of each row's ids, by what they were made from

_TELLING = 4.0  # times the tolerance: by so much a shift must move scores before it can be told from rounding


def echo(prompts: Sequence[Prompt], tokens: int) -> list[Rollout]:
    """Rows without a sampler: each prompt followed by the first `tokens` of its own ids, as if somebody had said so."""
    return [
        Rollout(
            prompt=prompt,
            completion_ids=prompt.token_ids[:tokens].clone(),
            source=Source.DATASET,
            finish_reason=FinishReason.LENGTH,
            version=0,
        )
        for prompt in prompts
    ]


def marks_of(teacher: AbstractTeacher, rollouts: Sequence[Rollout], needs: frozenset[Gives]) -> Marks:
    """What a teacher says of each row's ids at temperature 1, by each kind of mark that is needed of it."""
    kinds = needs & {Gives.SAMPLED_LOGPROBS, Gives.HIDDEN_STATES} or teacher.gives & {Gives.SAMPLED_LOGPROBS}
    return read_marks(teacher, rollouts, teacher.score(rollouts, kinds, 1.0))


def read_marks(teacher: AbstractTeacher, rollouts: Sequence[Rollout], scores: Sequence[Scores]) -> Marks:
    """The same of scores that have been given, by each kind that is in them.

    Raises:
        PairError: there are more or fewer of them than rows.
        RecordError: a row has too few or too many marks.
    """
    if len(scores) != len(rollouts):
        raise PairError(f"the teacher '{teacher.name}' gave {len(scores)} scores for {len(rollouts)} rows")
    for rollout, score in zip(rollouts, scores, strict=True):
        score.check(rollout)
    marks: dict[Gives, list[Tensor]] = {}
    drawn = [score.sampled_logprobs.double() for score in scores if score.sampled_logprobs is not None]
    hidden = [score.hidden for score in scores if score.hidden is not None]
    if drawn:
        marks[Gives.SAMPLED_LOGPROBS] = drawn
    head = teacher.head()
    if hidden and head is not None:
        head = head.in_logits_dtype(hidden[0])
        pairs = zip(hidden, rollouts, strict=True)
        marks[Gives.HIDDEN_STATES] = [_from_states(states_CD, head, row) for states_CD, row in pairs]
    return marks


@torch.no_grad()
def _from_states(states_CD: Tensor, head: OutputHead, rollout: Rollout) -> Tensor:
    logprobs_CV = next_token_logprobs(head.logits(states_CD.to(head.weight_VD.device)))
    return pick(logprobs_CV, rollout.completion_ids.to(logprobs_CV.device)).cpu().double()


@torch.no_grad()
def plain_logprobs(backbone: AbstractBackbone, prompt_ids: Tensor, completion_ids: Tensor) -> Tensor:
    """[C] float64: one row alone, no padding, no batch, token after token by the definition.

    On purpose without the code that training uses: the logits at place i - 1 are about the id at place i.
    """
    row = [*prompt_ids.tolist(), *completion_ids.tolist()]
    ids_1T = torch.tensor([row], device=backbone.device)
    with evaluating(backbone):
        hidden_1TD = backbone.hidden_states(ids_1T, torch.ones_like(ids_1T), torch.arange(len(row)).to(ids_1T)[None])
    head = backbone.head().in_logits_dtype(hidden_1TD)
    found = []
    for place in range(len(prompt_ids), len(row)):
        logits_V = head.logits(hidden_1TD[0, place - 1]).double().cpu()
        found.append(logits_V[row[place]] - logits_V.logsumexp(0))
    return torch.stack(found)


def aligned(teacher: str, marks: Marks, plain: Sequence[Tensor], tolerance: Tolerance) -> Finding:
    """Whether the scores are those of the tokens they stand at.

    Compared with `plain`, and with `plain` moved by one place: the figure of a shift, on this pair and these rows. A
    counting teacher says ln 0.9 = -0.105 of each token that counts on, and shifted by one ln(0.1 / 9) = -4.500.

    Args:
        teacher: its name.
        marks: what it says, by kind.
        plain: [C] of each row, of `plain_logprobs`.
        tolerance: of the precision it computes in.
    """
    shift = torch.cat([row_C[1:] - row_C[:-1] for row_C in plain])
    if not len(shift):
        return warned(
            Check.ALIGNMENT, "no row has two tokens, so no shift can be seen", "give the probe longer prompts"
        )
    told = size_of(shift)["mean"]
    for kind, rows in marks.items():
        gaps = torch.cat([mark_C - row_C for mark_C, row_C in zip(rows, plain, strict=True)])
        if not tolerance.holds(gaps):
            return _misaligned(teacher, kind, rows, plain, tolerance, size_of(gaps))
    everything = torch.cat([m - p for rows in marks.values() for m, p in zip(rows, plain, strict=True)])
    figures = size_of(everything) | {"shifted": told, "tokens": sum(map(len, plain))}
    if told < _TELLING * tolerance.mean:
        return warned(
            Check.ALIGNMENT,
            f"neighbouring tokens differ by {told:.2g} nats only, too little to tell a shift from rounding",
            "try prompts of the real data",
            **figures,
        )
    return passed(
        Check.ALIGNMENT,
        f"{figures['tokens']} scores of the {teacher} are off a plain reading by {figures['mean']:.1e} nats (largest "
        f"{figures['largest']:.1e}); shifted by one they would be off by {told:.2g}",
        **figures,
    )


def _misaligned(
    teacher: str, kind: Gives, rows: Sequence[Tensor], plain: Sequence[Tensor], tolerance: Tolerance, size: dict
) -> Finding:
    pairs = [(mark_C, row_C) for mark_C, row_C in zip(rows, plain, strict=True) if len(row_C) > 1]
    late = torch.cat([mark_C[1:] - row_C[:-1] for mark_C, row_C in pairs])
    early = torch.cat([mark_C[:-1] - row_C[1:] for mark_C, row_C in pairs])
    for name, gaps in (("before", late), ("after", early)):
        if tolerance.holds(gaps):
            return refused(
                Check.ALIGNMENT,
                f"the {kind} of the {teacher} are shifted by one: each is the score of the token {name} it (off by "
                f"{size['mean']:.2g} nats as they stand, by {size_of(gaps)['mean']:.1e} moved back)",
                "align scores and tokens where the teacher's answer is read",
                **size,
                shifted=size_of(gaps)["mean"],
            )
    return refused(
        Check.ALIGNMENT,
        f"the {kind} of the {teacher} are off a plain reading of its model by {size['mean']:.2g} nats a token (largest "
        f"{size['largest']:.2g}), and no shift by one explains it",
        "look for noise (repetition, below), another temperature, positions that count padding, or other weights",
        **size,
    )


def repeated(
    teacher: AbstractTeacher,
    rollouts: Sequence[Rollout],
    needs: frozenset[Gives],
    tolerance: Tolerance,
    first: Marks | None = None,
) -> Finding:
    """Whether a teacher says the same of a row when it is asked again, in another order, and beside other padding.

    Dropout left on, positions that count padding, and cached prefixes or buffers that are read before they are written
    (vllm #42019) all show here. Rows are scored as they are, in reverse, and each alone.

    Args:
        teacher: whoever marks.
        rollouts: at least two, of different lengths.
        needs: the kinds of marks that are needed of it.
        tolerance: of the precision it computes in.
        first: what it says of them as they are, where it has been asked.
    """
    first = marks_of(teacher, rollouts, needs) if first is None else first
    backwards = marks_of(teacher, rollouts[::-1], needs)
    alone = [marks_of(teacher, [rollout], needs) for rollout in rollouts]
    gaps = {
        "in another order": _gaps(first, {kind: rows[::-1] for kind, rows in backwards.items()}),
        "alone": _gaps(first, {kind: [one[kind][0] for one in alone] for kind in first}),
    }
    for how, found in gaps.items():
        if not tolerance.holds(found):
            size = size_of(found)
            return refused(
                Check.REPETITION,
                f"the {teacher.name} says something else of a row that it reads {how}: off by {size['mean']:.2g} nats "
                f"a token (largest {size['largest']:.2g})",
                "switch its dropout off, take positions from the attention mask, and keep no state between requests",
                **size,
            )
    size = size_of(torch.cat(list(gaps.values())))
    return passed(
        Check.REPETITION,
        f"{len(rollouts)} rows asked three times, in two orders and alone: off by {size['mean']:.1e} nats (largest "
        f"{size['largest']:.1e})",
        **size,
    )


def _gaps(ours: Marks, theirs: Marks) -> Tensor:
    return torch.cat([a - b for kind in ours for a, b in zip(ours[kind], theirs[kind], strict=True)])


def trimmed(rollouts: Sequence[Rollout], tokens: int) -> list[Rollout]:
    """The same rows, as if each had been finished after so many tokens."""

    def first(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:tokens]

    return [
        replace(
            rollout,
            completion_ids=rollout.completion_ids[:tokens],
            finish_reason=FinishReason.STOP,
            behaviour_logprobs=first(rollout.behaviour_logprobs),
            raw_logprobs=first(rollout.raw_logprobs),
            written=first(rollout.written),
        )
        for rollout in rollouts
    ]


def uneven(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Two rows of different lengths, so that one of them is padded beside the other: the first, halved, and the last."""
    half = max(1, rollouts[0].num_completion_tokens // 2)
    return [*trimmed(rollouts[:1], half), rollouts[-1]]
