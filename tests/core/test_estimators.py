"""The drawn token's forms, returns, advantages and ratios: hand values, and expected gradients by enumeration."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from etude.axes.names import Form, Importance
from etude.core.estimators import (
    clip_advantages,
    clipped,
    cut,
    form_value,
    from_sums,
    group_advantages,
    importance_ratio,
    length_normalised,
    log_ratio,
    moment_sums,
    policy_gradient,
    returns,
    whitened,
)

# The worked example: three drawn tokens with q = .5, .4, .3 under the student and p = .5, .1, .6 under the teacher.
RATIOS = torch.tensor([0.0, 1.386294, -0.693147])

FORWARD_KL_ROW = [-0.375, 0.25, 0.125, 0.0]
REVERSE_KL_ROW = [-0.216608, 0.173287, 0.086643, -0.043322]
ZERO_ROW = [0.0, 0.0, 0.0, 0.0]


# The worked example -------------------------------------------------------------------------------------------------


def test_log_ratio_of_the_worked_example() -> None:
    student, teacher = torch.tensor([0.5, 0.4, 0.3]).log(), torch.tensor([0.5, 0.1, 0.6]).log()
    c = log_ratio(student_logprobs=student, teacher_logprobs=teacher)
    torch.testing.assert_close(c, RATIOS, atol=1e-6, rtol=0)
    assert c.sum().item() == pytest.approx(0.693147, abs=1e-6)
    assert c.mean().item() == pytest.approx(0.231049, abs=1e-6)


@pytest.mark.parametrize(
    ("form", "expected", "total"),
    [
        (Form.K1, [0.0, 1.386294, -0.693147], 0.693147),
        (Form.K2, [0.0, 0.960906, 0.240227], 1.201133),
        (Form.K3, [0.0, 0.636294, 0.306853], 0.943147),
    ],
)
def test_forms_of_the_worked_example(form: Form, expected: list[float], total: float) -> None:
    values = form_value(RATIOS, form)
    torch.testing.assert_close(values, torch.tensor(expected), atol=1e-6, rtol=0)
    assert values.sum().item() == pytest.approx(total, abs=2e-6)


@pytest.mark.parametrize(
    ("discount", "expected"),
    [
        (0.0, [0.0, -1.386294, 0.693147]),
        (0.5, [-0.519860, -1.039721, 0.693147]),
        (1.0, [-0.693147, -0.693147, 0.693147]),
    ],
)
def test_returns_of_the_worked_example(discount: float, expected: list[float]) -> None:
    torch.testing.assert_close(returns(-RATIOS, discount), torch.tensor(expected), atol=1e-6, rtol=0)


def test_returns_equal_their_double_sum_and_leave_the_rewards_alone() -> None:
    rewards = torch.randn(9, dtype=torch.float64)
    kept = rewards.clone()
    for discount in (0.0, 0.3, 0.9, 1.0):
        found = returns(rewards, discount)
        expected = [sum(discount ** (u - t) * rewards[u].item() for u in range(t, 9)) for t in range(9)]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(rewards, kept)


@pytest.mark.parametrize("discount", [-0.1, 1.1])
def test_a_discount_out_of_range_is_refused(discount: float) -> None:
    with pytest.raises(ValueError, match="expected 0"):
        returns(-RATIOS, discount)


def test_length_normalised_returns_of_the_worked_example() -> None:
    found = length_normalised(returns(-RATIOS, 1.0))
    torch.testing.assert_close(found, torch.tensor([-0.231049, -0.346574, 0.693147]), atol=1e-6, rtol=0)


def test_a_length_normalised_return_is_the_mean_of_the_rest() -> None:
    rewards = [3.0, -1.0, 4.0, 2.0]
    found = length_normalised(returns(torch.tensor(rewards), 1.0))
    assert found.tolist() == [2.0, pytest.approx(5 / 3), 3.0, 2.0]
    assert length_normalised(torch.zeros(0)).tolist() == []
    assert length_normalised(torch.tensor([1.0, 3.0], dtype=torch.bfloat16)).dtype is torch.float32


# Advantages ---------------------------------------------------------------------------------------------------------


def test_moments_do_not_depend_on_how_the_round_was_cut_up() -> None:
    values = [0.5, -2.0, 3.0, 7.0, 1.5, -0.25]
    mask = torch.tensor([True, True, False, True, True, True])
    trained = [0.5, -2.0, 7.0, 1.5, -0.25]
    for parts in ((6,), (1, 5), (3, 3), (2, 2, 2), (1, 1, 1, 1, 1, 1)):
        rows = zip(torch.tensor(values).split(parts), mask.split(parts), strict=True)
        sums = torch.stack([moment_sums(row, trains) for row, trains in rows]).sum(0)
        assert sums.dtype is torch.float64
        assert sums.tolist() == [5.0, sum(trained), sum(value * value for value in trained)]
        mean, std = from_sums(sums)
        assert mean == pytest.approx(statistics.fmean(trained))
        assert std == pytest.approx(statistics.pstdev(trained))


def test_whitened_values_have_mean_zero_and_standard_deviation_one() -> None:
    values = torch.tensor([100.5, 98.0, 107.0, 101.5], dtype=torch.float64)
    everywhere = torch.ones(4, dtype=torch.bool)
    found = whitened(values, *from_sums(moment_sums(values, everywhere)))
    assert from_sums(moment_sums(found, everywhere)) == pytest.approx((0.0, 1.0), abs=1e-9)
    assert whitened(torch.tensor([5.0, 1.0]), mean=3.0, std=4.0).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e6])
def test_equal_values_are_whitened_to_exact_zeros(value: float) -> None:
    values = torch.full((1001,), value)
    mean, std = from_sums(moment_sums(values, torch.ones(1001, dtype=torch.bool)))
    assert (mean, std) == (pytest.approx(values[0].item()), 0.0)
    assert torch.equal(whitened(values, mean, std), torch.zeros(1001))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_values_that_all_but_agree_are_not_blown_up(size: float) -> None:
    """They differ by 1e-5 of their size, where divided by their own deviation they would be -1 and 1."""
    values = size * torch.tensor([1.0, 1.00002], dtype=torch.float64)
    mean, std = from_sums(moment_sums(values, torch.ones(2, dtype=torch.bool)))
    assert std == pytest.approx(1e-4 * size, rel=1e-4)
    assert whitened(values, mean, std).tolist() == pytest.approx([-0.1, 0.1], rel=1e-4)
    grouped = group_advantages(values, normalise=True).tolist()  # the sample's deviation is sqrt 2 of that
    assert grouped == pytest.approx([-0.1 / 2**0.5, 0.1 / 2**0.5], rel=1e-4)


def test_values_apart_keep_their_own_deviation() -> None:
    values = torch.tensor([1.0, 1.0004], dtype=torch.float64)
    _, std = from_sums(moment_sums(values, torch.ones(2, dtype=torch.bool)))
    assert std == pytest.approx(2e-4, rel=1e-6)


def test_values_that_are_not_trained_have_no_say() -> None:
    values = torch.tensor([1.0, math.nan, 3.0, math.inf])
    assert from_sums(moment_sums(values, torch.tensor([True, False, True, False]))) == (2.0, 1.0)


def test_whitening_after_a_kl_was_added_changes_its_coefficient() -> None:
    """Rewards 0 and 10 with a KL reward of one on the first token: it arrives whole before, and as a fifth after."""
    reward, kl_reward, everywhere = torch.tensor([0.0, 10.0]), torch.tensor([1.0, 0.0]), torch.tensor([True, True])
    before = whitened(reward, *from_sums(moment_sums(reward, everywhere)))
    assert (before + kl_reward).tolist() == [0.0, 1.0]  # -1 and 1 from the reward, and the KL's 1
    _, std = from_sums(moment_sums(reward + kl_reward, everywhere))
    assert std == pytest.approx(4.5)
    assert (kl_reward / std).tolist() == [pytest.approx(1 / 4.5), 0.0]  # what is left of it


def test_misused_moments_are_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one"):
        from_sums(moment_sums(torch.ones(2), torch.zeros(2, dtype=torch.bool)))
    with pytest.raises(ValueError, match="expected that of the values"):
        moment_sums(torch.ones(2), torch.ones(3, dtype=torch.bool))
    for std in (-1.0, math.nan):
        with pytest.raises(ValueError, match="expected 0 or more"):
            whitened(torch.ones(2), mean=0.0, std=std)


def test_advantages_are_clipped_on_both_sides() -> None:
    advantages = torch.tensor([-math.inf, -3.0, -2.0, 0.5, 2.5])
    assert clip_advantages(advantages, 2.0).tolist() == [-2.0, -2.0, -2.0, 0.5, 2.0]
    for bound in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="expected a number above 0"):
            clip_advantages(advantages, bound)


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])  # mean 1/4; squares 9/16 + 3/16, over 3: std 1/2
    assert group_advantages(rewards, normalise=False).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages(rewards, normalise=True).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert group_advantages(torch.tensor([1, 0]), normalise=True).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_normalised_group_advantages_know_no_scale_and_no_offset() -> None:
    rewards = torch.tensor([0.3, -1.0, 2.0, 0.0, 5.0], dtype=torch.float64)
    found = group_advantages(rewards, normalise=True)
    torch.testing.assert_close(group_advantages(7.0 * rewards - 3.0, normalise=True), found)
    torch.testing.assert_close(found.sum().item(), 0.0)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_group_of_equal_rewards_gives_exact_zeros(size: int, normalise: bool) -> None:
    assert torch.equal(group_advantages(torch.full((size,), 0.1), normalise=normalise), torch.zeros(size))


@pytest.mark.parametrize("rewards", [torch.ones(1), torch.ones(0), torch.ones(2, 2), torch.tensor(1.0)])
def test_what_is_not_a_group_is_refused(rewards: Tensor) -> None:
    with pytest.raises(ValueError, match="at least two completions"):
        group_advantages(rewards, normalise=False)


# Expected gradients -------------------------------------------------------------------------------------------------


def expected_gradient(student: list[float], teacher: list[float], loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Sum over the drawn token y, with its probability, of the gradient of loss(log q(y), log p(y)) on the logits."""
    logits = torch.tensor(student, dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    values = loss(logprobs, torch.tensor(teacher, dtype=torch.float64).log())
    probabilities = logprobs.exp().detach()  # who draws is not differentiated
    return torch.autograd.grad((probabilities * values).sum(), logits)[0]


def differentiated(form: Form) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda q, p: form_value(log_ratio(student_logprobs=q, teacher_logprobs=p), form)


def as_reward(form: Form, baseline: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(q: Tensor, p: Tensor) -> Tensor:
        reward = -form_value(log_ratio(student_logprobs=q.detach(), teacher_logprobs=p), form)
        return policy_gradient(
            student_logprobs=q, behaviour_logprobs=q.detach(), advantages=reward - baseline, importance=Importance.NONE
        )

    return loss


def state_kl_as_advantage(q: Tensor, p: Tensor) -> Tensor:
    state_kl = (q.exp() * (q - p)).sum().detach()
    return policy_gradient(
        student_logprobs=q,
        behaviour_logprobs=q.detach(),
        advantages=-state_kl.expand_as(q),
        importance=Importance.NONE,
    )


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (as_reward(Form.K1), REVERSE_KL_ROW),
        (as_reward(Form.K1, baseline=3.0), REVERSE_KL_ROW),
        (differentiated(Form.K2), REVERSE_KL_ROW),
        (differentiated(Form.K1), ZERO_ROW),
        (differentiated(Form.K3), FORWARD_KL_ROW),
        (as_reward(Form.K3), [0.158392, -0.076713, -0.038357, -0.043322]),
        (state_kl_as_advantage, ZERO_ROW),
    ],
    ids=["k1 reward", "k1 reward, baseline", "k2 loss", "k1 loss", "k3 loss", "k3 reward", "state kl"],
)
def test_expected_gradient_on_the_student_logits(
    loss: Callable[[Tensor, Tensor], Tensor], expected: list[float]
) -> None:
    found = expected_gradient([0.125, 0.5, 0.25, 0.125], [0.5, 0.25, 0.125, 0.125], loss)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_uniform_student() -> None:
    """A uniform student over three tokens: advantage form right, naive form nothing, k3 the other divergence."""
    student, teacher = [1 / 3, 1 / 3, 1 / 3], [0.7, 0.2, 0.1]
    for loss, expected in (
        (as_reward(Form.K1), [-0.35541, 0.06218, 0.29323]),
        (differentiated(Form.K1), [0.0, 0.0, 0.0]),
        (differentiated(Form.K3), [-0.36667, 0.13333, 0.23333]),
    ):
        found = expected_gradient(student, teacher, loss)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=6e-6, rtol=0)


# Importance ---------------------------------------------------------------------------------------------------------

# ratio, advantage, and whether a clip of 0.2 holds the token where it is
CLIP_CASES = [
    (1.0, 1.0, False),
    (1.0, -1.0, False),
    (1.5, 1.0, True),  # already more likely than wanted
    (1.5, -1.0, False),  # more likely, and unwanted: must come back
    (0.5, 1.0, False),
    (0.5, -1.0, True),
    (1.1, 1.0, False),
    (0.9, -1.0, False),
    (1.5, 0.0, False),
    (0.5, 0.0, False),
]


def test_ratio_is_student_over_behaviour() -> None:
    ratio = importance_ratio(
        student_logprobs=torch.tensor([0.5, 0.4]).log(), behaviour_logprobs=torch.tensor([0.25, 0.8]).log()
    )
    torch.testing.assert_close(ratio, torch.tensor([2.0, 0.5]))


@pytest.mark.parametrize(("ratio", "advantage", "held"), CLIP_CASES)
def test_ppo_clip_by_hand(ratio: float, advantage: float, held: bool) -> None:
    student = torch.tensor([0.3], dtype=torch.float64).log().requires_grad_()
    term = policy_gradient(
        student_logprobs=student,
        behaviour_logprobs=torch.tensor([0.3 / ratio], dtype=torch.float64).log(),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        importance=Importance.PPO_CLIP,
        clip=0.2,
    )
    bounded = min(max(ratio, 0.8), 1.2)
    assert term.item() == pytest.approx(-min(advantage * ratio, advantage * bounded))
    gradient = torch.autograd.grad(term.sum(), student)[0].item()
    assert gradient == pytest.approx(0.0 if held else -advantage * ratio)
    told = clipped(ratio=torch.tensor([ratio]), advantages=torch.tensor([advantage]), clip=0.2)
    assert told.tolist() == [held]


def test_ratio_gradient_by_hand() -> None:
    student = torch.tensor([0.3, 0.6], dtype=torch.float64).log().requires_grad_()
    term = policy_gradient(
        student_logprobs=student,
        behaviour_logprobs=torch.tensor([0.6, 0.2], dtype=torch.float64).log(),
        advantages=torch.tensor([2.0, -1.0], dtype=torch.float64),
        importance=Importance.RATIO,
    )
    assert term.tolist() == pytest.approx([-1.0, 3.0])
    assert torch.autograd.grad(term.sum(), student)[0].tolist() == pytest.approx([-1.0, 3.0])


def test_misuse_is_refused() -> None:
    q = torch.zeros(2)
    with pytest.raises(ValueError, match="must be detached"):
        policy_gradient(
            student_logprobs=q,
            behaviour_logprobs=q,
            advantages=torch.ones(2, requires_grad=True),
            importance=Importance.NONE,
        )
    for importance, clip in ((Importance.RATIO, 0.2), (Importance.NONE, 0.2), (Importance.PPO_CLIP, None)):
        with pytest.raises(ValueError, match="a clip goes with 'ppo_clip'"):
            policy_gradient(student_logprobs=q, behaviour_logprobs=q, advantages=q, importance=importance, clip=clip)
        with pytest.raises(ValueError, match="a clip goes with 'ppo_clip'"):
            cut(ratio=q, advantages=q, importance=importance, clip=clip)


@pytest.mark.parametrize(
    ("importance", "clip", "bounds", "sentence"),
    [
        (Importance.TRUNCATED, None, None, "bounds go with 'truncated' and 'masked'"),
        (Importance.MASKED, None, None, "bounds go with 'truncated' and 'masked'"),
        (Importance.NONE, None, (0.5, 2.0), "bounds go with 'truncated' and 'masked'"),
        (Importance.RATIO, None, (0.5, 2.0), "bounds go with 'truncated' and 'masked'"),
        (Importance.PPO_CLIP, 0.2, (0.5, 2.0), "bounds go with 'truncated' and 'masked'"),
        (Importance.MASKED, 0.2, (0.5, 2.0), "a clip goes with 'ppo_clip'"),
        (Importance.TRUNCATED, None, (-0.1, 2.0), "expected 0 <= low < high"),
        (Importance.TRUNCATED, None, (2.0, 2.0), "expected 0 <= low < high"),
        (Importance.MASKED, None, (2.0, 0.5), "expected 0 <= low < high"),
        (Importance.MASKED, None, (0.5, math.nan), "expected 0 <= low < high"),
    ],
)
def test_misused_bounds_are_refused(
    importance: Importance, clip: float | None, bounds: tuple[float, float] | None, sentence: str
) -> None:
    q = torch.zeros(2)
    with pytest.raises(ValueError, match=sentence):
        policy_gradient(
            student_logprobs=q, behaviour_logprobs=q, advantages=q, importance=importance, clip=clip, bounds=bounds
        )
    with pytest.raises(ValueError, match=sentence):
        cut(ratio=q, advantages=q, importance=importance, clip=clip, bounds=bounds)


# Bounded importance -------------------------------------------------------------------------------------------------

BOUNDED = [Importance.TRUNCATED, Importance.MASKED]
STUDENT, TEACHER = [0.125, 0.5, 0.25, 0.125], [0.5, 0.25, 0.125, 0.125]
# MiniLLM's sampler at alpha = .2, .2 p + .8 q; student / behaviour is .625, 10/9, 10/9, 1.
BEHAVIOUR = [0.2, 0.45, 0.225, 0.125]


# ratio, weight under bounds (.5, 2) of truncated and of masked, and whether the token was cut
@pytest.mark.parametrize(
    ("ratio", "truncated", "masked", "outside"),
    [
        (0.25, 0.5, 0.0, True),
        (0.5, 0.5, 0.5, False),
        (0.75, 0.75, 0.75, False),
        (1.0, 1.0, 1.0, False),
        (2.0, 2.0, 2.0, False),
        (4.0, 2.0, 0.0, True),
    ],
)
@pytest.mark.parametrize("advantage", [1.5, -0.5, 0.0])
def test_bounded_weights_by_hand(
    ratio: float, truncated: float, masked: float, outside: bool, advantage: float
) -> None:
    for importance, weight in ((Importance.TRUNCATED, truncated), (Importance.MASKED, masked)):
        behaviour = torch.tensor([0.125], dtype=torch.float64)
        student = (behaviour * ratio).log().requires_grad_()
        told = cut(
            ratio=torch.tensor([ratio]), advantages=torch.tensor([advantage]), importance=importance, bounds=(0.5, 2.0)
        )
        assert told.tolist() == [outside]
        # At a bound itself rounding decides the side, so the term is looked at a hair inside.
        bounds = (0.5 - 1e-12, 2.0 + 1e-12)
        term = policy_gradient(
            student_logprobs=student,
            behaviour_logprobs=behaviour.log(),
            advantages=torch.tensor([advantage], dtype=torch.float64),
            importance=importance,
            bounds=bounds,
        )
        assert term.item() == pytest.approx(-advantage * weight * math.log(0.125 * ratio))
        assert torch.autograd.grad(term.sum(), student)[0].item() == pytest.approx(-advantage * weight)


def test_cut_says_what_each_correction_changes() -> None:
    ratio, advantages = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5]), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    for importance in (Importance.NONE, Importance.RATIO):
        assert not cut(ratio=ratio, advantages=advantages, importance=importance).any()
    told = cut(ratio=ratio, advantages=advantages, importance=Importance.PPO_CLIP, clip=0.2)
    assert told.tolist() == [False, True, False, True, False]
    for importance in BOUNDED:
        told = cut(ratio=ratio, advantages=advantages, importance=importance, bounds=(0.8, 1.2))
        assert told.tolist() == [True, True, False, True, True]


def gradient_over_behaviour(
    importance: Importance,
    bounds: tuple[float, float] | None = None,
    *,
    behaviour: list[float] = BEHAVIOUR,
    baseline: float = 0.0,
) -> Tensor:
    """Sum over the drawn token y, with the probability b(y) of its draw, of the term's gradient on the logits."""
    logits = torch.tensor(STUDENT, dtype=torch.float64).log().requires_grad_()
    q, b = logits.log_softmax(-1), torch.tensor(behaviour, dtype=torch.float64)
    c = log_ratio(student_logprobs=q.detach(), teacher_logprobs=torch.tensor(TEACHER, dtype=torch.float64).log())
    term = policy_gradient(
        student_logprobs=q,
        behaviour_logprobs=b.log(),
        advantages=-c - baseline,
        importance=importance,
        bounds=bounds,
    )
    return torch.autograd.grad((b * term).sum(), logits)[0]


@pytest.mark.parametrize(
    ("importance", "bounds"),
    [
        (Importance.RATIO, None),
        (Importance.TRUNCATED, (0.0, math.inf)),
        (Importance.TRUNCATED, (0.6, 1.2)),
        (Importance.MASKED, (0.0, math.inf)),
        (Importance.MASKED, (0.6, 1.2)),
    ],
)
@pytest.mark.parametrize("baseline", [0.0, 3.0])
def test_wide_enough_bounds_leave_the_reverse_kl_unbiased(
    importance: Importance, bounds: tuple[float, float] | None, baseline: float
) -> None:
    found = gradient_over_behaviour(importance, bounds, baseline=baseline)
    torch.testing.assert_close(found, torch.tensor(REVERSE_KL_ROW, dtype=torch.float64), atol=1e-6, rtol=0)


def test_without_a_correction_the_gradient_is_another() -> None:
    """Sum over y of b c (e_y - q), b c = (-.277259, .311916, .155958, 0) with sum .190615."""
    found = gradient_over_behaviour(Importance.NONE)
    expected = [-0.277259 - 0.023827, 0.311916 - 0.095308, 0.155958 - 0.047654, -0.023827]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("importance", "bounds", "missing"),
    [
        # b w - q of each token: what its probability is off by, once weighed
        (Importance.MASKED, (0.8, 2.0), [-0.125, 0.0, 0.0, 0.0]),
        (Importance.TRUNCATED, (0.8, 2.0), [0.2 * 0.8 - 0.125, 0.0, 0.0, 0.0]),
        (Importance.MASKED, (0.0, 1.05), [0.0, -0.5, -0.25, 0.0]),
        (Importance.TRUNCATED, (0.0, 1.05), [0.0, 0.45 * 1.05 - 0.5, 0.225 * 1.05 - 0.25, 0.0]),
        (Importance.TRUNCATED, (0.8, 1.05), [0.035, -0.0275, -0.01375, 0.0]),
        (Importance.MASKED, (0.8, 1.05), [-0.125, -0.5, -0.25, 0.0]),
    ],
)
def test_bounds_that_cut_have_the_closed_form_bias(
    importance: Importance, bounds: tuple[float, float], missing: list[float]
) -> None:
    """Bias = sum over y of (b(y) w(y) - q(y)) c(y) (e_y - q), c = (-2 ln 2, ln 2, ln 2, 0)."""
    c = [-2 * math.log(2), math.log(2), math.log(2), 0.0]
    bias = [sum(missing[y] * c[y] * ((y == v) - STUDENT[v]) for y in range(4)) for v in range(4)]
    expected = [row + off for row, off in zip(REVERSE_KL_ROW, bias, strict=True)]
    found = gradient_over_behaviour(importance, bounds)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_masking_the_teachers_token_by_hand() -> None:
    """Without token 0 its part q c (e - q) = -.173287 (.875, -.5, -.25, -.125) is missing from the reverse-KL row."""
    found = gradient_over_behaviour(Importance.MASKED, (0.8, 2.0))
    expected = torch.tensor([-0.064982, 0.086643, 0.043322, -0.064982], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.0, 1.05), (0.8, 1.05), (0.9, 2.0), (0.0, 5.0)])
def test_laws_of_importance_weights(bounds: tuple[float, float]) -> None:
    """The weight of each token is read off the gradient at advantage -1, under the behaviour that drew it."""
    q, b = torch.tensor(STUDENT, dtype=torch.float64), torch.tensor(BEHAVIOUR, dtype=torch.float64)

    def weights(importance: Importance, bounds: tuple[float, float] | None = None) -> Tensor:
        leaf = q.log().requires_grad_()
        term = policy_gradient(
            student_logprobs=leaf,
            behaviour_logprobs=b.log(),
            advantages=-torch.ones_like(q),
            importance=importance,
            bounds=bounds,
        )
        return torch.autograd.grad(term.sum(), leaf)[0]

    ratio, truncated, masked = weights(Importance.RATIO), *(weights(each, bounds) for each in BOUNDED)
    outside = cut(ratio=ratio, advantages=torch.zeros(4), importance=Importance.MASKED, bounds=bounds)
    assert (b * ratio).sum().item() == pytest.approx(1.0)  # the behaviour's mean weight is one
    assert (b * masked).sum().item() == pytest.approx(q[~outside].sum().item())  # the student's mass that is kept
    assert bool((truncated >= bounds[0]).all() and (truncated <= bounds[1]).all())
    assert bool((masked <= truncated).all())
    torch.testing.assert_close(truncated[~outside], ratio[~outside])
    torch.testing.assert_close(masked, torch.where(outside, 0.0, ratio))
    if bounds[0] == 0.0:
        assert (b * truncated).sum().item() <= 1.0 + 1e-12  # an upper bound alone only takes away


@pytest.mark.parametrize("importance", BOUNDED)
def test_on_policy_the_bounded_forms_are_the_plain_one(importance: Importance) -> None:
    plain = gradient_over_behaviour(Importance.NONE, behaviour=STUDENT)
    found = gradient_over_behaviour(importance, (0.5, 2.0), behaviour=STUDENT)
    torch.testing.assert_close(found, plain, atol=1e-12, rtol=0)


@pytest.mark.parametrize("importance", BOUNDED)
def test_the_weight_is_not_differentiated(importance: Importance) -> None:
    """Finite differences of the term with its weight held, not of the weight's own formula."""
    behaviour, advantage, weight, step = 0.2, -1.3, 0.45 / 0.2, 1e-6
    student = torch.tensor([0.45], dtype=torch.float64).log().requires_grad_()
    term = policy_gradient(
        student_logprobs=student,
        behaviour_logprobs=torch.tensor([behaviour], dtype=torch.float64).log(),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        importance=importance,
        bounds=(0.1, 3.0),
    )
    held = [-advantage * weight * (math.log(0.45) + sign * step) for sign in (-1, 1)]
    found = torch.autograd.grad(term.sum(), student)[0].item()
    assert found == pytest.approx((held[1] - held[0]) / (2 * step))
    assert term.item() == pytest.approx(-advantage * weight * math.log(0.45))


@pytest.mark.parametrize("importance", BOUNDED)
@pytest.mark.parametrize("low", [0.0, 0.1])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_token_the_student_rules_out_gives_no_nan(importance: Importance, low: float, advantage: float) -> None:
    logits = torch.tensor([-math.inf, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    term = policy_gradient(
        student_logprobs=logits.log_softmax(-1),
        behaviour_logprobs=torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64).log(),
        advantages=torch.full((3,), advantage, dtype=torch.float64),
        importance=importance,
        bounds=(low, 3.0),
    )
    assert bool(term.isfinite().all())
    assert bool(torch.autograd.grad(term.sum(), logits)[0].isfinite().all())


@pytest.mark.parametrize("importance", BOUNDED)
def test_an_infinite_advantage_of_weight_zero_is_out(importance: Importance) -> None:
    student = torch.tensor([-math.inf, math.log(0.5)], requires_grad=True)
    term = policy_gradient(
        student_logprobs=student,
        behaviour_logprobs=torch.tensor([0.5, 0.5]).log(),
        advantages=torch.tensor([math.inf, 1.0]),
        importance=importance,
        bounds=(0.0, 2.0),
    )
    assert term.tolist() == [0.0, pytest.approx(math.log(2.0))]
    assert torch.autograd.grad(term.sum(), student)[0].tolist() == [0.0, pytest.approx(-1.0)]


@pytest.mark.parametrize("importance", BOUNDED)
def test_an_unknown_ratio_is_not_taken_for_a_cut_one(importance: Importance) -> None:
    """A missing behaviour log-probability (NaN) must be seen, not masked away."""
    term = policy_gradient(
        student_logprobs=torch.zeros(1),
        behaviour_logprobs=torch.tensor([math.nan]),
        advantages=torch.ones(1),
        importance=importance,
        bounds=(0.5, 2.0),
    )
    assert bool(term.isnan().all())


def test_half_precision_is_computed_in_float32() -> None:
    student = torch.tensor([-2.0], dtype=torch.bfloat16)
    ratio = importance_ratio(student_logprobs=student, behaviour_logprobs=torch.tensor([-2.125], dtype=torch.bfloat16))
    torch.testing.assert_close(ratio, torch.tensor([math.exp(0.125)]))


# The state's reverse KL as a control variate ------------------------------------------------------------------------


def gradients_of_every_draw(student: list[float], teacher: list[float], *, state_kl: bool) -> Tensor:
    """[V, V] row y: gradient on the logits when y is drawn, with advantage -c or -c + KL(q || p)."""
    logits = torch.tensor(student, dtype=torch.float64).log().requires_grad_()
    q = logits.log_softmax(-1)
    c = log_ratio(student_logprobs=q.detach(), teacher_logprobs=torch.tensor(teacher, dtype=torch.float64).log())
    kl = (q.detach().exp() * c).sum() if state_kl else 0.0
    term = policy_gradient(
        student_logprobs=q, behaviour_logprobs=q.detach(), advantages=-c + kl, importance=Importance.NONE
    )
    return torch.stack([torch.autograd.grad(value, logits, retain_graph=True)[0] for value in term])


@pytest.mark.parametrize(
    ("student", "teacher", "expected", "variances"),
    [
        # Square of the gradient at draw y: A^2 n, n = 1 - 2 q_y + sum of q^2 = 35/32, 11/32, 27/32, 35/32. In (ln 2)^2:
        # -c: c^2 = 4, 1, 1, 0 with mean of c^2 n .929688; -c + KL: 6.25, .25, .25, .25 with mean .984375; both less the
        # squared row, .179687. The variance rises: the likely token 1 has the smallest n, and the KL (.5) is beyond
        # twice the best constant, mean of c n / mean of n = 1/6.
        (STUDENT, TEACHER, REVERSE_KL_ROW, (0.360340, 0.386615)),
        # A uniform student has n = 2/3 throughout, so the KL is the best constant: 2/3 of .753655, and of .753655 less
        # the squared KL .105162; both less the squared row, .216166.
        ([1 / 3] * 3, [0.7, 0.2, 0.1], [-0.35541, 0.06218, 0.29323], (0.286272, 0.216164)),
    ],
    ids=["four ids", "uniform student"],
)
def test_the_state_kl_keeps_the_expected_gradient_and_not_the_variance(
    student: list[float], teacher: list[float], expected: list[float], variances: tuple[float, float]
) -> None:
    q = torch.tensor(student, dtype=torch.float64)
    for state_kl, variance in zip((False, True), variances, strict=True):
        gradients = gradients_of_every_draw(student, teacher, state_kl=state_kl)
        mean = q @ gradients
        torch.testing.assert_close(mean, torch.tensor(expected, dtype=torch.float64), atol=6e-6, rtol=0)
        assert (q @ (gradients - mean).square()).sum().item() == pytest.approx(variance, abs=2e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_state_kl_lowers_the_variance_over_many_ids(seed: int) -> None:
    """Where no id has a large share of the student, |e_y - q|^2 is nearly 1 for all, and the mean nearly the best."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 50, generator=generator, dtype=torch.float64).softmax(-1)
    spread = list[float]()
    for state_kl in (False, True):
        gradients = gradients_of_every_draw(student.tolist(), teacher.tolist(), state_kl=state_kl)
        spread.append((student @ (gradients - student @ gradients).square()).sum().item())
    assert spread[1] < spread[0]
