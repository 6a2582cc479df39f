"""A recipe as TOML text: what a run folder keeps, and what `etude show` prints with the origin of each value beside it.

Arrays stay on one line, tables keep the schema's order, options that are left out stay left out. What is written here
loads again and gives an equal recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tomli_w

from etude.config.plain import is_array, is_array_of_tables, is_table
from etude.config.schema import Recipe

COMMENT_COLUMN = 48  # where comments start; wide enough for all but lists and paths


def dump_toml(recipe: Recipe, comment: Callable[[str], str] | None = None) -> str:
    """The whole recipe, defaults included; `comment` says what to write beside the value of a dotted key."""
    return toml_text(recipe.model_dump(mode="json", exclude_none=True), comment)


def toml_text(table: Mapping[str, Any], comment: Callable[[str], str] | None = None) -> str:
    """Any table of plain data as TOML.

    >>> print(toml_text({"seed": 0, "terms": [{"beta": 0.1}]}), end="")
    seed = 0
    <BLANKLINE>
    [[terms]]
    beta = 0.1
    """
    return "\n".join(_lines(table, "", "", comment)).strip() + "\n"


def _lines(table: Mapping[str, Any], path: str, header: str, comment: Callable[[str], str] | None) -> Iterator[str]:
    """Plain values first, then the tables below, as TOML wants it; `path` counts places, `header` does not."""
    inner = {name: value for name, value in table.items() if is_table(value) or is_array_of_tables(value)}
    for name, value in table.items():
        if name not in inner:
            line = f"{_key(name)} = {_inline(value)}"
            yield f"{line:<{COMMENT_COLUMN}}# {comment(path + name)}" if comment else line
    for name, value in inner.items():
        title = f"{header}{_key(name)}"
        if is_array_of_tables(value):
            for place, row in enumerate(value):
                yield f"\n[[{title}]]"
                yield from _lines(row, f"{path}{name}.{place}.", f"{title}.", comment)
        elif is_table(value) and value:
            yield f"\n[{title}]"
            yield from _lines(value, f"{path}{name}.", f"{title}.", comment)


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")


def _inline(value: Any) -> str:
    if is_array(value):
        return f"[{', '.join(map(_inline, value))}]"
    return tomli_w.dumps({"_": value}).removeprefix("_ = ").removesuffix("\n")
