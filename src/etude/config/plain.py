"""Plain TOML data as a flat list of dotted keys, and back: `terms.0.beta` is the beta of the first table of terms.

Flat is how layers are laid over each other (`draft.py`) and how a recipe is explained; nested is what TOML and the
schema speak. Knows no key by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from etude.errors import RecipeError


def is_table(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value is a table."""
    return isinstance(value, Mapping)


def is_array(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is an array."""
    return isinstance(value, (list, tuple))


def is_array_of_tables(value: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a value is a non-empty array whose entries are all tables."""
    return is_array(value) and bool(value) and all(map(is_table, value))


def leaves(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is no table; an empty table stands for itself.

    >>> dict(leaves({"seed": 0, "terms": [{"beta": 0.1}], "student": {"lora": {}}}))
    {'seed': 0, 'terms.0.beta': 0.1, 'student.lora': {}}
    """
    for name, value in table.items():
        key = f"{path}{name}"
        if is_array_of_tables(value):
            value = dict(enumerate(value))
        if is_table(value) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tables and arrays that dotted keys describe.

    >>> nested({"seed": 0, "terms.0.beta": 0.1, "student.lora": {}})
    {'seed': 0, 'terms': [{'beta': 0.1}], 'student': {'lora': {}}}

    Raises:
        RecipeError: an array has a gap.
    """
    root: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        table = root
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return {name: _with_arrays(value, name) for name, value in root.items()}


def _with_arrays(value: Any, path: str) -> Any:
    """A table whose names are all numbers is an array."""
    if not is_table(value):
        return value
    inner = {name: _with_arrays(part, f"{path}.{name}") for name, part in value.items()}
    places = sorted(int(name) for name in inner if name.isdigit())
    if not inner or len(places) < len(inner):
        return inner
    if places != list(range(len(places))):
        found = ", ".join(map(str, places))
        raise RecipeError(f"{path}: found place {found} of the array; expected 0, 1, ... without a gap")
    return [inner[str(place)] for place in places]
