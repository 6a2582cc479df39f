"""Pictures of the maze: where walks went, and where they went wrong, in a terminal and as an image.

A footprint counts each cell's visits and how many of them were left wrongly. Three side by side (the teacher's routes,
a student taught on those, a student taught on its own walks) are the picture of exposure bias. The quickstart draws
them; matplotlib is imported only when an image is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, log
from pathlib import Path
from typing import TYPE_CHECKING

from etude.data.maze import GOALS, NEIGHBOURS, SIDE, Route, is_best, moves_of
from etude.errors import ExtraMissing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WRONG_SHARE = 0.5  # a cell is marked if more than this share of its visits is left wrongly
_GAP = "   "  # between panels in the terminal
_HEAT = " ░▒▓█"  # never visited, then rarely to often
_CORNER = " ╵╶└╷│┌├╴┘─┴┐┤┬┼"  # by the walls that meet there: 1 above, 2 to the right, 4 below, 8 to the left


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a set of walks left on the map."""

    title: str
    visits: Counter[str] = field(default_factory=Counter[str])  # by cell, the start included
    wrong: Counter[str] = field(default_factory=Counter[str])  # those left by a move that was not one of the best

    @property
    def marked(self) -> frozenset[str]:
        """Cells from which most moves are wrong."""
        return frozenset(cell for cell, count in self.wrong.items() if count > WRONG_SHARE * self.visits[cell])

    def heat(self, cell: str) -> float:
        """How often the cell was visited, from 0 (never) to 1 (most of all cells), logarithmically."""
        return log(1 + self.visits[cell]) / log(1 + max(self.visits.values(), default=1))


def footprint(title: str, walks: Iterable[tuple[Route, str]]) -> Footprint:
    """Follow each answer from its start to its end or its first illegal move.

    >>> footprint("a wall", [(Route("r3c9", "r1c9"), "r2c9 r2c8")]).marked
    frozenset({'r2c9'})
    """
    left = Footprint(title)
    for route, text in walks:
        for cell, word in moves_of(route, text):
            left.visits[cell] += 1
            left.wrong[cell] += not is_best(route.goal, cell, word)
    return left


# --------------------------------------------------------------------------------------------------------- the terminal


def draw(footprints: Sequence[Footprint]) -> str:
    """The maze once for each footprint, side by side; titles of up to 23 characters keep the panels straight.

    Darker is visited oftener, `×` marks cells from which most moves are wrong, `←` points at the goals. Three panels
    fit into 80 columns.
    """
    panels = [_panel(left) for left in footprints]
    return "\n".join(_GAP.join(lines).rstrip() for lines in zip(*panels, strict=True))


def _panel(left: Footprint) -> list[str]:
    """The title, and below it cells and walls in turn: a board of 2 * SIDE + 1 lines and columns."""
    width = 2 * SIDE + 1
    board = [[_tile(left, line, column) for column in range(width)] for line in range(width)]
    goal_lines = {2 * row + 1 for row in range(SIDE) if _cell(row, SIDE - 1) in GOALS}
    lines = ["".join(tiles) + (" ←" if line in goal_lines else "  ") for line, tiles in enumerate(board)]
    return [f"{left.title:{width + 2}}", *lines]


def _tile(left: Footprint, line: int, column: int) -> str:
    """One character: a cell where both numbers are odd, a corner where both are even, else a wall or a passage."""
    if line % 2 and column % 2:
        cell = _cell(line // 2, column // 2)
        return "×" if cell in left.marked else _HEAT[_level(left, cell)]
    if line % 2 or column % 2:
        if _is_wall(line, column):
            return "│" if line % 2 else "─"
        return _HEAT[min(_level(left, cell) for cell in _beside(line, column))]
    around = ((line - 1, column), (line, column + 1), (line + 1, column), (line, column - 1))
    return _CORNER[sum(_is_wall(*place) << bit for bit, place in enumerate(around))]


def _level(left: Footprint, cell: str) -> int:
    """An index of `_HEAT`: 0 only where nobody went."""
    return ceil(left.heat(cell) * (len(_HEAT) - 1))


def _cell(row: int, column: int) -> str:
    return f"r{row}c{column}"


def _beside(line: int, column: int) -> tuple[str, str]:
    """The two cells (or places outside) that a wall's place on the board lies between."""
    if line % 2:
        return _cell(line // 2, column // 2 - 1), _cell(line // 2, column // 2)
    return _cell(line // 2 - 1, column // 2), _cell(line // 2, column // 2)


def _is_wall(line: int, column: int) -> bool:
    """Whether a wall stands at this place between two cells; there is none off the board."""
    if not (0 <= line <= 2 * SIDE and 0 <= column <= 2 * SIDE):
        return False
    one, other = _beside(line, column)
    return other not in NEIGHBOURS.get(one, ())


# ------------------------------------------------------------------------------------------------------------ the image


def save_image(footprints: Sequence[Footprint], path: Path) -> None:
    """The same as an image, of the kind that the suffix of `path` names; crosses grow with the share of wrong moves.

    Raises:
        ExtraMissing: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: no window, no state shared with the caller's own plots
    except ImportError as error:
        raise ExtraMissing("matplotlib", "plot", "drawing the maze as an image") from error
    figure = Figure(figsize=(3.2 * len(footprints), 3.5), layout="constrained")
    for axes, left in zip(figure.subplots(1, len(footprints), squeeze=False)[0], footprints, strict=True):
        _paint(axes, left)
    figure.savefig(path, dpi=150)


def _paint(axes: Axes, left: Footprint) -> None:
    """One panel: a cell is a square of side 1 around (column, row)."""
    axes.set_title(left.title)
    axes.set_axis_off()
    heat = [[left.heat(_cell(row, column)) for column in range(SIDE)] for row in range(SIDE)]
    axes.imshow(heat, cmap="Blues", vmin=0, vmax=1.5)  # heat ends at 1: walls and crosses must stay visible on it
    cells, borders = range(1, 2 * SIDE, 2), range(0, 2 * SIDE + 1, 2)
    upright = [(border / 2 - 0.5, line // 2) for line in cells for border in borders if _is_wall(line, border)]
    level = [(border / 2 - 0.5, column // 2) for border in borders for column in cells if _is_wall(border, column)]
    axes.vlines([x for x, _ in upright], [y - 0.5 for _, y in upright], [y + 0.5 for _, y in upright], colors="black")
    axes.hlines([y for y, _ in level], [x - 0.5 for _, x in level], [x + 0.5 for _, x in level], colors="black")
    for row in range(SIDE):
        for column in range(SIDE):
            cell = _cell(row, column)
            if cell in GOALS:
                axes.plot(column + 0.8, row, marker="<", color="tab:green", clip_on=False)
            if left.wrong[cell]:
                share = left.wrong[cell] / left.visits[cell]
                axes.plot(column, row, marker="x", color="crimson", markersize=9 * share)
