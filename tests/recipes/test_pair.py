"""What is found of a pair's tokenizers and of the first examples, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.config.load import load_recipe
from etude.preflight.findings import Finding, Verdict
from etude.recipes.check import require_readable
from etude.recipes.pair import pair_findings
from etude.runtime.world import World
from etude.testing import CHAT_TEMPLATE, tiny_recipe, word_tokenizer

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT_TEMPLATE


def found(settings: dict[str, Any], *changes: str) -> dict[str, Finding]:
    recipe = load_recipe(settings, changes)
    return {finding.check: finding for finding in pair_findings(recipe, require_readable(recipe, World()).data)}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    for path in (tmp_path / "student", tmp_path / "teacher"):
        path.mkdir()
    return tiny_recipe(tmp_path, tokenizer=word_tokenizer(chat_template=CHAT_TEMPLATE))


def test_one_template(settings: dict[str, Any]) -> None:
    findings = found(settings, "data.system_prompt=w3")
    assert {finding.verdict for finding in findings.values()} == {Verdict.PASS}
    assert findings["template"].figures["student"] == ["system", "w3", "</s>", "user", "w0", "</s>", "assistant"]


def test_the_row_that_differs_is_shown(settings: dict[str, Any], tmp_path: Path) -> None:
    """The fourth row of the file is a talk of two turns, which the teacher's template shortens."""
    lines = (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    talk = [{"role": role, "content": "w1"} for role in ("user", "assistant", "user")]
    lines[3] = json.dumps({"prompt": talk, "completion": "w2", "answer": "w2"})
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    shortened = CHAT_TEMPLATE.replace("in messages", "in messages[-1:]")
    word_tokenizer(chat_template=shortened).save_pretrained(tmp_path / "teacher")
    template = found(settings, f"data.eval_prompts={tmp_path / 'prompts.jsonl'}", "data.eval_size=")["template"]
    assert template.verdict is Verdict.REFUSE
    assert template.figures["row"].endswith("prompts.jsonl:4")


def test_a_template_that_refuses_the_prompts(settings: dict[str, Any], tmp_path: Path) -> None:
    word_tokenizer(chat_template=NO_SYSTEM).save_pretrained(tmp_path / "teacher")
    template = found(settings, "data.system_prompt=w3")["template"]
    assert template.verdict is Verdict.REFUSE
    assert "the teacher's own template refuses a prompt" in template.evidence


def test_a_student_alone(settings: dict[str, Any]) -> None:
    del settings["teacher"]
    assert list(found(settings | {"method": "sft"})) == ["bos"]


def test_a_reference_of_another_family_is_refused_while_reading(settings: dict[str, Any], tmp_path: Path) -> None:
    named = {"reference": {"model": str(tmp_path / "teacher")}}
    terms = {"terms": [{}, {"name": "near", "teacher": "reference"}]}
    recipe = load_recipe(settings | named | terms)
    said = [finding.evidence for finding in pair_findings(recipe, require_readable(recipe, World()).data)]
    assert "all 32 ids mean the same to student and reference" in said
