"""What a check found: a verdict with its evidence and figures, for people and for machines.

A check never raises because the pair is wrong; it says so. Whoever asked for the checks decides what a refusal stops:
`etude check` its exit status, `etude train` the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from etude.errors import PairError


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


def passed(check: str, evidence: str, **figures: Any) -> Finding:
    """A finding that asks for nothing."""
    return Finding(str(check), Verdict.PASS, evidence, figures=figures)


def warned(check: str, evidence: str, cure: str, **figures: Any) -> Finding:
    """A finding to think about."""
    return Finding(str(check), Verdict.WARN, evidence, cure, figures)


def refused(check: str, evidence: str, cure: str = "", **figures: Any) -> Finding:
    """A finding that stops the run."""
    return Finding(str(check), Verdict.REFUSE, evidence, cure, figures)


def with_allowed(findings: Iterable[Finding], allowed: Collection[str]) -> list[Finding]:
    """The same findings, refusals of the allowed checks turned into warnings."""
    return [
        replace(finding, verdict=Verdict.WARN, evidence=f"{finding.evidence} (allowed)")
        if finding.verdict is Verdict.REFUSE and finding.check in allowed
        else finding
        for finding in findings
    ]


def require(findings: Iterable[Finding], allowed: Collection[str] = ()) -> None:
    """Stop at what is refused.

    Raises:
        PairError: names each refused check that is not among the allowed, with its evidence and cure.
    """
    stops = [finding for finding in with_allowed(findings, allowed) if finding.verdict is Verdict.REFUSE]
    if stops:
        said = "; ".join(f"{stop.check}: {stop.evidence}; {stop.cure}" for stop in stops)
        names = ", ".join(f'"{stop.check}"' for stop in stops)
        raise PairError(f"refused before step 1: {said} (preflight.allow = [{names}] goes on all the same)")
