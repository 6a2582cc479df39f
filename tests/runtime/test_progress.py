from __future__ import annotations

import io

import pytest

from etude.runtime.progress import PLAIN_LINES, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("etude.runtime.progress.monotonic", lambda: now[0])
    return now


def test_a_plain_line_says_where_the_run_is_and_how_it_goes(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(200, stream)
    clock[0] += 500  # loading and evaluating say nothing about the pace
    progress.show(0, {"heldout/reverse_kl": 1.3472, "heldout/accuracy": 0.45})
    clock[0] += 8
    progress.show(8, {"divergence/reverse_kl": 0.81249, "rollout/length": 15.21, "tokens/per_second": 1234.4})
    assert stream.getvalue().splitlines() == [
        "step   0/200  held-out 1.347  accuracy 0.45",
        "step   8/200  3:12 left  reverse_kl 0.812  held-out 1.347  accuracy 0.45  length 15.2  1,234 tokens/s",
    ]


def test_a_resumed_run_is_timed_from_where_it_goes_on(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(50, stream)
    clock[0] += 1000
    progress.begin(40)
    clock[0] += 3
    progress.show(42, {})
    assert stream.getvalue() == "step 42/50  0:12 left\n"


@pytest.mark.parametrize("total", [1, 7, 25, 26, 40, 150, 1000])
def test_plain_lines_are_few_and_the_last_is_among_them(total: int) -> None:
    stream = io.StringIO()
    progress = Progress(total, stream)
    for step in range(total + 1):
        for metrics in ({"divergence/x": 1.0}, {"heldout/accuracy": 0.5}):  # a step may have two lines of metrics
            progress.show(step, metrics)
    lines = stream.getvalue().splitlines()
    assert min(total, PLAIN_LINES // 2) <= len(lines) <= PLAIN_LINES + 4
    assert lines[-1] == f"step {total}/{total}  x 1.000  accuracy 0.50"


def test_in_a_terminal_one_line_is_redrawn_and_words_go_above_it() -> None:
    stream = Terminal()
    progress = Progress(3, stream)
    progress.say("going on after step 1 [in red]")
    for step in (2, 3):
        progress.show(step, {"divergence/reverse_kl": 1.0 / step})
    progress.close()
    written = stream.getvalue()
    assert "going on after step 1 [in red]" in written
    assert "step 2/3" in written
    assert "reverse_kl 0.333" in written
    assert written.count("\n") < 10


def test_standard_output_stays_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1)
    progress.show(1, {})
    progress.say("done")
    progress.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "step 1/1\ndone\n"
