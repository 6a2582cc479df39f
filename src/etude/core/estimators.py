"""From log-ratios to a differentiable term: the forms k1, k2, k3, returns, advantages, importance ratios, clips.

Everything here is about the token that was drawn (support `sampled`). c = log q(y) - log p(y) is its log-ratio, q the
student, p the teacher. Sums over a round are given and taken as tensors: who adds them up over ranks is not known here.
The worked example of the doctests: three drawn tokens with q = .5, .4, .3 and p = .5, .1, .6.

Legend: C completion tokens of one row, N scored tokens of a batch, G completions of one prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.axes.names import Form, Importance
from etude.core.divergences import LOG_OF_ZERO

# Share of the mean square below which a variance is rounding: float32 values resolve 1e-7 of themselves, squared 1e-14.
VARIANCE_OF_ROUNDING = 1e-12

# Least deviation that whitening divides by, as a share of the root mean square. A log-ratio is a difference of float32
# log-probabilities of some ten nats, good to 1e-6: ratios of a hundredth of a nat differ by that share for nothing.
LEAST_DEVIATION = 1e-4


def _in_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(torch.float32, values.dtype))


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


def length_normalised(returns_C: Tensor, counted_C: Tensor | None = None) -> Tensor:
    """[C] each return of one row divided by the number of tokens from it to the end: R_t / (C - t).

    With discount 1 that is the mean of the remaining rewards, so that early tokens do not weigh more for being early:

        >>> c = torch.tensor([1.0, 4.0, 0.5]).log()
        >>> length_normalised(returns(-c, 1.0))
        tensor([-0.2310, -0.3466,  0.6931])

    `counted_C` [C] bool counts those tokens alone, as what a tool wrote earns nothing:

        >>> length_normalised(torch.tensor([3.0, 1.0, 1.0]), torch.tensor([True, False, True]))
        tensor([1.5000, 1.0000, 1.0000])

    Reference: Gu et al. 2023 (MiniLLM), section 2.2, "length normalization".
    """
    returns_C = _in_float32(returns_C)
    ones_C = torch.ones_like(returns_C) if counted_C is None else counted_C.to(returns_C.dtype)
    remaining_C = ones_C.flip(0).cumsum(0).flip(0)
    return returns_C / remaining_C.clamp(min=1)  # behind the last counted token there is nothing to divide


# Advantages -------------------------------------------------------------------------------------------------------


def moment_sums(values_C: Tensor, mask_C: Tensor) -> Tensor:
    """[3] float64: count, sum and sum of squares of the values under the mask.

    Sums of rows, micro-batches and ranks add up to the sums of the round; then `from_sums`.

        >>> moment_sums(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
        tensor([2., 3., 5.], dtype=torch.float64)

    Raises:
        ValueError: values and mask of different shapes.
    """
    if values_C.shape != mask_C.shape:
        raise ValueError(
            f"the mask has shape {tuple(mask_C.shape)}; expected that of the values {tuple(values_C.shape)}"
        )
    # Picked, not multiplied: whatever stands where nothing is trained has no say, not even an infinity.
    trained = values_C.detach()[mask_C.bool()].double()
    return torch.stack([trained.new_tensor(float(len(trained))), trained.sum(), (trained * trained).sum()])


def from_sums(sums: Tensor) -> tuple[float, float]:
    """Mean and standard deviation (divided by the count) of everything that was added up.

    The deviation is one to divide by: `LEAST_DEVIATION` of the root mean square where it is less, so that values which
    all but agree are not blown up to the size of ones that do not, and 0 where rounding alone tells them apart.

        >>> both = torch.tensor([True, True])
        >>> from_sums(moment_sums(torch.tensor([1.0, 3.0]), both))
        (2.0, 1.0)
        >>> mean, std = from_sums(moment_sums(torch.tensor([1.0, 1.00002]), both))
        >>> round(std, 7)  # itself 0.00001
        0.0001

    Raises:
        ValueError: nothing was counted.
    """
    count, total, squares = (sums[i].item() for i in range(3))
    if count <= 0:
        raise ValueError(f"the sums count {count:g} values; a mean needs at least one")
    mean, mean_square = total / count, squares / count
    variance = mean_square - mean * mean
    if variance <= VARIANCE_OF_ROUNDING * mean_square:
        return mean, 0.0
    return mean, max(variance, LEAST_DEVIATION**2 * mean_square) ** 0.5


def whitened(values: Tensor, mean: float, std: float) -> Tensor:
    """(values - mean) / std, same shape; exact zeros where all values of the round were equal (std 0).

    For the task reward or the log-ratio return *before* anything else, such as a KL penalty, is added; never after.
    Two answers that are both right, reward 1 each, with a KL reward of a hundredth, +.01 and -.01. Whitened before, the
    rewards say nothing and the KL keeps its size:

        >>> reward, kl_reward = torch.tensor([1.0, 1.0]), torch.tensor([0.01, -0.01])
        >>> whitened(reward, mean=1.0, std=0.0) + kl_reward
        tensor([ 0.0100, -0.0100])

    Whitened after, the standard deviation is that of the KL alone: its coefficient has become a hundred times what was
    written, and with rewards 0 and 10 it would have been divided by 5 instead.

        >>> whitened(reward + kl_reward, mean=1.0, std=0.01)
        tensor([ 1.0000, -1.0000])

    Raises:
        ValueError: a negative standard deviation.
    """
    if not std >= 0.0:
        raise ValueError(f"the standard deviation is {std}; expected 0 or more")
    values = _in_float32(values)
    return torch.zeros_like(values) if std == 0.0 else (values - mean) / std


def clip_advantages(advantages: Tensor, bound: float) -> Tensor:
    """Advantages held between -bound and +bound, so that a few tokens cannot be the whole step; same shape.

    >>> clip_advantages(torch.tensor([-30.0, 0.5, float("inf")]), 20.0)
    tensor([-20.0000,   0.5000,  20.0000])

    Raises:
        ValueError: a bound that is not above 0.
    """
    if not bound > 0.0:
        raise ValueError(f"the bound on advantages is {bound}; expected a number above 0")
    return advantages.clamp(-bound, bound)


def group_advantages(rewards_G: Tensor, *, normalise: bool) -> Tensor:
    """[G] rewards of the completions of one prompt, minus their mean; `normalise` divides by their standard deviation.

    The standard deviation is the sample's, divided by G - 1. Equal rewards say nothing: exact zeros.

        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), normalise=False)
        tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), normalise=True)
        tensor([ 0.8660, -0.8660, -0.8660,  0.8660])

    Raises:
        ValueError: not one row of at least two rewards.

    Reference: Shao et al. 2024 (DeepSeekMath, GRPO), section 4.1.2; without `normalise` Liu et al. 2025 (Dr. GRPO).
    """
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise ValueError(f"rewards have shape {tuple(rewards_G.shape)}; a group is one row of at least two completions")
    one_group_G = torch.zeros(len(rewards_G), dtype=torch.int64, device=rewards_G.device)
    sums_31 = group_sums(rewards_G, one_group_G, 1)
    return off_their_groups(rewards_G, one_group_G, sums_31, normalise=normalise).to(_in_float32(rewards_G).dtype)


def off_their_groups(rewards_R: Tensor, groups_R: Tensor, sums_3G: Tensor, *, normalise: bool) -> Tensor:
    """[R] float64 `group_advantages` of rows of several groups, whose sums over all ranks are at hand.

    >>> rewards, groups = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 2, 2])
    >>> off_their_groups(rewards, groups, group_sums(rewards, groups, 3), normalise=False)
    tensor([-1.,  1.,  0.,  0.], dtype=torch.float64)
    """
    mean_G, deviation_G = group_moments(sums_3G)
    deviation_R = deviation_G[groups_R]
    centred_R = rewards_R.double() - mean_G[groups_R]
    advantages_R = centred_R / deviation_R if normalise else centred_R
    return torch.where(deviation_R > 0, advantages_R, 0.0)  # the rounded mean of equal numbers may differ from them


def group_sums(rewards_R: Tensor, groups_R: Tensor, num_groups: int) -> Tensor:
    """[3, num_groups] float64: of each group count, sum and sum of squares of its rows' rewards.

    Sums of ranks add up to the sums of the round; then `group_moments`. `groups_R` [R] int64 says whose row it is.

        >>> group_sums(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2]), 3)
        tensor([[ 2.,  0.,  1.],
                [ 4.,  0.,  5.],
                [10.,  0., 25.]], dtype=torch.float64)
    """
    rewards_R = rewards_R.detach().double()
    sums_3R = torch.stack([torch.ones_like(rewards_R), rewards_R, rewards_R * rewards_R])
    return sums_3R.new_zeros(3, num_groups).index_add_(1, groups_R, sums_3R)


def group_moments(sums_3G: Tensor) -> tuple[Tensor, Tensor]:
    """[G] mean and [G] standard deviation of each group's rewards, as `group_advantages` has them.

    The standard deviation is the sample's, with `from_sums`'s least size; it is 0 where there are fewer than two rows,
    or none to be told from rounding.

        >>> group_moments(group_sums(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2]), 3))
        (tensor([2., 0., 5.], dtype=torch.float64), tensor([1.4142, 0.0000, 0.0000], dtype=torch.float64))
    """
    counts_G, totals_G, squares_G = sums_3G
    mean_G = totals_G / counts_G.clamp(min=1)
    spread_G = squares_G - totals_G * mean_G
    spread_G = torch.where(spread_G <= VARIANCE_OF_ROUNDING * squares_G, 0.0, spread_G)
    least_G = torch.where(spread_G > 0, LEAST_DEVIATION**2 * squares_G, 0.0)
    return mean_G, (torch.maximum(spread_G, least_G) / (counts_G - 1).clamp(min=1)).sqrt()


# Importance -------------------------------------------------------------------------------------------------------


def importance_ratio(*, student_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """student / behaviour probability of the drawn token; behaviour is the distribution really sampled from.

    >>> q = torch.tensor([0.5, 0.4, 0.3]).log()
    >>> importance_ratio(student_logprobs=q, behaviour_logprobs=torch.full((3,), 0.5).log())
    tensor([1.0000, 0.8000, 0.6000])
    """
    return (_in_float32(student_logprobs) - _in_float32(behaviour_logprobs)).exp()


def _check_parameters(importance: Importance, clip: float | None, bounds: tuple[float, float] | None) -> None:
    if (clip is not None) != (importance is Importance.PPO_CLIP):
        raise ValueError(f"clip is {clip} with importance '{importance}'; a clip goes with 'ppo_clip' and only with it")
    if (bounds is not None) != (importance in (Importance.TRUNCATED, Importance.MASKED)):
        raise ValueError(
            f"bounds are {bounds} with importance '{importance}'; bounds go with 'truncated' and 'masked' and "
            "only with them"
        )
    if bounds is not None and not 0.0 <= bounds[0] < bounds[1]:
        raise ValueError(f"bounds on the importance ratio are {bounds}; expected 0 <= low < high")


def _outside(ratio: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (ratio < bounds[0]) | (ratio > bounds[1])


def _bounded_weight(ratio: Tensor, importance: Importance, bounds: tuple[float, float]) -> Tensor:
    if importance is Importance.TRUNCATED:
        return ratio.clamp(*bounds)
    return torch.where(_outside(ratio, bounds), 0.0, ratio)


def policy_gradient(
    *,
    student_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    importance: Importance,
    clip: float | None = None,
    bounds: tuple[float, float] | None = None,
) -> Tensor:
    """The per-token term whose gradient is -A grad log q(y), times the importance weight where there is one; [N].

    - `none`: -A log q
    - `ratio`: -A ratio
    - `ppo_clip`: -min(A ratio, A clamp(ratio, 1 - clip, 1 + clip))
    - `truncated`: -A sg(clamp(ratio, low, high)) log q
    - `masked`: -A sg(ratio 1[low <= ratio <= high]) log q

    `advantages` must be detached. The weight of the last two is detached (sg), so their gradient is exactly
    -A weight grad log q, also at a bound. At ratio 1 all five have the same gradient; at ratios 1, .8 and 3:

        >>> q, A = torch.tensor([0.5, 0.4, 0.3]).log(), torch.tensor([1.0, -2.0, 0.5])
        >>> b = torch.tensor([0.5, 0.5, 0.1]).log()
        >>> def gradient(importance, **parameters):
        ...     leaf = q.clone().requires_grad_()
        ...     term = policy_gradient(student_logprobs=leaf, behaviour_logprobs=b, advantages=A,
        ...                            importance=importance, **parameters)
        ...     return torch.autograd.grad(term.sum(), leaf)[0]
        >>> gradient(Importance.NONE), gradient(Importance.RATIO)
        (tensor([-1.0000,  2.0000, -0.5000]), tensor([-1.0000,  1.6000, -1.5000]))
        >>> gradient(Importance.PPO_CLIP, clip=0.1)
        tensor([-1.,  0.,  0.])
        >>> gradient(Importance.TRUNCATED, bounds=(0.9, 2.0)), gradient(Importance.MASKED, bounds=(0.5, 2.0))
        (tensor([-1.0000,  1.8000, -1.0000]), tensor([-1.0000,  1.6000, -0.0000]))

    Raises:
        ValueError: advantages that carry a gradient; a clip without `ppo_clip`, bounds without `truncated` or `masked`,
            and the reverse; bounds that are not 0 <= low < high.

    Reference: Williams 1992; Schulman et al. 2017 (PPO), eq. 7; Ionides 2008 (truncated); Ling Team 2025 (IcePop).
    """
    if advantages.requires_grad:
        raise ValueError("advantages must be detached: differentiating them as well gives another gradient")
    _check_parameters(importance, clip, bounds)
    if importance is Importance.NONE:
        return -advantages * student_logprobs
    ratio = importance_ratio(student_logprobs=student_logprobs, behaviour_logprobs=behaviour_logprobs)
    if bounds is not None:
        weight = _bounded_weight(ratio.detach(), importance, bounds)
        # A token of weight 0 is out, even where its advantage or log-probability is infinite and 0 times it is NaN.
        force = torch.where(weight == 0, 0.0, advantages * weight)
        return -force * _in_float32(student_logprobs).clamp(min=LOG_OF_ZERO)
    if clip is None:
        return -advantages * ratio
    return -torch.minimum(advantages * ratio, advantages * ratio.clamp(1.0 - clip, 1.0 + clip))


def clipped(*, ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Which tokens the PPO clip keeps from moving: the clipped branch is the smaller one; bool, same shape."""
    return torch.where(advantages > 0, ratio > 1.0 + clip, (advantages < 0) & (ratio < 1.0 - clip))


def cut(
    *,
    ratio: Tensor,
    advantages: Tensor,
    importance: Importance,
    clip: float | None = None,
    bounds: tuple[float, float] | None = None,
) -> Tensor:
    """Which tokens move otherwise than under the plain ratio; bool, same shape.

    `none` and `ratio` cut nothing; `ppo_clip` what `clipped` says, which depends on the advantage's sign; `truncated`
    and `masked` every token whose ratio is outside the bounds, whatever its advantage.

        >>> ratio, A = torch.tensor([1.0, 0.8, 3.0]), torch.tensor([1.0, 2.0, 0.5])
        >>> cut(ratio=ratio, advantages=A, importance=Importance.PPO_CLIP, clip=0.1)
        tensor([False, False,  True])
        >>> cut(ratio=ratio, advantages=A, importance=Importance.MASKED, bounds=(0.9, 2.0))
        tensor([False,  True,  True])

    Raises:
        ValueError: as `policy_gradient` for clip and bounds.
    """
    _check_parameters(importance, clip, bounds)
    if bounds is not None:
        return _outside(ratio, bounds)
    if clip is not None:
        return clipped(ratio=ratio, advantages=advantages, clip=clip)
    return torch.zeros_like(ratio, dtype=torch.bool)
