"""Every exception etude raises, drawn as one tree.

    EtudeError
    ├── UsageError          the person can mend it: exit status 2, one sentence, no traceback
    │   ├── RecipeError     a recipe, an override or a command-line value
    │   ├── LegalityError   a combination of axes whose gradient is zero or belongs to something else
    │   ├── DataError       a data file; names file and line
    │   ├── ModelError      a model folder that cannot be what it is asked to be
    │   ├── PairError       student and teacher that do not fit each other
    │   └── ExtraMissing    an optional dependency that is not installed
    └── RunError            the run met something it must not paper over: exit status 1
        ├── CheckpointError a checkpoint that is damaged or belongs to another run
        ├── NonFiniteError  a loss or a gradient that is not a number
        └── RecordError     a record whose fields contradict each other (a bug, ours or a role's)

Each message says what was found, what was expected, where, and what to do.
"""

from __future__ import annotations


class EtudeError(Exception):
    """Root of the tree; `exit_status` is what the command line returns."""

    exit_status = 1


class UsageError(EtudeError):
    """Something the person asked for cannot be done as asked."""

    exit_status = 2


class RecipeError(UsageError):
    """A recipe, an override or a command-line value is wrong."""


class LegalityError(UsageError):
    """The combination of axes has no gradient, or another objective's gradient."""


class DataError(UsageError):
    """A data file or dataset is not what was promised."""


class ModelError(UsageError):
    """A model folder cannot be what the recipe asks it to be."""


class PairError(UsageError):
    """Student and teacher, or a term and its teacher, do not fit each other."""


class ExtraMissing(UsageError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed: pip install 'etude[{extra}]'"
        )


class RunError(EtudeError):
    """The run met something it must not paper over."""


class CheckpointError(RunError):
    """A checkpoint is damaged, or belongs to another run."""


class NonFiniteError(RunError):
    """A loss, a gradient or a weight is not finite."""


class RecordError(RunError):
    """A record whose fields contradict each other."""
