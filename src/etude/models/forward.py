"""Running a backbone over finished rows: evaluation mode, batches of like length, and the states that predict tokens.

What student and frozen teacher have in common when they mark completions: both read each row once, padded on the right,
and keep the hidden state in front of every completion token. The shift by one and the padding themselves live in
`etude.core`; this file knows no role, no loss and no file.

Legend: B rows, T padded positions, C completion tokens of a row, N completion tokens of several rows, D hidden size,
V real vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from etude.core.collate import kept_sets, pad_rows
from etude.core.linear import OutputHead
from etude.core.logprobs import next_token_logprobs, pick, predicted_from
from etude.core.records import Rollout
from etude.core.weighting import entropy
from etude.errors import NonFiniteError
from etude.models.roles import AbstractBackbone

LOGITS_BYTES = 64 * 1024 * 1024  # float32 logits held at once while tokens are scored


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards, also after an exception, each submodule is back in the mode it was in.

    >>> model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())
    >>> with evaluating(model):
    ...     [part.training for part in model]
    [False, False]
    >>> [part.training for part in model]
    [True, False]
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def batches_by_length(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Indices of rows in batches of like length, the longest first; a row longer than the budget stands alone.

    Args:
        lengths: tokens of each row.
        tokens_per_batch: padded tokens (rows x longest row) a batch may hold.

    >>> batches_by_length([2, 9, 3, 3], tokens_per_batch=6)
    [[1], [2, 3], [0]]
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        # Sorted from the longest, so the first row of a batch is its width.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens_per_batch:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def first_too_long(rollouts: Sequence[Rollout], window: int | None) -> Rollout | None:
    """The first row with more tokens than a context window holds; None if all fit."""
    if window is None:
        return None
    return next((rollout for rollout in rollouts if rollout.token_ids.shape[0] > window), None)


def completion_states(
    backbone: AbstractBackbone, rollouts: Sequence[Rollout], tokens_per_batch: int
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Read all rows and yield, a batch at a time, which rows they are and each row's states.

    The state of a completion token is the one that *predicts* it, so its logits are about this very token. Gradients
    and modes are the caller's business.

    Yields:
        (indices into `rollouts`, for each of them the states [C, D] on the backbone's device).

    Raises:
        NonFiniteError: a state is not finite.
    """
    lengths = [rollout.token_ids.shape[0] for rollout in rollouts]
    for indices in batches_by_length(lengths, tokens_per_batch):
        rows = [rollouts[index] for index in indices]
        padded = pad_rows([row.token_ids for row in rows])
        hidden_BTD = backbone.hidden_states(*(tensor.to(backbone.device) for tensor in padded))
        states = [
            hidden_TD[predicted_from(row.num_prompt_tokens, row.num_completion_tokens).to(hidden_TD.device)]
            for hidden_TD, row in zip(hidden_BTD, rows, strict=True)
        ]
        for row, states_CD in zip(rows, states, strict=True):
            if not bool(states_CD.isfinite().all()):
                raise NonFiniteError(
                    f"the hidden states of row {row.prompt.row} hold values that are not finite; the weights are "
                    "damaged, or too large for this precision (float16 ends at 65,504: use bfloat16 or float32)"
                )
        yield indices, states


def token_logprobs(hidden_ND: Tensor, head: OutputHead, ids_N: Tensor, temperature: float) -> Tensor:
    """[N] float32 log-probability of one id a state, a few tokens at a time: N x V never exists."""
    return _read(hidden_ND, head, ids_N, temperature, pick)


def token_logprobs_and_entropies(hidden_ND: Tensor, head: OutputHead, ids_N: Tensor, temperature: float) -> Tensor:
    """[2, N] float32: the same, and the entropy of each state's whole distribution, in nats."""
    return _read(
        hidden_ND, head, ids_N, temperature, lambda lp_nV, ids_n: torch.stack([pick(lp_nV, ids_n), entropy(lp_nV)])
    )


def _read(
    hidden_ND: Tensor, head: OutputHead, ids_N: Tensor, temperature: float, marks: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """[..., N] float32: `marks` of (log-probabilities [n, V], ids [n]), a few tokens at a time."""
    head = head.in_logits_dtype(hidden_ND)
    num_tokens = max(1, LOGITS_BYTES // (4 * head.vocab_size))
    parts = [
        marks(next_token_logprobs(head.logits(part_nD), temperature), part_n)
        for part_nD, part_n in zip(hidden_ND.split(num_tokens), ids_N.split(num_tokens), strict=True)
    ]
    return torch.cat(parts, dim=-1).float()


def completion_logprobs(
    states: Sequence[Tensor], head: OutputHead, rollouts: Sequence[Rollout], temperature: float
) -> list[Tensor]:
    """[C] float32 on the CPU for each row: the log-probability of each of its completion ids.

    Args:
        states: [C, D] for each row, as `completion_states` yields them.
        rollouts: the same rows.
        temperature: both logits are divided by it before the softmax (the loss temperature).
    """
    return _by_row(token_logprobs, states, head, rollouts, temperature)


def completion_logprobs_and_entropies(
    states: Sequence[Tensor], head: OutputHead, rollouts: Sequence[Rollout], temperature: float
) -> list[Tensor]:
    """[2, C] float32 on the CPU for each row: the same, and the entropy in nats of what each id was drawn from."""
    return _by_row(token_logprobs_and_entropies, states, head, rollouts, temperature)


def completion_logprobs_and_kept_masses(
    states: Sequence[Tensor], head: OutputHead, rollouts: Sequence[Rollout], temperature: float
) -> list[Tensor]:
    """[2, C] float32 on the CPU for each row: the same, and the log of the probability on each id's kept set.

    It is 0 in a row without kept sets, from which nothing was cut; a term that is renormalised trains no such row.
    """
    found = kept_sets(rollouts)
    sets = None if found is None else found.to(states[0].device)

    def marks(hidden_ND: Tensor, head: OutputHead, ids_N: Tensor, temperature: float) -> Tensor:
        def of_part(logprobs_nV: Tensor, at_n: Tensor) -> Tensor:
            tokens = slice(int(at_n[0]), int(at_n[-1]) + 1)
            drawn_n = pick(logprobs_nV, ids_N[tokens])
            mass_n = torch.zeros_like(drawn_n) if sets is None else sets.log_mass(logprobs_nV, tokens)
            return torch.stack([drawn_n, mass_n])

        return _read(hidden_ND, head, torch.arange(len(ids_N)), temperature, of_part)

    return _by_row(marks, states, head, rollouts, temperature)


def _by_row(
    marks: Callable[[Tensor, OutputHead, Tensor, float], Tensor],
    states: Sequence[Tensor],
    head: OutputHead,
    rollouts: Sequence[Rollout],
    temperature: float,
) -> list[Tensor]:
    hidden_ND = torch.cat(list(states))
    ids_N = torch.cat([rollout.completion_ids for rollout in rollouts]).to(hidden_ND.device)
    of_all = marks(hidden_ND, head, ids_N, temperature).cpu()
    return [part.clone() for part in of_all.split([rollout.num_completion_tokens for rollout in rollouts], dim=-1)]
