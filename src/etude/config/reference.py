"""Every key a recipe may have, read off the schema: what `etude show --keys` prints and the docs include.

>>> print(key_reference("optim.final_fraction"))
optim.final_fraction = 0.1
    number; only when schedule is not constant
    Learning rate of the last step, as a share of the peak.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, get_args, get_origin

from pydantic.fields import FieldInfo

from etude.config.noun import Noun, OnlyWhen, choices, fields_below, noun_within, spelled
from etude.config.schema import Recipe

KINDS = {bool: "true | false", int: "whole number", float: "number", str: "text"}


def key_reference(prefix: str = "") -> str:
    """Keys under `prefix` with default, kind, condition and description; empty if there is no such key."""
    return "\n".join(
        "\n    ".join(
            [f"{key}{_default(field)}", "; ".join([kind(field.annotation), *_conditions(field)]), _says(field)]
        )
        for key, field in fields_below(Recipe)
        if not prefix or key == prefix or key.startswith(f"{prefix}.")
    )


def _says(field: FieldInfo) -> str:
    return field.description or ""


def kind(annotation: object) -> str:
    """What may be written for a field of this type, in words.

    >>> kind(tuple[int, ...] | None), kind(str | tuple[str, ...])
    ('list of whole number', 'text or list of text')
    """
    parts = [part for part in get_args(annotation) if part not in (NoneType, Ellipsis)]
    if get_origin(annotation) is Annotated:
        return kind(parts[0])
    if get_origin(annotation) is tuple:
        return f"list of {kind(parts[0])}"
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, Noun)):
        return "table"
    if isinstance(annotation, type) and annotation in KINDS:
        return KINDS[annotation]
    words = choices(annotation)
    return " | ".join(words) if words else " or ".join(kind(part) for part in parts)


def _default(field: FieldInfo) -> str:
    """` = VALUE`, where the field has a value whatever else is written."""
    rules = [rule for rule in field.metadata if isinstance(rule, OnlyWhen)]
    default = rules[0].default if rules and rules[0].default is not None else field.default
    plain = default is not None and not field.is_required() and field.default_factory is None
    return f" = {spelled(default)}" if plain and not noun_within(field.annotation) else ""


def _conditions(field: FieldInfo) -> list[str]:
    required = ["required"] if field.is_required() else []
    return required + [f"only when {rule.reads}" for rule in field.metadata if isinstance(rule, OnlyWhen)]
