"""Per-token divergences against hand-made values, finite differences and laws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from etude.axes.names import Divergence
from etude.core.divergences import (
    LARGEST_POWER,
    LOG_OF_ZERO,
    adaptive_kl,
    alpha_beta,
    divergence_fn,
    forward_kl,
    jsd,
    reverse_kl,
    skew_forward_kl,
    skew_reverse_kl,
    total_variation,
)

DivergenceOf = Callable[..., Tensor]

TEACHER = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
STUDENT = torch.tensor([0.125, 0.5, 0.25, 0.125], dtype=torch.float64)

# No power, one power, two of the same sign and of opposite signs; their sum one, zero and neither.
POWERS = [(1, 0), (0, 1), (0.5, 0.5), (0.2, 0.7), (0.5, 0), (0, 0.5), (0.5, -0.5), (-0.3, 1.1), (1.5, 1.5), (0, 0)]

ALL: dict[str, DivergenceOf] = {
    "forward_kl": divergence_fn(Divergence.FORWARD_KL),
    "reverse_kl": divergence_fn(Divergence.REVERSE_KL),
    "skew_forward_kl": divergence_fn(Divergence.SKEW_FORWARD_KL, alpha=0.1),
    "skew_reverse_kl": divergence_fn(Divergence.SKEW_REVERSE_KL, alpha=0.1),
    **{f"jsd({beta})": divergence_fn(Divergence.JSD, beta=beta) for beta in (0.0, 0.1, 0.5, 0.9, 1.0)},
    **{
        f"rescaled jsd({beta})": divergence_fn(Divergence.JSD, beta=beta, rescale=True)
        for beta in (1e-6, 0.1, 0.5, 0.9, 1 - 1e-6)
    },
    "total_variation": divergence_fn(Divergence.TOTAL_VARIATION),
    **{f"alpha_beta({a}, {b})": divergence_fn(Divergence.ALPHA_BETA, alpha=a, beta=b) for a, b in POWERS},
    "adaptive_kl": divergence_fn(Divergence.ADAPTIVE_KL, head_mass=0.5),
    "detached skew_reverse_kl": divergence_fn(Divergence.SKEW_REVERSE_KL, alpha=0.1, detach_mixture=True),
}
every_divergence = pytest.mark.parametrize("divergence", ALL.values(), ids=ALL.keys())
DETACHED = ("adaptive_kl", "detached skew_reverse_kl")  # their gradient is not that of their value; tests of their own


def value(divergence: DivergenceOf, student: Tensor, teacher: Tensor) -> float:
    return divergence(student_logprobs=student.log(), teacher_logprobs=teacher.log()).item()


def gradient(divergence: DivergenceOf, student_logits: Tensor, teacher_logprobs: Tensor) -> Tensor:
    leaf = student_logits.detach().clone().requires_grad_()
    result = divergence(student_logprobs=leaf.log_softmax(-1), teacher_logprobs=teacher_logprobs)
    return torch.autograd.grad(result.sum(), leaf)[0]


def random_logprobs(seed: int, *shape: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).log_softmax(-1)


# Values and gradients known beforehand ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (forward_kl, 0.625 * math.log(2)),
        (reverse_kl, 0.5 * math.log(2)),
        (ALL["jsd(0.1)"], 0.037234),
        (ALL["jsd(0.5)"], 0.092089),
        (ALL["jsd(0.9)"], 0.031399),
        (ALL["skew_forward_kl"], 0.321270),
        (ALL["skew_reverse_kl"], 0.284836),
        (ALL["detached skew_reverse_kl"], 0.284836),
        (total_variation, 0.375),
        (ALL["adaptive_kl"], 0.389895),
        (ALL["alpha_beta(0.5, 0.5)"], 0.378680),
        (ALL["alpha_beta(0.2, 0.7)"], 0.409820),
    ],
)
def test_values(divergence: DivergenceOf, expected: float) -> None:
    assert value(divergence, STUDENT, TEACHER) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (forward_kl, [-0.375, 0.25, 0.125, 0.0]),
        (reverse_kl, [-0.216608, 0.173287, 0.086643, -0.043322]),
        (ALL["jsd(0.5)"], [-0.063595, 0.046614, 0.023307, -0.006327]),
        (ALL["jsd(0.9)"], [-0.019915, 0.015650, 0.007825, -0.003560]),
        (total_variation, [-0.101562, 0.093750, 0.046875, -0.039062]),  # 0 at the last id, where they are equal
    ],
)
def test_gradients_on_student_logits(divergence: DivergenceOf, expected: list[float]) -> None:
    result = gradient(divergence, STUDENT.log(), TEACHER.log())
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_beta_weighs_the_teacher_and_the_ends_are_the_two_kls() -> None:
    teacher = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    student = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    expected = {0.0: 0.634897, 0.1: 0.055891, 0.9: 0.058399, 1.0: 0.675806}  # swapped weights: 0.457826 at 0.1
    found = {beta: value(ALL[f"jsd({beta})"], student, teacher) for beta in expected}
    assert found == pytest.approx(expected, abs=1e-6)
    assert found[0.0] == value(forward_kl, student, teacher)
    assert found[1.0] == value(reverse_kl, student, teacher)


def test_jsd_near_its_ends_shrinks_like_beta_times_a_kl() -> None:
    epsilon = 1e-6
    near_zero = value(divergence_fn(Divergence.JSD, beta=epsilon), STUDENT, TEACHER)
    near_one = value(divergence_fn(Divergence.JSD, beta=1 - epsilon), STUDENT, TEACHER)
    assert near_zero / epsilon == pytest.approx(0.433217, abs=1e-5)
    assert near_one / epsilon == pytest.approx(0.346574, abs=1e-5)
    assert value(divergence_fn(Divergence.JSD, beta=1e-3), STUDENT, TEACHER) == pytest.approx(0.000433, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("small", "tolerance"), [(1e-3, 2e-2), (1e-6, 2e-5), (1e-12, 1e-6)])
def test_rescaled_jsd_goes_to_the_two_kls(small: float, tolerance: float, dtype: torch.dtype) -> None:
    """Value and gradient, in float32 too, where KL(q || m) / beta taken literally is rounding noise."""
    logits, teacher = (random_logprobs(seed, 5, 30, scale=1.0).to(dtype) for seed in (12, 13))
    student = logits.log_softmax(-1)
    for beta, plain in ((small, forward_kl), (1 - small, reverse_kl)):
        near = divergence_fn(Divergence.JSD, beta=beta, rescale=True)
        torch.testing.assert_close(
            near(student_logprobs=student, teacher_logprobs=teacher),
            plain(student_logprobs=student, teacher_logprobs=teacher),
            rtol=tolerance,  # the next order is about beta times p / q, ten or so here
            atol=0,
        )
        torch.testing.assert_close(
            gradient(near, logits, teacher), gradient(plain, logits, teacher), rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("beta", [0.05, 0.3, 0.5, 0.7, 0.95])
def test_rescaling_divides_value_and_gradient(beta: float) -> None:
    logits, teacher = random_logprobs(14, 4, 9), random_logprobs(15, 4, 9)
    plain = divergence_fn(Divergence.JSD, beta=beta)
    rescaled = divergence_fn(Divergence.JSD, beta=beta, rescale=True)
    scale = beta * (1 - beta)
    torch.testing.assert_close(
        scale * rescaled(student_logprobs=logits, teacher_logprobs=teacher),
        plain(student_logprobs=logits, teacher_logprobs=teacher),
    )
    torch.testing.assert_close(scale * gradient(rescaled, logits, teacher), gradient(plain, logits, teacher))


def test_skews_approach_the_plain_kls() -> None:
    for divergence, plain in ((skew_forward_kl, 0.433217), (skew_reverse_kl, 0.346574)):
        result = divergence(student_logprobs=STUDENT.log(), teacher_logprobs=TEACHER.log(), alpha=1e-9)
        assert result.item() == pytest.approx(plain, abs=1e-6)


def test_the_two_kls_are_each_other_with_the_roles_swapped() -> None:
    student, teacher = random_logprobs(0, 5, 7), random_logprobs(1, 5, 7)
    torch.testing.assert_close(
        forward_kl(student_logprobs=student, teacher_logprobs=teacher),
        reverse_kl(student_logprobs=teacher, teacher_logprobs=student),
    )
    mirrored = jsd(student_logprobs=teacher, teacher_logprobs=student, beta=0.9)
    torch.testing.assert_close(jsd(student_logprobs=student, teacher_logprobs=teacher, beta=0.1), mirrored)


@pytest.mark.parametrize("name", [name for name in ALL if name not in DETACHED])
def test_gradient_equals_finite_differences(name: str) -> None:
    divergence = ALL[name]
    teacher = random_logprobs(2, 3, 6)

    def of_logits(logits: Tensor) -> Tensor:
        return divergence(student_logprobs=logits.log_softmax(-1), teacher_logprobs=teacher)

    logits = random_logprobs(3, 3, 6).requires_grad_()
    assert torch.autograd.gradcheck(of_logits, (logits,), eps=1e-6, atol=1e-7, rtol=1e-5)


# Alpha-beta ---------------------------------------------------------------------------------------------------------


def literal_alpha_beta(student: Tensor, teacher: Tensor, alpha: float, beta: float) -> Tensor:
    """The formulas as they are printed, each limit derived by hand; [..., V], one number an id."""
    power, ratio = alpha + beta, (teacher / student).log()
    if alpha == 0 and beta == 0:
        return ratio**2 / 2
    if alpha == 0:
        return (teacher**beta - student**beta - beta * student**beta * ratio) / beta**2
    if beta == 0:
        return (student**alpha - teacher**alpha + alpha * teacher**alpha * ratio) / alpha**2
    if power == 0:
        return ((teacher / student) ** alpha - 1 - alpha * ratio) / alpha**2
    mixed = alpha / power * teacher**power + beta / power * student**power
    return (mixed - teacher**alpha * student**beta) / (alpha * beta)


@pytest.mark.parametrize(("alpha", "beta"), [*POWERS, (-0.5, 0.5), (-1, 2), (2, -1), (-0.4, -0.3), (3, -2.5)])
def test_alpha_beta_is_its_formula(alpha: float, beta: float) -> None:
    student, teacher = random_logprobs(16, 6, 12, scale=1.5), random_logprobs(17, 6, 12, scale=1.5)
    expected = literal_alpha_beta(student.exp(), teacher.exp(), alpha, beta).sum(-1)
    result = alpha_beta(student_logprobs=student, teacher_logprobs=teacher, alpha=alpha, beta=beta)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=0)
    mirrored = alpha_beta(student_logprobs=teacher, teacher_logprobs=student, alpha=beta, beta=alpha)
    torch.testing.assert_close(result, mirrored, rtol=1e-12, atol=0)


def test_alpha_beta_has_the_kls_and_hellinger_inside() -> None:
    logits, teacher = random_logprobs(18, 6, 12), random_logprobs(19, 6, 12)

    def hellinger(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        return 4 * (1 - (student_logprobs.exp() * teacher_logprobs.exp()).sqrt().sum(-1))

    for (alpha, beta), known in {(1, 0): forward_kl, (0, 1): reverse_kl, (0.5, 0.5): hellinger}.items():
        found = divergence_fn(Divergence.ALPHA_BETA, alpha=alpha, beta=beta)
        torch.testing.assert_close(
            found(student_logprobs=logits, teacher_logprobs=teacher),
            known(student_logprobs=logits, teacher_logprobs=teacher),
        )
        torch.testing.assert_close(gradient(found, logits, teacher), gradient(known, logits, teacher))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (0, 1), (0.5, -0.5), (-0.5, 0.5), (0.5, 0), (0, 0.5), (0, 0)])
def test_alpha_beta_is_continuous_at_its_limits(alpha: float, beta: float, distance: float, dtype: torch.dtype) -> None:
    """From every side, in float32 too: nothing is divided by what goes to zero there."""
    logits, teacher = random_logprobs(20, 4, 20).to(dtype), random_logprobs(21, 4, 20).to(dtype)
    student = logits.log_softmax(-1)
    limit = divergence_fn(Divergence.ALPHA_BETA, alpha=alpha, beta=beta)
    expected, pull = limit(student_logprobs=student, teacher_logprobs=teacher), gradient(limit, logits, teacher)
    tolerance = 50 * distance + 10 * torch.finfo(dtype).eps  # 50: log-probabilities and log-ratios are about 10
    for one, two in itertools.product((-1, 0, 1), repeat=2):
        near = divergence_fn(Divergence.ALPHA_BETA, alpha=alpha + one * distance, beta=beta + two * distance)
        values = near(student_logprobs=student, teacher_logprobs=teacher)
        torch.testing.assert_close(values, expected, rtol=tolerance, atol=0)
        scale = pull.abs().max().item()
        torch.testing.assert_close(gradient(near, logits, teacher), pull, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(("alpha", "beta"), [*POWERS, (-0.5, 0.5), (-1, 2), (1e-3, 2e-3), (1e-6, -1e-6), (20, -19.5)])
@pytest.mark.parametrize("distance", [1e-3, 0.1, 3.0])
def test_alpha_beta_in_float32_is_that_in_float64(alpha: float, beta: float, distance: float) -> None:
    """Relative, however small the divergence is, over a vocabulary of the real size."""
    teacher = random_logprobs(22, 150_000).float()
    student = (teacher + distance * random_logprobs(23, 150_000, scale=1.0)).log_softmax(-1)
    function = divergence_fn(Divergence.ALPHA_BETA, alpha=alpha, beta=beta)
    single = function(student_logprobs=student, teacher_logprobs=teacher)
    double = function(student_logprobs=student.double(), teacher_logprobs=teacher.double())
    torch.testing.assert_close(single.double(), double, rtol=2e-5, atol=0)


@pytest.mark.parametrize(("alpha", "beta"), [(-0.5, 1.5), (-0.5, 0.5), (-1, -1), (0.5, -1), (1.5, -0.5), (-2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_negative_powers_of_zero_are_large_and_finite(alpha: float, beta: float, dtype: torch.dtype) -> None:
    logprobs = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=dtype).log()
    function = divergence_fn(Divergence.ALPHA_BETA, alpha=alpha, beta=beta)
    for student_logits, teacher in (logprobs, logprobs.flip(0), logprobs[[0, 0]]):
        result = function(student_logprobs=student_logits.log_softmax(-1), teacher_logprobs=teacher)
        push = gradient(function, student_logits, teacher)
        assert result.isfinite()
        assert result >= 0
        assert push.isfinite().all()
        assert push.norm().isfinite()
    # p = 0 under a negative alpha: descent lowers the logit of that id, with all the force there is.
    push = gradient(function, logprobs[1], logprobs[0])
    if alpha < 0:
        assert push[2] == pytest.approx((1 - 0.5) * math.exp(LARGEST_POWER) / -alpha, rel=0.8)
    assert push[2] > 0


def test_equal_distributions_have_exactly_no_alpha_beta_gradient() -> None:
    logits = 3 * torch.randn(20, 50)
    for alpha, beta in (*POWERS, (-1, 2), (-0.5, -0.5)):
        function = divergence_fn(Divergence.ALPHA_BETA, alpha=alpha, beta=beta)
        assert not function(student_logprobs=logits.log_softmax(-1), teacher_logprobs=logits.log_softmax(-1)).any()
        assert not gradient(function, logits, logits.log_softmax(-1)).any()


# Detached weights and mixtures --------------------------------------------------------------------------------------


def test_adaptive_kl_weighs_two_gradients_and_not_their_weights() -> None:
    """p = (.4, .3, .2, .1), q = (.1, .2, .3, .4): L1 errors .3, .1, .1, .3; a head of .75 is the first two ids."""
    teacher = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    student = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    order = [2, 0, 3, 1]  # the head is found by probability and not by position
    forward, reverse = (gradient(kl, student.log(), teacher.log()) for kl in (forward_kl, reverse_kl))
    for head_mass, weight in ((0.1, 3 / 8), (0.6, 3 / 8), (0.75, 4 / 8), (0.95, 5 / 8)):
        function = divergence_fn(Divergence.ADAPTIVE_KL, head_mass=head_mass)
        expected = weight * value(forward_kl, student, teacher) + (1 - weight) * value(reverse_kl, student, teacher)
        assert value(function, student[order], teacher[order]) == pytest.approx(expected)
        found = gradient(function, student[order].log(), teacher[order].log())
        torch.testing.assert_close(found, (weight * forward + (1 - weight) * reverse)[order])


def test_detaching_the_mixture_changes_the_gradient_alone() -> None:
    """q (h - E_q h): h = log(q / m) when detached; log(q / m) - alpha q / m when the student in m moves too."""
    alpha, logits, teacher = 0.1, random_logprobs(24, 5, 8), random_logprobs(25, 5, 8)
    plain, detached = ALL["skew_reverse_kl"], ALL["detached skew_reverse_kl"]
    same = {"student_logprobs": logits, "teacher_logprobs": teacher}
    assert torch.equal(plain(**same), detached(**same))
    student, mixture = logits.exp(), (1 - alpha) * teacher.exp() + alpha * logits.exp()

    def closed_form(h: Tensor) -> Tensor:
        return student * (h - (student * h).sum(-1, keepdim=True))

    log_ratio = (student / mixture).log()
    found, full = gradient(detached, logits, teacher), gradient(plain, logits, teacher)
    torch.testing.assert_close(found, closed_form(log_ratio))
    torch.testing.assert_close(full, closed_form(log_ratio - alpha * student / mixture))
    assert (found - full).abs().max() > 1e-3
    torch.testing.assert_close(found, gradient(reverse_kl, logits, mixture.log()))  # m as a teacher of its own


# Laws ---------------------------------------------------------------------------------------------------------------


@every_divergence
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_on_itself_with_zero_gradient(divergence: DivergenceOf, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(20, 50)).to(dtype)
    same = logits.log_softmax(-1)
    tolerance = 2 * torch.finfo(dtype).eps  # that a row of probabilities sums to one holds up to rounding
    assert divergence(student_logprobs=same, teacher_logprobs=same).abs().max() <= tolerance
    assert gradient(divergence, logits, same).abs().max() <= tolerance


def test_reverse_kl_has_exactly_no_gradient_on_itself() -> None:
    logits = 3 * torch.randn(20, 50)
    assert not gradient(reverse_kl, logits, logits.log_softmax(-1)).any()


@every_divergence
def test_never_negative_and_one_number_a_token(divergence: DivergenceOf) -> None:
    result = divergence(student_logprobs=random_logprobs(4, 8, 25, 11), teacher_logprobs=random_logprobs(5, 8, 25, 11))
    assert result.shape == (8, 25)
    assert (result > 0).all()


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_is_bounded(beta: float) -> None:
    """By the entropy of the coin that picks teacher or student: ln 2 at most, reached where they share no id."""
    apart = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64).log()
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert jsd(student_logprobs=apart[0], teacher_logprobs=apart[1], beta=beta).item() == pytest.approx(entropy)
    values = jsd(
        student_logprobs=random_logprobs(6, 200, 5, scale=20), teacher_logprobs=random_logprobs(7, 200, 5), beta=beta
    )
    assert values.max() <= math.log(2)


@every_divergence
def test_a_constant_on_the_logits_changes_nothing(divergence: DivergenceOf) -> None:
    logits, teacher = random_logprobs(8, 4, 9), random_logprobs(9, 4, 9)
    plain = divergence(student_logprobs=logits.log_softmax(-1), teacher_logprobs=teacher)
    moved = divergence(student_logprobs=(logits + 17.0).log_softmax(-1), teacher_logprobs=(teacher - 5).log_softmax(-1))
    torch.testing.assert_close(plain, moved)
    gradients = gradient(divergence, logits, teacher)
    torch.testing.assert_close(gradient(divergence, logits + 17.0, teacher), gradients)
    torch.testing.assert_close(gradients.sum(-1), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)


# Zeros and low precision --------------------------------------------------------------------------------------------

ZEROS = {
    "teacher": ([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]),
    "student": ([0.2, 0.3, 0.5], [0.5, 0.5, 0.0]),
    "both": ([0.4, 0.6, 0.0], [0.5, 0.5, 0.0]),
    "one hot": ([0.0, 1.0, 0.0], [0.2, 0.3, 0.5]),
    "apart": ([1.0, 0.0, 0.0], [0.0, 0.5, 0.5]),
}


@every_divergence
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("teacher", "student"), ZEROS.values(), ids=ZEROS.keys())
def test_zeros_give_no_nan(
    divergence: DivergenceOf, teacher: list[float], student: list[float], dtype: torch.dtype
) -> None:
    student_logits = torch.tensor(student, dtype=dtype).log()  # minus infinity where it is zero
    teacher_logprobs = torch.tensor(teacher, dtype=dtype).log()
    result = divergence(student_logprobs=student_logits.log_softmax(-1), teacher_logprobs=teacher_logprobs)
    assert result.isfinite()
    assert result >= 0
    assert gradient(divergence, student_logits, teacher_logprobs).isfinite().all()


def test_what_zeros_are_worth() -> None:
    teacher, student = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.2, 0.3, 0.5])
    hand = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.3)
    assert value(forward_kl, student, teacher) == pytest.approx(hand)  # 0 log 0 = 0
    assert value(reverse_kl, student, teacher) == pytest.approx(-0.5 * LOG_OF_ZERO, rel=1e-3)  # dear, not infinite
    push = gradient(reverse_kl, student.log(), teacher.log())
    assert push[2] > 1000  # descent lowers the logit of the id that the teacher rules out


@every_divergence
def test_improbable_ids_of_float32_logits_stay_exact(divergence: DivergenceOf) -> None:
    """Probabilities far below float32's smallest number, on either side, against the same sum in float64."""
    student, teacher = torch.tensor([0.0, -300.0, -1.0]), torch.tensor([-2.0, 0.0, -400.0])
    single = divergence(student_logprobs=student.log_softmax(-1), teacher_logprobs=teacher.log_softmax(-1))
    double = divergence(
        student_logprobs=student.double().log_softmax(-1), teacher_logprobs=teacher.double().log_softmax(-1)
    )
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        gradient(divergence, student, teacher.log_softmax(-1)).double(),
        gradient(divergence, student.double(), teacher.double().log_softmax(-1)),
        rtol=1e-5,
        atol=1e-6,
    )


@every_divergence
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(divergence: DivergenceOf, dtype: torch.dtype) -> None:
    student, teacher = random_logprobs(10, 6, 40).to(dtype), random_logprobs(11, 6, 40).to(dtype)
    result = divergence(student_logprobs=student, teacher_logprobs=teacher)
    assert result.dtype is torch.float32
    assert torch.equal(result, divergence(student_logprobs=student.float(), teacher_logprobs=teacher.float()))


# Parameters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_beta_out_of_range_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="the teacher's weight in the mixture"):
        jsd(student_logprobs=STUDENT.log(), teacher_logprobs=TEACHER.log(), beta=beta)
    with pytest.raises(ValueError, match="the teacher's weight in the mixture"):
        divergence_fn(Divergence.JSD, beta=beta)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    for function, name in (
        (skew_forward_kl, Divergence.SKEW_FORWARD_KL),
        (skew_reverse_kl, Divergence.SKEW_REVERSE_KL),
    ):
        with pytest.raises(ValueError, match="strictly between 0 and 1"):
            function(student_logprobs=STUDENT.log(), teacher_logprobs=TEACHER.log(), alpha=alpha)
        with pytest.raises(ValueError, match="strictly between 0 and 1"):
            divergence_fn(name, alpha=alpha)


def test_a_parameter_belongs_to_its_own_divergence() -> None:
    with pytest.raises(ValueError, match=r"'jsd' takes \['beta'\], got \[\]"):
        divergence_fn(Divergence.JSD)
    with pytest.raises(ValueError, match=r"'reverse_kl' takes no parameter, got \['beta'\]"):
        divergence_fn(Divergence.REVERSE_KL, beta=0.5)
    with pytest.raises(ValueError, match=r"'skew_forward_kl' takes \['alpha'\], got \['beta'\]"):
        divergence_fn(Divergence.SKEW_FORWARD_KL, beta=0.5)
    with pytest.raises(ValueError, match=r"'alpha_beta' takes \['alpha', 'beta'\], got \['alpha'\]"):
        divergence_fn(Divergence.ALPHA_BETA, alpha=0.5)
    with pytest.raises(ValueError, match=r"'adaptive_kl' takes \['head_mass'\], got \[\]"):
        divergence_fn(Divergence.ADAPTIVE_KL)
    with pytest.raises(ValueError, match=r"'total_variation' takes no parameter, got \['head_mass'\]"):
        divergence_fn(Divergence.TOTAL_VARIATION, head_mass=0.5)


@pytest.mark.parametrize(("alpha", "beta"), [(math.nan, 0.5), (0.5, math.nan), (math.inf, 0.5), (0.5, -math.inf)])
def test_powers_are_finite_numbers(alpha: float, beta: float) -> None:
    with pytest.raises(ValueError, match="the powers of alpha_beta are finite numbers"):
        alpha_beta(student_logprobs=STUDENT.log(), teacher_logprobs=TEACHER.log(), alpha=alpha, beta=beta)
    with pytest.raises(ValueError, match="the powers of alpha_beta are finite numbers"):
        divergence_fn(Divergence.ALPHA_BETA, alpha=alpha, beta=beta)


@pytest.mark.parametrize("head_mass", [0.0, 1.0, -0.1, math.nan])
def test_head_mass_out_of_range_is_refused(head_mass: float) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        adaptive_kl(student_logprobs=STUDENT.log(), teacher_logprobs=TEACHER.log(), head_mass=head_mass)
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        divergence_fn(Divergence.ADAPTIVE_KL, head_mass=head_mass)


def test_a_flag_belongs_to_its_own_divergence() -> None:
    for beta in (0.0, 1.0):
        with pytest.raises(ValueError, match="the ends are the plain KLs already"):
            divergence_fn(Divergence.JSD, beta=beta, rescale=True)
        with pytest.raises(ValueError, match="the ends are the plain KLs already"):
            jsd(student_logprobs=STUDENT.log(), teacher_logprobs=TEACHER.log(), beta=beta, rescale=True)
    with pytest.raises(ValueError, match="'reverse_kl' with rescale; only 'jsd' is rescaled"):
        divergence_fn(Divergence.REVERSE_KL, rescale=True)
    with pytest.raises(ValueError, match="'skew_forward_kl' with detach_mixture; only 'skew_reverse_kl' has a mixture"):
        divergence_fn(Divergence.SKEW_FORWARD_KL, alpha=0.1, detach_mixture=True)
