"""Names of models that come with etude, or with an extra of it, and the folders they stand for.

`resolve` is asked wherever a recipe names a model; any other name is left to transformers. It loads no weights.
"""

from __future__ import annotations

from pathlib import Path

import etude.data
from etude.errors import ModelError

PREFIX = "etude:"
MAZE_MODELS = Path(etude.data.__file__).parent / "maze_models"


def _smollm2() -> Path:
    from etude.data import smollm2  # a builder that needs an extra and, the first time, a minute

    return smollm2.folder()


_FOLDERS = {
    "maze-teacher": lambda: MAZE_MODELS / "teacher",
    "maze-student": lambda: MAZE_MODELS / "student",
    "smollm2-135m-instruct": _smollm2,
}


def resolve(model: str) -> str:
    """The folder of a shipped model; any other name, as it is.

    >>> resolve("etude:maze-teacher").endswith("maze_models/teacher")
    True
    >>> resolve("Qwen/Qwen2.5-0.5B")
    'Qwen/Qwen2.5-0.5B'

    Raises:
        ModelError: there is no shipped model of that name.
        ExtraMissing: it comes with an extra that is not installed.
    """
    if not model.startswith(PREFIX):
        return model
    name = model.removeprefix(PREFIX)
    if name not in _FOLDERS:
        known = ", ".join(f"{PREFIX}{shipped}" for shipped in _FOLDERS)
        raise ModelError(f"no model '{model}' comes with etude; write one of {known}, a folder, or a name on the hub")
    return str(_FOLDERS[name]())
