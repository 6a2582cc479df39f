"""A recipe in the making: settings laid over each other layer by layer, and which layer each came from.

Tables merge key by key, arrays of tables place by place, anything else replaces what was there. Whether the keys exist
and the values fit is `schema.py`'s business. `load.py` is the only caller.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.config.plain import leaves, nested
from etude.errors import RecipeError

COMMAND_LINE = "command line"

FILE_KEYS = frozenset({"data.prompts", "data.eval_prompts"})  # always a path
FOLDER_KEYS = frozenset(  # a path or a hub name
    {"student.model", "teacher.model", "reference.model", "data.dataset", "data.eval_dataset"}
)


def method_layer(name: str) -> str:
    """What the layer of a method's settings is called."""
    return f"method {name}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of a recipe, and which layer it comes from: default, a method, the recipe, or the command line."""

    key: str  # dotted
    value: Any
    origin: str


@dataclass(slots=True)
class Draft:
    """Settings so far, by dotted key."""

    settings: dict[str, Setting] = field(default_factory=dict[str, Setting])

    def lay(self, layer: Mapping[str, Any], origin: str, folder: Path) -> None:
        """Lay a layer over what is there. Its keys may be dotted; its relative paths are looked up from `folder`."""
        for key, value in leaves(layer):
            self.put(Setting(key, located(key, value, folder), origin))

    def put(self, setting: Setting) -> None:
        """Lay one setting, its path made absolute before, over what is there."""
        key = setting.key
        if setting.value == {} and any(known.startswith(f"{key}.") for known in self.settings):
            return  # an empty table takes nothing away
        self.remove(key)
        for above in _tables_above(key):
            self.settings.pop(above, None)
        self.settings[key] = setting

    def remove(self, key: str) -> None:
        """Take a key, or a whole table, back to its default."""
        for known in [known for known in self.settings if known == key or known.startswith(f"{key}.")]:
            del self.settings[known]

    def has(self, key: str) -> bool:
        """Whether a key, or anything below it, is set."""
        return any(known == key or known.startswith(f"{key}.") for known in self.settings)

    def origin(self, key: str) -> str | None:
        """The layer that set a key, what holds it, or everything below it; None: nobody did, or several did."""
        holders = (self.settings.get(known) for known in (key, *_tables_above(key)))
        if holder := next(filter(None, holders), None):
            return holder.origin
        origins = {setting.origin for known, setting in self.settings.items() if known.startswith(f"{key}.")}
        return origins.pop() if len(origins) == 1 else None

    @property
    def table(self) -> dict[str, Any]:
        """The settings as nested tables."""
        return nested({key: setting.value for key, setting in self.settings.items()})


def _tables_above(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def without_stage(key: str) -> str:
    """The key of a recipe that a key in a stage changes; any other key as it is.

    >>> without_stage("stages.1.data.prompts"), without_stage("data.prompts")
    ('data.prompts', 'data.prompts')
    """
    return re.sub(r"^stages\.\d+\.", "", key)


def located(key: str, value: Any, folder: Path) -> Any:
    """The value, made absolute where its key holds a path: a hub name stays what it is unless such a folder exists.

    So does the name of a GGUF file.
    """
    key = without_stage(key)
    if not isinstance(value, str) or not (key in FILE_KEYS or key in FOLDER_KEYS):
        return value
    path = folder / os.path.expanduser(value)  # os.path does not raise on what cannot be a path
    here = os.path.isdir(path) or (value.endswith(".gguf") and os.path.isfile(path))
    if key in FILE_KEYS or here or value.startswith(("./", "../", "~", "/")):
        return os.path.abspath(path)
    return value


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` with the value read as TOML, and as plain text where it is a bare word; None where it is empty.

    >>> parse_override("optim.learning_rate=1e-4"), parse_override("terms.0.divergence=jsd")
    (('optim.learning_rate', 0.0001), ('terms.0.divergence', 'jsd'))
    >>> parse_override("optim.final_fraction=")
    ('optim.final_fraction', None)
    """
    key, equals, written = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")):
        raise RecipeError(f"{COMMAND_LINE}: found '{text}'; expected key=value, such as optim.learning_rate=1e-4")
    if not written:
        return key, None
    try:
        parsed = tomllib.loads(f"value = {written}")
    except (ValueError, RecursionError) as error:  # beside TOML's own: numbers and nesting beyond Python's limits
        if written[0] in "[{\"'":
            raise RecipeError(f"{COMMAND_LINE}: {key}: {written} is not TOML: {error}; mind the quotes") from None
        return key, written
    return key, parsed["value"] if len(parsed) == 1 else written
