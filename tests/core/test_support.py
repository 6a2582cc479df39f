"""Top-k support against hand-made values, enumeration of the drawn id, finite differences and laws."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from etude.axes.names import Divergence, Owner, Tail
from etude.core.divergences import LOG_OF_ZERO, DivergenceFn, divergence_fn, forward_kl, jsd, reverse_kl
from etude.core.support import kept_ids, kept_mass, overlap, top_ids, top_k_divergence

TEACHER = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
STUDENT = torch.tensor([0.125, 0.5, 0.25, 0.125], dtype=torch.float64).log()
TOP_2 = torch.tensor([0, 1])

ALL: dict[str, DivergenceFn] = {
    "forward_kl": divergence_fn(Divergence.FORWARD_KL),
    "reverse_kl": divergence_fn(Divergence.REVERSE_KL),
    "jsd": divergence_fn(Divergence.JSD, beta=0.3),
    "skew_forward_kl": divergence_fn(Divergence.SKEW_FORWARD_KL, alpha=0.1),
    "skew_reverse_kl": divergence_fn(Divergence.SKEW_REVERSE_KL, alpha=0.1),
    "alpha_beta": divergence_fn(Divergence.ALPHA_BETA, alpha=0.2, beta=0.7),
    "adaptive_kl": divergence_fn(Divergence.ADAPTIVE_KL, head_mass=0.5),
    "total_variation": divergence_fn(Divergence.TOTAL_VARIATION),
}
SHOWN_TAILS = (Tail.BUCKET, Tail.TRUNCATE, Tail.RENORMALISE)  # those that any divergence may have
TAILS_OF_ALL = [(name, tail) for name in ALL for tail in Tail if tail in SHOWN_TAILS or name == "reverse_kl"]
every_tail_of_every_divergence = pytest.mark.parametrize(("name", "tail"), TAILS_OF_ALL)


def compare(
    divergence: DivergenceFn, student: Tensor, teacher: Tensor, ids: Tensor, tail: Tail, drawn: Tensor | None = None
) -> Tensor:
    return top_k_divergence(
        divergence, student_logprobs_nV=student, teacher_logprobs_nV=teacher, ids_nK=ids, tail=tail, drawn_ids_n=drawn
    )


def drawn_for(tail: Tail, ids: Tensor) -> Tensor | None:
    return ids[..., 0] if tail is Tail.SAMPLED else None


def gradient(of_logprobs: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(of_logprobs(leaf.log_softmax(-1)).sum(), leaf)[0]


def random_logprobs(seed: int, *shape: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).log_softmax(-1)


def assert_near(found: Tensor, expected: list[float] | Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), atol=atol, rtol=0)


# Values and gradients known beforehand --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divergence", "tail", "expected"),
    [
        (forward_kl, Tail.BUCKET, 0.418494),
        (reverse_kl, Tail.BUCKET, 0.325336),
        (forward_kl, Tail.RENORMALISE, 0.510826),
        (reverse_kl, Tail.RENORMALISE, 0.459580),
        (forward_kl, Tail.TRUNCATE, 0.519860),
        (reverse_kl, Tail.TRUNCATE, 0.173287),
    ],
)
def test_values_on_the_teachers_top_2(divergence: DivergenceFn, tail: Tail, expected: float) -> None:
    ids = kept_ids(student_top_nk=top_ids(STUDENT, 2), teacher_top_nk=top_ids(TEACHER, 2), owner=Owner.TEACHER)
    assert compare(divergence, STUDENT, TEACHER, ids, tail).item() == pytest.approx(expected, abs=1e-6)


def test_one_id_with_a_bucket() -> None:
    value = compare(reverse_kl, STUDENT, TEACHER, torch.tensor([0]), Tail.BUCKET)
    hand = 0.125 * math.log(0.125 / 0.5) + 0.875 * math.log(0.875 / 0.5)
    assert hand == pytest.approx(0.316377, abs=1e-6)
    assert value.item() == pytest.approx(hand)


def test_gradient_with_a_bucket() -> None:
    found = gradient(lambda q: compare(reverse_kl, q, TEACHER, TOP_2, Tail.BUCKET), STUDENT)
    assert_near(found, [-0.213954, 0.183905, 0.020032, 0.010016])


def test_truncated_reverse_kl_is_not_the_derivative_of_its_sum() -> None:
    """The derivative raises ids 2 and 3, of which it knows nothing; the detached coefficient leaves them to the sum."""

    def naive(q: Tensor) -> Tensor:
        return (q.exp() * (q - TEACHER))[..., :2].sum(-1)

    assert_near(gradient(naive, STUDENT), [-0.148073, 0.447430, -0.199572, -0.099786])
    found = gradient(lambda q: compare(reverse_kl, q, TEACHER, TOP_2, Tail.TRUNCATE), STUDENT)
    assert_near(found, [-0.194948, 0.259930, -0.043322, -0.021661])


def test_truncated_gradients_in_closed_form() -> None:
    """Reverse: q_j (1_K c_j - sum_K q c). Forward: -1_K p_j + P_K q_j."""
    student, teacher = random_logprobs(0, 4, 7), random_logprobs(1, 4, 7)
    ids = top_ids(teacher, 3)
    kept = torch.zeros_like(student).scatter(-1, ids, 1.0)
    q, p, c = student.exp(), teacher.exp(), student - teacher
    found = gradient(lambda x: compare(reverse_kl, x, teacher, ids, Tail.TRUNCATE), student)
    assert_near(found, q * (kept * c - (kept * q * c).sum(-1, keepdim=True)), atol=1e-12)
    found = gradient(lambda x: compare(forward_kl, x, teacher, ids, Tail.TRUNCATE), student)
    assert_near(found, -kept * p + (kept * p).sum(-1, keepdim=True) * q, atol=1e-12)


# The sampled tail, every drawn id enumerated --------------------------------------------------------------------------


def test_sampled_tail_is_the_full_reverse_kl_in_expectation() -> None:
    def of_each_drawn(q: Tensor) -> Tensor:
        each = torch.arange(4)
        return compare(reverse_kl, q.expand(4, 4), TEACHER.expand(4, 4), TOP_2.expand(4, 2), Tail.SAMPLED, each)

    values, probabilities = of_each_drawn(STUDENT), STUDENT.exp()
    # c = log(q/p) = -2, 1, 1, 0 times ln 2; the head is .25 ln 2, and only id 2 adds a tail other than zero.
    assert_near(values, [0.25 * math.log(2), 0.25 * math.log(2), 1.25 * math.log(2), 0.25 * math.log(2)], atol=1e-12)
    assert (probabilities * values).sum().item() == pytest.approx(0.5 * math.log(2))
    expected_gradient = gradient(lambda q: probabilities * of_each_drawn(q), STUDENT)
    assert_near(expected_gradient, [-0.216608, 0.173287, 0.086643, -0.043322])


@pytest.mark.parametrize("owner", Owner)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_sampled_tail_has_no_bias_whatever_is_kept(owner: Owner, k: int) -> None:
    student, teacher = random_logprobs(2, 6), random_logprobs(3, 6)
    ids = kept_ids(student_top_nk=top_ids(student, k), teacher_top_nk=top_ids(teacher, k), owner=owner)

    def mean(q: Tensor) -> Tensor:
        per_drawn = [compare(reverse_kl, q, teacher, ids, Tail.SAMPLED, torch.tensor(y)) for y in range(6)]
        return (student.exp() * torch.stack(per_drawn)).sum()

    full = partial(reverse_kl, teacher_logprobs=teacher)
    assert_near(mean(student), full(student_logprobs=student), atol=1e-12)
    assert_near(gradient(mean, student), gradient(lambda q: full(student_logprobs=q), student), atol=1e-12)


def test_every_divergence_is_looked_at() -> None:
    assert ALL.keys() == {str(name) for name in Divergence}


# Laws -----------------------------------------------------------------------------------------------------------------


@every_tail_of_every_divergence
@pytest.mark.parametrize("owner", Owner)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_whole_vocabulary_is_the_full_divergence(name: str, tail: Tail, owner: Owner, dtype: torch.dtype) -> None:
    student, teacher = random_logprobs(4, 5, 9).to(dtype), random_logprobs(5, 5, 9).to(dtype)
    ids = kept_ids(student_top_nk=top_ids(student, 9), teacher_top_nk=top_ids(teacher, 9), owner=owner)

    def top_k(q: Tensor) -> Tensor:
        return compare(ALL[name], q, teacher, ids, tail, drawn_for(tail, ids))

    def full(q: Tensor) -> Tensor:
        return ALL[name](student_logprobs=q, teacher_logprobs=teacher)

    tolerance = 20 * torch.finfo(dtype).eps
    assert_near(top_k(student), full(student), atol=tolerance)
    assert_near(gradient(top_k, student), gradient(full, student), atol=tolerance)


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"alpha_beta", "adaptive_kl"}))  # these two are no f-divergences
@pytest.mark.parametrize("owner", Owner)
@pytest.mark.parametrize("k", [1, 4, 12])
def test_a_bucket_never_exceeds_the_full_divergence(name: str, owner: Owner, k: int) -> None:
    student, teacher = random_logprobs(6, 200, 12, scale=4.0), random_logprobs(7, 200, 12, scale=4.0)
    ids = kept_ids(student_top_nk=top_ids(student, k), teacher_top_nk=top_ids(teacher, k), owner=owner)
    value = compare(ALL[name], student, teacher, ids, Tail.BUCKET)
    assert (value >= -1e-15).all()
    assert (value <= ALL[name](student_logprobs=student, teacher_logprobs=teacher) + 1e-12).all()


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"adaptive_kl"}))  # its weights are detached
@pytest.mark.parametrize("tail", [Tail.BUCKET, Tail.RENORMALISE])
def test_gradient_equals_finite_differences(name: str, tail: Tail) -> None:
    teacher = random_logprobs(8, 3, 6)
    ids = torch.cat([top_ids(teacher, 2), torch.full((3, 1), 5), torch.full((3, 1), 5)], dim=-1)

    def of_logits(logits: Tensor) -> Tensor:
        return compare(ALL[name], logits.log_softmax(-1), teacher, ids, tail)

    logits = random_logprobs(9, 3, 6).requires_grad_()
    assert torch.autograd.gradcheck(of_logits, (logits,), eps=1e-6, atol=1e-7, rtol=1e-5)


def test_truncated_forward_kl_equals_finite_differences() -> None:
    teacher = random_logprobs(10, 3, 6)

    def of_logits(logits: Tensor) -> Tensor:
        return compare(forward_kl, logits.log_softmax(-1), teacher, top_ids(teacher, 2), Tail.TRUNCATE)

    assert torch.autograd.gradcheck(of_logits, (random_logprobs(11, 3, 6).requires_grad_(),), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("divergence", "tail"), [*((reverse_kl, tail) for tail in Tail), *((ALL["jsd"], tail) for tail in SHOWN_TAILS)]
)
def test_no_value_and_no_gradient_where_they_agree(divergence: DivergenceFn, tail: Tail) -> None:
    same = random_logprobs(12, 6, 20)
    ids = top_ids(same, 4)

    def top_k(q: Tensor) -> Tensor:
        return compare(divergence, q, same, ids, tail, torch.arange(6) if tail is Tail.SAMPLED else None)

    assert_near(top_k(same), torch.zeros(6), atol=1e-15)
    assert_near(gradient(top_k, same), torch.zeros(6, 20), atol=1e-15)


@every_tail_of_every_divergence
def test_a_constant_on_the_logits_and_the_order_of_ids_change_nothing(name: str, tail: Tail) -> None:
    logits, teacher = random_logprobs(13, 4, 9), random_logprobs(14, 4, 9)
    ids, drawn = top_ids(teacher, 3), torch.arange(4) if tail is Tail.SAMPLED else None
    plain = compare(ALL[name], logits, teacher, ids, tail, drawn)
    assert_near(compare(ALL[name], (logits + 17.0).log_softmax(-1), teacher, ids, tail, drawn), plain, atol=1e-12)
    assert torch.equal(compare(ALL[name], logits, teacher, ids.flip(-1), tail, drawn), plain)
    found = gradient(lambda q: compare(ALL[name], q, teacher, ids, tail, drawn), logits)
    assert_near(found.sum(-1), torch.zeros(4), atol=1e-12)


@every_tail_of_every_divergence
def test_tokens_are_told_apart_whatever_their_shape(name: str, tail: Tail) -> None:
    student, teacher = random_logprobs(15, 2, 3, 8), random_logprobs(16, 2, 3, 8)
    ids = top_ids(student, 3)
    drawn = torch.tensor([[0, 1, 2], [3, 4, 5]]) if tail is Tail.SAMPLED else None
    values = compare(ALL[name], student, teacher, ids, tail, drawn)
    assert values.shape == (2, 3)
    for b, t in ((0, 0), (0, 2), (1, 1)):
        alone = compare(
            ALL[name], student[b, t], teacher[b, t], ids[b, t], tail, None if drawn is None else drawn[b, t]
        )
        assert_near(values[b, t], alone, atol=1e-12)


# Which ids are kept ---------------------------------------------------------------------------------------------------


def test_owners() -> None:
    student, teacher = top_ids(STUDENT, 2), top_ids(TEACHER, 2)
    ids = {owner: kept_ids(student_top_nk=student, teacher_top_nk=teacher, owner=owner) for owner in Owner}
    assert {owner: sorted(x.tolist()) for owner, x in ids.items()} == {
        Owner.STUDENT: [1, 2],
        Owner.TEACHER: [0, 1],
        Owner.UNION: [0, 1, 1, 2],
    }


@every_tail_of_every_divergence
def test_an_id_of_both_sides_counts_once(name: str, tail: Tail) -> None:
    """The union {1, 2} + {0, 1} + {1, 1} is the set {0, 1, 2}, in value and gradient."""
    drawn = torch.tensor(3) if tail is Tail.SAMPLED else None
    twice, once = torch.tensor([1, 2, 0, 1, 1, 1]), torch.tensor([0, 1, 2])
    found, expected = (
        partial(compare, ALL[name], teacher=TEACHER, ids=x, tail=tail, drawn=drawn) for x in (twice, once)
    )
    assert_near(found(student=STUDENT), expected(student=STUDENT), atol=1e-15)
    assert_near(
        gradient(lambda q: found(student=q), STUDENT), gradient(lambda q: expected(student=q), STUDENT), atol=1e-15
    )


def test_ties_keep_exactly_k_ids() -> None:
    even = torch.full((3, 8), 1 / 8, dtype=torch.float64).log()
    ids = top_ids(even, 5)
    assert all(len(set(row)) == 5 for row in ids.tolist())
    assert_near(kept_mass(even, ids), [5 / 8] * 3)
    assert overlap(student_top_nk=ids, teacher_top_nk=top_ids(even.clone(), 5)).tolist() == [1.0, 1.0, 1.0]
    union = kept_ids(student_top_nk=ids, teacher_top_nk=torch.arange(3, 8).expand(3, 5), owner=Owner.UNION)
    for tail in SHOWN_TAILS:
        assert_near(compare(reverse_kl, even, even, union, tail), [0.0] * 3, atol=1e-15)


def test_masses_and_overlap() -> None:
    assert kept_mass(TEACHER, TOP_2).item() == pytest.approx(0.75)
    assert kept_mass(STUDENT, TOP_2).item() == pytest.approx(0.625)
    assert kept_mass(STUDENT, torch.tensor([1, 1, 2, 1])).item() == pytest.approx(0.75)
    assert overlap(student_top_nk=torch.tensor([1, 2]), teacher_top_nk=torch.tensor([0, 1])).item() == 0.5
    student, teacher = random_logprobs(17, 30, 12), random_logprobs(18, 30, 12)
    own, others = top_ids(student, 4), top_ids(teacher, 4)
    expected = [len(set(a) & set(b)) / 4 for a, b in zip(own.tolist(), others.tolist(), strict=True)]
    assert overlap(student_top_nk=own, teacher_top_nk=others).tolist() == expected


def test_metrics_and_choice_carry_no_gradient() -> None:
    student = STUDENT.clone().requires_grad_()
    assert not kept_mass(student, TOP_2).requires_grad
    assert not top_ids(student, 2).requires_grad


# Zeros and low precision ----------------------------------------------------------------------------------------------

ZEROS = {
    "teacher": ([0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]),
    "student": ([0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.0, 0.0]),
    "both": ([0.4, 0.6, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]),
    "one hot": ([0.0, 1.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]),
    "apart": ([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
}


@every_tail_of_every_divergence
@pytest.mark.parametrize("ids", [[0, 1], [2, 3], [0, 2, 2], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize(("teacher", "student"), ZEROS.values(), ids=ZEROS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_give_no_nan(
    name: str, tail: Tail, ids: list[int], teacher: list[float], student: list[float], dtype: torch.dtype
) -> None:
    teacher_logprobs, logits = torch.tensor(teacher, dtype=dtype).log(), torch.tensor(student, dtype=dtype).log()
    for drawn in range(4) if tail is Tail.SAMPLED else (None,):
        drawn_ids = None if drawn is None else torch.tensor(drawn)

        def top_k(q: Tensor, drawn_ids: Tensor | None = drawn_ids) -> Tensor:
            return compare(ALL[name], q, teacher_logprobs, torch.tensor(ids), tail, drawn_ids)

        assert top_k(logits.log_softmax(-1)).isfinite()
        assert gradient(top_k, logits).isfinite().all()


def test_what_zeros_are_worth() -> None:
    """A tail the teacher rules out is dear and not infinite; its bucket pushes the student's tail down."""
    teacher = torch.tensor([0.5, 0.5, 0.0, 0.0]).log()
    student = torch.tensor([0.1, 0.2, 0.3, 0.4])
    bucket = compare(reverse_kl, student.log(), teacher, TOP_2, Tail.BUCKET)
    assert bucket.item() == pytest.approx(-0.7 * LOG_OF_ZERO, rel=1e-3)
    assert (gradient(lambda q: compare(reverse_kl, q, teacher, TOP_2, Tail.BUCKET), student.log())[2:] > 500).all()
    drawn = compare(reverse_kl, student.log(), teacher, TOP_2, Tail.SAMPLED, torch.tensor(2))
    assert drawn.item() == pytest.approx(-LOG_OF_ZERO, rel=1e-3)


@pytest.mark.parametrize("divergence", [forward_kl, reverse_kl])
def test_a_tiny_rest_of_float32_keeps_its_log(divergence: DivergenceFn) -> None:
    """The teacher's rest of 1e-9 is lost in 1 - kept mass, and an impossible rest would be worth 10,000 nats."""
    student, teacher = torch.tensor([0.0, -1.0, -5.0, -6.0]), torch.tensor([1.0, 0.0, -21.0, -20.0])

    def top_k(q: Tensor, p: Tensor) -> Tensor:
        return compare(divergence, q, p, TOP_2, Tail.BUCKET)

    single, double = (
        top_k(student.to(d).log_softmax(-1), teacher.to(d).log_softmax(-1)) for d in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        gradient(lambda q: top_k(q, teacher.log_softmax(-1)), student).double(),
        gradient(lambda q: top_k(q, teacher.double().log_softmax(-1)), student.double()),
        rtol=1e-5,
        atol=1e-7,
    )


@every_tail_of_every_divergence
def test_half_precision_is_computed_in_float32(name: str, tail: Tail) -> None:
    student, teacher = random_logprobs(19, 6, 40).bfloat16(), random_logprobs(20, 6, 40).bfloat16()
    ids, drawn = top_ids(teacher, 5), torch.arange(6) if tail is Tail.SAMPLED else None
    result = compare(ALL[name], student, teacher, ids, tail, drawn)
    assert result.dtype is torch.float32
    assert torch.equal(result, compare(ALL[name], student.float(), teacher.float(), ids, tail, drawn))


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_out_of_range_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k is {k}; expected 1 to 4"):
        top_ids(TEACHER, k)


def test_renormalising_one_id_is_refused() -> None:
    with pytest.raises(ValueError, match="with one kept id .* has no gradient; expected k >= 2"):
        compare(reverse_kl, STUDENT, TEACHER, torch.tensor([0]), Tail.RENORMALISE)


@pytest.mark.parametrize("divergence", [forward_kl, jsd, divergence_fn(Divergence.JSD, beta=0.5)])
def test_one_drawn_id_estimates_reverse_kl_alone(divergence: DivergenceFn) -> None:
    with pytest.raises(
        ValueError, match="tail 'sampled' got (forward_kl|jsd); one drawn id estimates reverse_kl alone"
    ):
        compare(divergence, STUDENT, TEACHER, TOP_2, Tail.SAMPLED, torch.tensor(0))


def test_drawn_ids_go_with_the_sampled_tail() -> None:
    with pytest.raises(ValueError, match="got no drawn ids with tail 'sampled'"):
        compare(reverse_kl, STUDENT, TEACHER, TOP_2, Tail.SAMPLED)
    with pytest.raises(ValueError, match="got drawn ids with tail 'bucket'"):
        compare(reverse_kl, STUDENT, TEACHER, TOP_2, Tail.BUCKET, torch.tensor(0))


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    student, ids = random_logprobs(21, 3, 6), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"shape \(3, 5\) and the student's \(3, 6\)"):
        compare(reverse_kl, student, student[:, :5], ids, Tail.BUCKET)
    with pytest.raises(ValueError, match=r"ids have shape \(2, 2\); expected \(3, 'K'\)"):
        compare(reverse_kl, student, student, ids[:2], Tail.BUCKET)
    with pytest.raises(ValueError, match=r"drawn ids have shape \(2,\); expected \(3,\)"):
        compare(reverse_kl, student, student, ids, Tail.SAMPLED, torch.zeros(2, dtype=torch.int64))
