"""`check` on whole recipes of a second, and what `train` proves before its first step. The faults: tests/preflight."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.axes.names import Check
from etude.config.load import load_recipe
from etude.config.schema import Recipe
from etude.core.records import Scores
from etude.errors import PairError
from etude.models.teachers import FrozenTeacher
from etude.preflight.findings import Finding, Verdict
from etude.recipes.check import check, start_findings
from etude.recipes.record import record
from etude.recipes.run import train
from etude.testing import CHAT_TEMPLATE, tiny_folder, tiny_recipe, word_tokenizer
from etude.training.loop import Parts


def found(settings: dict[str, Any], *changes: str) -> dict[str, Finding]:
    [checked] = check(load_recipe(settings, changes))
    return {finding.check: finding for finding in checked.findings}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr("etude.recipes.build.load_backbone", fail)


class TestBeforeWeights:
    @pytest.mark.parametrize(
        ("change", "check", "evidence"),
        [
            ("sampler.max_new_tokens=64", "data", "context window"),
            ("device.device=cuda", "recipe", "is not available here"),
            ("output={folder}", "recipe", "is not empty and holds no run"),
            ("data.columns.prompt=question", "data", "prompts.jsonl:1"),  # case 37
            ("teacher.model={folder}/nowhere", "models", "nowhere"),
        ],
    )
    def test_what_train_would_refuse(
        self, tmp_path: Path, no_weights: None, monkeypatch: pytest.MonkeyPatch, change: str, check: str, evidence: str
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        findings = found(tiny_recipe(tmp_path), change.format(folder=tmp_path))
        [refusal] = [finding for finding in findings.values() if finding.verdict is Verdict.REFUSE]
        assert (refusal.check, refusal.verdict) == (check, Verdict.REFUSE)
        assert evidence in refusal.evidence

    def test_it_matches_needs_with_gives(
        self, tmp_path: Path, no_weights: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("etude.recipes.build.FrozenTeacher.gives", frozenset())
        [(_, refusal)] = found(tiny_recipe(tmp_path)).items()
        assert refusal.verdict is Verdict.REFUSE
        assert "teacher 'teacher' gives nothing" in refusal.evidence

    def test_special_tokens_that_differ_are_told(self, tmp_path: Path) -> None:
        other = tiny_folder(tmp_path / "other", layers=1, seed=1, tokenizer=word_tokenizer(pad_is_eos=True))
        special = found(tiny_recipe(tmp_path), f"teacher.model={other}")["special-ids"]
        assert special.verdict is Verdict.WARN
        assert special.evidence == "the pad_token of the student is '<pad>', of the teacher '</s>'"

    def test_a_template_on_one_side(self, tmp_path: Path) -> None:
        tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
        other = tiny_folder(tmp_path / "other", layers=1, seed=1, tokenizer=tokenizer)
        template = found(tiny_recipe(tmp_path), f"teacher.model={other}")["template"]
        assert (template.verdict, template.evidence[:27]) == (Verdict.WARN, "the student's tokenizer has")


class TestWithWeights:
    def test_nothing_is_written(self, tmp_path: Path) -> None:
        settings = tiny_recipe(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        findings = found(settings)
        assert sorted(tmp_path.rglob("*")) == before
        assert {f.check for f in findings.values() if f.verdict is not Verdict.PASS} == {"warm-start"}  # it is random

    def test_every_word_of_a_check_is_a_finding(self, tmp_path: Path) -> None:
        settings = tiny_recipe(tmp_path, tokenizer=word_tokenizer(chat_template=CHAT_TEMPLATE))
        assert set(Check) <= found(settings).keys()

    @pytest.mark.parametrize(
        "terms",
        [
            [{"support": "sampled", "estimator": "policy_gradient", "divergence": "reverse_kl", "discount": 1.0}],
            [{"support": "top_k", "top_k": 4}, {"name": "gold", "teacher": "label", "divergence": "forward_kl"}],
            [{"divergence": "jsd", "beta": 0.5}, {"name": "near", "teacher": "reference", "coefficient": 0.1}],
        ],
        ids=["policy gradient", "top-k and labels", "jsd and a reference"],
    )
    def test_the_gradient_of_every_term(self, tmp_path: Path, terms: list[dict[str, Any]]) -> None:
        """A mixture of writers: each of them writes rows for the probe, so that each term has some."""
        for term in terms:
            term |= {"sources": ["dataset"]} if term.get("teacher") == "label" else {}
        settings = tiny_recipe(tmp_path) | {"terms": terms}
        changes = ["sampler.student_fraction=0.5"] if len(terms) > 1 else []
        gradient = found(settings, *changes)["gradient"]
        assert gradient.verdict is Verdict.PASS, gradient
        assert gradient.figures["tokens"] <= 32
        assert set(gradient.figures["relative_error"]) == {term.get("name", "reverse_kl") for term in terms} or terms

    def test_padded_rows_alone_and_together(self, tmp_path: Path) -> None:
        """Case 5, with learned positions."""
        findings = found(tiny_recipe(tmp_path, "gpt2"))
        assert findings["repetition"].figures["largest"] < 1e-5
        assert findings["sampler"].figures["largest"] < 1e-4

    def test_adapters_and_a_shortened_student_are_themselves(self, tmp_path: Path) -> None:
        settings = tiny_recipe(tmp_path, layers=2)
        assert found(settings, "student.keep_layers=[0]")["identity"].figures["divergence"] < 1e-7
        pytest.importorskip("peft")
        assert found(settings, "student.lora.rank=2")["identity"].figures["divergence"] < 1e-7

    @pytest.mark.parametrize("weights", ["live", "ema", "base"])
    def test_a_teacher_that_begins_as_the_student(self, tmp_path: Path, weights: str) -> None:
        if weights == "base":
            pytest.importorskip("peft")
        settings = tiny_recipe(tmp_path) | {"teacher": {"weights": weights}}
        if weights == "ema":
            settings["teacher"] |= {"ema_rate": 0.5, "ema_every": 1}
        findings = found(settings, *(["student.lora.rank=2"] if weights == "base" else []))
        assert findings["difference"].verdict is Verdict.WARN
        told = {name: one.verdict for name, one in findings.items() if one.verdict is not Verdict.PASS}
        assert told.keys() <= {"difference", "warm-start", "gradient"}  # there is none yet
        assert set(told.values()) == {Verdict.WARN}
        assert "alignment" in findings  # there is a model to read plainly

    def test_stored_scores_are_neither_asked_nor_added_to(self, tmp_path: Path) -> None:
        settings = tiny_recipe(tmp_path) | {"terms": [{"support": "sampled", "estimator": "policy_gradient"}]}
        folder = tmp_path / "recording"
        settings["teacher"]["scores"] = str(folder)
        settings["sampler"] = {**settings.get("sampler", {}), "recorded": str(folder)}
        record(load_recipe(settings), quiet=True)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        whole = found(settings)
        assert {name for name, one in whole.items() if one.verdict is Verdict.REFUSE} == set()
        stored = found(settings, "teacher.model=")
        assert {name for name, one in stored.items() if one.verdict is not Verdict.PASS} == set()
        assert "stored scores only" in stored["alignment"].evidence
        assert set(Check) - {"special-ids", "template", "thinking"} <= stored.keys()
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before

    def test_a_recipe_without_a_teacher(self, tmp_path: Path) -> None:
        settings = tiny_recipe(tmp_path) | {"method": "sft"}
        del settings["teacher"]
        assert {"bos", "sampler", "identity", "gradient"} <= found(settings).keys()

    def test_each_stage_is_judged(self, tmp_path: Path) -> None:
        stages = [{"method": "sft", "train": {"steps": 1}}, {"name": "second", "train": {"steps": 1}}]
        checked = check(load_recipe(tiny_recipe(tmp_path) | {"stages": stages}))
        assert [one.stage for one in checked] == ["1-sft", "2-second"]
        assert all(one.verdict is not Verdict.REFUSE for one in checked)


class TestAtTheStart:
    def test_a_copy_of_the_student_stops_the_run(self, tmp_path: Path) -> None:
        settings = tiny_recipe(tmp_path)
        copy = f"teacher.model={shutil.copytree(tmp_path / 'student', tmp_path / 'copy')}"
        with pytest.raises(PairError, match=r"before step 1: difference: the teacher is the student, .* nats a token"):
            train(load_recipe(settings, [copy]), quiet=True)
        assert not (tmp_path / "run").exists()
        allowed = [copy, 'preflight.allow=["difference"]', "train.steps=1"]
        assert train(load_recipe(settings, allowed), quiet=True).steps == 1

    def test_the_same_name_twice_is_meant(self, tmp_path: Path) -> None:
        changes = [f"teacher.model={tmp_path / 'student'}", "train.steps=1"]
        assert train(load_recipe(tiny_recipe(tmp_path), changes), quiet=True).steps == 1

    def test_another_template_stops_it_before_weights_are_read(self, tmp_path: Path, no_weights: None) -> None:
        settings = tiny_recipe(tmp_path, tokenizer=word_tokenizer(chat_template=CHAT_TEMPLATE))
        word_tokenizer(chat_template=CHAT_TEMPLATE.replace("' </s> '", "' '")).save_pretrained(tmp_path / "teacher")
        with pytest.raises(PairError, match="template: .* they part at token 2: 'user w0 </s> assistant'"):
            train(load_recipe(settings), quiet=True)

    def test_shifted_scores_stop_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        score = FrozenTeacher.score

        def shifted(self: FrozenTeacher, *args: Any) -> list[Scores]:
            return [replace(m, hidden=None if m.hidden is None else m.hidden.roll(1, 0)) for m in score(self, *args)]

        monkeypatch.setattr(FrozenTeacher, "score", shifted)
        with pytest.raises(PairError, match="alignment: the hidden_states of the teacher are shifted by one"):
            train(load_recipe(tiny_recipe(tmp_path)), quiet=True)

    def test_it_is_quick_and_is_not_done_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from etude.recipes import run

        seconds: list[float] = []

        def timed(recipe: Recipe, parts: Parts) -> list[Finding]:
            started = time.process_time()
            findings = start_findings(recipe, parts)
            seconds.append(time.process_time() - started)
            return findings

        monkeypatch.setattr(run, "start_findings", timed)
        settings = tiny_recipe(tmp_path)
        train(load_recipe(settings), quiet=True)
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
        train(load_recipe(settings), quiet=True)  # goes on
        [once] = seconds
        assert once < 0.3
