"""From log-ratios to a differentiable term: the forms k1, k2, k3, returns, importance ratios, clips.

Everything here is about the token that was drawn (support `sampled`). c = log q(y) - log p(y) is its log-ratio, q the
student, p the teacher. The worked example of the doctests: three drawn tokens with q = .5, .4, .3 and p = .5, .1, .6.

Legend: C completion tokens of one row, N scored tokens of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.axes.names import Form, Importance


def log_ratio(*, student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """c = log q(y) - log p(y) of the drawn tokens, same shape as the inputs.

    >>> q, p = torch.tensor([0.5, 0.4, 0.3]).log(), torch.tensor([0.5, 0.1, 0.6]).log()
    >>> log_ratio(student_logprobs=q, teacher_logprobs=p)
    tensor([ 0.0000,  1.3863, -0.6931])
    """
    return student_logprobs - teacher_logprobs


def form_value(c: Tensor, form: Form) -> Tensor:
    """k1 = c, k2 = c^2 / 2, k3 = exp(-c) - 1 + c; their mean over the student's tokens estimates the reverse KL.

    Which of them may be differentiated, and which may serve as a detached reward, is `axes.legality`'s business.

        >>> c = torch.tensor([1.0, 4.0, 0.5]).log()
        >>> [round(form_value(c, form).sum().item(), 6) for form in (Form.K1, Form.K2, Form.K3)]
        [0.693147, 1.201133, 0.943147]

    Reference: Schulman 2020, "Approximating KL divergence".
    """
    if form is Form.K1:
        return c
    if form is Form.K2:
        return 0.5 * c * c
    return torch.expm1(-c) + c


def returns(rewards_C: Tensor, discount: float) -> Tensor:
    """[C] discounted reward-to-go of one row: R_t = sum_{u >= t} discount^(u - t) r_u.

    With r = -c, discount 0 keeps each token's own reward (the gradient of the token-level reverse KL), discount 1 gives
    the gradient of the sequence-level reverse KL.

        >>> c = torch.tensor([1.0, 4.0, 0.5]).log()
        >>> returns(-c, 0.0)
        tensor([-0.0000, -1.3863,  0.6931])
        >>> returns(-c, 0.5)
        tensor([-0.5199, -1.0397,  0.6931])
        >>> returns(-c, 1.0)
        tensor([-0.6931, -0.6931,  0.6931])

    Raises:
        ValueError: discount outside [0, 1].
    """
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount is {discount}; expected 0 (each token alone) to 1 (the whole rest of the row)")
    # Plain numbers: the same loop over a tensor's elements takes a hundred times as long.
    rewards: list[float] = rewards_C.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    for t in reversed(range(len(rewards) - 1)):  # from the end, so that each token adds one reward
        rewards[t] += discount * rewards[t + 1]
    return rewards_C.new_tensor(rewards)


def importance_ratio(*, student_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """student / behaviour probability of the drawn token; behaviour is the distribution really sampled from.

    >>> q = torch.tensor([0.5, 0.4, 0.3]).log()
    >>> importance_ratio(student_logprobs=q, behaviour_logprobs=torch.full((3,), 0.5).log())
    tensor([1.0000, 0.8000, 0.6000])
    """
    return (student_logprobs - behaviour_logprobs).exp()


def policy_gradient(
    *,
    student_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    importance: Importance,
    clip: float | None = None,
) -> Tensor:
    """The per-token term whose gradient is -A grad log q(y), times the importance ratio where there is one; [N].

    - `none`: -A log q
    - `ratio`: -A ratio
    - `ppo_clip`: -min(A ratio, A clamp(ratio, 1 - clip, 1 + clip))

    `advantages` must be detached. At ratio 1 all three have the same gradient:

        >>> q, A = torch.tensor([0.5, 0.4, 0.3]).log(), torch.tensor([1.0, -2.0, 0.5])
        >>> def gradient(importance, clip=None):
        ...     leaf = q.clone().requires_grad_()
        ...     term = policy_gradient(student_logprobs=leaf, behaviour_logprobs=q, advantages=A,
        ...                            importance=importance, clip=clip)
        ...     return torch.autograd.grad(term.sum(), leaf)[0]
        >>> gradient(Importance.NONE)
        tensor([-1.0000,  2.0000, -0.5000])
        >>> gradient(Importance.RATIO), gradient(Importance.PPO_CLIP, 0.2)
        (tensor([-1.0000,  2.0000, -0.5000]), tensor([-1.0000,  2.0000, -0.5000]))

    Raises:
        ValueError: advantages that carry a gradient, or a clip without `ppo_clip` and the reverse.

    Reference: Williams 1992; Schulman et al. 2017 (PPO), eq. 7.
    """
    if advantages.requires_grad:
        raise ValueError("advantages must be detached: differentiating them as well gives another gradient")
    if (clip is not None) != (importance is Importance.PPO_CLIP):
        raise ValueError(f"clip is {clip} with importance '{importance}'; a clip goes with 'ppo_clip' and only with it")
    if importance is Importance.NONE:
        return -advantages * student_logprobs
    ratio = importance_ratio(student_logprobs=student_logprobs, behaviour_logprobs=behaviour_logprobs)
    if clip is None:
        return -advantages * ratio
    return -torch.minimum(advantages * ratio, advantages * ratio.clamp(1.0 - clip, 1.0 + clip))


def clipped(*, ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Which tokens the PPO clip keeps from moving: the clipped branch is the smaller one; bool, same shape."""
    return torch.where(advantages > 0, ratio > 1.0 + clip, (advantages < 0) & (ratio < 1.0 - clip))
