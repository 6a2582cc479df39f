from __future__ import annotations

import io

from rich.console import Console

from etude.preflight.findings import Finding, passed, refused
from etude.preflight.table import prompt_lines, show


def shown(*findings: Finding) -> str:
    console = Console(file=io.StringIO(), width=100)
    show(findings, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_line_a_check_and_cures_where_there_is_something_to_cure() -> None:
    text = shown(passed("bos", "one [bold]", count=1), refused("template", "they differ", "change it"))
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["bos", "pass", "one", "[bold]"],
        ["template", "refuse", "they", "differ"],
        ["->", "change", "it"],
    ]


def test_both_renderings_of_a_prompt() -> None:
    figures = {"row": "a:1", "student": ["<s>", "hi"], "teacher": ["hi"]}
    found = refused("template", "", "", **figures)
    assert prompt_lines([passed("bos", ""), found]) == ["a:1, student: <s> hi", "a:1, teacher: hi"]
    assert shown(found).endswith("a:1, student: <s> hi\na:1, teacher: hi\n")
