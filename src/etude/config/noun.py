"""What every table of a recipe has in common: strict types, no unknown keys, no option that would do nothing.

`schema.py` builds its tables on `Noun`. A field whose meaning hangs on other fields of its table says so once, with
`OnlyWhen`, and is then settled in one place: filled where it applies, refused where it would be ignored. Knows nothing
about files, methods or the command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Strict, model_validator
from pydantic.fields import FieldInfo

T = TypeVar("T")

Word = Annotated[T, Strict(False)]  # an enumeration, written as its plain word
Many = Annotated[tuple[T, ...], Strict(False)]  # a TOML array, kept as a tuple


@dataclass(frozen=True, slots=True)
class OnlyWhen:
    """A condition on the fields declared above this one.

    Where it holds, a field that was not written gets `default`, or what `default_of` gives for the table. Where it does
    not, the field keeps the default of its declaration, and writing anything else is refused: it would do nothing.
    """

    reads: str  # how the condition reads after "only when"
    holds: Callable[[Any], bool]  # asked of the table
    default: object = None  # None: as declared
    default_of: Callable[[Any], object] | None = None


@dataclass(frozen=True, slots=True)
class ToldElsewhere:
    """Marks a table whose keys have their descriptions where the same table stands by itself."""


class Idle(ValueError):
    """A field was written that would do nothing."""

    def __init__(self, field: str, value: object, reads: str) -> None:
        super().__init__(f"{field} = {spelled(value)} does nothing here, it counts only when {reads}; remove it")
        self.field = field


class Noun(BaseModel):
    """A table of the recipe: frozen, strict, and refusing what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _settle_dependent_fields(self) -> Self:
        for name, field in type(self).model_fields.items():
            for rule in field.metadata:
                if isinstance(rule, OnlyWhen):
                    self._settle(name, field, rule)
        return self

    def _settle(self, name: str, field: FieldInfo, rule: OnlyWhen) -> None:
        value = getattr(self, name)
        written = name in self.model_fields_set and value is not None
        if rule.holds(self):
            default = rule.default_of(self) if rule.default_of else rule.default
            if not written and default is not None:
                object.__setattr__(self, name, default)  # frozen for others; it is still being built
        elif written and value != field.default:
            raise Idle(name, value, rule.reads)


def spelled(value: object) -> str:
    """A value as a person would write it in a recipe.

    >>> spelled(True), spelled("jsd"), spelled((1, "a"))
    ('true', '"jsd"', '[1, "a"]')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # on one line, whatever is in it
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(spelled(item) for item in cast('list[object]', value))}]"
    return str(value)


def noun_within(annotation: object) -> type[Noun] | None:
    """The table a field holds, looked for inside `| None` and arrays; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Noun):
        return annotation
    return next((noun for part in get_args(annotation) if (noun := noun_within(part))), None)


def fields_below(noun: type[Noun], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a table and of the tables in it, dotted, as declared; place 0 stands for every place of an array."""
    for name, field in noun.model_fields.items():
        key = prefix + name
        yield key, field
        told = any(isinstance(mark, ToldElsewhere) for mark in field.metadata)
        if not told and (inner := noun_within(field.annotation)):
            yield from fields_below(inner, f"{key}.0." if _is_array(field.annotation) else f"{key}.")


def _is_array(annotation: object) -> bool:
    return get_origin(annotation) is tuple or any(map(_is_array, get_args(annotation)))


def choices(annotation: object) -> list[str]:
    """The words a field may be, if it is a choice among words; else nothing."""
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return [str(member) for member in annotation]
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for part in get_args(annotation) for word in choices(part)]
