from __future__ import annotations

from etude.config.noun import fields_below
from etude.config.reference import key_reference
from etude.config.schema import Recipe


def test_every_key_is_there_once_with_its_description():
    lines = key_reference().splitlines()
    keys = [line.partition(" = ")[0] for line in lines if not line.startswith(" ")]
    assert keys == [key for key, _ in fields_below(Recipe)]
    assert len(lines) == 3 * len(keys)


def test_one_table_only():
    text = key_reference("terms.0")
    assert text.startswith('terms.0.teacher = "teacher"\n')
    assert "optim" not in text
    assert key_reference("term") == ""


def test_kinds_defaults_and_conditions():
    assert key_reference("student.model").splitlines()[:2] == ["student.model", "    text; required"]
    assert key_reference("terms.0.beta").splitlines()[:2] == [
        "terms.0.beta = 0.5",
        '    number; only when divergence is "jsd" or "alpha_beta"',
    ]
    assert key_reference("terms.0.sources").splitlines()[1] == "    list of student | dataset | teacher"
    assert key_reference("student.keep_layers").splitlines()[:2] == ["student.keep_layers", "    list of whole number"]
    assert key_reference("optim.learning_rate").splitlines()[0] == "optim.learning_rate = 1e-05"
    assert key_reference("output").splitlines()[0] == "output"  # its default is made from the name
