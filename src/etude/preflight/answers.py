"""What does the teacher make of the student's own answers, and of where they end?

On-policy distillation learns from the teacher's marks on what the student writes. A student whose answers mean nothing
to the teacher learns nothing from them, and one that ends its answers with a token the teacher never uses learns never
to end (ms-swift #9526). It knows no recipe and samples nothing; rows come in.

Legend: C completion tokens of a row, N of several rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from etude.axes.names import Check, Gives
from etude.core.logprobs import next_token_logprobs
from etude.core.records import Rollout
from etude.models.roles import AbstractTeacher
from etude.preflight.findings import Finding, passed, refused, warned

# Starts that training recovered from, held-out reverse KL in nats a token: a pruned SmolLM2 from 1.4 to 0.8 (recipe
# smollm2-prune), the maze's student from 5.4 without a warm start (recipe maze, 0.01 to 0.62 of the routes right).
# Beyond, the teacher's marks are about text that it would never write, and they get worse with depth (arXiv 2603.25562,
# 2604.13016).
FURTHEST = 6.0
# Of the entropy of dice: a student whose own expectation of its words is worse than half of that of dice, of text that
# the teacher expects less than dice, has not learned to write.
CLUELESS = 0.5

NEVER = 1e-3  # a stop token below it everywhere is one the teacher does not use: case 13's fault gives it 1e-6
SELDOM = 0.05  # mean probability at the ends below which the teacher would rather go on


def warm_start(ours: Sequence[Tensor], theirs: Sequence[Tensor], vocab_size: int) -> Finding:
    """Whether the teacher can read what the student writes.

    Args:
        ours: [C] the student's log-probabilities of its own samples, a row each.
        theirs: [C] the teacher's.
        vocab_size: dice with so many sides expect each token with log(1 / vocab_size).
    """
    own, other = torch.cat(list(ours)).double().mean().item(), torch.cat(list(theirs)).double().mean().item()
    thirds = [torch.cat(part).double().mean().item() for part in _thirds(theirs)]
    dice = -math.log(vocab_size)
    figures = {"teacher": other, "student": own, "gap": own - other, "by_third": thirds, "uniform": dice}
    said = (
        f"of the student's samples the teacher expects {other:.2f} nats a token, the student {own:.2f}; by thirds "
        + ", ".join(f"{third:.2f}" for third in thirds)
    )
    clueless = other <= dice and own <= CLUELESS * dice
    if own - other <= FURTHEST and not clueless:
        return passed(Check.WARM_START, said, **figures)
    usual = f"starts that were recovered from lay up to 5.4 apart, and dice would give {dice:.2f}"
    return warned(
        Check.WARM_START,
        f"{said}; {usual}",
        "warm-start the student on answers of the teacher first (a stage with method sft or seqkd)",
        **figures,
    )


def _thirds(rows: Sequence[Tensor]) -> list[list[Tensor]]:
    """First, middle and last third of each row; a third without a token is left out."""
    parts: list[list[Tensor]] = [[], [], []]
    for row_C in rows:
        cuts = [len(row_C) * third // 3 for third in range(4)]
        for part, (start, end) in zip(parts, pairwise(cuts), strict=True):
            part.extend([row_C[start:end]] if end > start else [])
    return [part for part in parts if part]


@torch.no_grad()
def stop_probabilities(
    teacher: AbstractTeacher, rollouts: Sequence[Rollout], stop_ids: Sequence[int]
) -> tuple[list[Tensor], list[int]]:
    """[C, S] of each row the teacher's probability of each stop id at each place; and its likeliest id at the end."""
    head = teacher.head()
    assert head is not None  # asked of teachers with hidden states only
    probabilities, likeliest = [], []
    for score in teacher.score(rollouts, frozenset({Gives.HIDDEN_STATES}), 1.0):
        assert score.hidden is not None
        logprobs_CV = next_token_logprobs(head.logits(score.hidden.to(head.weight_VD.device)))
        probabilities.append(logprobs_CV[:, list(stop_ids)].exp().cpu().double())
        likeliest.append(int(logprobs_CV[-1].argmax()))
    return probabilities, likeliest


def stop_token(
    rollouts: Sequence[Rollout],
    probabilities_CS: Sequence[Tensor],
    stop_ids: Sequence[int],
    *,
    names: Sequence[str],
    likeliest: Sequence[str],
    whose: str = "the student's greedy answers",
) -> Finding:
    """Whether the teacher ends an answer with the token by which these rows end.

    A stop token that the teacher gives less than 1 in 1000 at every place of every row is one it does not use. One that
    it uses elsewhere, and not where these rows end, is told: they end too early, or in a place of their own.

    Args:
        rollouts: rows, those that were cut included.
        probabilities_CS: [C, S] of each, the teacher's probability of each stop id at each place.
        stop_ids: S ids.
        names: their spellings.
        likeliest: what the teacher would write at the end of each row.
        whose: what the rows are.
    """
    ended = [place for place, rollout in enumerate(rollouts) if not rollout.truncated]
    if not ended:
        anywhere = max(rows_CS.max().item() for rows_CS in probabilities_CS)
        return passed(
            Check.STOP,
            f"none of {len(rollouts)} of {whose} ended within the probe; the teacher's probability of a stop token "
            f"within them is at most {anywhere:.1e}",
            ended=0,
            anywhere=anywhere,
        )
    ids = [int(rollouts[place].completion_ids[-1]) for place in ended]
    columns = [list(stop_ids).index(id_) for id_ in ids]
    at_end = [probabilities_CS[place][-1, column].item() for place, column in zip(ended, columns, strict=True)]
    anywhere = max(rows_CS[:, column].max().item() for rows_CS in probabilities_CS for column in set(columns))
    mean = math.fsum(at_end) / len(at_end)
    used = ", ".join(sorted({names[column] for column in columns}))
    figures = {"ended": len(ended), "rows": len(rollouts), "mean": mean, "lowest": min(at_end), "anywhere": anywhere}
    said = f"at {len(ended)} ends of {whose} ({used}) the teacher's probability of it is {mean:.2g}"
    if mean >= SELDOM:
        return passed(Check.STOP, said, **figures)
    instead = ", ".join(sorted({repr(likeliest[place]) for place in ended})[:3])
    said = f"{said}, at most {anywhere:.1e} anywhere in them; it would write {instead} there"
    if anywhere >= NEVER:
        cure = "if answers soon run to the limit, warm-start the student on whole answers of the teacher"
        return warned(Check.STOP, said, cure, **figures)
    cure = "the student would learn never to stop: name the teacher's stop token in sampler.stop, warm-start on it"
    return refused(Check.STOP, said, cure, **figures)
