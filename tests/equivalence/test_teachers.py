"""The same weights through every door of a teacher: the same marks, and the same gradient of the student."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.axes.names import Gives
from etude.config.load import load_recipe
from etude.core.collate import collate
from etude.core.records import Scores
from etude.models.backbone import load_backbone
from etude.models.own_teachers import BaseTeacher
from etude.models.roles import AbstractTeacher
from etude.models.teachers import FrozenTeacher
from etude.recipes.build import build
from etude.recipes.run import train
from etude.runtime.seeds import Key
from etude.runtime.tracking import Tracker
from etude.runtime.world import World
from etude.testing import rollout_of, tiny_recipe
from etude.training.evaluation import score_rows
from etude.training.learner import Marked
from etude.training.loop import Parts
from etude.training.loop import train as run_loop
from etude.training.state import State

BOTH = frozenset({Gives.SAMPLED_LOGPROBS, Gives.HIDDEN_STATES})
TERMS = [
    {"divergence": "reverse_kl"},
    {"name": "drawn", "support": "sampled", "estimator": "policy_gradient", "sources": ["student"]},
]
PROBE = [rollout_of([7, 11, 2], [30, 9, 2]), rollout_of([5], [6], row=1)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An adapted student of a model that came out of a run, whose first checkpoint is another."""
    folder = tmp_path_factory.mktemp("doors")
    origin = tiny_recipe(folder) | {"output": str(folder / "origin")}
    model = train(load_recipe(origin, ["train.steps=2"]), quiet=True).student
    return origin | {
        "output": str(folder / "run"),
        "terms": TERMS,
        "student": {"model": model, "lora": {"rank": 2, "alpha": 4}},
        "teacher": {"model": model},
    }


def doors(settings: dict[str, Any]) -> dict[str, list[str]]:
    origin = Path(settings["output"]).with_name("origin")
    return {
        "frozen": [],
        "offloaded": ["teacher.offload=true"],
        "on a device of its own": ["teacher.device=cpu"],
        "the student without its adapters": ["teacher.model=", "teacher.weights=base"],
        "a run's newest checkpoint": [f"teacher.model={origin}"],
        "a run's checkpoint by its step": [f"teacher.model={origin}", "teacher.step=2"],
        "one's own class": [
            "teacher.model=",
            f"teacher.weights={__name__}:own",
            f"teacher.options.model={settings['student']['model']}",
        ],
    }


def own(name: str, model: str) -> AbstractTeacher:
    return FrozenTeacher(name, load_backbone(model))


def made(settings: dict[str, Any], *changes: str) -> Parts:
    recipe = load_recipe(settings, changes)
    tracker = Tracker(None, console=False, total_steps=recipe.train.steps)
    return build(recipe, folder=Path(recipe.output), world=World(), tracker=tracker)


def marks_and_gradient(parts: Parts) -> tuple[list[Scores], dict[str, Tensor]]:
    """Of a student whose adapters have moved, on the rows it writes."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in parts.student.trainable_parameters().values():
            weight.add_(0.3 * torch.randn(weight.shape, generator=draws))
    parts.sampler.refresh(parts.student, 0)
    rollouts = parts.sampler.sample(parts.prompts(0), Key(0, "sample", 0, 0))
    rows = parts.learner.prepare(score_rows(rollouts, parts.teachers, parts.objective), 0)
    scales_J = parts.objective.scales(parts.objective.counts(rows))
    batch = collate(rows, version=0)
    loss, _ = Marked(parts.student.backbone, parts.objective)(batch, scales_J, parts.learner.heads)
    loss.backward()
    gradient = {name: w.grad for name, w in parts.student.trainable_parameters().items() if w.grad is not None}
    return [row.scores["teacher"] for row in rows], gradient


def test_every_door_leads_to_the_same_step(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "etude.recipes.build.require_teacher", lambda recipe, device: None
    )  # it refuses to offload here
    expected_marks, expected = marks_and_gradient(made(settings))
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
    for door, changes in doors(settings).items():
        marks, found = marks_and_gradient(made(settings, *changes))
        close = partial(torch.testing.assert_close, atol=1e-6, rtol=0, msg=door)
        for mine, theirs in zip(marks, expected_marks, strict=True):
            close(mine.sampled_logprobs, theirs.sampled_logprobs)
            close(mine.hidden, theirs.hidden)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            close(found[name], gradient)
    other, _ = marks_and_gradient(made(settings, *doors(settings)["a run's newest checkpoint"], "teacher.step=1"))
    assert (other[0].sampled_logprobs - expected_marks[0].sampled_logprobs).abs().max() > 1e-4  # pyright: ignore


def test_the_base_under_the_adapters_stays_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    """A probe of fixed rows, before and after training and after a resume; the student itself moves."""
    changes = ["teacher.model=", "teacher.weights=base", f"output={tmp_path}", "train.updates_per_round=2"]
    gold = [{"teacher": "label", "divergence": "forward_kl"}, {"coefficient": 0.1}]
    trained = made(settings | {"terms": gold}, *changes, "sampler.student_fraction=0.0", "optim.weight_decay=0.5")
    teacher = trained.teachers["teacher"]
    assert isinstance(teacher, BaseTeacher)
    before, own = teacher.score(PROBE, BOTH, 1.0), trained.student.logprobs(PROBE, 1.0)
    with trained.tracker:
        run_loop(trained, State())
    after = teacher.score(PROBE, BOTH, 1.0)
    assert (torch.cat(trained.student.logprobs(PROBE, 1.0)) - torch.cat(own)).abs().max() > 1e-3
    again = made(settings | {"terms": gold}, *changes, "sampler.student_fraction=0.0", "optim.weight_decay=0.5")
    checkpoint = again.saver.store.newest()
    assert checkpoint is not None
    again.saver.restore(checkpoint, again.student, again.learner, again.sampler, again.teachers)
    resumed = again.teachers["teacher"].score(PROBE, BOTH, 1.0)
    moved = torch.cat(again.student.logprobs(PROBE, 1.0))
    assert moved.equal(torch.cat(trained.student.logprobs(PROBE, 1.0)))
    for first, *others in zip(before, after, resumed, strict=True):
        for other in others:
            assert first.sampled_logprobs is not None
            assert first.hidden is not None
            assert first.sampled_logprobs.equal(other.sampled_logprobs)  # pyright: ignore[reportArgumentType]
            assert first.hidden.equal(other.hidden)  # pyright: ignore[reportArgumentType]
