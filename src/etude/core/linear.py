"""Output head + per-token terms in tiles, so that tokens x vocabulary never exists.

The loss of a tile of tokens is computed and differentiated on the spot: the gradient with respect to the hidden states
and the head is accumulated during the forward pass and handed to autograd in the backward pass. Nothing is ever written
to `.grad`, so wrappers that watch autograd (DDP, FSDP) see an ordinary function. It follows that the scalar summed here
must already be the final loss (scaled by coefficient / count); `reduction.term_scales` gives those factors beforehand.

Two sizes of tile share one budget of bytes. The outer tile holds the logits of student and teachers and amortises the
large matrix products, the inner one bounds the temporaries of softmax, divergence and their gradients. The student's
logits are overwritten by their own gradient, inner tile by inner tile.

It knows nothing of terms: the caller passes a function from logits to a scalar.

Legend: N scored tokens, n tokens of a tile, V real vocabulary, D hidden size (of each model its own), M metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

DEFAULT_CHUNK_BYTES = 256 * 1024 * 1024

# V-wide rows alive per token while a tile is differentiated (softmaxes, mixtures, ratios, gradients). Measured: 11
# for the most expensive divergences (alpha-beta, skewed reverse KL), 5 more for each further full-support term, 2 for a
# soft cap.
_TEMPORARIES = 20
# Of the budget, for the temporaries of the inner tile. A CPU is fastest with 1 to 3 MB a tensor, which stay in its
# cache; the default budget gives 3 MB.
_INNER_SHARE = 0.25

Slice = slice
_Apply = Callable[..., tuple[Tensor, Tensor]]
TokenLoss = Callable[[Tensor, Mapping[str, Tensor], Slice], tuple[Tensor, Tensor]]
"""(student logits [n, V], teachers' logits by name [n, V], which of the N tokens) -> (scalar loss, metric sums [M])."""


@dataclass(frozen=True, eq=False, slots=True)
class OutputHead:
    """What turns hidden states into logits: `softcap(scale * (hidden @ weight.T + bias))`, real vocabulary only."""

    weight_VD: Tensor  # [V, D]
    bias_V: Tensor | None = None  # [V]
    scale: float = 1.0  # logits are multiplied by it (Granite divides, Cohere multiplies)
    softcap: float | None = None  # cap * tanh(logits / cap), as in Gemma 2

    @property
    def vocab_size(self) -> int:
        return self.weight_VD.shape[0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] logits in float32 (float64 stays float64): a bfloat16 logit of 20 is already off by 0.06."""
        return self.finish(self.linear(hidden_ND))

    def logits_as_stored(self, hidden_ND: Tensor, product: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """[N, V] float32 logits of a product in the head's own precision: to write with, not to be marked with.

        Half the bytes of a head in half precision, which is what writing one token a row costs. `product` is a faster
        way to the affine part, if the caller has one.
        """
        hidden_ND = hidden_ND.to(self.weight_VD.dtype)
        affine_NV = product(hidden_ND) if product else functional.linear(hidden_ND, self.weight_VD, self.bias_V)
        return self.finish(affine_NV.to(self.logits_dtype(hidden_ND)))

    def linear(self, hidden_ND: Tensor) -> Tensor:
        """The affine part, [N, V]."""
        dtype = self.logits_dtype(hidden_ND)
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        return functional.linear(hidden_ND.to(dtype), self.weight_VD.to(dtype), bias_V)

    def finish(self, affine_NV: Tensor) -> Tensor:
        """Scale and soft cap of the affine part, [N, V]."""
        if self.scale != 1.0:
            affine_NV = affine_NV * self.scale
        if self.softcap is not None:
            affine_NV = self.softcap * torch.tanh(affine_NV / self.softcap)
        return affine_NV

    def logits_dtype(self, hidden_ND: Tensor) -> torch.dtype:
        return torch.promote_types(torch.float32, torch.promote_types(hidden_ND.dtype, self.weight_VD.dtype))

    def in_logits_dtype(self, hidden_ND: Tensor) -> OutputHead:
        """The same head, detached, with its tensors cast once instead of once a tile."""
        dtype = self.logits_dtype(hidden_ND)
        bias_V = None if self.bias_V is None else self.bias_V.detach().to(dtype)
        return OutputHead(self.weight_VD.detach().to(dtype), bias_V, self.scale, self.softcap)


def tile_sizes(vocab_size: int, num_models: int, chunk_bytes: int, bytes_per_logit: int = 4) -> tuple[int, int]:
    """(outer, inner) tokens a tile for a budget of bytes; at least one token each.

    A vocabulary of 151,936 ids in float32, student and one teacher, 256 MiB:

        >>> tile_sizes(151_936, num_models=2, chunk_bytes=256 * 1024 * 1024)
        (165, 5)
    """
    row = vocab_size * bytes_per_logit
    inner = max(1, int(chunk_bytes * _INNER_SHARE) // (row * _TEMPORARIES))
    outer = max(inner, int(chunk_bytes * (1 - _INNER_SHARE)) // (row * num_models))
    return outer, inner


def head_sum(
    hidden_ND: Tensor,
    head: OutputHead,
    token_loss: TokenLoss,
    num_metrics: int,
    *,
    teachers: Mapping[str, tuple[OutputHead, Tensor]] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Sum `token_loss` over all tokens without ever holding [N, V].

    Args:
        hidden_ND: [N, D] the student's hidden states.
        head: the student's head.
        token_loss: see `TokenLoss`; must not depend on how the tokens are cut into tiles.
        num_metrics: M, the length of the metric sums `token_loss` returns.
        teachers: by name, a head and the teacher's own hidden states [N, D'].
        chunk_bytes: budget for all tensors of tokens x vocabulary. Not in it: the gradient of the head, and one float32
            copy of each head that is kept in half precision.

    Returns:
        (loss, metrics): a scalar in the logits' dtype, differentiable once, and [M] sums without gradient, in float64
        (float32 on devices that have no float64).
    """
    inputs = (hidden_ND, head.weight_VD, head.bias_V)
    # Asked here, because inside `forward` grad mode is always off and an evaluation must not pay for gradients.
    needed = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs)
    apply: _Apply = _HeadSum.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return apply(*inputs, head, token_loss, num_metrics, dict(teachers or {}), chunk_bytes, needed)


class _HeadSum(torch.autograd.Function):
    """Forward computes value and gradients tile by tile; backward scales and returns them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: OutputHead,
        token_loss: TokenLoss,
        num_metrics: int,
        teachers: dict[str, tuple[OutputHead, Tensor]],
        chunk_bytes: int,
        needed: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor]:
        # Autocast would quietly redo the products in half precision.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            sums = _Sums(hidden_ND, head, num_metrics, needed)
            cast_teachers = {name: (h.in_logits_dtype(x), x) for name, (h, x) in teachers.items()}
            outer, inner = tile_sizes(
                head.vocab_size, 1 + len(teachers), chunk_bytes, bytes_per_logit=sums.loss.element_size()
            )
            for start in range(0, hidden_ND.shape[0], outer):
                sums.add_tile(slice(start, min(start + outer, hidden_ND.shape[0])), inner, token_loss, cast_teachers)
        ctx.save_for_backward(sums.grad_hidden_ND, sums.grad_weight_VD, sums.grad_bias_V)  # freed by the backward pass
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        ctx.mark_non_differentiable(sums.metrics)
        return sums.loss, sums.metrics

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the parameters' names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_loss = grad_outputs[0]
        # Scaled before the cast: a float16 run's loss scale must arrive while the gradient is still float32. Scaled in
        # place: a second [V, D] would be the largest tensor of the step. (autograd refuses a second pass by itself.)
        scaled = (
            None if gradient is None else gradient.mul_(grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None, None, None)


class _Sums:
    """The running loss, metrics and gradients of one `head_sum`."""

    def __init__(self, hidden_ND: Tensor, head: OutputHead, num_metrics: int, needed: tuple[bool, ...]) -> None:
        self.hidden_ND = hidden_ND.detach()
        self.head = head.in_logits_dtype(hidden_ND)
        dtype, device = self.head.weight_VD.dtype, hidden_ND.device
        need_hidden, need_weight, need_bias = needed
        self.need_any = any(needed)
        # Logits are exact; the products that carry their gradient on are made like those of every layer below. Not in
        # float16, whose smallest numbers are larger than a token's share of the loss.
        half = hidden_ND.dtype == torch.bfloat16 and dtype == torch.float32
        self.gradient_dtype = torch.bfloat16 if half else dtype
        self.weight_of_gradient_VD = self.head.weight_VD.to(self.gradient_dtype) if need_hidden else self.head.weight_VD
        self.loss = torch.zeros((), dtype=dtype, device=device)
        wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        self.metrics = torch.zeros(num_metrics, dtype=wide, device=device)
        self.grad_hidden_ND = torch.zeros_like(self.hidden_ND, dtype=dtype) if need_hidden else None
        self.grad_weight_VD = torch.zeros_like(self.head.weight_VD) if need_weight else None
        self.grad_bias_V = torch.zeros_like(self.head.bias_V) if need_bias and self.head.bias_V is not None else None

    def add_tile(
        self, tokens: Slice, inner: int, token_loss: TokenLoss, teachers: Mapping[str, tuple[OutputHead, Tensor]]
    ) -> None:
        hidden_nD = self.hidden_ND[tokens].to(self.head.weight_VD.dtype)
        affine_nV = self.head.linear(hidden_nD)
        affine_teachers = {name: head.linear(hidden[tokens]) for name, (head, hidden) in teachers.items()}
        for start in range(0, hidden_nD.shape[0], inner):
            part = slice(start, min(start + inner, hidden_nD.shape[0]))
            where = slice(tokens.start + part.start, tokens.start + part.stop)
            self._mark(
                affine_nV[part],
                {name: teachers[name][0].finish(a[part]) for name, a in affine_teachers.items()},
                where,
                token_loss,
            )
        del affine_teachers  # as large as the student's, which are enough from here on
        if self.grad_bias_V is not None:
            self.grad_bias_V += affine_nV.sum(0)
        affine_nV = affine_nV.to(self.gradient_dtype)
        if self.grad_hidden_ND is not None:
            self.grad_hidden_ND[tokens] = (affine_nV @ self.weight_of_gradient_VD).to(self.head.weight_VD.dtype)
        if self.grad_weight_VD is None:
            return
        if self.gradient_dtype == self.grad_weight_VD.dtype:
            self.grad_weight_VD.addmm_(affine_nV.T, hidden_nD)
        else:  # summed over tiles in full
            self.grad_weight_VD += affine_nV.T @ hidden_nD.to(self.gradient_dtype)

    def _mark(
        self, affine_nV: Tensor, teacher_logits: Mapping[str, Tensor], where: Slice, token_loss: TokenLoss
    ) -> None:
        """Add up the loss of a few tokens; their logits, needed no more, make place for their own gradient."""
        with torch.set_grad_enabled(self.need_any):
            leaf_nV = affine_nV.detach().requires_grad_(self.need_any)
            loss, metrics = token_loss(self.head.finish(leaf_nV), teacher_logits, where)
        self.loss += loss.detach()
        self.metrics += metrics.detach()
        if self.need_any:
            gradient_nV = torch.autograd.grad(loss, leaf_nV)[0] if loss.requires_grad else torch.zeros_like(affine_nV)
            affine_nV.copy_(gradient_nV)
