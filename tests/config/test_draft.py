from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.config.draft import FILE_KEYS, FOLDER_KEYS, Draft, located, parse_override
from etude.config.noun import fields_below
from etude.config.schema import Recipe
from etude.errors import RecipeError

HERE = Path("/nowhere")


def draft_of(*layers: dict[str, Any]) -> Draft:
    draft = Draft()
    for number, layer in enumerate(layers):
        draft.lay(layer, f"layer {number}", HERE)
    return draft


def test_tables_merge_key_by_key_and_arrays_place_by_place():
    draft = draft_of(
        {"optim": {"learning_rate": 1, "schedule": "linear"}, "terms": [{"a": 1, "b": 2}]},
        {"optim": {"learning_rate": 2}, "terms": [{"b": 3}, {"c": 4}]},
    )
    assert draft.table == {
        "optim": {"learning_rate": 2, "schedule": "linear"},
        "terms": [{"a": 1, "b": 3}, {"c": 4}],
    }


def test_plain_arrays_are_replaced_whole():
    assert draft_of({"stop": ["a", "b"]}, {"stop": ["c"]}).table == {"stop": ["c"]}


def test_a_value_replaces_a_table_and_a_table_a_value():
    assert draft_of({"a": {"b": {"c": 1}}}, {"a": 2}).table == {"a": 2}
    assert draft_of({"a": 2}, {"a": {"b": {"c": 1}}}).table == {"a": {"b": {"c": 1}}}


def test_an_empty_table_takes_nothing_away():
    assert draft_of({"lora": {"rank": 8}}, {"lora": {}}).table == {"lora": {"rank": 8}}
    assert draft_of({"lora": {}}, {"lora": {"rank": 8}}).table == {"lora": {"rank": 8}}


def test_origins_follow_the_values():
    draft = draft_of({"optim": {"a": 1, "b": 1}}, {"optim": {"b": 2}})
    assert draft.origin("optim.a") == "layer 0"
    assert draft.origin("optim.b") == "layer 1"
    assert draft.origin("optim.a.0") == "layer 0"  # an entry of a plain array
    assert draft.origin("optim") is None  # several layers
    assert draft.origin("train.steps") is None  # none


def test_remove_takes_a_key_or_a_table_away():
    draft = draft_of({"optim": {"a": 1, "b": 1}, "optimist": 1})
    draft.remove("optim.a")
    assert draft.table == {"optim": {"b": 1}, "optimist": 1}
    draft.remove("optim")
    assert draft.table == {"optimist": 1}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1", 1),
        ("1e-4", 1e-4),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"1"', "1"),
        ("{rank = 8}", {"rank": 8}),
        ("jsd", "jsd"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("a=b", "a=b"),
        ("two words", "two words"),
        ("1\nseed = 2", "1\nseed = 2"),  # never a second key
        ("", None),
    ],
)
def test_override_values(written: str, value: object):
    assert parse_override(f"some.key={written}") == ("some.key", value)


@pytest.mark.parametrize("text", ["seed", "=1", "optim.=1", ".seed=1"])
def test_what_is_no_override_is_refused(text: str):
    with pytest.raises(RecipeError, match=r"expected key=value, such as optim\.learning_rate=1e-4"):
        parse_override(text)


@pytest.mark.parametrize("written", ["[1, 2", "{a = }", '"open', "[a]"])
def test_broken_toml_is_not_taken_for_text(written: str):
    with pytest.raises(RecipeError, match="command line: some.key: .* is not TOML.*mind the quotes"):
        parse_override(f"some.key={written}")


def test_paths_are_looked_up_from_the_folder_of_their_layer(tmp_path: Path):
    (tmp_path / "student").mkdir()
    assert located("data.prompts", "p.jsonl", tmp_path) == str(tmp_path / "p.jsonl")
    assert located("data.prompts", "../p.jsonl", tmp_path) == str(tmp_path.parent / "p.jsonl")
    assert located("data.prompts", "/p.jsonl", tmp_path) == "/p.jsonl"
    assert located("student.model", "student", tmp_path) == str(tmp_path / "student")
    assert located("student.model", "Qwen/Qwen2.5-0.5B", tmp_path) == "Qwen/Qwen2.5-0.5B"
    assert located("student.model", "etude:maze-student", tmp_path) == "etude:maze-student"
    assert located("student.model", "./missing", tmp_path) == str(tmp_path / "missing")
    assert located("name", "student", tmp_path) == "student"


def test_the_keys_that_hold_paths_are_keys_of_the_schema():
    assert dict(fields_below(Recipe)).keys() >= FILE_KEYS | FOLDER_KEYS
