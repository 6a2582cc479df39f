from __future__ import annotations

import codecs
import json
import sys
from pathlib import Path

import pytest

from etude.data.examples import read_dataset, read_jsonl, require_answers, require_completions
from etude.errors import DataError, ExtraMissing

GOOD = b'{"prompt": "SECRET one"}\n'

# (name, content, line the error names, or None where the file loads with that many rows)
REFUSED = {
    "broken line in the middle": (GOOD + b'{"prompt": "SECRET" "b"}\n' + GOOD, 2, "no valid JSON"),
    "cut last line": (GOOD + GOOD + b'{"prompt": "SECR', 3, "no valid JSON"),
    "a list as a line": (GOOD + b'["SECRET"]\n', 2, "the line is a list"),
    "no prompt": (GOOD + b'{"question": "SECRET"}\n', 2, "no column 'prompt'"),
    "null": (b'{"prompt": null, "x": "SECRET"}\n', 1, "'prompt' is null"),
    "a number": (GOOD + b'{"prompt": 5, "x": "SECRET"}\n', 2, "'prompt' is a number"),
    "a list among strings": (GOOD + b'{"prompt": ["SECRET"]}\n' + GOOD, 2, "message 1 is a text"),
    "NaN": (GOOD + b'{"prompt": "SECRET", "score": NaN}\n', 2, "NaN is no JSON number"),
    "a double key": (GOOD + b'{"prompt": "SECRET", "prompt": "b"}\n', 2, "a key stands twice"),
    "a lone surrogate": (GOOD + b'{"prompt": "SECRET \\ud83d"}\n', 2, "half of a surrogate pair"),
    "empty": (b"", 1, "holds no row"),
    "blank only": (b"\n \r\n\t\n", 1, "holds no row"),
    "Latin-1": (GOOD + '{"prompt": "SECRET café"}\n'.encode("latin-1"), 2, "byte 23 is not UTF-8"),
    "a raw NUL": (GOOD + b'{"prompt": "SECRET \x00"}\n', 2, "no valid JSON"),
    "UTF-16": ('{"prompt": "SECRET"}'.encode("utf-16"), 1, "byte 1 is not UTF-8"),
    "an endless number": (GOOD + b'{"prompt": "SECRET", "score": 1e999}\n', 2, "a number is too large"),
    "a long whole number": (GOOD + b'{"prompt": "SECRET", "n": ' + b"9" * 5000 + b"}\n", 2, "integer string"),
    "a deep nest": (GOOD + b"[" * 100_000 + b"\n", 2, "nested too deeply"),
    "a blank prompt": (GOOD + b'{"prompt": "  ", "x": "SECRET"}\n', 2, "'prompt' is an empty text"),
    "no message": (GOOD + b'{"messages": [], "x": "SECRET"}\n', 2, "'messages' is an empty list"),
    "a message with parts": (b'{"messages": [{"role": "user", "content": [{"text": "SECRET"}]}]}', 1, "two texts"),
    "a message with more": (b'{"messages": [{"role": "user", "content": "SECRET", "name": "x"}]}', 1, "two texts"),
    "only an assistant": (b'{"messages": [{"role": "assistant", "content": "SECRET"}]}', 1, "the only message"),
    "a completion of numbers": (b'{"prompt": "SECRET", "completion": 4}', 1, "the completion is a number"),
    "an empty completion": (b'{"prompt": "SECRET", "completion": ""}', 1, "the completion is an empty text"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_bad_row_is_refused_with_file_and_line_and_without_its_content(tmp_path: Path, kind: str) -> None:
    content, line, reason = REFUSED[kind]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ")
    assert reason in message
    assert "SECR" not in message
    assert "\n" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None  # a traceback shows no content either


LOADED = {
    "blank lines": (b"\n" + GOOD + b"\n  \n" + GOOD + b"\n", [2, 5]),
    "CRLF with BOM": (codecs.BOM_UTF8 + GOOD.replace(b"\n", b"\r\n") * 2, [1, 2]),
    "no line end at the end": (GOOD + GOOD.rstrip(), [1, 2]),
    "other line separators inside a string": ('{"prompt": "SECRET one\u2028two\x85three"}'.encode(), [1]),
    "an escaped NUL": (b'{"prompt": "SECRET one\\u0000"}', [1]),
    "a whole surrogate pair": (b'{"prompt": "SECRET one \\ud83d\\ude00"}', [1]),
}


@pytest.mark.parametrize("kind", LOADED)
def test_harmless_oddities_load(tmp_path: Path, kind: str) -> None:
    content, lines = LOADED[kind]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    examples = read_jsonl(path)
    assert [example.where for example in examples] == [f"{path}:{line}" for line in lines]
    assert all(str(example.prompt).startswith("SECRET one") for example in examples)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read \(No such file"):
        read_jsonl(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_jsonl(tmp_path)


def test_columns_have_names(tmp_path: Path) -> None:
    row = {"question": "2 + 2?", "solution": "It is 4.", "final": 4, "answer": "other", "topic": "sums"}
    columns = {"prompt": "question", "completion": "solution", "answer": "final"}
    (example,) = read_jsonl(write(tmp_path / "a.jsonl", row), columns)
    assert (example.prompt, example.completion, example.answer) == ("2 + 2?", "It is 4.", 4)
    assert example.fields == row | {"answer": 4}


def test_a_named_column_must_be_there_and_an_unnamed_one_may_be_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "one", "answer": None}, {"prompt": "two", "completion": "2"})
    one, two = read_jsonl(path)
    assert (one.completion, one.answer, two.completion, two.answer) == (None, None, "2", None)
    with pytest.raises(DataError, match=r"a\.jsonl:1: no column 'completion', which data\.columns\.completion names"):
        read_jsonl(path, {"completion": "completion"})
    with pytest.raises(DataError, match=r"a\.jsonl:1: no column 'text'"):
        read_jsonl(path, {"prompt": "text"})


def test_messages(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "be kind"}, {"role": "user", "content": "hello", "name": None}
    answer = {"role": "assistant", "content": "hello there"}
    path = write(tmp_path / "a.jsonl", {"messages": [system, user]}, {"prompt": [system, user, answer]})
    asked, answered = read_jsonl(path)
    assert asked.prompt == answered.prompt == [system, {"role": "user", "content": "hello"}]
    assert (asked.completion, answered.completion) == (None, "hello there")
    with pytest.raises(DataError, match=r"b\.jsonl:1: there is a completion, and the messages end"):
        read_jsonl(write(tmp_path / "b.jsonl", {"prompt": [user, answer], "completion": "hi"}))


def test_what_a_mode_needs_is_asked_for_before_a_model_is_loaded(tmp_path: Path) -> None:
    examples = read_jsonl(write(tmp_path / "a.jsonl", {"prompt": "one", "completion": "1"}, {"prompt": "two"}))
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: no completion, which sampler\.other = 'dataset' needs in each row"
    ):
        require_completions(examples, "sampler.other = 'dataset'")
    with pytest.raises(DataError, match=r"a\.jsonl:1: no answer, which data\.verifier needs in each row"):
        require_answers(examples, "data.verifier")
    require_completions(examples[:1], "sampler.other = 'dataset'")


class TestDatasets:
    """The `datasets` package on local folders."""

    @pytest.fixture(autouse=True)
    def _own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        datasets = pytest.importorskip("datasets", reason="extra 'data' is not installed")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        datasets.disable_progress_bars()

    @pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "splits"])
    def test_a_folder(self, tmp_path: Path, kind: str) -> None:
        import datasets

        folder = tmp_path / "rows"
        folder.mkdir()
        rows = datasets.Dataset.from_list([{"question": f"q{n}", "answer": n} for n in range(3)])
        if kind == "jsonl":
            rows.to_json(folder / "train.jsonl")
        elif kind == "parquet":
            rows.to_parquet(folder / "train.parquet")
        elif kind == "arrow":
            rows.save_to_disk(folder)
        else:
            datasets.DatasetDict({"train": rows}).save_to_disk(folder)
        examples = read_dataset(str(folder), columns={"prompt": "question"})
        assert [(example.prompt, example.answer) for example in examples] == [("q0", 0), ("q1", 1), ("q2", 2)]
        assert examples[1].where == f"{folder}[train] row 1"

    def test_messages_of_a_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "rows"
        folder.mkdir()
        write(folder / "train.jsonl", {"messages": [{"role": "user", "content": "hello"}]})
        assert read_dataset(str(folder))[0].prompt == [{"role": "user", "content": "hello"}]

    def test_what_is_not_there_is_said(self, tmp_path: Path) -> None:
        folder = tmp_path / "rows"
        folder.mkdir()
        write(folder / "train.jsonl", {"prompt": "one"}, {"prompt": None})
        with pytest.raises(DataError, match=r"rows\[test\]: the dataset cannot be loaded \(Unknown split"):
            read_dataset(str(folder), split="test")
        with pytest.raises(DataError, match=r"rows\[train\] row 1: 'prompt' is null"):
            read_dataset(str(folder))
        with pytest.raises(DataError, match=r"^no-such/dataset\[train\]: the dataset cannot be loaded"):
            read_dataset("no-such/dataset")

    @pytest.mark.parametrize("content", ["", '{"prompt": "one"}\n{"prompt": "SECR'])
    def test_a_broken_file_is_said_in_one_line(self, tmp_path: Path, content: str) -> None:
        folder = tmp_path / "rows"
        folder.mkdir()
        (folder / "train.jsonl").write_text(content)
        with pytest.raises(DataError, match=r"rows\[train\]: the dataset cannot be loaded") as caught:
            read_dataset(str(folder))
        assert "SECR" not in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("split", ["train[:0]", "train"])
    def test_an_empty_one_is_refused(self, tmp_path: Path, split: str) -> None:
        folder = tmp_path / "rows"
        folder.mkdir()
        write(folder / "train.jsonl", *([{"prompt": "one"}] if split == "train[:0]" else []))
        with pytest.raises(DataError, match=r"rows\[train.*\]: the dataset cannot be loaded"):
            read_dataset(str(folder), split=split)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExtraMissing, match=r"openai/gsm8k.*pip install 'etude\[data\]'"):
        read_dataset("openai/gsm8k", "main")
