"""The benchmark's plumbing: etude's side does the work asked on a tiny model, and two sides become one table."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from etude.testing import tiny_folder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

FAKE_SIDE = """
import json
step = {{"write": {seconds} / 2, "step": {seconds}}}
print("a line of somebody else's")
print(json.dumps({{"steps": [step], "peak_mib": 100, "written_tokens": {tokens}, "versions": "fake"}}))
"""


@pytest.fixture
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return {name: importlib.import_module(name) for name in ("work", "etude_step", "against_trl")}


def test_etudes_side_does_the_work_it_is_asked_for(
    benchmark_modules: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_folder(tmp_path / "model", window=128)
    monkeypatch.setattr(sys, "argv", ["etude_step.py", "--model", model, "--threads", "1", "--steps", "2"])
    benchmark_modules["etude_step"].main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["written_tokens"] == 8 * 64
    assert len(line["steps"]) == 2
    for step in line["steps"]:
        parts = sum(seconds for name, seconds in step.items() if name != "step")
        assert 0.0 < parts <= step["step"]


def fake_sides(folder: Path, *, tokens: int) -> Path:
    for side, seconds in (("etude", 2.0), ("trl", 8.0)):
        (folder / f"{side}_step.py").write_text(FAKE_SIDE.format(seconds=seconds, tokens=tokens), encoding="utf-8")
    return folder


def test_medians_ratio_and_parts_are_printed(
    benchmark_modules: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    against_trl = benchmark_modules["against_trl"]
    monkeypatch.setattr(against_trl, "HERE", fake_sides(tmp_path, tokens=512))
    argv = ["against_trl.py", "--trl-python", sys.executable, "--model", "m", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    against_trl.main()
    printed = capsys.readouterr().out
    order = [line.split()[2] for line in printed.splitlines() if line.startswith("round")]
    assert order == ["etude", "trl", "etude", "trl"]
    assert "seconds a step              2.00      8.00      0.25   rounds: 0.25, 0.25" in printed
    assert "peak memory, MiB             100       100      1.00" in printed
    assert printed.count("write") == printed.count("50%") == 2


def test_a_side_that_did_other_work_ends_the_comparison(
    benchmark_modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    against_trl = benchmark_modules["against_trl"]
    monkeypatch.setattr(against_trl, "HERE", fake_sides(tmp_path, tokens=511))
    monkeypatch.setattr(sys, "argv", ["against_trl.py", "--trl-python", sys.executable, "--model", "m"])
    with pytest.raises(SystemExit, match="etude wrote 511 tokens a step; the work is 512"):
        against_trl.main()
