from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from etude.config.load import load_recipe
from etude.config.schema import Recipe
from etude.errors import RecipeError
from etude.recipes.devices import SMALL_MODEL, Device, choose_device, choose_threads
from etude.runtime.world import World


def recipe(*changes: str) -> Recipe:
    settings = {"student": {"model": "s"}, "teacher": {"model": "t"}, "data": {"prompts": "p.jsonl"}}
    return load_recipe(settings, changes)


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with what the test names: "cuda", "old cuda" (which only emulates bfloat16), "mps"."""
    has = getattr(request, "param", ())
    monkeypatch.setattr("torch.cuda.is_available", lambda: any("cuda" in name for name in has))
    monkeypatch.setattr(
        "torch.cuda.is_bf16_supported", lambda including_emulation=True: "cuda" in has or including_emulation
    )
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: "mps" in has)
    monkeypatch.setattr("torch.cuda.set_device", lambda index: None)


@pytest.mark.parametrize(
    ("machine", "changes", "expected"),
    [
        ([], [], Device("cpu", "float32", "float32", "float32")),
        (["mps"], [], Device("mps", "float32", "float32", "float32")),
        (["cuda"], [], Device("cuda:0", "bfloat16", "bfloat16", "bfloat16")),
        (["old cuda"], [], Device("cuda:0", "float16", "float16", "float16")),
        (["cuda", "mps"], [], Device("cuda:0", "bfloat16", "bfloat16", "bfloat16")),
        (["cuda", "mps"], ["device.device=mps"], Device("mps", "float32", "float32", "float32")),
        (["cuda"], ["device.device=cpu"], Device("cpu", "float32", "float32", "float32")),
        ([], ["student.compute_dtype=bfloat16"], Device("cpu", "bfloat16", "bfloat16", "bfloat16")),
        (["cuda"], ["student.compute_dtype=float32"], Device("cuda:0", "float32", "float32", "float32")),
        (["cuda"], ["teacher.dtype=float32"], Device("cuda:0", "bfloat16", "float32", "bfloat16")),
        (["cuda"], ["sampler.dtype=float32"], Device("cuda:0", "bfloat16", "bfloat16", "float32")),
        ([], ["teacher.dtype=float16", "sampler.dtype=float16"], Device("cpu", "float32", "float16", "float16")),
    ],
    indirect=["machine"],
)
def test_every_auto_is_resolved(machine: None, changes: list[str], expected: Device) -> None:
    assert choose_device(recipe(*changes), World()) == expected


@pytest.mark.parametrize("machine", [["cuda"]], indirect=True)
def test_each_process_has_a_card_of_its_own(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    assert choose_device(recipe(), World(rank=5, size=8, local_rank=1)).name == "cuda:1"
    assert current == [1]


@pytest.mark.parametrize(
    ("machine", "asked", "there"),
    [([], "cuda", "cpu"), ([], "mps", "cpu"), (["mps"], "cuda", "cpu, mps"), (["cuda"], "mps", "cpu, cuda")],
    indirect=["machine"],
)
def test_what_is_not_there_is_refused(machine: None, asked: str, there: str) -> None:
    with pytest.raises(RecipeError, match=rf'device.device = "{asked}" is not available here \({there}\); write'):
        choose_device(recipe(f"device.device={asked}"), World())


@pytest.mark.parametrize("machine", [[], ["mps"]], indirect=True)
def test_float16_is_trained_on_cuda_only(machine: None) -> None:
    with pytest.raises(RecipeError, match='student.compute_dtype = "float16" needs a CUDA card and this run is on'):
        choose_device(recipe("student.compute_dtype=float16"), World())


def test_only_float16_needs_a_loss_scale() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        assert Device("cuda:0", dtype, "float32", "float32").needs_scaler == (dtype == "float16")


class TestThreads:
    @pytest.fixture(autouse=True)
    def _two(self) -> Iterator[None]:
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(1)

    @pytest.mark.parametrize(
        ("asked", "parameters", "expected"),
        [(0, SMALL_MODEL, 2), (0, SMALL_MODEL - 1, 1), (3, SMALL_MODEL - 1, 3), (3, SMALL_MODEL, 3)],
    )
    def test_as_asked_or_one_for_small_models(self, asked: int, parameters: int, expected: int) -> None:
        choose_threads(asked, parameters)
        assert torch.get_num_threads() == expected
