from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from etude.data.examples import Example
from etude.data.tasks import exact, last_number, load_task, load_verifier, number
from etude.errors import DataError, ExtraMissing


def of_answers(*answers: Any) -> list[Example]:
    return [Example("p", None, a, {"answer": a}, f"f.jsonl:{n}") for n, a in enumerate(answers, start=1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("He has 3 and then 12.", 12.0),
        ("Janet makes 9 * 2 = $<<9*2=18>>18 a day.\n#### 18", 18.0),
        ("It costs $1,234.50!", 1234.5),
        ("-5", -5.0),
        ("the result is -5.", -5.0),
        ("-$5", -5.0),
        ("12-5", 5.0),
        ("(3) - 4", 4.0),
        ("x=-4", -4.0),
        ("1, 2, 3", 3.0),
        ("\\boxed{42}", 42.0),
        ("1,000,000", 1_000_000.0),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, expected: float | None) -> None:
    assert last_number(text) == expected


def test_named_verifiers() -> None:
    gsm8k = {"answer": "She eats 3 of 45. #### 42"}
    assert number(gsm8k, "First 45, less 3, so the answer is 42.0") == 1.0
    assert number(gsm8k, "The answer is 43") == 0.0
    assert number(gsm8k, "I do not know.") == 0.0
    assert exact({"answer": "Paris"}, "Paris\n") == 1.0
    assert exact({"answer": "Paris"}, "It is Paris") == 0.0
    assert load_verifier("exact", of_answers("a")) is exact
    assert load_verifier("number", of_answers("#### 4", 5)) is number


def test_a_verifier_needs_answers_it_can_compare_with() -> None:
    with pytest.raises(DataError, match=r"f\.jsonl:2: no answer, which data\.verifier = 'exact' needs in each row"):
        load_verifier("exact", of_answers("a", None))
    with pytest.raises(
        DataError, match=r"f\.jsonl:2: the answer holds no number, which data\.verifier = 'number' needs"
    ):
        load_verifier("number", of_answers("4", "four"))
    with pytest.raises(DataError, match=r"data\.verifier names 'fuzzy', which is unknown; expected exact, number or"):
        load_verifier("fuzzy", of_answers("a"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("my_tasks")
    monkeypatch.setitem(sys.modules, "my_tasks", made)
    return made


def verify_sum(fields: Mapping[str, Any], text: str) -> float:
    return float(text == fields["answer"])


def test_a_users_own_task(module: ModuleType) -> None:
    def sums(count: int, seed: int) -> tuple[list[dict[str, str]], Any]:
        return [{"prompt": f"{seed} + {n}?", "answer": str(seed + n)} for n in range(count)], verify_sum

    module.sums = sums  # type: ignore[attr-defined]
    task = load_task("my_tasks:sums", count=3, seed=5)
    assert [example.prompt for example in task.examples] == ["5 + 0?", "5 + 1?", "5 + 2?"]
    assert [task.verify(example.fields, "6") for example in task.examples] == [0.0, 1.0, 0.0]
    assert task.examples[2].where == "my_tasks:sums question 2"


def test_the_maze_is_a_task_by_name() -> None:
    task = load_task("maze", count=5, seed=1)
    assert task.examples == load_task("maze", count=5, seed=1).examples != load_task("maze", count=5, seed=2).examples
    for example in task.examples:
        assert task.verify(example.fields, "") == 0.0


def test_a_users_own_verifier(module: ModuleType) -> None:
    module.judge = verify_sum  # type: ignore[attr-defined]
    assert load_verifier("my_tasks:judge", of_answers("a")) is verify_sum


def test_a_task_that_is_none_is_refused(module: ModuleType) -> None:
    module.short = lambda count, seed: ([{"prompt": "one"}], verify_sum)  # type: ignore[attr-defined]
    module.rows = lambda count, seed: [{"prompt": "one"}]  # type: ignore[attr-defined]
    module.blank = lambda count, seed: ([{"prompt": ""}], verify_sum)  # type: ignore[attr-defined]
    module.word = "no function"  # type: ignore[attr-defined]
    for name, reason in {
        "my_tasks:short": "made 1 questions of the 2 asked for",
        "my_tasks:rows": "returned a list; expected the pair",
        "my_tasks:blank": "question 0: 'prompt' is an empty text",
        "my_tasks:word": "is a str; expected a function",
        "my_tasks:absent": "cannot be imported .* its folder must be on the Python path",
        "no_such_module:sums": "cannot be imported",
        "mase": "names 'mase', which is unknown; expected maze, reasoning_gym:NAME or package.module:function",
    }.items():
        with pytest.raises(DataError, match=reason):
            load_task(name, count=2, seed=0)


class TestReasoningGym:
    """The package's own questions and scorers."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("reasoning_gym", reason="extra 'tasks' is not installed")

    def test_the_seed_decides(self) -> None:
        first, again, other = (load_task("reasoning_gym:leg_counting", count=4, seed=s) for s in (3, 3, 4))
        assert first.examples == again.examples
        assert first.examples != other.examples
        assert all(isinstance(example.prompt, str) and "legs" in example.prompt for example in first.examples)

    def test_its_own_scorer_judges(self) -> None:
        task = load_task("reasoning_gym:leg_counting", count=3, seed=0)
        for example in task.examples:
            assert task.verify(example.fields, f" {example.answer}\n") == 1.0
            assert task.verify(example.fields, f"I count them. <answer>{example.answer}</answer>") == 1.0
            assert task.verify(example.fields, "no idea") == 0.0

    def test_an_unknown_name_gets_the_nearest(self) -> None:
        with pytest.raises(DataError, match="no task 'leg_countin'; it has leg_counting"):
            load_task("reasoning_gym:leg_countin", count=1, seed=0)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ExtraMissing, match=r"'reasoning_gym:gcd' needs .*pip install 'etude\[tasks\]'"):
        load_task("reasoning_gym:gcd", count=1, seed=0)
