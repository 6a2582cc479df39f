"""From `[teacher]` to who marks: each kind is made, shared where it may be, and refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.axes.names import Gives
from etude.config.load import load_recipe
from etude.core.linear import OutputHead
from etude.core.records import Rollout, Scores
from etude.errors import ExtraMissing, PairError, RecipeError
from etude.models.own_teachers import BaseTeacher, EmaTeacher, LiveTeacher
from etude.models.roles import AbstractTeacher
from etude.models.sampling import InProcessSampler
from etude.models.table import TableBackbone
from etude.models.teachers import EnsembleTeacher, FrozenTeacher, OffloadedTeacher
from etude.recipes.build import build
from etude.recipes.check import require_readable
from etude.recipes.devices import Device
from etude.recipes.run import train
from etude.recipes.teachers import gives_of, loading_once, own_class, require_teacher
from etude.runtime.tracking import Tracker, read_metrics
from etude.runtime.world import World
from etude.testing import CountingTeacher, check_teacher, tiny_backbone, tiny_folder, tiny_recipe
from etude.training.loop import Parts

LORA = ["student.lora.rank=2", "student.lora.alpha=4"]
OWN = ["teacher.model=", f"teacher.weights={__name__}:Even"]
CUDA = Device("cuda:0", "bfloat16", "bfloat16", "bfloat16")


class Even(AbstractTeacher):
    """A user's own: every id but the favourite is equally likely, and the favourite `times` as likely as those."""

    gives = FrozenTeacher.gives

    def __init__(self, name: str, favourite: int = 0, times: float = 1.0, ids: int = 32) -> None:
        self.name = name
        logits_V = torch.zeros(ids)
        logits_V[favourite] = torch.tensor(times).log()
        self.teacher = FrozenTeacher(name, TableBackbone(logits_V.expand(ids, ids).clone()))

    def score(self, rollouts: Sequence[Rollout], needs: frozenset[Gives], temperature: float) -> list[Scores]:
        return self.teacher.score(rollouts, needs, temperature)

    def head(self) -> OutputHead:
        return self.teacher.head()


def sampled_only(name: str) -> AbstractTeacher:
    """A function will do, and may give less than everything."""
    return EnsembleTeacher(name, {"only": (CountingTeacher("only", base=32), 1.0)})


def nobody(name: str) -> str:
    return name


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return tiny_recipe(tmp_path)


def made(settings: dict[str, Any], *changes: str) -> Parts:
    recipe = load_recipe(settings, changes)
    tracker = Tracker(None, console=False, total_steps=recipe.train.steps)
    return build(recipe, folder=Path(recipe.output), world=World(), tracker=tracker)


class TestKinds:
    def test_the_student_without_its_adapters(self, settings: dict[str, Any]) -> None:
        parts = made(settings, "teacher.model=", "teacher.weights=base", *LORA)
        teacher = parts.teachers["teacher"]
        assert isinstance(teacher, BaseTeacher)
        assert teacher.backbone is parts.student.backbone
        assert teacher.tokens_per_batch == parts.learner.tokens_per_micro_batch
        check_teacher(teacher)

    def test_the_student_as_the_round_begins(self, settings: dict[str, Any]) -> None:
        parts = made(settings, "teacher.model=", "teacher.weights=live")
        assert isinstance(parts.teachers["teacher"], LiveTeacher)
        check_teacher(parts.teachers["teacher"])

    def test_an_average(self, settings: dict[str, Any]) -> None:
        teacher = made(settings, "teacher.model=", "teacher.weights=ema").teachers["teacher"]
        assert isinstance(teacher, EmaTeacher)
        assert (teacher.rate, teacher.every) == (0.05, 1)
        check_teacher(teacher)
        rare = ["teacher.ema_rate=0.2", "teacher.ema_every=7", "teacher.dtype=bfloat16"]
        teacher = made(settings, "teacher.model=", "teacher.weights=ema", *rare).teachers["teacher"]
        assert isinstance(teacher, EmaTeacher)
        assert (teacher.rate, teacher.every) == (0.2, 7)
        assert {weight.dtype for weight in teacher.backbone.parameters()} == {torch.bfloat16}

    def test_an_average_may_write(self, settings: dict[str, Any]) -> None:
        writes = ["sampler.student_fraction=0.0", "sampler.other=teacher"]
        parts = made(settings, "teacher.model=", "teacher.weights=ema", *writes)
        assert isinstance(parts.sampler, InProcessSampler)
        assert parts.sampler.backbone is parts.teachers["teacher"].backbone  # pyright: ignore

    def test_ones_own_class(self, settings: dict[str, Any]) -> None:
        parts = made(settings, *OWN, "teacher.options.favourite=9", "teacher.options.times=8.0")
        teacher = parts.teachers["teacher"]
        assert isinstance(teacher, Even)
        check_teacher(teacher)
        assert teacher.teacher.backbone.get_parameter("weight_VS")[9].exp().tolist() == pytest.approx([8.0] * 32)
        assert parts.evaluation is not None
        assert parts.evaluation.teacher is teacher

    def test_ones_own_teaches(self, settings: dict[str, Any]) -> None:
        """The student learns to write the one word this teacher likes."""
        liked = ["teacher.options.favourite=9", "teacher.options.times=200.0", "train.steps=30", "checkpoint.every=0"]
        summary = train(load_recipe(settings, [*OWN, *liked, "optim.learning_rate=0.03"]), quiet=True)
        assert summary.after["heldout/reverse_kl"] < 0.2 * summary.before["heldout/reverse_kl"]

    def test_without_hidden_states_the_divergence_is_not_measured(self, settings: dict[str, Any]) -> None:
        own = ["teacher.model=", f"teacher.weights={__name__}:sampled_only"]
        term = {"support": "sampled", "estimator": "policy_gradient"}
        parts = made(settings | {"terms": [term]}, *own)
        check_teacher(parts.teachers["teacher"])
        assert parts.evaluation is not None
        assert parts.evaluation.teacher is None
        adaptive = ["sampler.student_fraction=0.5", "sampler.adaptive.rise=0.1", "evaluation.every=2"]
        with pytest.raises(PairError, match=r"\[sampler.adaptive\] follows the held-out divergence .* gives none"):
            made(settings | {"terms": [term | {"sources": ["student"]}]}, *own, *adaptive)
        with pytest.raises(PairError, match="'teacher' gives sampled_logprobs, and a term needs hidden_states"):
            made(settings, *own)

    def test_on_a_device_of_its_own(self, settings: dict[str, Any]) -> None:
        teacher = made(settings, "teacher.device=cpu").teachers["teacher"]
        assert isinstance(teacher, FrozenTeacher)
        assert teacher.backbone.device == torch.device("cpu")

    def test_offloaded(self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """The refusal on a CPU aside, for there is no card here."""
        monkeypatch.setattr("etude.recipes.build.require_teacher", lambda recipe, device: None)
        teacher = made(settings, "teacher.offload=true").teachers["teacher"]
        assert isinstance(teacher, OffloadedTeacher)
        assert teacher.device == torch.device("cpu")
        check_teacher(teacher)


class TestSharing:
    def test_the_same_checkpoint_is_loaded_once(self, settings: dict[str, Any]) -> None:
        near = {"name": "near", "teacher": "reference", "coefficient": 0.1}
        model = settings["teacher"]["model"]
        teachers: Any = made(settings | {"terms": [{}, near]}, f"reference.model={model}").teachers
        assert teachers["teacher"].backbone is teachers["reference"].backbone
        assert [teachers[name].name for name in teachers] == ["teacher", "reference"]
        other = made(settings | {"terms": [{}, near]}, f"reference.model={model}", "reference.dtype=bfloat16").teachers
        assert other["teacher"].backbone is not other["reference"].backbone  # pyright: ignore

    def test_never_with_the_student(self, settings: dict[str, Any]) -> None:
        parts = made(settings, f"teacher.model={settings['student']['model']}")
        assert parts.teachers["teacher"].backbone is not parts.student.backbone  # pyright: ignore

    def test_by_what_a_name_stands_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[str, dict[str, Any]]] = []

        def load(model: str, **how: Any) -> Any:
            asked.append((model, how))
            return tiny_backbone()

        monkeypatch.chdir(tmp_path)
        tiny_folder(tmp_path / "model")
        once = loading_once(load)
        first = once("model", dtype="float32", device="cpu")
        assert once(str(tmp_path / "model"), device="cpu", dtype="float32") is first
        assert once("model", dtype="bfloat16", device="cpu") is not first
        assert once("owner/name", dtype="float32") is once("owner/name", dtype="float32")
        assert len(asked) == 3


class TestRefusals:
    def refused(self, settings: dict[str, Any], *changes: str) -> None:
        """As `etude check` and `etude train` do."""
        recipe = load_recipe(settings, changes)
        with pytest.raises((RecipeError, ExtraMissing)) as checked:
            require_readable(recipe, World())
        with pytest.raises((RecipeError, ExtraMissing)) as trained:
            train(recipe, quiet=True)
        assert str(checked.value) == str(trained.value)
        raise checked.value

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            (["teacher.offload=true"], "teacher.offload = true does nothing on cpu"),
            (["teacher.device=cuda:7"], r'teacher.device = "cuda:7" is not there \(0 of the kind cuda are\)'),
            (["teacher.quantization=torchao-int8"], r"torchao-int8 needs the package 'torchao'.*etude\[torchao\]"),
            (["teacher.model=", "teacher.weights=no.module:Class"], "'no.module:Class', which cannot be imported"),
            (["teacher.model=", f"teacher.weights={__name__}:OWN"], "is a list; expected a class"),
            (["teacher.step=3"], "teacher.step = 3 and teacher.model = .* is no run; remove step"),
        ],
    )
    def test_before_any_weight_is_loaded(
        self, settings: dict[str, Any], changes: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
        monkeypatch.setattr("etude.models.quantised.util.find_spec", lambda name: None)
        monkeypatch.setattr("etude.recipes.build.load_backbone", None)
        with pytest.raises((RecipeError, ExtraMissing), match=sentence):
            self.refused(settings, *changes)

    def test_what_is_no_teacher(self, settings: dict[str, Any]) -> None:
        with pytest.raises(PairError, match="made a str; expected an AbstractTeacher"):
            made(settings, "teacher.model=", f"teacher.weights={__name__}:nobody")

    def test_on_a_card_offloading_is_welcome(self, settings: dict[str, Any]) -> None:
        require_teacher(load_recipe(settings, ["teacher.offload=true"]), CUDA)

    def test_a_function_may_say_later_what_it_gives(self, settings: dict[str, Any]) -> None:
        teacher = load_recipe(settings, OWN).teacher
        assert teacher is not None
        assert gives_of(teacher) == Even.gives
        teacher = load_recipe(settings, ["teacher.model=", f"teacher.weights={__name__}:nobody"]).teacher
        assert teacher is not None
        assert gives_of(teacher) == frozenset(Gives)
        assert own_class(f"{__name__}:Even") is Even


def divergences(settings: dict[str, Any], weights: str, *terms: dict[str, Any]) -> list[float]:
    """Of four steps, two a round."""
    changes = ["teacher.model=", f"teacher.weights={weights}", "train.epochs=2", "sampler.student_fraction=0.5"]
    summary = train(load_recipe(settings | {"terms": [{}, *terms]}, changes), quiet=True)
    lines = read_metrics(Path(summary.run) / "metrics.jsonl")
    return [line["divergence/reverse_kl"] for line in lines if "divergence/reverse_kl" in line]


@pytest.mark.parametrize("weights", ["live", "ema"])
def test_a_teacher_made_of_the_student_pulls_where_something_else_pushes(
    settings: dict[str, Any], weights: str
) -> None:
    """By itself it is the student, for ever. Live, it is so again whenever a round begins."""
    gold = {"name": "gold", "teacher": "label", "divergence": "forward_kl", "sources": ["dataset"]}
    assert max(map(abs, divergences(settings, weights))) < 1e-6
    settings["output"] += "-pushed"
    first, second, third, fourth = divergences(settings, weights, gold)
    assert abs(first) < 1e-6
    assert min(second, fourth) > 1e-5
    assert (abs(third) < 1e-6) == (weights == "live")
