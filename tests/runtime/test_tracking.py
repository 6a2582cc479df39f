from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etude.errors import CheckpointError, RecordError
from etude.runtime.tracking import METRICS, METRICS_FILE, Tracker, describe, read_metrics

DOCS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("etude.runtime.tracking.perf_counter", lambda: now[0])
    return now


def _quiet(folder: Path | None) -> Tracker:
    return Tracker(folder, console=False, total_steps=10)


def _record_steps(folder: Path, *steps: int) -> None:
    with _quiet(folder) as tracker:
        for step in steps:
            tracker.record(step, {"divergence/reverse_kl": step / 3})


def _steps(folder: Path) -> list[float]:
    return [line["step"] for line in read_metrics(folder / METRICS_FILE)]


class TestNames:
    @pytest.mark.parametrize(
        "name",
        ["divergence/my term", "tokens/scored", "tokens/reverse_kl", "time/sample_s", "time/step_s", "learning_rate"],
    )
    def test_known(self, name: str) -> None:
        assert describe(name)

    @pytest.mark.parametrize("name", ["loss", "divergence", "divergence/", "divergence/a/b", "time/sample", "step", ""])
    def test_a_name_without_a_row_is_refused(self, tmp_path: Path, name: str) -> None:
        with _quiet(tmp_path) as tracker, pytest.raises(RecordError, match=re.escape(f"metric '{name}' has no row")):
            tracker.record(1, {"divergence/reverse_kl": 1.0, name: 1.0})
        assert not (tmp_path / METRICS_FILE).exists()

    def test_an_exact_name_keeps_its_own_words(self) -> None:
        assert describe("tokens/scored") == METRICS["tokens/scored"]

    def test_the_docs_have_the_same_table(self) -> None:
        rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", DOCS_PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert dict(rows) == {name: text.replace("||", "&#124;&#124;") for name, text in METRICS.items()}


class TestRecord:
    def test_one_strict_line_a_step_flushed_at_once(self, tmp_path: Path) -> None:
        with _quiet(tmp_path / "run") as tracker:
            for step, value in enumerate([0.1, math.nan, math.inf, -math.inf, torch.tensor(2.0)]):
                tracker.record(step, {"gradient/norm": value})
                text = (tmp_path / "run" / METRICS_FILE).read_text()
                assert text.count("\n") == step + 1
        assert [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()] == [
            {"step": 0, "gradient/norm": 0.1},
            {"step": 1, "gradient/norm": "NaN"},
            {"step": 2, "gradient/norm": "Infinity"},
            {"step": 3, "gradient/norm": "-Infinity"},
            {"step": 4, "gradient/norm": 2.0},
        ]
        values = [line["gradient/norm"] for line in read_metrics(tmp_path / "run" / METRICS_FILE)]
        assert values[0] == 0.1
        assert math.isnan(values[1])
        assert values[2:] == [math.inf, -math.inf, 2.0]

    def test_lines_survive_a_kill(self, tmp_path: Path) -> None:
        script = (
            "import os; from pathlib import Path; from etude.runtime.tracking import Tracker; "
            f"tracker = Tracker(Path({str(tmp_path)!r}), console=False, total_steps=2); "
            "tracker.record(1, {'learning_rate': 0.5}); os.kill(os.getpid(), 9)"
        )
        assert subprocess.run([sys.executable, "-c", script]).returncode == -9
        assert read_metrics(tmp_path / METRICS_FILE) == [{"step": 1, "learning_rate": 0.5}]

    def test_without_a_folder_nothing_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with _quiet(None) as tracker:
            tracker.truncate_after(0)
            tracker.record(1, {"learning_rate": 0.5})
        assert os.listdir(tmp_path) == []

    def test_quiet_says_nothing_and_the_console_does(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for console in (False, True):
            with Tracker(tmp_path, console=console, total_steps=1) as tracker:
                tracker.say("hello")
                tracker.record(1, {"divergence/reverse_kl": 0.5})
            expected = "hello\nstep 1/1  reverse_kl 0.500\n" if console else ""
            assert capsys.readouterr() == ("", expected)


class TestSpans:
    def test_are_summed_and_belong_to_the_next_line(self, tmp_path: Path, clock: list[float]) -> None:
        with _quiet(tmp_path) as tracker:
            for name, seconds in (("sample", 2.0), ("score", 1.0), ("sample", 0.5)):
                with tracker.span(name):
                    clock[0] += seconds
            clock[0] += 0.25  # outside every span
            tracker.record(1, {"tokens/scored": 30.0})
            with tracker.span("evaluate"):
                clock[0] += 7.0
            tracker.record(1, {"heldout/accuracy": 0.5})
            clock[0] += 2.0
            tracker.record(2, {"tokens/scored": 10.0})
        assert read_metrics(tmp_path / METRICS_FILE) == [
            {"step": 1, "tokens/scored": 30.0, "time/sample_s": 2.5, "time/score_s": 1.0}
            | {"time/step_s": 3.75, "tokens/per_second": 8.0},
            {"step": 1, "heldout/accuracy": 0.5, "time/evaluate_s": 7.0},
            {"step": 2, "tokens/scored": 10.0, "time/step_s": 2.0, "tokens/per_second": 5.0},
        ]

    def test_time_is_counted_when_the_part_fails(self, tmp_path: Path, clock: list[float]) -> None:
        def fail() -> None:
            clock[0] += 3.0
            raise OSError

        with _quiet(tmp_path) as tracker:
            with pytest.raises(OSError), tracker.span("sample"):
                fail()
            with tracker.span("sample"):
                clock[0] += 1.0
            tracker.record(1, {})
        assert read_metrics(tmp_path / METRICS_FILE) == [{"step": 1, "time/sample_s": 4.0}]

    def test_one_inside_another_is_refused(self) -> None:
        inside = pytest.raises(RecordError, match="span 'save' inside span 'learn'")
        with _quiet(None) as tracker, tracker.span("learn"), inside, tracker.span("save"):
            pass


class TestResume:
    def test_what_comes_after_the_restored_step_is_dropped(self, tmp_path: Path) -> None:
        _record_steps(tmp_path, 0, 1, 2, 2, 3, 4)
        before = (tmp_path / METRICS_FILE).read_text().splitlines()
        with _quiet(tmp_path) as tracker:
            tracker.truncate_after(2)
            tracker.record(3, {"learning_rate": 1.0})
        after = (tmp_path / METRICS_FILE).read_text().splitlines()
        assert after == [*before[:4], '{"step": 3, "learning_rate": 1.0}']
        assert os.listdir(tmp_path) == [METRICS_FILE]

    def test_a_fresh_start_drops_all(self, tmp_path: Path) -> None:
        _record_steps(tmp_path, 0, 1)
        with _quiet(tmp_path) as tracker:
            tracker.truncate_after(-1)
        assert _steps(tmp_path) == []

    def test_nothing_recorded_yet(self, tmp_path: Path) -> None:
        with _quiet(tmp_path) as tracker:
            tracker.truncate_after(5)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("torn", ['{"step": 3, "learni', '{"step": 3}', "{"])
    def test_a_line_cut_off_by_a_kill_is_dropped(self, tmp_path: Path, torn: str) -> None:
        _record_steps(tmp_path, 1, 2)
        with (tmp_path / METRICS_FILE).open("a") as file:
            file.write(torn)
        assert _steps(tmp_path) == [1, 2]
        with _quiet(tmp_path) as tracker:
            tracker.truncate_after(3)
            tracker.record(3, {"learning_rate": 1.0})
        assert _steps(tmp_path) == [1, 2, 3]

    @pytest.mark.parametrize("line", ["not json", "[1]", '{"learning_rate": 1.0}', '{"step": "1"}', ""])
    def test_a_damaged_line_is_named(self, tmp_path: Path, line: str) -> None:
        _record_steps(tmp_path, 1)
        with (tmp_path / METRICS_FILE).open("a") as file:
            file.write(f'{line}\n{{"step": 2}}\n')
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2 is not a line of metrics"):
            read_metrics(tmp_path / METRICS_FILE)
        with _quiet(tmp_path) as tracker, pytest.raises(CheckpointError, match=r"metrics\.jsonl:2"):
            tracker.truncate_after(1)
