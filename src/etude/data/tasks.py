"""Questions with verifiers: where prompts come from when no file holds them, and what judges a finished answer.

A task makes its questions from a count and a seed, and scores an answer's text. It knows no tokenizer, model or loss;
`recipes/data.py` loads tasks and verifiers by name, evaluation calls the verifier. A recipe can name code to be
imported here (`package.module:function`), so a recipe from elsewhere is to be read like a program.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from etude.data.examples import Example, example_from_row, require_answers
from etude.errors import DataError, ExtraMissing

Verify = Callable[[Mapping[str, Any], str], float]  # (fields of the example, text of the answer) -> score, 1.0 is right

_MAZE = "etude.data.maze:maze_task"
_GYM = "reasoning_gym:"
# A minus sign belongs to the number unless something stands before it: "10-3" ends with 3.
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Task:
    """Questions, and the judge of their answers."""

    name: str
    examples: list[Example]
    verify: Verify


def load_task(name: str, *, count: int, seed: int) -> Task:
    """Make `count` questions of a task; the same count and seed give the same ones.

    Args:
        name: "maze", "reasoning_gym:NAME" (scored by that package's own scorer), or "package.module:function" of
            anything that can be imported. The function is called with `count` and `seed` and returns a pair: rows
            such as `{"prompt": ..., "answer": ...}`, and the verifier `(row, text of the answer) -> float`.
        count: how many.
        seed: what they are drawn by.

    Raises:
        ExtraMissing: `reasoning-gym` is not installed.
        DataError: there is no such task, or it does not make what it should.
    """
    if name.startswith(_GYM):
        rows, verify = _reasoning_gym(name.removeprefix(_GYM), count, seed)
    else:
        rows, verify = _made_by(_imported(_MAZE if name == "maze" else name, "data.task"), name, count, seed)
    examples = [example_from_row(row, {}, f"{name} question {number}") for number, row in enumerate(rows)]
    if len(examples) != count:
        raise DataError(f"task '{name}' made {len(examples)} questions of the {count} asked for; change data.task_size")
    return Task(name, examples, verify)


def load_verifier(name: str, examples: Sequence[Example]) -> Verify:
    """The judge that `data.verifier` names, for data that brings answers and no judge.

    Args:
        name: "exact" (the same text, edges stripped), "number" (the same last number, so that of GSM8K's `#### 42`),
            or "package.module:function", a function of the example's fields and the answer's text.
        examples: those it is to judge; each must have an answer.

    Raises:
        DataError: there is no such verifier, or an example has no answer that it could compare with.
    """
    purpose = f"data.verifier = '{name}'"
    require_answers(examples, purpose)
    if name == "exact":
        return exact
    if name == "number":
        for example in examples:
            if last_number(str(example.answer)) is None:
                raise DataError(f"{example.where}: the answer holds no number, which {purpose} needs in each row")
        return number
    return cast(Verify, _imported(name, "data.verifier"))


def exact(fields: Mapping[str, Any], text: str) -> float:
    """1.0 if the text is the answer, white space at the edges aside.

    >>> exact({"answer": "Paris"}, " Paris "), exact({"answer": "Paris"}, "It is Paris.")
    (1.0, 0.0)
    """
    return float(text.strip() == str(fields["answer"]).strip())


def number(fields: Mapping[str, Any], text: str) -> float:
    """1.0 if the last number of the text is the last number of the answer.

    >>> number({"answer": "21 + 21 = 42 #### 42"}, "So she pays $42.00.")
    1.0
    """
    found = last_number(text)
    return float(found is not None and found == last_number(str(fields["answer"])))


def last_number(text: str) -> float | None:
    """The last number written in a text, thousands separators and dollar signs aside; None if there is none.

    >>> [last_number(text) for text in ("between 3 and 1,250.50 dollars.", "-$7", "10-3", "1,2", "none")]
    [1250.5, -7.0, 3.0, 2.0, None]
    """
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("$", "")) if found else None


def _reasoning_gym(name: str, count: int, seed: int) -> tuple[list[dict[str, Any]], Verify]:
    """Questions of a reasoning-gym dataset, scored by its own `score_answer`."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.utils import extract_answer
    except ImportError as error:
        raise ExtraMissing("reasoning-gym", "tasks", f"data.task = '{_GYM}{name}'") from error
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)[:3]
        raise DataError(f"reasoning_gym has no task '{name}'; it has {', '.join(near)} and others")
    dataset = reasoning_gym.create_dataset(name, size=count, seed=seed)

    def verify(fields: Mapping[str, Any], text: str) -> float:
        # The package asks models for <answer>...</answer>; an answer without them is judged whole.
        return float(dataset.score_answer(extract_answer(text) or text.strip(), dict(fields)))

    return [{"prompt": entry["question"], **entry} for entry in dataset], verify


def _made_by(
    make: Callable[..., object], name: str, count: int, seed: int
) -> tuple[Sequence[Mapping[str, Any]], Verify]:
    made = make(count=count, seed=seed)
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
        raise DataError(f"task '{name}' returned a {type(made).__name__}; expected the pair (rows, verify)")
    return cast("tuple[Sequence[Mapping[str, Any]], Verify]", made)


def _imported(name: str, key: str) -> Callable[..., object]:
    """The callable that `package.module:name` names."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        known = "maze, reasoning_gym:NAME" if key == "data.task" else "exact, number"
        raise DataError(f"{key} names '{name}', which is unknown; expected {known} or package.module:function")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"{key} names '{name}', which cannot be imported ({error}); its folder must be on the Python path, "
            "for example PYTHONPATH=."
        ) from error
    if not callable(found):
        raise DataError(f"{key} names '{name}', which is a {type(found).__name__}; expected a function")
    return found
