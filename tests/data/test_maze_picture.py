from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from etude.data.maze import NEIGHBOURS, ROUTES, Route, shortest_walk
from etude.data.maze_picture import Footprint, draw, footprint, save_image
from etude.errors import ExtraMissing

ROUTE = Route("r3c9", "r1c9")  # a passage straight down: r1c9, r2c9, r3c9


def test_a_footprint_counts_visits_and_wrong_moves_up_to_the_first_wall() -> None:
    left = footprint(
        "three walks",
        [
            (ROUTE, "r2c9 r3c9"),  # right
            (ROUTE, "r0c9 r1c9 r2c9"),  # away from the goal and back, and an end before it
            (ROUTE, "r2c9 r2c8 r3c8"),  # through a wall: nowhere from then on
        ],
    )
    assert left.visits == {"r1c9": 4, "r2c9": 3, "r3c9": 1, "r0c9": 1}
    assert {cell: count for cell, count in left.wrong.items() if count} == {"r1c9": 1, "r2c9": 2}
    assert left.marked == {"r2c9"}  # two of three; of four moves from r1c9, one


def test_heat_runs_from_never_to_most() -> None:
    left = footprint("", [(ROUTE, "r2c9 r3c9"), (ROUTE, "r2c9")])
    assert left.heat("r0c0") == 0.0
    assert left.heat("r1c9") == 1.0
    assert 0.0 < left.heat("r3c9") < 1.0


def test_an_empty_footprint_draws_the_bare_map() -> None:
    lines = draw([Footprint("nobody")]).splitlines()
    assert lines[0].strip() == "nobody"
    assert len(lines) == 1 + 21
    assert set("".join(lines[1:])) <= set("│─┌┐└┘├┤┬┴┼╴╵╶╷ ←")
    assert [number for number, line in enumerate(lines[1:]) if line.endswith("←")] == [1, 7, 13, 19]
    for row in range(10):
        for column in range(9):
            between = lines[2 * row + 2][2 * column + 2]
            assert (between == " ") == (f"r{row}c{column + 1}" in NEIGHBOURS[f"r{row}c{column}"])


def test_cells_show_heat_or_a_cross_and_passages_what_both_ends_have() -> None:
    lines = draw([footprint("", [(ROUTE, "r2c9 r3c9"), (ROUTE, "r2c9")])]).splitlines()[1:]
    assert [lines[line][19] for line in range(1, 8)] == [" ", " ", "█", "█", "█", "▓", "▓"]
    crossed = draw([footprint("", [(ROUTE, "r0c9 r0c8")])]).splitlines()[1:]
    assert crossed[3][19] == "×"


def test_three_panels_fit_into_eighty_columns() -> None:
    routes = [(route, " ".join(shortest_walk(route))) for route in ROUTES]
    drawing = draw([footprint(title, routes) for title in ("one", "two", "three")])
    assert max(map(len, drawing.splitlines())) <= 80
    assert "×" not in drawing
    assert drawing.splitlines()[0].split() == ["one", "two", "three"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_image_is_written(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    left = footprint("two walks", [(ROUTE, "r2c9 r3c9"), (ROUTE, "r2c9 r2c8")])
    save_image([left, Footprint("nobody")], tmp_path / f"maze{suffix}")
    assert (tmp_path / f"maze{suffix}").stat().st_size > 1000


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ExtraMissing, match=r"etude\[plot\]"):
        save_image([Footprint("nobody")], tmp_path / "maze.png")
