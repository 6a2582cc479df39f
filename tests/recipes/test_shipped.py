from __future__ import annotations

from pathlib import Path

import pytest

from etude.config.load import dump_toml, load_recipe, shipped_recipes, verdicts
from etude.config.schema import Recipe

NAMES = list(shipped_recipes())


def lines_of(name: str) -> list[str]:
    return shipped_recipes()[name].read_text(encoding="utf-8").splitlines()


def test_the_recipes_that_are_promised():
    assert set(NAMES) >= {
        "gsm8k-qwen2.5-0.5b",
        "gsm8k-qwen2.5-0.5b-16gb",
        "lightning",
        "math-qwen3-8b-from-32b",
        "maze",
        "maze-two-stages",
        "smollm2-prune",
        "smollm2-prune-forward-kd",
        "smollm2-prune-reverse-kd",
        "starter",
    }


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_is_legal_and_survives_a_dump(name: str, tmp_path: Path):
    recipe = load_recipe(name)
    assert (recipe.name, recipe.output) == (name, f"runs/{name}")
    kinds = {rule.kind for rules in verdicts(recipe).values() for rule in rules}
    assert kinds == ({"surrogate"} if recipe.sampler.recorded else {"exact"})  # recorded: an older student's tokens
    (tmp_path / "again.toml").write_text(dump_toml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "again.toml") == recipe


@pytest.mark.parametrize("name", NAMES)
def test_its_header_says_purpose_hardware_and_what_to_expect(name: str):
    lines = lines_of(name)
    header = lines[: lines.index("")]
    assert all(line.startswith("#") for line in header)
    assert len(header[0].removeprefix("# ")) < 100  # `etude show` prints it on one line
    assert header[1] == "#"
    assert sum(line.startswith("# Hardware: ") for line in header) == 1
    assert sum(line.startswith("# Expected: ") for line in header) == 1
    assert max(map(len, lines)) <= 120


def without(recipe: Recipe, *keys: str) -> dict[str, object]:
    return recipe.model_dump(exclude={"name", "output", *keys})


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_the_controls_differ_from_the_run_in_who_writes_and_what_is_measured_only(divergence: str):
    run, control = load_recipe("smollm2-prune"), load_recipe(f"smollm2-prune-{divergence}-kd")
    assert without(run, "sampler", "terms") == without(control, "sampler", "terms")
    assert control.sampler.model_dump() == run.sampler.model_dump() | {"student_fraction": 0.0, "other": "teacher"}
    assert control.terms[0].divergence == f"{divergence}_kl"


def test_the_pruned_layers():
    kept = load_recipe("smollm2-prune").student.keep_layers
    assert kept is not None
    assert set(range(30)) - set(kept) == set(range(16, 22))


def test_the_small_card_changes_memory_only():
    large, small = load_recipe("gsm8k-qwen2.5-0.5b"), load_recipe("gsm8k-qwen2.5-0.5b-16gb")
    changed = {
        key
        for table in ("student", "loss", "train")
        for key, value in getattr(small, table).model_dump().items()
        if getattr(getattr(large, table), key) != value
    }
    assert changed == {"compute_dtype", "activation_checkpointing", "chunk_bytes", "tokens_per_micro_batch"}
    assert without(large, "student", "loss", "train") == without(small, "student", "loss", "train")


def test_the_starter_with_its_method_uncommented_is_that_method(tmp_path: Path):
    lines = [line.removeprefix("# ") if line.startswith("# method") else line for line in lines_of("starter")]
    (tmp_path / "mine.toml").write_text("\n".join(lines), encoding="utf-8")
    recipe = load_recipe(tmp_path / "mine.toml")
    assert recipe.method == "gkd"
    assert (recipe.sampler.student_fraction, recipe.sampler.other) == (0.5, "dataset")
    assert recipe.terms[0].divergence == "jsd"


def test_files_that_recipes_name_are_shipped_with_them():
    prompts = [recipe.data.prompts for name in NAMES if name != "starter" if (recipe := load_recipe(name)).data.prompts]
    assert prompts
    assert all(Path(path).is_file() for path in prompts if path is not None)
