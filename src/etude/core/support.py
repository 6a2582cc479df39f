"""Top-k support: how two distributions over the whole vocabulary are coarsened to a few ids before they are compared.

Whose likeliest ids are kept is the *owner*, what stands for the others is the *tail*. `top_ids` and `kept_ids` choose
ids, `top_k_divergence` compares student and teacher on them, `kept_mass` and `overlap` say how much that leaves out.
The kept set is a constant: no gradient flows through the choice. Everything is per token and never reduced, and tokens
may have any leading shape. It knows no mask, no weight and no sampler.

The running example of the doctests: teacher p = (1/2, 1/4, 1/8, 1/8), student q = (1/8, 1/2, 1/4, 1/8).
Legend: n tokens, V vocabulary, k ids a side, K kept ids (k, or 2k for a union).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from etude.axes.names import Owner, Tail
from etude.core.divergences import LOG_OF_ZERO, DivergenceFn, reverse_kl

# Which ids are kept ---------------------------------------------------------------------------------------------------


def top_ids(logprobs_nV: Tensor, k: int) -> Tensor:
    """[n, k] int64: the k likeliest ids of each token, in no order; exactly k, whichever of those that tie at the edge.

    >>> p = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    >>> sorted(top_ids(p, 2).tolist())
    [0, 1]

    Raises:
        ValueError: k below 1 or above the vocabulary.
    """
    vocab_size = logprobs_nV.shape[-1]
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k is {k}; expected 1 to {vocab_size}, the ids of the vocabulary")
    return logprobs_nV.detach().topk(k, dim=-1, sorted=False).indices


def kept_ids(*, student_top_nk: Tensor, teacher_top_nk: Tensor, owner: Owner) -> Tensor:
    """[n, K] int64: the owner's ids. A union has 2k columns; an id that both sides keep stands twice, counts once.

    >>> q, p = (torch.tensor(x).log() for x in ([0.125, 0.5, 0.25, 0.125], [0.5, 0.25, 0.125, 0.125]))
    >>> ids = kept_ids(student_top_nk=top_ids(q, 2), teacher_top_nk=top_ids(p, 2), owner=Owner.UNION)
    >>> sorted(ids.tolist())
    [0, 1, 1, 2]
    """
    if owner is Owner.STUDENT:
        return student_top_nk
    if owner is Owner.TEACHER:
        return teacher_top_nk
    return torch.cat([student_top_nk, teacher_top_nk], dim=-1)


def _once(ids_nK: Tensor) -> tuple[Tensor, Tensor]:
    """The ids in ascending order, and where one repeats the id before it; each [n, K]."""
    ids_nK = ids_nK.sort(dim=-1).values
    repeated_nK = torch.zeros_like(ids_nK, dtype=torch.bool)
    repeated_nK[..., 1:] = ids_nK[..., 1:] == ids_nK[..., :-1]
    return ids_nK, repeated_nK


# What they leave out --------------------------------------------------------------------------------------------------


def kept_mass(logprobs_nV: Tensor, ids_nK: Tensor) -> Tensor:
    """[n] probability on the kept ids, each counted once; no gradient.

    >>> p = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    >>> kept_mass(p, torch.tensor([0, 1])), kept_mass(p, torch.tensor([0, 1, 1, 2]))
    (tensor(0.7500), tensor(0.8750))
    """
    return _kept(logprobs_nV.detach(), *_once(ids_nK)).exp().sum(-1)


def overlap(*, student_top_nk: Tensor, teacher_top_nk: Tensor) -> Tensor:
    """[n] float32: the share of the student's own top k among the teacher's top k.

    >>> overlap(student_top_nk=torch.tensor([1, 2]), teacher_top_nk=torch.tensor([0, 1]))
    tensor(0.5000)
    """
    _, repeated_n2k = _once(torch.cat([student_top_nk, teacher_top_nk], dim=-1))
    return repeated_n2k.sum(-1) / student_top_nk.shape[-1]


# The comparison -------------------------------------------------------------------------------------------------------


def top_k_divergence(
    divergence: DivergenceFn,
    *,
    student_logprobs_nV: Tensor,
    teacher_logprobs_nV: Tensor,
    ids_nK: Tensor,
    tail: Tail,
    drawn_ids_n: Tensor | None = None,
) -> Tensor:
    """[n] the divergence of student and teacher as far as the kept ids K (and the tail) tell them apart, in nats.

    Q_K and P_K are the mass of student and teacher on K, c = log q - log p. With K = V every tail is the full
    divergence.

    - `bucket`: one more id, of probability 1 - Q_K and 1 - P_K. The value is at most the full one (of the KLs,
      JSD, skewed KLs and total variation).
    - `truncate`: the divergence's own sum, over K alone; may be negative. Reverse KL: sum_K q_v c_v with the gradient
      sum_K q_v c_v grad log q_v; the derivative of that sum has grad Q_K more, which pushes mass out of K whatever the
      teacher says. Forward KL: sum_K p_v (log p_v - log q_v), gradient on logits P_K q_v - p_v on K and P_K q_v
      elsewhere; it is smallest where the student has all its mass on K.
    - `renormalise`: q / Q_K against p / P_K. Blind to how much mass is on K. A side that gives K no probability at all
      counts as even over it.
    - `sampled`: reverse KL only: the truncated head exactly, and for the drawn id y its c_y, with the gradient
      c_y grad log q(y), where y is not in K. Over y ~ q the expected value and gradient are the full ones exactly.

    Args:
        divergence: a function of `core.divergences`, its parameter filled in.
        student_logprobs_nV: [n, V] normalised; the gradient is right with respect to the logits behind them.
        teacher_logprobs_nV: [n, V] normalised.
        ids_nK: [n, K] int64 from `kept_ids`; an id that stands twice counts once.
        tail: what stands for the other ids.
        drawn_ids_n: [n] int64, with `sampled` and only with it: one id a token, drawn from the student as it is here.

    The teacher's top 2 of the example:

        >>> q, p = (torch.tensor(x).log() for x in ([0.125, 0.5, 0.25, 0.125], [0.5, 0.25, 0.125, 0.125]))
        >>> for tail in (Tail.BUCKET, Tail.TRUNCATE, Tail.RENORMALISE):
        ...     value = top_k_divergence(reverse_kl, student_logprobs_nV=q, teacher_logprobs_nV=p,
        ...                              ids_nK=torch.tensor([0, 1]), tail=tail)
        ...     print(f"{tail}: {value.item():.6f}")
        bucket: 0.325336
        truncate: 0.173287
        renormalise: 0.459580

    Raises:
        ValueError: shapes that do not belong together, `renormalise` with one id, `sampled` with another divergence
            than reverse KL, or drawn ids without `sampled` and the reverse.

    Reference: arXiv 2603.25562 (local support), arXiv 2605.11182 (the detached coefficient of `truncate`).
    """
    _check_shapes(student_logprobs_nV, teacher_logprobs_nV, ids_nK, drawn_ids_n)
    _check_tail(divergence, ids_nK.shape[-1], tail, drawn_ids_n)
    ids_nK, repeated_nK = _once(ids_nK)
    student_nK, teacher_nK = (
        _coarse(logprobs_nV, ids_nK, repeated_nK, tail) for logprobs_nV in (student_logprobs_nV, teacher_logprobs_nV)
    )
    values_n = divergence(student_logprobs=student_nK, teacher_logprobs=teacher_nK)
    if drawn_ids_n is None:
        return values_n
    return values_n + _drawn_tail(student_logprobs_nV, teacher_logprobs_nV, ids_nK, drawn_ids_n)


def _in_float32(logprobs: Tensor) -> Tensor:
    return logprobs.to(torch.promote_types(torch.float32, logprobs.dtype))


def _kept(logprobs_nV: Tensor, ids_nK: Tensor, repeated_nK: Tensor) -> Tensor:
    """[n, K] log-probabilities of the kept ids. A repeated one gets probability 0 on both sides: it counts nothing."""
    return _in_float32(logprobs_nV.gather(-1, ids_nK)).masked_fill(repeated_nK, -torch.inf)


class _LogRest(torch.autograd.Function):
    """[n] log of the probability outside the kept ids; minus infinity, with gradient 0, where there is none.

    Summed over the rest: as 1 - kept mass, a rest below 1e-7 would round to 0 in float32, and its log be worth 10,000
    nats. Not `logsumexp` of a masked copy, which keeps the copy for its backward pass and has no gradient where all is
    minus infinity: this takes one temporary [n, V] in each direction and keeps none.
    """

    @staticmethod
    def forward(ctx: Any, logprobs_nV: Tensor, ids_nK: Tensor) -> Tensor:
        rest_nV = logprobs_nV.scatter(-1, ids_nK, -torch.inf)
        highest_n1 = rest_nV.amax(-1, keepdim=True).clamp(min=LOG_OF_ZERO)  # infinity less infinity is no number
        log_rest_n1 = rest_nV.sub_(highest_n1).exp_().sum(-1, keepdim=True).log_().add_(highest_n1)
        ctx.save_for_backward(logprobs_nV, ids_nK, log_rest_n1)
        return log_rest_n1.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the parameters' names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        logprobs_nV, ids_nK, log_rest_n1 = ctx.saved_tensors
        shares_nV = (logprobs_nV - log_rest_n1.clamp(min=LOG_OF_ZERO)).exp_().scatter_(-1, ids_nK, 0.0)
        return shares_nV.mul_(grad_outputs[0].unsqueeze(-1)), None


def _coarse(logprobs_nV: Tensor, ids_nK: Tensor, repeated_nK: Tensor, tail: Tail) -> Tensor:
    """[n, K], or [n, K + 1] with a bucket: what a divergence is shown of one side."""
    kept_nK = _kept(logprobs_nV, ids_nK, repeated_nK)
    if tail is Tail.BUCKET:
        log_rest: Callable[..., Tensor] = _LogRest.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return torch.cat([kept_nK, log_rest(_in_float32(logprobs_nV), ids_nK).unsqueeze(-1)], dim=-1)
    if tail is Tail.RENORMALISE:
        return kept_nK.clamp(min=LOG_OF_ZERO).log_softmax(-1)  # clamped: nothing to renormalise gives no NaN
    return kept_nK


def _drawn_tail(
    student_logprobs_nV: Tensor, teacher_logprobs_nV: Tensor, ids_nK: Tensor, drawn_ids_n: Tensor
) -> Tensor:
    """[n] c_y with the gradient c_y grad log q(y) where the drawn id y is not kept, else 0."""
    drawn_n1 = drawn_ids_n.unsqueeze(-1)
    student_n, teacher_n = (
        _in_float32(logprobs_nV.gather(-1, drawn_n1)).squeeze(-1).clamp(min=LOG_OF_ZERO)
        for logprobs_nV in (student_logprobs_nV, teacher_logprobs_nV)
    )
    c_n = (student_n - teacher_n).detach()
    score_n = student_n - student_n.detach()  # zero, with the gradient of log q(y)
    return torch.where((ids_nK == drawn_n1).any(-1), 0.0, c_n * (1.0 + score_n))


def _check_shapes(student_nV: Tensor, teacher_nV: Tensor, ids_nK: Tensor, drawn_ids_n: Tensor | None) -> None:
    """Checked by hand, because gather takes a smaller index and leaves the other tokens out."""
    if teacher_nV.shape != student_nV.shape:
        raise ValueError(
            f"the teacher's log-probabilities have shape {tuple(teacher_nV.shape)} and the student's "
            f"{tuple(student_nV.shape)}; expected the same tokens and ids"
        )
    tokens = student_nV.shape[:-1]
    if ids_nK.shape[:-1] != tokens:
        raise ValueError(f"ids have shape {tuple(ids_nK.shape)}; expected {(*tokens, 'K')}, one row a token")
    if drawn_ids_n is not None and drawn_ids_n.shape != tokens:
        raise ValueError(f"drawn ids have shape {tuple(drawn_ids_n.shape)}; expected {tuple(tokens)}, one a token")


def _check_tail(divergence: DivergenceFn, num_kept: int, tail: Tail, drawn_ids_n: Tensor | None) -> None:
    if tail is Tail.RENORMALISE and num_kept == 1:
        raise ValueError("tail 'renormalise' with one kept id compares 1 with 1 and has no gradient; expected k >= 2")
    if (drawn_ids_n is not None) != (tail is Tail.SAMPLED):
        found = "no drawn ids" if drawn_ids_n is None else "drawn ids"
        raise ValueError(f"got {found} with tail '{tail}'; drawn ids go with 'sampled' and only with it")
    function = divergence.func if isinstance(divergence, partial) else divergence
    if tail is Tail.SAMPLED and function is not reverse_kl:
        raise ValueError(
            f"tail 'sampled' got {getattr(function, '__name__', function)}; one drawn id estimates reverse_kl alone"
        )
