"""The chunked head: equal to the plain path, frugal, and an ordinary function to autograd."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from etude.core import linear
from etude.core.divergences import reverse_kl
from etude.core.linear import OutputHead, head_sum, tile_sizes

NUM_TOKENS, VOCAB, HIDDEN, TEACHER_HIDDEN = 23, 31, 5, 3


def random_head(seed: int, hidden: int, dtype: torch.dtype = torch.float64, **options: float | None) -> OutputHead:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB, hidden, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64).to(dtype)
    return OutputHead(weight.requires_grad_(), bias.requires_grad_(), **options)


def random_hidden(seed: int, hidden: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_TOKENS, hidden, generator=generator, dtype=torch.float64).to(dtype)


# One tile of 7 has no weight at all.
WEIGHTS = torch.rand(NUM_TOKENS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
WEIGHTS[7:14] = 0.0


def token_loss(student: Tensor, teachers: Mapping[str, Tensor], tokens: slice) -> tuple[Tensor, Tensor]:
    values = reverse_kl(student_logprobs=student.log_softmax(-1), teacher_logprobs=teachers["teacher"].log_softmax(-1))
    weights = WEIGHTS[tokens].to(values.dtype)
    return (weights * values).sum(), torch.stack([values.detach().sum(), (weights > 0).sum().to(values.dtype)])


def plain_logits(hidden: Tensor, head: OutputHead) -> Tensor:
    """The head written out once more, in the dtype of its inputs."""
    logits = (hidden @ head.weight_VD.T + (0.0 if head.bias_V is None else head.bias_V)) * head.scale
    return logits if head.softcap is None else head.softcap * (logits / head.softcap).tanh()


@pytest.fixture
def tiles_of_seven(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def seven(*_: object, **__: object) -> tuple[int, int]:
        return 7, getattr(request, "param", 3)

    monkeypatch.setattr(linear, "tile_sizes", seven)


OPTIONS = [(1.0, None), (0.5, None), (1.0, 2.0), (3.0, 5.0)]


@pytest.mark.usefixtures("tiles_of_seven")
@pytest.mark.parametrize("tiles_of_seven", [1, 3, 7], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("scale", "softcap"), OPTIONS)
def test_chunked_equals_plain(dtype: torch.dtype, scale: float, softcap: float | None) -> None:
    head = random_head(1, HIDDEN, dtype, scale=scale, softcap=softcap)
    teacher = random_head(2, TEACHER_HIDDEN, dtype, scale=1.5, softcap=4.0)
    hidden, teacher_hidden = random_hidden(3, HIDDEN, dtype).requires_grad_(), random_hidden(4, TEACHER_HIDDEN, dtype)
    assert head.bias_V is not None
    inputs = (hidden, head.weight_VD, head.bias_V)

    loss, metrics = head_sum(hidden, head, token_loss, 2, teachers={"teacher": (teacher, teacher_hidden)})
    found = torch.autograd.grad(2.5 * loss, inputs)
    logits = {"teacher": plain_logits(teacher_hidden, teacher).detach()}
    plain, plain_metrics = token_loss(plain_logits(hidden, head), logits, slice(0, NUM_TOKENS))
    expected = torch.autograd.grad(2.5 * plain, inputs)

    tolerance = 1e-6 if dtype is torch.float32 else 1e-13
    torch.testing.assert_close(loss, plain, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(metrics, plain_metrics.double(), atol=10 * tolerance, rtol=tolerance)
    for chunked, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(chunked, whole, atol=tolerance * whole.abs().max().item(), rtol=tolerance)
    assert not found[0][7:14].any()  # exactly nothing where nothing is trained
    assert teacher.weight_VD.grad is None
    assert hidden.grad is None, "gradients go through autograd and nowhere else"


def test_logits_of_the_head() -> None:
    head = random_head(1, HIDDEN, torch.bfloat16, scale=0.5, softcap=3.0)
    hidden = random_hidden(3, HIDDEN, torch.bfloat16)
    exact = replace(
        head, weight_VD=head.weight_VD.double(), bias_V=head.bias_V.double() if head.bias_V is not None else None
    )
    logits = head.logits(hidden)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits.double(), plain_logits(hidden.double(), exact), atol=1e-5, rtol=1e-5)
    assert random_head(1, HIDDEN).logits(random_hidden(3, HIDDEN)).dtype is torch.float64
    assert OutputHead(torch.zeros(VOCAB, HIDDEN)).vocab_size == VOCAB


# Precision ----------------------------------------------------------------------------------------------------------


def half_precision_gradients(dtype: torch.dtype, loss_scale: float) -> tuple[Tensor, Tensor, OutputHead, Tensor]:
    """Loss and gradient in the hidden states of a float32 head over half-precision hidden states."""
    head, teacher = random_head(1, HIDDEN, torch.float32), random_head(2, TEACHER_HIDDEN, dtype)
    hidden = random_hidden(3, HIDDEN, dtype).requires_grad_()
    loss, _ = head_sum(
        hidden, head, token_loss, 2, teachers={"teacher": (teacher, random_hidden(4, TEACHER_HIDDEN, dtype))}
    )
    return loss, torch.autograd.grad(loss_scale * loss, hidden)[0], head, hidden


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    """But for the products that carry a bfloat16 gradient on, which are bfloat16's own."""
    loss, gradient, head, hidden = half_precision_gradients(dtype, 1.0)
    teacher, teacher_hidden = random_head(2, TEACHER_HIDDEN, dtype), random_hidden(4, TEACHER_HIDDEN, dtype)
    exact_teacher = OutputHead(
        teacher.weight_VD.float(), teacher.bias_V.float() if teacher.bias_V is not None else None
    )
    leaf = hidden.detach().float().requires_grad_()
    logits = {"teacher": plain_logits(teacher_hidden.float(), exact_teacher).detach()}
    plain, _ = token_loss(plain_logits(leaf, head), logits, slice(0, NUM_TOKENS))
    expected = torch.autograd.grad(plain, leaf)[0]
    assert (loss.dtype, gradient.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    atol = 1e-7 if dtype == torch.float16 else 0.004 * expected.abs().max().item()
    torch.testing.assert_close(gradient, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=atol)


def test_autocast_outside_changes_nothing() -> None:
    plain = half_precision_gradients(torch.bfloat16, 1.0)[:2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = half_precision_gradients(torch.bfloat16, 1.0)[:2]
    assert all(a.equal(b) for a, b in zip(plain, inside, strict=True))


def test_a_float16_loss_scale_arrives_before_the_cast() -> None:
    """Gradients of 1e-9 vanish in float16, whose smallest number is 6e-8; times 65536 they do not."""
    head, hidden = OutputHead(torch.eye(2)), torch.zeros(1, 2, dtype=torch.float16, requires_grad=True)

    def tiny(student: Tensor, teachers: Mapping[str, Tensor], tokens: slice) -> tuple[Tensor, Tensor]:
        return 1e-9 * student[:, 0].sum(), torch.zeros(0)

    def gradient(scale: float) -> float:
        loss, _ = head_sum(hidden, head, tiny, 0)
        return torch.autograd.grad(scale * loss, hidden)[0][0, 0].item()

    assert gradient(1.0) == 0.0
    assert gradient(65536.0) == pytest.approx(65536e-9, rel=1e-3)


# Autograd -----------------------------------------------------------------------------------------------------------


def student_only(student: Tensor, teachers: Mapping[str, Tensor], tokens: slice) -> tuple[Tensor, Tensor]:
    return student.log_softmax(-1)[:, 0].sum(), torch.full((1,), float(student.requires_grad))


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    head, hidden = random_head(1, HIDDEN), random_hidden(3, HIDDEN)
    with torch.no_grad():
        loss, took_gradients = head_sum(hidden.requires_grad_(), head, student_only, 1)
    assert not loss.requires_grad
    assert took_gradients.item() == 0.0
    frozen = OutputHead(head.weight_VD.detach())
    loss, took_gradients = head_sum(hidden.detach(), frozen, student_only, 1)
    assert not loss.requires_grad
    assert took_gradients.item() == 0.0
    # A frozen head under trained hidden states, as with adapters: no [V, D] gradient.
    loss, took_gradients = head_sum(hidden, frozen, student_only, 1)
    assert took_gradients.item() > 0.0
    loss.backward()
    assert hidden.grad is not None
    assert frozen.weight_VD.grad is None


def test_no_tokens_at_all() -> None:
    head = random_head(1, HIDDEN)
    hidden = torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    loss, metrics = head_sum(hidden, head, student_only, 1)
    loss.backward()
    assert (loss.item(), metrics.tolist()) == (0.0, [0.0])
    assert head.weight_VD.grad is not None
    assert not head.weight_VD.grad.any()


def test_a_loss_that_does_not_touch_the_logits_has_zero_gradient() -> None:
    head, hidden = random_head(1, HIDDEN), random_hidden(3, HIDDEN).requires_grad_()
    loss, _ = head_sum(hidden, head, lambda student, teachers, tokens: (student.new_ones(()), torch.zeros(0)), 0)
    loss.backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_once_and_only_once_differentiable() -> None:
    head, hidden = random_head(1, HIDDEN), random_hidden(3, HIDDEN).requires_grad_()
    loss, _ = head_sum(hidden, head, student_only, 1)
    (first,) = torch.autograd.grad(loss * loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    loss, _ = head_sum(hidden, head, student_only, 1)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tied_head_adds_up_both_of_its_gradients() -> None:
    weight = random_head(1, HIDDEN).weight_VD

    def total(chunked: bool) -> Tensor:
        hidden = weight[:NUM_TOKENS] * 2.0  # embedding and head are one parameter
        if chunked:
            loss, _ = head_sum(hidden, OutputHead(weight), student_only, 1)
        else:
            loss, _ = student_only(hidden @ weight.T, {}, slice(0, NUM_TOKENS))
        return torch.autograd.grad(loss, weight)[0]

    torch.testing.assert_close(total(chunked=True), total(chunked=False))


def test_gradients_are_freed_by_the_backward_pass() -> None:
    """Not only when the loss goes out of scope: a loop keeps its loss until the next one has been computed."""
    head, hidden = random_head(1, HIDDEN), random_hidden(3, HIDDEN).requires_grad_()
    loss, _ = head_sum(hidden, head, student_only, 1)
    assert loss.grad_fn is not None
    kept = weakref.ref(loss.grad_fn.saved_tensors[1])
    loss.backward()
    head.weight_VD.grad = None
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = loss.grad_fn.saved_tensors


# The budget ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [30, 49_152, 151_936, 262_144])
@pytest.mark.parametrize("num_models", [1, 2, 3])
@pytest.mark.parametrize("chunk_bytes", [2**20, 2**26, 2**28, 2**30])
def test_tiles_keep_to_the_budget(vocab_size: int, num_models: int, chunk_bytes: int) -> None:
    outer, inner = tile_sizes(vocab_size, num_models, chunk_bytes)
    row = 4 * vocab_size
    assert outer >= inner >= 1
    if outer > inner > 1:
        assert outer * num_models * row + inner * linear._TEMPORARIES * row <= chunk_bytes
    in_double = tile_sizes(vocab_size, num_models, chunk_bytes, bytes_per_logit=8)
    assert in_double == tile_sizes(vocab_size, num_models, chunk_bytes // 2)


MEASURED_PEAK = """
import os, resource, sys
import torch
from etude.axes.names import Divergence
from etude.core.linear import OutputHead
from etude.core.objective import Objective, Term
from etude.core.records import Batch, TeacherColumns

torch.set_num_threads(1)
N, V, D = int(sys.argv[2]), 151_936, 64
objective = Objective([Term(divergence=Divergence(sys.argv[1]), **eval(sys.argv[3]))], chunk_bytes=256 * 2**20)

hidden = torch.randn(N, D).requires_grad_()
weight, teacher_weight = torch.randn(V, D).requires_grad_(), torch.randn(V, D)
hidden.grad, weight.grad = torch.ones(N, D), torch.ones(V, D)  # ones: every page is touched
ids = torch.arange(N)
batch = Batch(
    token_ids_BT=ids[None], attention_mask_BT=ids[None], position_ids_BT=ids[None], predicted_from_N=ids,
    target_ids_N=ids, weights_JN=torch.ones(1, N), advantages_JN=torch.zeros(1, N),
    behaviour_logprobs_N=torch.zeros(N), raw_logprobs_N=torch.zeros(N),
    teachers={"teacher": TeacherColumns(None, torch.randn(N, D))},
)
pages = int(open("/proc/self/statm").read().split()[1])
before = pages * os.sysconf("SC_PAGE_SIZE")
loss, _ = objective.sum(
    hidden, OutputHead(weight), batch, torch.full((1,), 1 / N), {"teacher": OutputHead(teacher_weight)}
)
loss.backward()
assert weight.grad.isfinite().all() and (weight.grad != 1).any()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the peak of resident memory as Linux reports it"
)
@pytest.mark.parametrize(
    ("divergence", "options", "num_tokens"),
    [("reverse_kl", {}, 2048), ("jsd", {"beta": 0.5}, 340), ("skew_reverse_kl", {"alpha": 0.1}, 340)],
)
def test_peak_memory(divergence: str, options: dict[str, float], num_tokens: int) -> None:
    """Loss and backward of 2,048 tokens x 151,936 ids at a budget of 256 MiB: 400 MiB above inputs and gradients.

    One float32 tensor of tokens x vocabulary would be 1,187 MiB. The peak does not grow with the tokens, so the dearer
    divergences are measured on two outer tiles of them.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    result = subprocess.run(
        [sys.executable, "-c", MEASURED_PEAK, divergence, str(num_tokens), repr(options)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    peak_mib = float(result.stdout)
    assert 200 < peak_mib < 400  # below 200 something was not measured


@pytest.mark.parametrize("chunk_bytes", [2_000, 10**6])
def test_gradient_products_of_bfloat16_states_are_bfloat16s(chunk_bytes: int) -> None:
    """Logits and loss are those of float32 to the digit; gradients are off by the rounding of a bfloat16, 0.4 %."""
    torch.manual_seed(0)
    states, weight = torch.randn(23, 32).bfloat16(), torch.randn(40, 32) * 0.3
    marks = torch.randn(23, 40)

    def run(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaves = states.clone().requires_grad_(), weight.clone().requires_grad_()

        def token_loss(logits_nV: Tensor, _: Mapping[str, Tensor], tokens: slice) -> tuple[Tensor, Tensor]:
            return (logits_nV.log_softmax(-1) * marks[tokens]).sum(), torch.zeros(1)

        loss, _ = head_sum(leaves[0], OutputHead(leaves[1]), token_loss, 1, chunk_bytes=chunk_bytes)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    loss, of_states, of_weight = run(states)
    exact, exact_of_states, exact_of_weight = run(states.float())
    assert loss == exact
    assert (of_states.dtype, of_weight.dtype) == (torch.bfloat16, torch.float32)
    for found, expected in ((of_states.float(), exact_of_states), (of_weight, exact_of_weight)):
        assert (found - expected).norm() < 0.004 * expected.norm()
        assert not found.equal(expected)
