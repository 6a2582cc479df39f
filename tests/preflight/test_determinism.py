"""The same step twice: a healthy model, and planted modules that are not the same twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from etude.preflight.determinism import determinism
from etude.preflight.findings import Verdict
from etude.preflight.rehearsal import rehearse
from etude.training.loop import Parts

Built = Callable[..., Parts]


class Drifting(nn.Module):
    """Multiplies by a little more each time it is asked while it trains, or at any time."""

    def __init__(self, inner: nn.Module, *, only_training: bool) -> None:
        super().__init__()
        self.inner = inner
        self.only_training = only_training
        self.count = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        drifts = self.training or not self.only_training
        return self.inner(x) * (1.0 + (0.1 * next(self.count) if drifts else 0.0))


def plant(parts: Parts, *, only_training: bool) -> None:
    rehearse(parts, max_new_tokens=1, rows=1)  # what is proved of a model once, is proved of the healthy one
    model: nn.Module = parts.student.backbone.model  # pyright: ignore[reportAssignmentType]
    layer = model.get_submodule("model.layers.0.mlp")
    drifting = Drifting(layer.get_submodule("down_proj"), only_training=only_training)
    layer.down_proj = drifting  # pyright: ignore[reportArgumentType]


def test_a_healthy_run_passes_and_keeps_its_weights(built: Built) -> None:
    parts = built("student.dropout=true")
    before = {name: weight.clone() for name, weight in parts.student.trainable_parameters().items()}
    found = determinism(parts, max_new_tokens=6)
    assert found.verdict is Verdict.PASS
    assert all(weight.equal(before[name]) for name, weight in parts.student.trainable_parameters().items())
    assert not parts.learner.optimizer.state


def test_another_gradient_is_refused_with_its_figure(built: Built) -> None:
    parts = built()
    plant(parts, only_training=True)
    found = determinism(parts, max_new_tokens=6)
    assert found.verdict is Verdict.REFUSE
    assert found.figures["same_rows"]
    assert found.figures["weights_apart"] > 0
    assert found.figures["relative_difference"] > 1e-3
    assert "gradients of" in found.evidence


def test_other_rows_are_refused(built: Built) -> None:
    parts = built()
    plant(parts, only_training=False)
    found = determinism(parts, max_new_tokens=6)
    assert found.verdict is Verdict.REFUSE
    assert "other rows were written" in found.evidence


def test_torchs_own_random_numbers_are_noticed(built: Built) -> None:
    """Noise from the global generator, which nobody seeds outside of learning; the sampler meets it."""

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    parts = built()
    rehearse(parts, max_new_tokens=1, rows=1)
    model: nn.Module = parts.student.backbone.model  # pyright: ignore[reportAssignmentType]
    model.get_submodule("model").norm = Noisy()  # pyright: ignore[reportArgumentType]
    assert determinism(parts, max_new_tokens=6).verdict is Verdict.REFUSE
