"""On-policy distillation of language models: the student writes, the teacher marks every token, the student learns.

The names below are the whole public door; `etude.core` is usable by itself on plain tensors. Nothing heavy is imported
before a name is asked for, so that `import etude` is instant.

    >>> from etude import load_recipe
    >>> load_recipe("maze", ["train.steps=20"]).train.steps
    20
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.config.load import dump_toml, load_recipe
    from etude.config.methods import METHODS
    from etude.config.schema import Recipe
    from etude.core.objective import Objective
    from etude.core.records import Prompt, Rollout
    from etude.core.term import Term
    from etude.errors import EtudeError, RunError, UsageError
    from etude.recipes.run import Summary, train

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "EtudeError",
    "Objective",
    "Prompt",
    "Recipe",
    "Rollout",
    "RunError",
    "Summary",
    "Term",
    "UsageError",
    "__version__",
    "dump_toml",
    "load_recipe",
    "train",
]

_HOMES = {  # where each lazy name lives
    "METHODS": "etude.config.methods",
    "EtudeError": "etude.errors",
    "Objective": "etude.core.objective",
    "Prompt": "etude.core.records",
    "Recipe": "etude.config.schema",
    "Rollout": "etude.core.records",
    "RunError": "etude.errors",
    "Summary": "etude.recipes.run",
    "Term": "etude.core.term",
    "UsageError": "etude.errors",
    "dump_toml": "etude.config.load",
    "load_recipe": "etude.config.load",
    "train": "etude.recipes.run",
}


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
