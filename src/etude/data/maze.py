"""The embedded world: a fixed 10 x 10 maze in which learning from one's own mistakes visibly matters.

A cell is a word (`r3c7`: row 3, column 7). A prompt names a goal and a start; the answer is the walk between them, one
cell a token, and then the end. A walk that strays is still on the map, so what a student does where no teacher went
decides whether it arrives. Here are the map, the prompts, the walks that the shipped models are made from, and the
verifier. Nothing here knows a model; `tasks.py`, `maze_picture.py` and the experiments call it.

    >>> read_route("r3c9 r1c9")
    Route(goal='r3c9', start='r1c9')
    >>> shortest_walk(read_route("r3c9 r1c9"))
    ['r2c9', 'r3c9', '<end>']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from random import Random
from typing import Any, NamedTuple

from etude.errors import DataError
from etude.runtime.seeds import derive

SIDE = 10
EXTRA_PASSAGES = 0.12  # share of the walls left by the spanning tree that are opened too: some loops, many detours
MAX_MOVES = 44  # a longer walk is wrong; the longest of the shortest walks has 24, which leaves room to come back
END = "<end>"  # the word after the last cell; a control token of the shipped tokenizer
CELLS = tuple(f"r{row}c{column}" for row in range(SIDE) for column in range(SIDE))
GOALS = ("r0c9", "r3c9", "r6c9", "r9c9")  # all in the right-hand column


class Route(NamedTuple):
    """Where to go, and where from."""

    goal: str
    start: str

    @property
    def prompt(self) -> str:
        return f"{self.goal} {self.start}"


ROUTES = tuple(Route(goal, start) for goal in GOALS for start in CELLS if start != goal)  # 396


# -------------------------------------------------------------------------------------------------------------- the map


def _passages() -> Iterator[tuple[str, str]]:
    """The pairs of neighbours without a wall between: a random spanning tree, and a share of the rest.

    Each wall has a random height that follows from its name alone, so the maze is the same everywhere.
    """
    below = [(f"r{row}c{column}", f"r{row + 1}c{column}") for row in range(SIDE - 1) for column in range(SIDE)]
    right = [(f"r{row}c{column}", f"r{row}c{column + 1}") for row in range(SIDE) for column in range(SIDE - 1)]
    room = {cell: {cell} for cell in CELLS}  # the cells each cell is joined with so far (Kruskal's algorithm)
    standing: list[tuple[str, str]] = []
    for cell, other in sorted(below + right, key=lambda wall: derive("maze", "tree", *wall)):
        if room[cell] is room[other]:
            standing.append((cell, other))
            continue
        room[cell].update(room[other])
        room.update(dict.fromkeys(room[other], room[cell]))
        yield cell, other
    standing.sort(key=lambda wall: derive("maze", "extra", *wall))
    yield from standing[: round(EXTRA_PASSAGES * len(standing))]


def _neighbours() -> Mapping[str, tuple[str, ...]]:
    joined: dict[str, list[str]] = {cell: [] for cell in CELLS}
    for cell, other in _passages():
        joined[cell].append(other)
        joined[other].append(cell)
    return {cell: tuple(sorted(others)) for cell, others in joined.items()}


NEIGHBOURS = _neighbours()  # the cells that each cell has a passage to


@cache
def distances(goal: str) -> Mapping[str, int]:
    """The least number of moves to `goal`, from each cell.

    >>> max(max(distances(goal).values()) for goal in GOALS)
    24
    """
    moves = {goal: 0}
    reached = [goal]
    for cell in reached:  # grows while it is walked through: breadth first
        for other in NEIGHBOURS[cell]:
            if other not in moves:
                moves[other] = moves[cell] + 1
                reached.append(other)
    return moves


# ------------------------------------------------------------------------------------------------------------ the walks


def is_legal(goal: str, cell: str, word: str) -> bool:
    """Whether `word` may follow `cell`: a neighbour without a wall between, or the end at the goal."""
    return word in NEIGHBOURS[cell] or (word == END and cell == goal)


def is_best(goal: str, cell: str, word: str) -> bool:
    """Whether `word` is a legal move that brings nearer to the goal, or the end at it. Often there is just one such."""
    if cell == goal:
        return word == END
    return word in NEIGHBOURS[cell] and distances(goal)[word] < distances(goal)[cell]


def best_word(goal: str, cell: str) -> str:
    """What the teacher is taught to say: the end at the goal, else the first of the best moves.

    >>> best_word("r0c9", "r1c9"), best_word("r0c9", "r0c9")
    ('r0c9', '<end>')
    """
    return END if cell == goal else next(word for word in NEIGHBOURS[cell] if is_best(goal, cell, word))


def shortest_walk(route: Route) -> list[str]:
    """The walk that takes the best word each time, the end included."""
    words = [best_word(route.goal, route.start)]
    while words[-1] != END:
        words.append(best_word(route.goal, words[-1]))
    return words


def random_walk(route: Route, random: Random) -> list[str]:
    """A walk of random legal moves until the goal happens to be met (then the end), or `MAX_MOVES` are made.

    What the base student is made from: the map is in these walks, the way is not.
    """
    words, cell = list[str](), route.start
    while cell != route.goal and len(words) < MAX_MOVES:
        cell = random.choice(NEIGHBOURS[cell])
        words.append(cell)
    return [*words, END] if cell == route.goal else words


def corrected_walk(route: Route, random: Random, *, noise: float) -> tuple[list[str], list[str]]:
    """A walk in which a share `noise` of the moves is random, and the best word at each of its places.

    What the teacher is made from: it strays in what it reads and never in what it is taught to say, so it knows the way
    from everywhere and not only along its own routes.

    Returns:
        The words walked and the words that would have been best, of the same length. At a random move from the goal the
        walk goes on; it has no end if it has not come back within `MAX_MOVES`.
    """
    walked, best, cell = list[str](), list[str](), route.start
    while cell != END and len(walked) <= MAX_MOVES:
        best.append(best_word(route.goal, cell))
        cell = random.choice(NEIGHBOURS[cell]) if random.random() < noise else best[-1]
        walked.append(cell)
    return walked, best


# ------------------------------------------------------------------------------------------------- prompts and verifier


def read_route(prompt: str) -> Route:
    """The route of a prompt's text, `"r3c9 r5c0"`: first the goal, then the start.

    Raises:
        DataError: it is not two cells of the map.
    """
    words = prompt.split()
    if len(words) != 2 or not set(words) <= NEIGHBOURS.keys():
        raise DataError(f"the maze prompt has {len(words)} words; expected a goal and a start, as in 'r3c9 r5c0'")
    return Route(*words)


def moves_of(route: Route, text: str) -> Iterator[tuple[str, str]]:
    """Each place of an answer's text with the word that follows it there, the end last.

    The walk stops after its first illegal word, after which it is nowhere.

    Args:
        route: what was asked.
        text: the answer, with its end token or without (decoding usually drops it): the walk ends where the text ends.

    >>> list(moves_of(read_route("r3c9 r4c9"), "r3c9"))
    [('r4c9', 'r3c9'), ('r3c9', '<end>')]
    """
    cell = route.start
    for word in [*text.removesuffix(END).split(), END]:
        yield cell, word
        if not is_legal(route.goal, cell, word):
            return
        cell = word


def verify(fields: Mapping[str, Any], text: str) -> float:
    """1.0 if the answer walks through passages only, ends at the goal, and takes at most `MAX_MOVES` moves.

    >>> verify({"prompt": "r3c9 r1c9"}, "r2c9 r3c9"), verify({"prompt": "r3c9 r1c9"}, "r2c9")
    (1.0, 0.0)

    Args:
        fields: of the example; its prompt is all that is needed.
        text: the answer. A walk cut at `MAX_MOVES + 1` tokens or more is wrong even though it shows no end.
    """
    route = read_route(fields["prompt"])
    moves = list(moves_of(route, text))
    return float(len(moves) <= MAX_MOVES + 1 and all(is_legal(route.goal, cell, word) for cell, word in moves))


def maze_task(*, count: int, seed: int) -> tuple[list[dict[str, str]], Callable[[Mapping[str, Any], str], float]]:
    """`count` of the 396 routes, drawn by the seed, and their judge; the completion is a shortest walk.

    Raises:
        DataError: more are asked for than there are.
    """
    if count > len(ROUTES):
        raise DataError(f"the maze has {len(ROUTES)} routes and {count} were asked for; lower data.task_size")
    drawn = sorted(ROUTES, key=lambda route: derive("maze", "routes", seed, route.prompt))[:count]
    return [{"prompt": route.prompt, "completion": " ".join(shortest_walk(route)[:-1])} for route in drawn], verify
