"""The embedded world: a fixed 10 x 10 maze in which learning from one's own mistakes visibly matters.

A cell is a word (`r3c7`: row 3, column 7). The prompt names a goal and a start, the answer is the walk between them, one
cell a token, and then the end. A walk that strays stays on the map, so what a student does where no teacher ever went
decides whether it arrives. Here are the map, its prompts, the walks that models are made from, and the verifier; the
picture is in `maze_picture.py`. It knows no model and no training; tasks, the quickstart and the script that makes the
shipped models call it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from typing import NamedTuple

from etude.runtime.seeds import derive

SIDE = 10
EXTRA_PASSAGES = 0.12  # share of the walls left by the spanning tree that are opened again: a few loops, many detours
MAX_MOVES = 44  # a longer walk is wrong; the longest shortest route has 24, so there is room to stray and come back
TRAINING_ROUTES = 24  # of 396: the teacher's routes cover part of the map only, which is the point
END = "<end>"  # ends an answer; a token of the shipped tokenizer

CELLS = tuple(f"r{row}c{column}" for row in range(SIDE) for column in range(SIDE))
GOALS = ("r0c9", "r3c9", "r6c9", "r9c9")  # all in the right-hand column


class Route(NamedTuple):
    """Where to go and where from."""

    goal: str
    start: str


ROUTES = tuple(Route(goal, start) for goal in GOALS for start in CELLS if start != goal)


def _passages() -> Iterator[tuple[str, str]]:
    """Open walls between neighbours: a random spanning tree, then a share of the walls that remain.

    Each wall has a random height that follows from its name, so the maze is the same on every machine and version.
    """
    sides = [(f"r{r}c{c}", f"r{r + down}c{c + 1 - down}") for r in range(SIDE) for c in range(SIDE) for down in (0, 1)]
    walls = [(cell, other) for cell, other in sides if other in CELLS]
    part_of = {cell: {cell} for cell in CELLS}  # Kruskal: the connected part each cell belongs to
    remaining: list[tuple[str, str]] = []
    for cell, other in sorted(walls, key=lambda wall: derive("maze", "tree", *wall)):
        if part_of[cell] is part_of[other]:
            remaining.append((cell, other))
            continue
        part_of[cell] |= part_of[other]
        part_of.update(dict.fromkeys(part_of[other], part_of[cell]))
        yield cell, other
    remaining.sort(key=lambda wall: derive("maze", "extra", *wall))
    yield from remaining[: round(EXTRA_PASSAGES * len(remaining))]


def _neighbours() -> Mapping[str, tuple[str, ...]]:
    open_to: dict[str, list[str]] = {cell: [] for cell in CELLS}
    for cell, other in _passages():
        open_to[cell].append(other)
        open_to[other].append(cell)
    return {cell: tuple(sorted(others)) for cell, others in open_to.items()}


NEIGHBOURS = _neighbours()  # the cells one legal move away


@cache
def moves_to(goal: str) -> Mapping[str, int]:
    """The least number of moves from each cell to `goal`."""
    moves = {goal: 0}
    queue = [goal]
    for cell in queue:
        for other in NEIGHBOURS[cell]:
            if other not in moves:
                moves[other] = moves[cell] + 1
                queue.append(other)
    return moves


def best_move(goal: str, cell: str) -> str:
    """The next word of a shortest route: `END` at the goal, else the first neighbour that is nearer to it.

    >>> best_move("r0c9", "r0c9")
    '<end>'
    """
    return END if cell == goal else min(NEIGHBOURS[cell], key=moves_to(goal).__getitem__)
