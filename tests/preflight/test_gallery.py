"""Pairs with one fault each, planted in folders of a second: `check` names it, refuses where it must, passes the rest.

The table in docs/pitfalls.md is what comes out here, figures aside. A difference fails with the table as it should be.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

from etude.config.load import load_recipe
from etude.core.records import Scores
from etude.models.backbone import TransformersBackbone, load_backbone
from etude.models.teachers import FrozenTeacher
from etude.preflight.findings import Finding, Verdict, worst
from etude.recipes.check import check

PAGE = Path(__file__).parents[2] / "docs" / "pitfalls.md"
BEGIN, END = "<!-- planted pairs -->\n", "<!-- end of planted pairs -->"

Make = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Callable[[Path, Make, pytest.MonkeyPatch], None]  # spoils a copy of the healthy pair
    check: str  # who must notice
    verdict: Verdict


def retemplate(folder: Path, make: Make, template: str) -> None:
    make(template).save_pretrained(folder)


def nothing(folder: Path, make: Make, patch: pytest.MonkeyPatch) -> None:
    pass


def padded_vocabulary(folder: Path, make: Make, patch: pytest.MonkeyPatch) -> None:
    """Case 14: the teacher's head grows filler rows with logits of their own."""
    network: Any = load_backbone(str(folder / "teacher")).base
    network.resize_token_embeddings(64, mean_resizing=False)
    network.lm_head.weight.data[40:] = 1.0
    TransformersBackbone(network, make()).save(folder / "teacher")


def wrong_template(folder: Path, make: Make, patch: pytest.MonkeyPatch) -> None:
    retemplate(folder / "teacher", make, make().chat_template.replace("message['role'] + ' ' + ", ""))


def thinking_on_one_side(folder: Path, make: Make, patch: pytest.MonkeyPatch) -> None:
    retemplate(folder / "teacher", make, make().chat_template.replace("'assistant '", "'assistant <think> '"))


def double_bos(folder: Path, make: Make, patch: pytest.MonkeyPatch) -> None:
    """Case 3, on both sides, so that no comparison of the two shows it."""
    for name in ("student", "teacher"):
        retemplate(folder / name, make, make().chat_template.replace("'<s> '", "'<s> <s> '"))


def permuted_vocabulary(folder: Path, make: Make, patch: pytest.MonkeyPatch) -> None:
    """Case 15: as many ids, of which two have changed places."""
    path = folder / "teacher" / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    swapped = text.replace('"w3": 10', '"w3": 11').replace('"w4": 11', '"w4": 10')
    assert swapped != text
    path.write_text(swapped, encoding="utf-8")


def swapped_eos(folder: Path, make: Make, patch: pytest.MonkeyPatch) -> None:
    """Case 13: the teacher ends its answers with another token than the student."""
    network: Any = load_backbone(str(folder / "teacher")).base
    weight = network.lm_head.weight.data
    weight[[0, 2]] = weight[[2, 0]]
    tokenizer = make()
    tokenizer.eos_token, tokenizer.pad_token = "<pad>", "</s>"
    network.generation_config.eos_token_id = network.config.eos_token_id = 0
    TransformersBackbone(network, tokenizer).save(folder / "teacher")


def copy_of_the_student(folder: Path, make: Make, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder / "teacher")
    shutil.copytree(folder / "student", folder / "teacher")


def respoken(change: Callable[[Tensor], Tensor], patch: pytest.MonkeyPatch) -> None:
    """Whatever the teacher says goes through `change` before anybody hears it."""
    score = FrozenTeacher.score

    def changed(self: FrozenTeacher, *args: Any) -> list[Scores]:
        found = score(self, *args)
        if self.name != "teacher":  # the student, loaded through the same door, is left alone
            return found
        return [replace(marks, hidden=None if marks.hidden is None else change(marks.hidden)) for marks in found]

    patch.setattr(FrozenTeacher, "score", changed)


def shifted_scores(folder: Path, make: Make, patch: pytest.MonkeyPatch) -> None:
    """Case 6: each token is given the marks of the token before it."""
    respoken(lambda hidden_CD: hidden_CD.roll(1, dims=0), patch)


def dropout_left_on(folder: Path, make: Make, patch: pytest.MonkeyPatch) -> None:
    """Case 22."""
    respoken(lambda hidden_CD: functional.dropout(hidden_CD, 0.1, training=True), patch)


GALLERY = [
    Fault("nothing: a healthy pair", nothing, "", Verdict.PASS),
    Fault("padded vocabulary: 64 rows for 33 ids, healthy", padded_vocabulary, "vocabulary", Verdict.PASS),
    Fault("permuted vocabulary of equal size", permuted_vocabulary, "vocabulary", Verdict.REFUSE),
    Fault("wrong template: the teacher's own has no roles", wrong_template, "template", Verdict.REFUSE),
    Fault("thinking on for the teacher only", thinking_on_one_side, "thinking", Verdict.REFUSE),
    Fault("double BOS, on both sides", double_bos, "bos", Verdict.REFUSE),
    Fault("EOS swapped with another token in the teacher", swapped_eos, "stop-token", Verdict.REFUSE),
    Fault("the teacher's folder is a copy of the student's", copy_of_the_student, "difference", Verdict.REFUSE),
    Fault("the teacher's scores shifted by one", shifted_scores, "alignment", Verdict.REFUSE),
    Fault("dropout left on in the teacher", dropout_left_on, "repetition", Verdict.REFUSE),
]


def judged(
    fault: Fault, pair: Path, make: Make, settings: dict[str, Any], folder: Path, patch: pytest.MonkeyPatch
) -> list[Finding]:
    """The findings of a copy of the pair in which the fault was planted."""
    for name in ("student", "teacher"):
        shutil.copytree(pair / name, folder / name)
    shutil.copy(pair / "prompts.jsonl", folder)
    fault.plant(folder, make, patch)
    patch.chdir(folder)
    [checked] = check(load_recipe(settings | {"output": "run"}))
    return list(checked.findings)


@pytest.fixture(scope="module")
def gallery(pair: Path, make_tokenizer: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finding]]:
    """All faults, and what was found of each."""
    settings = {
        "student": {"model": "student"},
        "teacher": {"model": "teacher"},
        "data": {"prompts": "prompts.jsonl", "eval_size": 4},
        "sampler": {"max_new_tokens": 6},
        "train": {"steps": 1, "prompts_per_round": 4},
        "device": {"device": "cpu", "threads": 1},
    }
    found = {}
    for fault in GALLERY:
        with pytest.MonkeyPatch.context() as patch:
            folder = tmp_path_factory.mktemp("planted")
            found[fault.name] = judged(fault, pair, make_tokenizer, settings, folder, patch)
    return found


@pytest.mark.parametrize("fault", GALLERY, ids=lambda fault: fault.name)
def test_check_names_the_fault(fault: Fault, gallery: dict[str, list[Finding]]) -> None:
    findings = gallery[fault.name]
    said = "\n".join(f"{finding.check}: {finding.verdict}: {finding.evidence}" for finding in findings)
    assert worst(findings) is fault.verdict, said
    if fault.check:
        assert [f.verdict for f in findings if f.check == fault.check] == [fault.verdict], said


def test_a_healthy_pair_passes_every_check(gallery: dict[str, list[Finding]]) -> None:
    healthy = [gallery[fault.name] for fault in GALLERY if fault.verdict is Verdict.PASS]
    read = ["recipe", "sampling", "data", "vocabulary", "special-ids", "bos", "template", "thinking"]
    probed = ["sampler", "identity", "alignment", "repetition", "difference", "warm-start", "stop-token", "gradient"]
    tried_out = ["disk", "determinism", "time", "cost", "memory"]
    assert [[finding.check for finding in findings] for findings in healthy] == [read + probed + tried_out] * len(
        healthy
    )


def test_filler_rows_are_told(gallery: dict[str, list[Finding]]) -> None:
    [found] = [f for f in gallery["padded vocabulary: 64 rows for 33 ids, healthy"] if f.check == "vocabulary"]
    assert found.figures == {"ids": 33, "filler": {"student": 7, "teacher": 31}}


def table(gallery: dict[str, list[Finding]]) -> str:
    """Fault, who noticed, and its words."""
    lines = ["| planted | check | verdict | what `etude check` said |", "|---|---|---|---|"]
    for fault in GALLERY:
        shown = [finding for finding in gallery[fault.name] if finding.check == fault.check]
        for finding in shown or [Finding("all", Verdict.PASS, "every check passes")]:
            said = re.sub(r"\S*/(?=prompts\.jsonl)", "", finding.evidence).replace("|", "\\|")
            lines.append(f"| {fault.name} | {finding.check} | {finding.verdict} | {said} |")
    return "\n".join(lines) + "\n"


def without_figures(text: str) -> str:
    """Other machines round otherwise; a count is a count everywhere, but no more is promised than words."""
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)


def test_the_page_shows_what_it_said(gallery: dict[str, list[Finding]]) -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    shown, _, _ = rest.partition(END)
    expected = table(gallery)
    assert without_figures(shown) == without_figures(expected), f"docs/pitfalls.md should show\n\n{expected}"
