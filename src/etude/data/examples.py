"""Rows of a file or a dataset as examples, each checked when it is read.

An example is a prompt, perhaps an answer to learn from (the completion) and perhaps one to be judged by (the answer).
What is wrong with a row is said with file, line and reason, and never with the row's content, which may be private.
Nothing here knows a tokenizer; `prompts.py` turns examples into ids, `tasks.py` makes examples out of generated rows.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from etude.errors import DataError, ExtraMissing

Message = dict[str, str]  # {"role": ..., "content": ...}
_NO_COLUMNS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Example:
    """One row, as it was read."""

    prompt: str | list[Message]  # plain text, or the messages before the answer
    completion: str | None  # the dataset's own answer, to be learned from
    answer: Any  # what a verifier compares with; None if the row has none
    fields: Mapping[str, Any]  # the whole row, with "answer" set to the above: what verifiers are given
    where: str  # "prompts.jsonl:12": how messages call this row


def read_jsonl(path: str | Path, columns: Mapping[str, str] = _NO_COLUMNS) -> list[Example]:
    """Read a file of one JSON object a line, strictly.

    UTF-8, with or without BOM, any line ends; blank lines are passed over but counted.

    Args:
        path: the file.
        columns: names of the columns "prompt", "completion" and "answer", where they are others than these. Without a
            name, the prompt may also stand under "messages", and completion and answer may be missing.

    Raises:
        DataError: the file cannot be read, holds no row, or holds a bad one; names file and line, counted from 1.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path of the prompts file") from error
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")  # not splitlines(), which also breaks inside strings
    rows = ((f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())
    examples = [example_from_row(_parsed(line, where), columns, where) for where, line in rows]
    return _not_empty(examples, f"{path}:1")


def read_dataset(
    name: str, config: str | None = None, split: str = "train", columns: Mapping[str, str] = _NO_COLUMNS
) -> list[Example]:
    """Read a dataset of the hub, or a local folder of Parquet, Arrow or JSONL files, with the `datasets` package.

    Args:
        name: the hub's name of the dataset, or the folder. A folder may also be one that `save_to_disk` wrote.
        config: which of the dataset's configurations; None where it has only one.
        split: such as "train" or "test[:200]" (no slices in a folder that `save_to_disk` wrote).
        columns: as for `read_jsonl`.

    Raises:
        ExtraMissing: `datasets` is not installed.
        DataError: there is no such dataset, configuration or split, or a row is bad; names the row, counted from 0.
    """
    place = f"{name}[{split}]"
    rows = _loaded(name, config, split)
    examples = [
        example_from_row(cast("Mapping[str, Any]", row), columns, f"{place} row {number}")
        for number, row in enumerate(rows)
    ]
    return _not_empty(examples, place)


def example_from_row(row: Mapping[str, Any], columns: Mapping[str, str], where: str) -> Example:
    """Check one row and name its parts.

    A list of messages that ends with the assistant's is a prompt and its completion.

    Raises:
        DataError: a named column is missing, or holds something else than it should.
    """
    prompt_column = columns.get("prompt") or ("messages" if "messages" in row and "prompt" not in row else "prompt")
    if prompt_column not in row:
        raise DataError(f"{where}: no column {prompt_column!r}; name the column of the prompt in data.columns.prompt")
    prompt = _checked_prompt(row[prompt_column], prompt_column, where)
    completion = _optional(row, columns, "completion", where)
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        if completion is not None:
            raise DataError(f"{where}: there is a completion, and the messages end with the assistant's; keep one")
        prompt, completion = prompt[:-1], prompt[-1]["content"]
        if not prompt:
            raise DataError(f"{where}: the only message is the assistant's; put the messages it answers before it")
    if completion is not None and not _is_text(completion):
        raise DataError(f"{where}: the completion is {_kind(completion)}; expected a text")
    answer = _optional(row, columns, "answer", where)
    fields = dict(row) if answer is None else {**row, "answer": answer}
    return Example(prompt, completion, answer, fields, where)


def require_completions(examples: Iterable[Example], purpose: str) -> None:
    """Raise `DataError` unless each example has a completion; `purpose` says which recipe key asks for it.

    To be called before any model is loaded: without completions such a run has nothing to learn from.
    """
    for example in examples:
        if example.completion is None:
            raise DataError(
                f"{example.where}: no completion, which {purpose} needs in each row; name its column in "
                "data.columns.completion, or let the student write every row (sampler.student_fraction = 1.0)"
            )


def require_answers(examples: Iterable[Example], purpose: str) -> None:
    """Raise `DataError` unless each example has an answer; `purpose` says which recipe key asks for it."""
    for example in examples:
        if example.answer is None:
            raise DataError(
                f"{example.where}: no answer, which {purpose} needs in each row; name its column in data.columns.answer"
            )


# -------------------------------------------------------------------------------------------------------- one JSON line


def _parsed(line: bytes, where: str) -> Mapping[str, Any]:
    """The line's object. Errors are raised `from None`: the parser's own exceptions carry the line with them."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    try:
        row = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refused_number, parse_float=_finite)
        json.dumps(row, ensure_ascii=False).encode("utf-8")  # fails on half a surrogate pair, which no tokenizer takes
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: no valid JSON at character {error.pos + 1} ({error.msg}); mend the line") from None
    except UnicodeEncodeError:
        raise DataError(f"{where}: holds half of a surrogate pair; write the whole character") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DataError(f"{where}: {reason}; mend the line") from None
    if not isinstance(row, dict):
        raise DataError(f'{where}: the line is {_kind(row)}; expected an object such as {{"prompt": "..."}}')
    return cast("Mapping[str, Any]", row)


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return row


def _refused_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


# ----------------------------------------------------------------------------------------------------------- one column


def _optional(row: Mapping[str, Any], columns: Mapping[str, str], part: str, where: str) -> Any:
    """The part's value; None where the row has none, which is an error only if the recipe names the column."""
    if part in columns and columns[part] not in row:
        raise DataError(f"{where}: no column {columns[part]!r}, which data.columns.{part} names")
    return row.get(columns.get(part, part))


def _checked_prompt(prompt: Any, column: str, where: str) -> str | list[Message]:
    if _is_text(prompt):
        return cast(str, prompt)
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: {column!r} is {_kind(prompt)}; expected a text or a list of messages")
    return [_checked_message(m, f"{where}: message {n}") for n, m in enumerate(cast("list[Any]", prompt), start=1)]


def _checked_message(message: Any, what: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f'{what} is {_kind(message)}; expected {{"role": "user", "content": "..."}}')
    filled = {key: value for key, value in cast("dict[str, Any]", message).items() if value is not None}
    if filled.keys() != {"role", "content"} or not all(isinstance(value, str) for value in filled.values()):
        raise DataError(f"{what} is not made of two texts, role and content; give it these two and nothing else")
    return filled


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _kind(value: Any) -> str:
    """What a wrong value is, without showing it.

    >>> _kind([]), _kind(3), _kind(None)
    ('an empty list', 'a number', 'null')
    """
    names = {str: "text", list: "list", dict: "object", bool: "truth value", int: "number", float: "number"}
    name = names.get(type(value))
    if value is None:
        return "null"
    if isinstance(value, (str, list, dict)) and not (value.strip() if isinstance(value, str) else value):
        return f"an empty {name}"
    return f"a{'n' if name == 'object' else ''} {name or type(value).__name__}"


# ------------------------------------------------------------------------------------------------------------ a dataset


def _loaded(name: str, config: str | None, split: str) -> Iterable[object]:
    try:
        import datasets
    except ImportError as error:
        raise ExtraMissing("datasets", "data", f"data.dataset = '{name}'") from error
    try:
        if (Path(name) / "dataset_dict.json").is_file():
            return cast("Mapping[str, Iterable[object]]", datasets.load_from_disk(name))[split]
        if (Path(name) / "state.json").is_file():  # a single dataset, written without splits
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the package lets through whatever its many readers raise, StopIteration included
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise DataError(
            f"{name}[{split}]: the dataset cannot be loaded ({reason}); check data.dataset, dataset_config and split, "
            "and the connection if it lies on the hub"
        ) from error


def _not_empty(examples: list[Example], where: str) -> list[Example]:
    if not examples:
        raise DataError(f"{where}: holds no row; at least one prompt is needed")
    return examples
