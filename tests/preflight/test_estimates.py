"""All estimates of one run through the one door."""

from __future__ import annotations

import json
from collections.abc import Callable

from etude.preflight.duration import Times
from etude.preflight.estimates import amounts_of, estimates
from etude.preflight.findings import Verdict, worst
from etude.preflight.rehearsal import rehearse
from etude.training.loop import Parts

Built = Callable[..., Parts]


LENGTHS = {"longest_prompt": 5, "longest_completion": 6, "max_new_tokens": 6}


def test_every_estimate_of_a_healthy_run(built: Built) -> None:
    parts = built()
    backbone = parts.student.backbone
    found = list(estimates(parts, {"teacher": backbone}, **LENGTHS, start_s=1.0, free_bytes=10**9, room_bytes=10**12))
    assert [finding.check for finding in found] == ["disk", "determinism", "time", "cost", "memory"]
    assert worst(found) is Verdict.PASS
    assert json.loads(json.dumps([finding.as_json() for finding in found])) == [f.as_json() for f in found]


def test_what_cannot_be_is_refused_and_the_rest_is_told_all_the_same(built: Built) -> None:
    found = list(estimates(built(), {}, **LENGTHS, start_s=1.0, free_bytes=0, room_bytes=1))
    verdicts = {finding.check: finding.verdict for finding in found}
    assert verdicts["disk"] is verdicts["memory"] is Verdict.REFUSE
    assert verdicts["cost"] is verdicts["determinism"] is Verdict.PASS


def test_amounts_of_a_run(built: Built) -> None:
    """4 steps in 2 rounds of 3 x 2 rows, half of them the teacher's; 4 held-out rows of which all are greedy too."""
    parts = built(
        "train.epochs=2",
        "train.prompts_per_round=3",
        "sampler.samples_per_prompt=2",
        "sampler.student_fraction=0.5",
        "sampler.other=teacher",
        "evaluation.every=2",
    )
    found = amounts_of(parts, Times.of(parts), rehearse(parts, max_new_tokens=6))
    assert (found.rounds, found.rows, found.epochs, found.evaluations) == (2, 6, 2, 3)
    assert (found.student_writes, found.teacher_writes) == (0.5, 0.5)
    assert (found.evaluation_rows, found.evaluation_marked, found.student_marks) == (4, True, False)
    assert 1 <= found.evaluation_greedy_rows <= 4
    assert 0.0 < found.completion <= 6.0
