"""Is the gradient of each term the gradient of its formula?

The way training goes (tiles, float32 or bfloat16, gradients made in the forward pass) against the plain one: all logits
at once, in float64, autograd on the terms of `core.tile`. On a few tokens of the user's own rows, with the advantages,
weights and counts that training would use. It knows no sampler and no recipe.

Legend: N scored tokens, V vocabulary, D hidden size, J terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from etude.axes.names import REFERENCE, Check
from etude.core.collate import collate
from etude.core.linear import OutputHead
from etude.core.logprobs import next_token_logprobs, pick
from etude.core.objective import Objective
from etude.core.records import Batch, Scored
from etude.core.tile import Tile, mark
from etude.models.forward import evaluating
from etude.models.roles import AbstractBackbone
from etude.preflight.findings import Finding, passed, refused, warned
from etude.preflight.tolerance import Tolerance

_ROWS = 8192  # of a head, cast to float64 at a time
_SILENT = 1e-3  # of the gradient that moves one logit a token: a smaller one is rounding, or nothing
_LEAST = 1e-30  # of a divisor, where a term trains no token of the probe


def gradient(
    objective: Objective,
    backbone: AbstractBackbone,
    rows: Sequence[Scored],
    heads: Mapping[str, OutputHead],
    tolerance: Tolerance,
) -> Finding:
    """Compare both gradients with respect to the student's hidden states, term by term.

    Args:
        objective: the recipe's.
        backbone: the student's.
        rows: prepared, with at most a few dozen tokens in all.
        heads: of teachers with hidden states, by name.
        tolerance: of the student's precision.
    """
    batch = collate(rows).to(backbone.device)
    with torch.no_grad(), evaluating(backbone):
        hidden_BTD = backbone.hidden_states(batch.token_ids_BT, batch.attention_mask_BT, batch.position_ids_BT)
    hidden_ND = hidden_BTD.flatten(0, 1)[batch.predicted_from_N]
    head = _without_gradient(backbone.head())
    scales_J = objective.scales(objective.counts(rows))
    errors: dict[str, float] = {}
    silent: list[str] = []
    for j, term in enumerate(objective.terms):
        own_J = torch.where(torch.arange(len(scales_J)) == j, scales_J, 0.0)
        ours_ND = _trained(objective, hidden_ND, head, batch, own_J, heads)
        exact_ND = reference(objective, j, hidden_ND, head, batch, float(scales_J[j]), heads)
        # The size of the gradient that moves one logit of each token by the term's weight.
        unit = (
            float(scales_J[j].abs() * batch.weights_JN[j].norm())
            * head.weight_VD[batch.target_ids_N].norm(dim=1).mean()
        )
        size = exact_ND.norm().item()
        if size <= _SILENT * float(unit) and term.teacher != REFERENCE:  # the reference is the student as it begins
            silent.append(term.name)
        errors[term.name] = (ours_ND - exact_ND).norm().item() / max(size, _SILENT * float(unit), _LEAST)
    return _finding(errors, silent, batch.num_scored_tokens, tolerance)


def _finding(errors: Mapping[str, float], silent: Sequence[str], tokens: int, tolerance: Tolerance) -> Finding:
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    figures = {"relative_error": dict(errors), "tokens": tokens, "silent": list(silent)}
    if not errors[worst] <= tolerance.gradient:
        return refused(
            Check.GRADIENT,
            f"the gradient of term '{worst}' is off its formula in float64 by {errors[worst]:.1%} of its size on "
            f"{tokens} tokens",
            "this is a fault of etude's, or of a divergence of your own: please report it with the recipe",
            **figures,
        )
    said = f"{len(errors)} term{'s' * (len(errors) > 1)} on {tokens} tokens, off float64 by at most {errors[worst]:.1e}"
    if silent:
        return warned(
            Check.GRADIENT,
            f"{said}; none at all from {', '.join(silent)}",
            "see that these terms train rows that somebody writes, and that teacher and student differ",
            **figures,
        )
    return passed(Check.GRADIENT, said, **figures)


def _without_gradient(head: OutputHead) -> OutputHead:
    bias_V = None if head.bias_V is None else head.bias_V.detach()
    return replace(head, weight_VD=head.weight_VD.detach(), bias_V=bias_V)


def _trained(
    objective: Objective,
    hidden_ND: Tensor,
    head: OutputHead,
    batch: Batch,
    scales_J: Tensor,
    heads: Mapping[str, OutputHead],
) -> Tensor:
    """[N, D] float64 on the CPU: as a step of training makes it."""
    leaf_ND = hidden_ND.detach().clone().requires_grad_()
    loss, _ = objective.sum(leaf_ND, head, batch, scales_J, heads)
    return torch.autograd.grad(loss, leaf_ND)[0].double().cpu()


def reference(
    objective: Objective,
    j: int,
    hidden_ND: Tensor,
    head: OutputHead,
    batch: Batch,
    scale: float,
    heads: Mapping[str, OutputHead],
) -> Tensor:
    """[N, D] float64 on the CPU: term j as it is written, all tokens and all of the vocabulary at once."""
    exact, term = _in_float64(batch), objective.terms[j]
    affine_NV = _affine(hidden_ND, head).requires_grad_()
    student_NV = next_token_logprobs(head.finish(affine_NV), objective.temperature)
    teachers_NV = {
        name: next_token_logprobs(heads[name].finish(_affine(columns.hidden_ND, heads[name])), objective.temperature)
        for name, columns in exact.teachers.items()
        if columns.hidden_ND is not None and name in heads
    }
    chosen_N = pick(student_NV, exact.target_ids_N)
    tile = Tile(student_NV, teachers_NV, chosen_N, slice(0, len(chosen_N)), exact)
    values_N = mark(term, term.divergence_fn(), tile, exact.advantages_JN[j]).values_n
    loss = scale * (exact.weights_JN[j] * values_N).sum()
    found_NV = torch.autograd.grad(loss, affine_NV, allow_unused=True)[0] if loss.requires_grad else None
    if found_NV is None:
        return torch.zeros(hidden_ND.shape, dtype=torch.float64)
    parts = zip(found_NV.split(_ROWS, dim=1), head.weight_VD.split(_ROWS), strict=True)
    return torch.stack([part_Nv @ rows_vD.double().cpu() for part_Nv, rows_vD in parts]).sum(0)


def _affine(hidden_ND: Tensor, head: OutputHead) -> Tensor:
    """[N, V] float64 on the CPU, before scale and cap; a block of the head at a time, for it may be large."""
    hidden_ND = hidden_ND.detach().double().cpu()
    affine_NV = torch.cat([hidden_ND @ rows_vD.detach().double().cpu().T for rows_vD in head.weight_VD.split(_ROWS)], 1)
    return affine_NV if head.bias_V is None else affine_NV + head.bias_V.detach().double().cpu()


def _in_float64(batch: Batch) -> Batch:
    """The same rows, every number in float64."""

    def exact(value: Tensor | None) -> Tensor | None:
        return value.double() if value is not None and value.is_floating_point() else value

    batch = batch.to("cpu")
    tensors = {f.name: exact(getattr(batch, f.name)) for f in fields(batch) if f.name != "teachers"}
    teachers = {
        name: replace(columns, sampled_logprobs_N=exact(columns.sampled_logprobs_N), hidden_ND=columns.hidden_ND)
        for name, columns in batch.teachers.items()
    }
    return replace(batch, **tensors, teachers=teachers)
