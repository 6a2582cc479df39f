"""Per-token divergences of two log-probability tensors over the same ids; never reduced over tokens.

Each takes normalised `student_logprobs` and `teacher_logprobs` of shape [..., V] by keyword and returns [...], in nats;
gradients are right with respect to the logits that the log-probabilities were normalised from, not with respect to
log-probabilities as free variables. They know no mask, no weight and no sampling. Inputs in half precision are computed
in float32. A probability of exactly zero (a log-probability of minus infinity) gives no NaN in value or gradient on
either side: 0 log 0 is 0, and an id that only the second distribution of a KL rules out counts with `LOG_OF_ZERO`
instead of minus infinity, so that the student is pushed off it with a large finite force instead of breaking the step.

The running example of the doctests: teacher p = (1/2, 1/4, 1/8, 1/8), student q = (1/8, 1/2, 1/4, 1/8).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from etude.axes.names import Divergence

DivergenceFn = Callable[..., Tensor]

LOG_OF_ZERO = -1e4  # nats; far below any log-probability a float32 softmax of real logits gives


def _in_float32(logprobs: Tensor) -> Tensor:
    return logprobs.to(torch.promote_types(torch.float32, logprobs.dtype))


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second), every log-probability at least `LOG_OF_ZERO`: 0 log 0 is 0, and nothing is infinite.

    `first` is detached inside the log-ratio: sum_v exp(first_v) * 1 is constant for normalised log-probabilities, so
    that part of the derivative is zero on paper and only rounding noise in floating point. Without it the gradient on
    the logits is exactly zero where the two distributions are equal.
    """
    first, second = _in_float32(first), _in_float32(second)
    ratio = first.detach().clamp(min=LOG_OF_ZERO) - second.clamp(min=LOG_OF_ZERO)
    return (first.exp() * ratio).sum(-1)


def forward_kl(*, student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(teacher || student) = sum_v p_v (log p_v - log q_v). Gradient on student logits: q - p.

    >>> p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
    >>> round(forward_kl(student_logprobs=q, teacher_logprobs=p).item(), 6)  # 0.625 ln 2
    0.433217

    Reference: Hinton et al. 2015 (distillation); the supervised objective of Agarwal et al. 2023 (GKD), eq. 1.
    """
    return _kl(teacher_logprobs, student_logprobs)


def reverse_kl(*, student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(student || teacher) = sum_v q_v c_v, c = log q - log p. Gradient on student logits: q (c - KL).

    >>> p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
    >>> round(reverse_kl(student_logprobs=q, teacher_logprobs=p).item(), 6)  # 0.5 ln 2
    0.346574

    Reference: Gu et al. 2023 (MiniLLM), eq. 1, here for one token with its state fixed.
    """
    return _kl(student_logprobs, teacher_logprobs)


def _log_mixture(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """log(weight * exp(first) + (1 - weight) * exp(second)), 0 < weight < 1.

    Lifted to the smallest normal number where both are (nearly) impossible, since log has no gradient at 0; nothing is
    weighed there.
    """
    first, second = _in_float32(first), _in_float32(second)
    mixture = weight * first.exp() + (1.0 - weight) * second.exp()
    return mixture.clamp(min=torch.finfo(mixture.dtype).tiny).log()


def jsd(*, student_logprobs: Tensor, teacher_logprobs: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence; `beta` weighs the *teacher* in the mixture m = beta p + (1 - beta) q.

    beta KL(p || m) + (1 - beta) KL(q || m) for 0 < beta < 1. The formula goes to zero at both ends, so the ends are
    defined as what the GKD paper means by them: `beta=0` is forward KL, `beta=1` is reverse KL.

    >>> p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
    >>> [round(jsd(student_logprobs=q, teacher_logprobs=p, beta=b).item(), 6) for b in (0.0, 0.1, 0.5, 0.9, 1.0)]
    [0.433217, 0.037234, 0.092089, 0.031399, 0.346574]

    Note the jump of scale next to the ends: JSD(beta) / beta goes to forward KL as beta goes to 0. `Objective.warnings`
    names a beta within 0.05 of an end.

    Raises:
        ValueError: beta outside [0, 1].

    Reference: Agarwal et al. 2023 (GKD), section 2; some libraries weigh the student instead.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; it is the teacher's weight in the mixture, between 0 and 1")
    if beta == 0.0:
        return forward_kl(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    if beta == 1.0:
        return reverse_kl(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    # Detached: the derivative through m is -sum_v dm_v, and the probabilities of m always sum to one.
    mixture = _log_mixture(teacher_logprobs, student_logprobs, beta).detach()
    return beta * _kl(teacher_logprobs, mixture) + (1.0 - beta) * _kl(student_logprobs, mixture)


def _check_alpha(alpha: float) -> None:
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha is {alpha}; a skew lies strictly between 0 and 1 (0 is the plain KL)")


def skew_forward_kl(*, student_logprobs: Tensor, teacher_logprobs: Tensor, alpha: float) -> Tensor:
    """KL(p || alpha p + (1 - alpha) q): forward KL with a bounded gradient.

    >>> p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
    >>> round(skew_forward_kl(student_logprobs=q, teacher_logprobs=p, alpha=0.1).item(), 6)
    0.32127

    Raises:
        ValueError: alpha outside (0, 1).

    Reference: Ko et al. 2024 (DistiLLM), eq. 4; alpha = 0.1 there.
    """
    _check_alpha(alpha)
    return _kl(teacher_logprobs, _log_mixture(teacher_logprobs, student_logprobs, alpha))


def skew_reverse_kl(*, student_logprobs: Tensor, teacher_logprobs: Tensor, alpha: float) -> Tensor:
    """KL(q || (1 - alpha) p + alpha q): reverse KL with a bounded gradient.

    >>> p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
    >>> round(skew_reverse_kl(student_logprobs=q, teacher_logprobs=p, alpha=0.1).item(), 6)
    0.284836

    Raises:
        ValueError: alpha outside (0, 1).

    Reference: Ko et al. 2024 (DistiLLM), eq. 5; alpha = 0.1 there.
    """
    _check_alpha(alpha)
    return _kl(student_logprobs, _log_mixture(student_logprobs, teacher_logprobs, alpha))


def divergence_fn(name: Divergence, *, beta: float | None = None, alpha: float | None = None) -> DivergenceFn:
    """The divergence of that name with its parameter filled in.

    Raises:
        ValueError: the parameter is missing, out of range, or belongs to another divergence.
    """
    functions: dict[Divergence, tuple[DivergenceFn, str | None]] = {
        Divergence.FORWARD_KL: (forward_kl, None),
        Divergence.REVERSE_KL: (reverse_kl, None),
        Divergence.JSD: (jsd, "beta"),
        Divergence.SKEW_FORWARD_KL: (skew_forward_kl, "alpha"),
        Divergence.SKEW_REVERSE_KL: (skew_reverse_kl, "alpha"),
    }
    function, parameter = functions[name]
    given = {key: value for key, value in (("beta", beta), ("alpha", alpha)) if value is not None}
    expected = {parameter} if parameter else set[str]()
    if set(given) != expected:
        raise ValueError(f"divergence '{name}' takes {sorted(expected) or 'no parameter'}, got {sorted(given)}")
    if parameter == "alpha":
        _check_alpha(given["alpha"])
    elif parameter == "beta" and not 0.0 <= given["beta"] <= 1.0:
        raise ValueError(f"beta is {given['beta']}; it is the teacher's weight in the mixture, between 0 and 1")
    return partial(function, **given)
