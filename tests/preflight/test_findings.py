from __future__ import annotations

import json

import pytest

from etude.errors import PairError
from etude.preflight.findings import Finding, Verdict, passed, refused, require, warned, with_allowed, worst

FINDINGS = [
    passed("bos", "one", count=1),
    warned("special-ids", "they differ", "look"),
    refused("template", "they differ", "change it", place=3),
]


def test_the_worst_counts() -> None:
    assert [worst(FINDINGS[:count]) for count in range(4)] == [
        Verdict.PASS,
        Verdict.PASS,
        Verdict.WARN,
        Verdict.REFUSE,
    ]


def test_they_are_json() -> None:
    assert json.loads(json.dumps(FINDINGS[2].as_json())) == {
        "check": "template",
        "verdict": "refuse",
        "evidence": "they differ",
        "cure": "change it",
        "figures": {"place": 3},
    }


def test_what_is_allowed_is_a_warning() -> None:
    judged = with_allowed(FINDINGS, ["template", "bos"])
    assert judged[:2] == FINDINGS[:2]
    assert judged[2] == Finding("template", Verdict.WARN, "they differ (allowed)", "change it", {"place": 3})


def test_a_refusal_stops_and_says_how_to_go_on() -> None:
    require(FINDINGS[:2])
    require(FINDINGS, ["template"])
    with pytest.raises(PairError) as stopped:
        require([*FINDINGS, refused("bos", "two", "write one")], ["identity"])
    assert str(stopped.value) == (
        "refused before step 1: template: they differ; change it; bos: two; write one "
        '(preflight.allow = ["template", "bos"] goes on all the same)'
    )
