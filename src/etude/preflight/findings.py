"""What a check found: a verdict with its evidence and figures, for people and for machines.

A check never raises because the pair is wrong; it says so. Whoever asked for the checks decides what a refusal stops:
`etude check` its exit status, `etude train` the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What follows from a finding."""

    PASS = "pass"
    WARN = "warn"  # legal, and perhaps not meant
    REFUSE = "refuse"  # the run would teach nothing, or something else


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the preflight's table."""

    check: str  # its name, in words with hyphens
    verdict: Verdict
    evidence: str  # what was seen, one sentence
    cure: str = ""  # what to do, one sentence; empty where it passed
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what JSON can hold, by name

    def as_json(self) -> dict[str, Any]:
        """All of it, for `--json`."""
        return asdict(self)


def worst(findings: Sequence[Finding]) -> Verdict:
    """The gravest verdict; pass where there is none.

    >>> worst([Finding("a", Verdict.PASS, ""), Finding("b", Verdict.WARN, "")])
    <Verdict.WARN: 'warn'>
    """
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.PASS)
