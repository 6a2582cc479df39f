"""What every table of a recipe has in common: strict types, no unknown keys, no option that would do nothing.

`schema.py` builds its tables on `Noun`. A field whose meaning hangs on other fields of its table says so once, with
`OnlyWhen`, and is then settled in one place: filled where it applies, refused where it would be ignored. Knows nothing
about files, methods or the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Strict, model_validator
from pydantic.fields import FieldInfo

T = TypeVar("T")

Word = Annotated[T, Strict(False)]  # an enumeration, written as its plain word
Many = Annotated[tuple[T, ...], Strict(False)]  # a TOML array, kept as a tuple


@dataclass(frozen=True, slots=True)
class OnlyWhen:
    """A condition on the fields declared above this one.

    Where it holds, the field has `default` unless it was written. Where it does not, the field keeps the default of its
    declaration, and writing anything else is refused: it would do nothing.
    """

    reads: str  # how the condition reads after "only when"
    holds: Callable[[Any], bool]  # asked of the table
    default: object = None  # the value, or a function of the table that gives it

    def default_for(self, noun: Noun) -> object:
        return cast("Callable[[Noun], object]", self.default)(noun) if callable(self.default) else self.default


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
            if not written:
                self.__dict__[name] = rule.default_for(self)  # frozen for everybody else; still being built here
        elif written and value != field.default:
            raise ValueError(f"{name} = {spelled(value)} does nothing here, it counts only when {rule.reads}; remove it")


def spelled(value: object) -> str:
    """A value as a person would write it in a recipe.

    >>> spelled(True), spelled("jsd"), spelled((1, "a"))
    ('true', '"jsd"', '[1, "a"]')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(spelled(item) for item in cast('list[object]', value))}]"
    return str(value)


def noun_within(annotation: object) -> type[Noun] | None:
    """The table a field holds, looked for inside `| None` and arrays; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Noun):
        return annotation
    return next((noun for part in get_args(annotation) if (noun := noun_within(part))), None)


def fields_below(noun: type[Noun], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a table and of the tables in it, dotted, in the order of declaration; arrays of tables at place 0."""
    for name, field in noun.model_fields.items():
        key = prefix + name
        yield key, field
        if inner := noun_within(field.annotation):
            is_array = inner not in (field.annotation, *get_args(field.annotation))
            yield from fields_below(inner, f"{key}.0." if is_array else f"{key}.")
