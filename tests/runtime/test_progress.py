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
        "step   8/200  3:12 left  reverse_kl 0.812  length 15.2  1,234 tokens/s",
    ]


def test_held_out_values_stand_where_they_were_measured_and_a_step_once(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(100, stream)  # a line every 4 steps
    for step in range(1, 101):
        measured = step in (50, 100)
        progress.show(step, {"divergence/x": step}, more=measured)
        if measured:
            progress.show(step, {"heldout/accuracy": step / 100})
    lines = stream.getvalue().splitlines()
    steps = [int(line.split("/")[0].split()[1]) for line in lines]
    assert steps == sorted({*range(4, 101, 4), 50})
    assert [line.split("left")[-1].strip() for line in lines if "accuracy" in line] == [
        "x 50.000  accuracy 0.50",  # between the lines of steps 48 and 52
        "step 100/100  x 100.000  accuracy 1.00",
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
        progress.show(step, {"divergence/x": 1.0}, more=True)  # a step may have two lines of metrics
        progress.show(step, {"heldout/accuracy": 0.5})
    lines = stream.getvalue().splitlines()
    assert min(total, PLAIN_LINES // 2) <= len(lines) <= PLAIN_LINES + 4
    assert lines[-1] == f"step {total}/{total}  x 1.000  accuracy 0.50"


def test_in_a_terminal_one_line_is_redrawn_and_words_go_above_it() -> None:
    stream = Terminal()
    progress = Progress(3, stream)
    progress.say("going on after step 1 [in red]")
    progress.show(1, {"heldout/accuracy": 0.5})
    for step in (2, 3):
        progress.show(step, {"divergence/reverse_kl": 1.0 / step})
    progress.close()
    written = stream.getvalue()
    assert "going on after step 1 [in red]" in written
    assert "step 2/3" in written
    assert "reverse_kl 0.333" in written
    assert "accuracy 0.50 (of step 1)" in written
    assert written.count("\n") < 10


def test_standard_output_stays_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1)
    progress.show(1, {})
    progress.say("done")
    progress.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "step 1/1\ndone\n"
