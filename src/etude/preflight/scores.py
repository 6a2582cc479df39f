"""Are a teacher's scores those of its own model, each at its own token, whatever stands around the row?

The checks take any teacher through its door (`score`) and compare what comes out with other answers of the same door
and with a plain reading of the model behind it, where that is in this process. They know no recipe and no loss.

Legend: C completion tokens of a row, N completion tokens of several rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    """Rows without a sampler: each prompt followed by `tokens` of the different ids that all of them hold.

    Different ones, because a model gives a row of one repeated id the same state everywhere, and no shift would show.
    """
    ids_K = torch.cat([prompt.token_ids for prompt in prompts]).unique()
    return [
        Rollout(
            prompt=prompt,
            completion_ids=ids_K.roll(-place).repeat(tokens)[:tokens],
            source=Source.DATASET,
            finish_reason=FinishReason.LENGTH,
            version=0,
        )
        for place, prompt in enumerate(prompts)
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


@dataclass(frozen=True, eq=False, slots=True)
class Plain:
    """[C] float64 log-probabilities of a row's ids by the definition, and by two mistakes."""

    right_C: Tensor  # from the state one place before the id, which predicts it
    late_C: Tensor  # from the state before that one
    early_C: Tensor  # from the state at the id itself

    @classmethod
    @torch.no_grad()
    def of(cls, backbone: AbstractBackbone, prompt_ids: Tensor, completion_ids: Tensor) -> Plain:
        """One row alone, no padding, no batch, token after token.

        On purpose without the code that training uses: the logits at place i - 1 are about the id at place i.
        """
        row = [*prompt_ids.tolist(), *completion_ids.tolist()]
        ids_1T = torch.tensor([row], device=backbone.device)
        places_1T = torch.arange(len(row), device=backbone.device)[None]
        with evaluating(backbone):
            hidden_TD = backbone.hidden_states(ids_1T, torch.ones_like(ids_1T), places_1T)[0]
        places = range(len(prompt_ids), len(row))
        read = list(range(max(0, places.start - 2), places.stop))
        logits = dict(zip(read, backbone.head().logits(hidden_TD[read]).double().cpu(), strict=True))

        def expected(back: int) -> Tensor:
            return torch.stack([logits[max(0, i - back)].log_softmax(0)[row[i]] for i in places])

        return cls(right_C=expected(1), late_C=expected(2), early_C=expected(0))


def aligned(teacher: str, marks: Marks, plain: Sequence[Plain], tolerance: Tolerance) -> Finding:
    """Whether the scores are those of the tokens they stand at.

    Compared with a plain reading, and with what a shift by one would give on this pair and these rows. A counting
    teacher says ln 0.9 = -0.105 of each token that counts on, and from the state before ln(0.1 / 9) = -4.500.

    Args:
        teacher: its name.
        marks: what it says, by kind.
        plain: of each row.
        tolerance: of the precision it computes in.
    """
    found: dict[str, float] = {}
    for kind, rows in marks.items():
        gaps = torch.cat([mark_C - row.right_C for mark_C, row in zip(rows, plain, strict=True)])
        if not tolerance.holds(gaps):
            return _misaligned(teacher, kind, rows, plain, tolerance, size_of(gaps))
        shift = min(
            (size_of(shift)["mean"] for shift in _shifts(kind, [row.right_C for row in plain], plain)), default=0.0
        )
        size = size_of(gaps) | {"shifted": shift, "tokens": len(gaps)}
        if shift < _TELLING * tolerance.mean:
            return warned(
                Check.ALIGNMENT,
                f"a shift by one would move the {kind} of these rows by {shift:.2g} nats only, too little to tell it "
                "from rounding",
                "try prompts of the real data, or longer ones",
                **size,
            )
        found = size if size["mean"] >= found.get("mean", 0.0) else found
    return passed(
        Check.ALIGNMENT,
        f"{found['tokens']} scores of the {teacher} are off a plain reading by {found['mean']:.1e} nats (largest "
        f"{found['largest']:.1e}); shifted by one they would be off by {found['shifted']:.2g}",
        **found,
    )


def _shifts(kind: Gives, marks: Sequence[Tensor], plain: Sequence[Plain]) -> list[Tensor]:
    """[N] gaps between marks and what they would be if they were the token's before, and the token's after.

    Log-probabilities move as they are; of states that move, each token is expected by another one's state.
    """
    pairs = [(mark_C, row) for mark_C, row in zip(marks, plain, strict=True) if len(mark_C) > 1]
    if not pairs:
        return []
    if kind is Gives.HIDDEN_STATES:
        late = [mark_C[1:] - row.late_C[1:] for mark_C, row in pairs]
        early = [mark_C[:-1] - row.early_C[:-1] for mark_C, row in pairs]
    else:
        late = [mark_C[1:] - row.right_C[:-1] for mark_C, row in pairs]
        early = [mark_C[:-1] - row.right_C[1:] for mark_C, row in pairs]
    return [torch.cat(late), torch.cat(early)]


def _misaligned(
    teacher: str,
    kind: Gives,
    rows: Sequence[Tensor],
    plain: Sequence[Plain],
    tolerance: Tolerance,
    size: dict[str, float],
) -> Finding:
    for name, gaps in zip(("before", "after"), _shifts(kind, rows, plain), strict=False):
        if tolerance.holds(gaps):
            back = size_of(gaps)["mean"]
            return refused(
                Check.ALIGNMENT,
                f"the {kind} of the {teacher} are shifted by one: each is that of the token {name} (off by "
                f"{size['mean']:.2g} nats as they stand, by {back:.1e} moved back)",
                "align scores and tokens where the teacher's answer is read",
                **size,
                shifted=back,
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
    """The first row, halved, and the last: of different lengths, so that one is padded beside the other."""
    half = max(1, rollouts[0].num_completion_tokens // 2)
    return [*trimmed(rollouts[:1], half), rollouts[-1]]
