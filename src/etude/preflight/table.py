"""Findings for people and for machines: a table with a line a check, and JSON.

What follows from a finding is in `findings.py`; how it was found, in the other files. This one only shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.axes.names import Check
from etude.preflight.findings import Finding, Verdict

STYLE = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.REFUSE: "bold red"}
WIDTH = 120  # characters, where the output is no terminal


def show(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print a line a check, the cures of what did not pass, and the probed prompt as each side reads it."""
    if console is None:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(highlight=False, width=WIDTH)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what was seen", overflow="fold")
    for finding in findings:
        seen = Text(finding.evidence)
        if finding.cure and finding.verdict is not Verdict.PASS:
            seen.append(f"\n-> {finding.cure}", style="dim")
        table.add_row(Text(finding.check), Text(finding.verdict, style=STYLE[finding.verdict]), seen)
    console.print(table)
    for line in prompt_lines(findings):
        console.print(Text(line), soft_wrap=True)


def prompt_lines(findings: Sequence[Finding]) -> list[str]:
    """The tokens of the probed prompt, one line if both sides read the same, otherwise one below the other.

    >>> figures = {"row": "a:1", "student": ["x"], "teacher": ["x"]}
    >>> prompt_lines([Finding("template", Verdict.PASS, "", figures=figures)])
    ['a:1, both: x']
    """
    found = (f.figures for f in findings if f.check == Check.TEMPLATE and "student" in f.figures)
    lines: list[str] = []
    for figures in found:
        ours, theirs = " ".join(figures["student"]), " ".join(figures["teacher"])
        row = figures["row"]
        lines += (
            [f"{row}, both: {ours}"] if ours == theirs else [f"{row}, student: {ours}", f"{row}, teacher: {theirs}"]
        )
    return lines
