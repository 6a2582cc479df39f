from __future__ import annotations

import tomllib

from etude.config.load import load_recipe
from etude.config.write import dump_toml, toml_text

TABLE = {
    "seed": 0,
    "rate": 1e-05,
    "text": 'a "b"\nc',
    "list": [1, [True, "x"]],
    "odd key": 1,
    "outer": {"inner": {"a": 1}, "b": 2, "empty": {}},
    "terms": [{"a": 1, "sub": {"c": 3}}, {"a": 2}],
}


def test_what_is_written_reads_back():
    outer = {name: value for name, value in TABLE["outer"].items() if value != {}}  # empty tables say nothing
    assert tomllib.loads(toml_text(TABLE)) == TABLE | {"outer": outer}


def test_the_text_itself():
    assert toml_text(TABLE) == (
        "seed = 0\n"
        "rate = 1e-05\n"
        'text = "a \\"b\\"\\nc"\n'
        'list = [1, [true, "x"]]\n'
        '"odd key" = 1\n'
        "\n[outer]\n"
        "b = 2\n"
        "\n[outer.inner]\n"
        "a = 1\n"
        "\n[[terms]]\n"
        "a = 1\n"
        "\n[terms.sub]\n"
        "c = 3\n"
        "\n[[terms]]\n"
        "a = 2\n"
    )


def test_comments_stand_beside_the_values_and_are_asked_by_dotted_key():
    asked: list[str] = []
    text = toml_text({"seed": 0, "terms": [{"beta": 0.5}]}, lambda key: asked.append(key) or f"about {key}")
    assert asked == ["seed", "terms.0.beta"]
    assert "seed = 0                                        # about seed\n" in text
    assert tomllib.loads(text) == {"seed": 0, "terms": [{"beta": 0.5}]}


def test_a_recipe_is_written_whole_and_without_what_is_left_out():
    written = tomllib.loads(dump_toml(load_recipe("maze")))
    assert written["optim"]["clip_norm"] == 1.0
    assert "lora" not in written["student"]
    assert "beta" not in written["terms"][0]
