"""Per-token divergences of two log-probability tensors over the same ids; never reduced over tokens.

Each takes normalised `student_logprobs` and `teacher_logprobs` of shape [..., V] by keyword and returns [...], in nats;
gradients are right with respect to the logits that the log-probabilities were normalised from, not with respect to
log-probabilities as free variables. They know no mask, no weight and no sampling. Inputs in half precision are computed
in float32. A probability of exactly zero (a log-probability of minus infinity) gives no NaN in value or gradient on
either side: 0 log 0 is 0, and an id that only the second distribution of a KL rules out counts with `LOG_OF_ZERO`
instead of minus infinity, so that the student is pushed off it with a large finite force instead of breaking the step.
The negative powers that `alpha_beta` allows are infinite at zero too; no power counts with more than `LARGEST_POWER`.

The running example of the doctests: teacher p = (1/2, 1/4, 1/8, 1/8), student q = (1/8, 1/2, 1/4, 1/8).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from etude.axes.names import Divergence

DivergenceFn = Callable[..., Tensor]

LOG_OF_ZERO = -1e4  # nats; far below any log-probability a float32 softmax of real logits gives
LARGEST_POWER = 30.0  # nats; exp of it, 1e13, still leaves room in float32 for the square in the norm of a gradient


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


def _check_beta(beta: float, rescale: bool = False) -> None:
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; it is the teacher's weight in the mixture, between 0 and 1")
    if rescale and beta in (0.0, 1.0):
        raise ValueError(f"rescale with beta {beta}; the ends are the plain KLs already, expected beta inside (0, 1)")


def _rescaled_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """KL(teacher || m) / (1 - beta) + KL(student || m) / beta; small betas do not amplify rounding.

    Of the two, the one that weighs less in m is `light`, the other `heavy`. The mixture nearly is `heavy`, so log m -
    log heavy, which is divided by the small weight, comes from the gap of the two and not as a difference of two logs.
    """
    student, teacher = _in_float32(student), _in_float32(teacher)
    light, heavy = (teacher, student) if beta <= 0.5 else (student, teacher)
    weight = max(min(beta, 1.0 - beta), 1e-30)  # below, float32 runs out of numbers; the limit is reached long before
    gap = light.detach().clamp(min=LOG_OF_ZERO) - heavy.detach().clamp(min=LOG_OF_ZERO)
    lift = torch.where(  # log(m / heavy); detached with m, as in `jsd`
        gap < 80.0,  # exp(80) still is a float32
        (weight * gap.clamp(max=80.0).expm1()).log1p(),
        gap + (weight + (1.0 - weight) * (-gap).exp()).log(),
    )
    return (light.exp() * (gap - lift)).sum(-1) / (1.0 - weight) - (heavy.exp() * lift).sum(-1) / weight


def jsd(*, student_logprobs: Tensor, teacher_logprobs: Tensor, beta: float, rescale: bool = False) -> Tensor:
    """Generalised Jensen-Shannon divergence; `beta` weighs the *teacher* in the mixture m = beta p + (1 - beta) q.

    beta KL(p || m) + (1 - beta) KL(q || m) for 0 < beta < 1. The formula goes to zero at both ends, so the ends are
    defined as what the GKD paper means by them: `beta=0` is forward KL, `beta=1` is reverse KL.

    >>> p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
    >>> [round(jsd(student_logprobs=q, teacher_logprobs=p, beta=b).item(), 6) for b in (0.0, 0.1, 0.5, 0.9, 1.0)]
    [0.433217, 0.037234, 0.092089, 0.031399, 0.346574]

    Note the jump of scale next to the ends: JSD(beta) / beta goes to forward KL as beta goes to 0. `Objective.warnings`
    names a beta within 0.05 of an end. `rescale` divides by beta (1 - beta), which removes the jump: value and gradient
    then go to those of the two KLs at the ends.

    >>> betas = (1e-6, 0.5, 1 - 1e-6)
    >>> [round(jsd(student_logprobs=q, teacher_logprobs=p, beta=b, rescale=True).item(), 5) for b in betas]
    [0.43322, 0.36836, 0.34657]

    Raises:
        ValueError: beta outside [0, 1], or `rescale` at one of the ends, which need none.

    Reference: Agarwal et al. 2023 (GKD), section 2; some libraries weigh the student instead.
    """
    _check_beta(beta, rescale)
    if beta == 0.0:
        return forward_kl(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    if beta == 1.0:
        return reverse_kl(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    if rescale:
        return _rescaled_jsd(student_logprobs, teacher_logprobs, beta)
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


def skew_reverse_kl(
    *, student_logprobs: Tensor, teacher_logprobs: Tensor, alpha: float, detach_mixture: bool = False
) -> Tensor:
    """KL(q || m), m = (1 - alpha) p + alpha q: reverse KL with a bounded gradient.

    Gradient on student logits: q (h - E_q h) with h = log(q / m) - alpha q / m. `detach_mixture` takes the student
    inside m for a constant, as DistiLLM-2 does: the same value, and h = log(q / m) alone.

    >>> p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
    >>> round(skew_reverse_kl(student_logprobs=q, teacher_logprobs=p, alpha=0.1).item(), 6)
    0.284836

    Raises:
        ValueError: alpha outside (0, 1).

    Reference: Ko et al. 2024 (DistiLLM), eq. 5; alpha = 0.1 there. Ko et al. 2025 (DistiLLM-2) for the detached one.
    """
    _check_alpha(alpha)
    mixture = _log_mixture(student_logprobs, teacher_logprobs, alpha)
    return _kl(student_logprobs, mixture.detach() if detach_mixture else mixture)


def total_variation(*, student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """1/2 sum_v |p_v - q_v|, at most 1. Gradient on student logits: q (h - E_q h), h = sign(q - p) / 2, 0 where equal.

    >>> p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
    >>> round(total_variation(student_logprobs=q, teacher_logprobs=p).item(), 6)
    0.375

    Reference: Wen et al. 2023 (f-DISTILL), there summed over student and teacher rows.
    """
    student, teacher = _in_float32(student_logprobs), _in_float32(teacher_logprobs)
    return 0.5 * (teacher.exp() - student.exp()).abs().sum(-1)


def _check_head_mass(head_mass: float) -> None:
    if not 0.0 < head_mass < 1.0:
        raise ValueError(f"head_mass is {head_mass}; the teacher's probability in the head, strictly between 0 and 1")


def _head_share(student_logprobs: Tensor, teacher_logprobs: Tensor, head_mass: float) -> Tensor:
    """Share of sum_v |p_v - q_v| that lies on the teacher's likeliest ids, up to `head_mass` of its probability."""
    teacher_sorted, order = _in_float32(teacher_logprobs.detach()).exp().sort(dim=-1, descending=True, stable=True)
    error = (teacher_sorted - _in_float32(student_logprobs.detach()).exp().gather(-1, order)).abs()
    head = teacher_sorted.cumsum(-1) <= head_mass
    head[..., 0] = True  # however much the likeliest id holds
    # Two equal distributions have no error to share; whatever the weights, both KLs and their gradients are zero there.
    return (error * head).sum(-1) / error.sum(-1).clamp(min=torch.finfo(error.dtype).tiny)


def adaptive_kl(*, student_logprobs: Tensor, teacher_logprobs: Tensor, head_mass: float) -> Tensor:
    """AKL: w forward KL + (1 - w) reverse KL, w the share of the L1 error that lies in the teacher's head.

    The head is the longest run of the teacher's likeliest ids whose probabilities sum to `head_mass` at most, and its
    likeliest id in any case. w is detached: the gradient is that of the two KLs with w fixed, not of the whole formula.

    >>> p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
    >>> round(adaptive_kl(student_logprobs=q, teacher_logprobs=p, head_mass=0.5).item(), 6)  # w = 0.375 / 0.75
    0.389895

    Raises:
        ValueError: head_mass outside (0, 1).

    Reference: Wu et al. 2024 (Rethinking KL), the adaptive KL with mu = 0.5.
    """
    _check_head_mass(head_mass)
    share = _head_share(student_logprobs, teacher_logprobs, head_mass)
    forward = forward_kl(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    reverse = reverse_kl(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    return share * forward + (1.0 - share) * reverse


def _check_powers(alpha: float, beta: float) -> None:
    if not (math.isfinite(alpha) and math.isfinite(beta)):
        raise ValueError(f"alpha is {alpha} and beta is {beta}; the powers of alpha_beta are finite numbers")


def _power(teacher: Tensor, student: Tensor, alpha: float, beta: float) -> Tensor:
    """p^alpha q^beta, at most exp(`LARGEST_POWER`)."""
    return (alpha * teacher + beta * student).clamp(max=LARGEST_POWER).exp()


def _mean_of_decay(x: Tensor) -> Tensor:
    """(1 - exp(-x)) / x for x >= 0: the mean of exp(-t) over 0 <= t <= x, so 1 at 0."""
    return torch.where(x > 0, -(-x).expm1() / x, 1.0)


def _alpha_beta_values(student: Tensor, teacher: Tensor, alpha: float, beta: float) -> Tensor:
    """What each id adds to the divergence, without its gradient; never negative, and no case of its own for any limit.

    With r = log p - log q it is q^(alpha + beta) times the second divided difference of x -> exp(r x) at 0, alpha and
    alpha + beta. Divided differences exist where their points meet, which is what the limits are. Points that are far
    apart are divided out, seen from the largest power so that nothing overflows; where r times their distance is small
    that would cancel, and a Taylor series around their centre is exact to rounding.
    """
    low, middle, high = sorted(
        [(0.0, alpha + beta), (alpha, beta), (alpha + beta, 0.0)]
    )  # powers of (teacher, student)
    ratio = teacher - student
    up, down = ratio.clamp(min=0), (-ratio).clamp(min=0)
    near = (high[0] - middle[0]) * up + (middle[0] - low[0]) * down  # from the largest power to the middle one, in nats
    rest = (middle[0] - low[0]) * up + (high[0] - middle[0]) * down
    largest = torch.maximum(_power(teacher, student, *low), _power(teacher, student, *high))
    divided = largest * (_mean_of_decay(near) - (-near).exp() * _mean_of_decay(rest)) / (near + rest)

    centre = (2 * alpha + beta) / 3
    a, b, c = (powers[0] - centre for powers in (low, middle, high))  # they sum to zero
    two, three = -(a * b + a * c + b * c), a * b * c
    coefficients = (1 / 2, 0.0, two / 24, three / 120, two**2 / 720, 2 * two * three / 5040)
    series = torch.full_like(ratio, (two**3 + three**2) / 40320)
    for coefficient in reversed(coefficients):
        series = series * ratio + coefficient
    series = series * _power(teacher, student, centre, alpha + beta - centre)
    return ratio**2 * torch.where(near + rest < 0.1, series, divided)


def alpha_beta(*, student_logprobs: Tensor, teacher_logprobs: Tensor, alpha: float, beta: float) -> Tensor:
    """sum_v [alpha / s p^s + beta / s q^s - p^alpha q^beta] / (alpha beta), s = alpha + beta, for any two numbers.

    (1, 0) is forward KL, (0, 1) reverse KL, (1/2, 1/2) 4 (1 - sum sqrt(p q)). Where a divisor is zero it is the limit:

        alpha = 0            sum [p^beta - q^beta - beta q^beta r] / beta^2, r = log(p / q)
        beta = 0             sum [q^alpha - p^alpha + alpha p^alpha r] / alpha^2
        alpha + beta = 0     sum [(p / q)^alpha - 1 - alpha r] / alpha^2
        alpha = beta = 0     1/2 sum r^2

    Gradient on student logits: g - q sum g with g = q^beta (q^alpha - p^alpha) / alpha. The teacher is a constant: it
    gets no gradient. Powers of any sign have no bound: what an id adds, and its g, are exact while the powers in them
    are below exp(`LARGEST_POWER`); larger ones count with that, so the force keeps its sign and stays finite.

    >>> p, q = (torch.tensor(x).log() for x in ([0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]))
    >>> pairs = [(0.5, 0.5), (0.2, 0.7), (1, 0), (0, 1)]
    >>> [round(alpha_beta(student_logprobs=q, teacher_logprobs=p, alpha=a, beta=b).item(), 6) for a, b in pairs]
    [0.37868, 0.40982, 0.433217, 0.346574]

    Raises:
        ValueError: alpha or beta infinite or not a number.

    Reference: Wang et al. 2025 (ABKD), after Cichocki et al. 2011; the code published with ABKD divides by alpha or
    beta once instead of squared in the limits.
    """
    _check_powers(alpha, beta)
    moving = _in_float32(student_logprobs).clamp(min=LOG_OF_ZERO)
    student, teacher = moving.detach(), _in_float32(teacher_logprobs.detach()).clamp(min=LOG_OF_ZERO)
    values = _alpha_beta_values(student, teacher, alpha, beta).sum(-1)
    # g in closed form, since it is exact where differentiating the steps to the value would cancel or overflow.
    ratio = teacher - student
    larger = torch.maximum(_power(teacher, student, alpha, beta), _power(teacher, student, 0.0, alpha + beta))
    slope = -ratio * _mean_of_decay(abs(alpha) * ratio.abs()) * larger
    return values + (slope * (moving - student)).sum(-1)  # adds zero to the value


def divergence_fn(
    name: Divergence,
    *,
    beta: float | None = None,
    alpha: float | None = None,
    head_mass: float | None = None,
    rescale: bool = False,
    detach_mixture: bool = False,
) -> DivergenceFn:
    """The divergence of that name with its parameters filled in.

    Raises:
        ValueError: a parameter is missing, out of range, or belongs to another divergence.
    """
    functions: dict[Divergence, tuple[DivergenceFn, Callable[..., None] | None, set[str]]] = {
        Divergence.FORWARD_KL: (forward_kl, None, set()),
        Divergence.REVERSE_KL: (reverse_kl, None, set()),
        Divergence.JSD: (jsd, _check_beta, {"beta"}),
        Divergence.SKEW_FORWARD_KL: (skew_forward_kl, _check_alpha, {"alpha"}),
        Divergence.SKEW_REVERSE_KL: (skew_reverse_kl, _check_alpha, {"alpha"}),
        Divergence.ALPHA_BETA: (alpha_beta, _check_powers, {"alpha", "beta"}),
        Divergence.ADAPTIVE_KL: (adaptive_kl, _check_head_mass, {"head_mass"}),
        Divergence.TOTAL_VARIATION: (total_variation, None, set()),
    }
    function, check, expected = functions[name]
    values = {"beta": beta, "alpha": alpha, "head_mass": head_mass}
    given = {key: value for key, value in values.items() if value is not None}
    if set(given) != expected:
        raise ValueError(f"divergence '{name}' takes {sorted(expected) or 'no parameter'}, got {sorted(given)}")
    if rescale and name is not Divergence.JSD:
        raise ValueError(f"divergence '{name}' with rescale; only 'jsd' is rescaled")
    if detach_mixture and name is not Divergence.SKEW_REVERSE_KL:
        raise ValueError(f"divergence '{name}' with detach_mixture; only 'skew_reverse_kl' has a mixture to detach")
    if check is not None:
        check(**given, **({"rescale": True} if rescale else {}))
    flags = {key: True for key, value in (("rescale", rescale), ("detach_mixture", detach_mixture)) if value}
    return partial(function, **given, **flags)
