"""From what the schema objects to, to one sentence for a person: where, which key, what was found, what was expected.

pydantic reports everything it met; the person gets the first thing to mend, unknown keys before all others because they
are often the cause of the rest. `load.py` is the only caller.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from etude.config.noun import Idle, Noun, choices, fields_below, noun_within, spelled
from etude.config.plain import is_table
from etude.config.schema import Recipe

LONGEST_VALUE = 60  # characters of a wrong value that an error repeats
NEAR = 0.75  # share of letters in common, in order, from which a word is a slip of another

KINDS: Mapping[type, str] = {str: "text", int: "a whole number", float: "a number", list: "a list", tuple: "a list"}

EXPECTED: Mapping[str, str] = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "model_type": "a table",
    "string_pattern_mismatch": "letters, digits, - and _",
    "string_too_short": "some text",
    "string_type": "text",
    "too_short": "at least {min_length} entry",
    "tuple_type": "a list",
}  # pydantic's type of error -> what would have been right


def sentence(error: ValidationError, where: Callable[[str], str]) -> str:
    """The first thing to mend; `where` names the layer that set a key."""
    details = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]
    # Of a number or a table, and a table was written: what is wrong is in the table, if anything is said of it.
    details = [detail for detail in details if not _is_other_arm(detail)] or details
    first = min(details, key=lambda detail: not _is_unknown_key(detail))  # min keeps the order among equals
    key, field = _locate(first["loc"])
    if _is_unknown_key(first):
        return f"{where(key)}: unknown key {key}{_suggestion(key)}"
    if first["type"] == "missing":
        return f"{where(key)}: found no {key}; expected {_meaning(cast(FieldInfo, field))}"
    if first["type"] == "value_error":
        error = first.get("ctx", {})["error"]
        setter = where(".".join(filter(None, (key, error.field))) if isinstance(error, Idle) else key)
        return f"{setter}: {key + ': ' if key else ''}{error}"
    same_key = [detail for detail in details if _locate(detail["loc"])[0] == key]
    expected = " or ".join(dict.fromkeys(_expected(detail, field) for detail in same_key))
    return f"{where(key)}: {key}: found {_described(first['input'])}, expected {expected}{_nearest_word(first, field)}"


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The most alike of the words, if any is so near that it may have been meant.

    >>> nearest("learning_rat", ["learning_rate", "schedule"]), nearest("gdk", ["gkd"]), nearest("nope", ["scope"])
    ('learning_rate', 'gkd', None)
    """
    words = list(words)
    # Letters in another order: a slip of short words, which count as little alike by their ratio.
    swapped = [other for other in words if sorted(other) == sorted(word)]
    return next(iter(swapped or get_close_matches(word, words, n=1, cutoff=NEAR)), None)


def suggestion(word: str, words: Iterable[str]) -> str:
    """`did you mean ...?` or, where nothing is near, all that there is."""
    words = list(words)
    near = nearest(word, words)
    return f"did you mean {near}?" if near else f"expected one of {', '.join(words)}"


def _is_unknown_key(detail: ErrorDetails) -> bool:
    return detail["type"] == "extra_forbidden" or detail["loc"][-1:] == ("[key]",)


def _is_other_arm(detail: ErrorDetails) -> bool:
    return detail["loc"][-1:] in (("float",), ("int",)) and is_table(detail["input"])


def _locate(location: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """The dotted key and its field; what pydantic appends about unions and dictionary keys is left off."""
    parts: list[str] = []
    noun: type[Noun] | None = Recipe
    field: FieldInfo | None = None
    for part in location:
        if isinstance(part, int):
            parts.append(str(part))
        elif noun is not None and (part in ("float", "int") or noun.__name__ in part):
            continue  # one arm of a union
        elif noun is not None:
            parts.append(part)
            field = noun.model_fields.get(part)
            noun = noun_within(field.annotation) if field else None
        elif field is not None and field.annotation is not None and "dict" in str(field.annotation) and part != "[key]":
            parts.append(part)
    return ".".join(parts), field


def _suggestion(key: str) -> str:
    """`; did you mean ...?`: a sibling of nearly that name, or a key of nearly that name in another table."""
    table, _, name = key.rpartition(".")
    siblings = _keys_of(table)
    if sibling := nearest(name, siblings):
        return f"; did you mean {f'{table}.' if table else ''}{sibling}?"
    elsewhere = {
        path.rpartition(".")[2]: path for path, field in fields_below(Recipe) if not noun_within(field.annotation)
    }
    if namesake := nearest(name, elsewhere):
        return f"; did you mean {elsewhere[namesake]}?"
    return f"; {table or 'a recipe'} has {', '.join(siblings)}" if siblings else ""


def _keys_of(table: str) -> list[str]:
    """The names a table may hold; its places in an array do not matter."""
    if not table:
        return list(Recipe.model_fields)
    generic = ".".join("0" if part.isdigit() else part for part in table.split("."))
    field = dict(fields_below(Recipe)).get(re.sub(r"\.0$", "", generic))
    inner = noun_within(field.annotation) if field else None
    return list(inner.model_fields) if inner else choices(field.annotation if field else None)


def _meaning(field: FieldInfo) -> str:
    """The field's description as the end of a sentence."""
    text = (field.description or "").rstrip(".")
    return text[:1].lower() + text[1:]


def _expected(detail: ErrorDetails, field: FieldInfo | None) -> str:
    if detail["type"] in ("enum", "literal_error"):
        return f"one of {', '.join(choices(field.annotation if field else None))}"
    template = EXPECTED.get(detail["type"])
    if "." in detail.get("ctx", {}).get("pattern", ""):
        return "letters, digits, -, _, = and, after the first, dots"
    limits = {name: f"{limit:g}" for name, limit in detail.get("ctx", {}).items() if isinstance(limit, (int, float))}
    return template.format_map(limits) if template else detail["msg"]


def _nearest_word(detail: ErrorDetails, field: FieldInfo | None) -> str:
    words: Collection[str] = choices(field.annotation) if field else ()
    word = nearest(detail["input"], words) if isinstance(detail["input"], str) else None
    return f"; did you mean {word}?" if word else ""


def _described(value: object) -> str:
    if is_table(value):
        return "a table"
    if isinstance(value, bool):
        return spelled(value)
    kind = next((words for kind, words in KINDS.items() if isinstance(value, kind)), f"a {type(value).__name__}")
    return f"{textwrap.shorten(spelled(value), LONGEST_VALUE, placeholder='...')} ({kind})"
