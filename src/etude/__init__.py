"""On-policy distillation of language models: the student writes, the teacher marks every token, the student learns.

The names below are the whole public door; `etude.core` is usable by itself on plain tensors. Nothing heavy is imported
before a name is asked for, so that `import etude` is instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.config.load import load_recipe
    from etude.recipes.run import train

__version__ = "0.1.0"

__all__ = ["__version__", "load_recipe", "train"]

_HOMES = {"load_recipe": "etude.config.load", "train": "etude.recipes.run"}  # where each lazy name lives


def __getattr__(name: str) -> Any:
    """Import a public name from its home the first time it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'etude' has no attribute '{name}'; public names: {', '.join(__all__)}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
