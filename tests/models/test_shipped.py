import sys
from pathlib import Path
from types import ModuleType

import pytest

from etude.errors import ModelError
from etude.models.shipped import resolve


@pytest.mark.parametrize("name", ["teacher", "student"])
def test_maze_models_lie_within_the_package(name: str) -> None:
    import etude

    folder = Path(resolve(f"etude:maze-{name}"))
    assert folder == Path(etude.__file__).parent / "data" / "maze_models" / name


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "/models/mine", "./mine", "maze-teacher"])
def test_other_names_are_left_alone(name: str) -> None:
    assert resolve(name) == name


def test_a_built_model_is_asked_for_only_when_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builder = ModuleType("etude.data.smollm2")
    builder.folder = lambda: tmp_path  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "etude.data.smollm2", builder)
    monkeypatch.setattr("etude.data.smollm2", builder, raising=False)
    assert resolve("etude:smollm2-135m-instruct") == str(tmp_path)


def test_an_unknown_shipped_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ModelError, match="no model 'etude:maze' comes with etude; write one of etude:maze-teacher, etude"
    ):
        resolve("etude:maze")
