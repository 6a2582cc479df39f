"""The table of methods: the same conditions for all, what is asked of whom, and an interrupted table that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from etude.config.methods import METHODS
from etude.experiments import arena, methods_table
from etude.experiments.arena import Arena, Score
from etude.experiments.methods_table import FITTED, Book, Cell, explanation, must_be_good, recipe_of, table


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_on_the_maze_under_the_same_conditions(name: str) -> None:
    recipe = recipe_of(name, 300)
    assert recipe.train.steps == 300
    assert recipe.train.prompts_per_round * recipe.sampler.samples_per_prompt == 64
    assert recipe.optim.learning_rate == 2e-3
    assert recipe.sampler.max_new_tokens == 45
    own = METHODS[name].settings["sampler"].get("temperature", 1.3)
    assert recipe.sampler.temperature == FITTED.get(name, {}).get("sampler.temperature", own)


def test_what_is_set_for_the_maze_belongs_to_a_method() -> None:
    assert FITTED.keys() <= METHODS.keys()
    horizon: Any = recipe_of("prefix", 300).terms[0].first_tokens
    assert (horizon.start, horizon.end, horizon.last) == (8, 45, 300)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("opd", True),
        ("gkd", True),
        ("imitkd", True),  # all data at first, all student at last
        ("distillm2", True),
        ("skd", True),
        ("distillm", False),  # its adaptive share begins at 0 and may stay there
        ("minillm", False),  # one of its terms sees the drawn token only
        ("thinking-machines", False),
        ("local-support", False),
        ("supervised-kd", False),
        ("seqkd", False),
    ],
)
def test_of_whom_the_accuracy_is_asked(name: str, asked: bool) -> None:
    assert must_be_good(recipe_of(name, 300)) is asked


def cell(accuracy: float, reached: int | None = None) -> Cell:
    return Cell(Score(accuracy, 0.9, 0.5, 0.25), reached, tokens=98_765.0, seconds=12.4, own_rows=0.5)


def printed(found: dict[str, list[Cell]]) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(table(found, 300))
        console.print(explanation(found, 300), soft_wrap=True)
    return capture.get()


def test_rows_by_hand() -> None:
    found = {
        "sft": [cell(0.9), cell(0.7)],
        "opd": [cell(0.625, 300), cell(0.75, 75)],
        "gkd": [cell(0.5), cell(0.75, 50)],
    }
    lines = printed(found).splitlines()[3:]  # below the heading
    opd, gkd, sft = (next(line for line in lines if line.strip().startswith(name)) for name in ("opd", "gkd", "sft"))
    assert lines.index(opd) < lines.index(gkd) < lines.index(sft)  # best first, and those of whom much is asked above
    # 300: the slower of the two seeds
    words = [
        "opd",
        "reverse_kl",
        "full",
        "analytic",
        "1.3",
        "50%",
        "0.69",
        "0.62-0.75",
        "0.90",
        "0.25",
        "300",
        "99",
        "12",
    ]
    assert opd.split() == words
    assert gkd.split()[-3] == "never"  # one seed was not there
    assert "1 of 2 reach 0.65; below: gkd." in printed(found)
    assert "Set for the maze alone: nothing." in printed(found)
    assert f"terms.0.first_tokens.end = {arena.MAX_NEW_TOKENS}" in printed({"prefix": [cell(0.7, 25)]})


def test_a_method_of_several_terms_has_a_line_for_each() -> None:
    text = printed({"minillm": [cell(0.6)]})
    first, second = (line.split() for line in text.splitlines() if "analytic" in line or "policy_gradient" in line)
    assert first[:4] == ["minillm", "reverse_kl", "sampled", "policy_gradient"]
    assert second == ["full", "analytic"]


def test_only_what_was_found_under_the_same_settings_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Book(path).add({"seed": 0, "maze": {"steps": 300}}, cell(0.7, 50))
    assert Book(path).get({"seed": 0, "maze": {"steps": 300}}) == cell(0.7, 50)
    assert Book(path).get({"seed": 0, "maze": {"steps": 200}}) is None
    assert Book(path).get({"seed": 1, "maze": {"steps": 300}}) is None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight walks an update, one walk a held-out route."""
    monkeypatch.setattr(arena, "WARM_START_STEPS", 1)
    monkeypatch.setattr(arena, "WALKS", 1)
    monkeypatch.setattr(methods_table, "WALKS", 1)
    monkeypatch.setattr(methods_table, "ROWS", 8)


@pytest.mark.usefixtures("small")
def test_an_interrupted_table_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    words = ["--seeds", "1", "--steps", "2", "--output", str(tmp_path), "--methods"]
    assert methods_table.main([*words, "thinking-machines"]) == 0

    trained: list[str] = []
    run = Arena.run

    def noting(self: Arena, name: str, *rest: Any, **options: Any) -> Any:
        trained.append(name)
        return run(self, name, *rest, **options)

    monkeypatch.setattr(Arena, "run", noting)
    assert methods_table.main([*words, "thinking-machines", "sft"]) == 0
    assert trained == ["warm-start", "sft"]
    assert methods_table.main([*words, "thinking-machines", "sft"]) == 0
    assert trained == ["warm-start", "sft"]
    torch.set_num_threads(threads)

    out = capsys.readouterr().out
    assert "372 held-out routes, 1 walks each; 2 updates of 8 rows; seeds 0 to 0" in out
    assert "0 of 0 reach 0.65." in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("thinking", "sft"))]
    assert rows[0][:5] == ["thinking-machines", "reverse_kl", "sampled", "policy_gradient", "1"]
    found = Book(tmp_path / "results.json")._entries
    assert [entry["asked"]["maze"]["method"] for entry in found] == ["thinking-machines", "sft"]
    assert all(0 < entry["found"]["tokens"] <= 2 * 8 * arena.MAX_NEW_TOKENS for entry in found)
    assert all(0 < entry["found"]["score"]["entropy"] < 5 for entry in found)


def test_an_unknown_method_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        methods_table.main(["--methods", "gdk"])
    assert leaving.value.code == 2
    assert "gdk" in capsys.readouterr().err
