"""Help, recipes and their checking answer at once: nothing on their way imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
LIGHT_FOLDERS = ("etude/axes", "etude/cli", "etude/config")
HEAVY = {"torch", "transformers", "datasets", "numpy", "peft"}


def _light_modules() -> list[str]:
    paths = [path for folder in LIGHT_FOLDERS for path in (SOURCE / folder).glob("*.py") if path.stem != "__init__"]
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in sorted(paths)]
    return ["etude", "etude.errors", "etude.runtime.seeds", "etude.runtime.world", *names]


def _run(script: str) -> dict:
    """Run a script in a fresh interpreter; what is heavy in it, and the CPU seconds it took from the start."""
    report = (
        "\nimport json, sys, time\nprint(json.dumps({'loaded': list(sys.modules), 'seconds': time.process_time()}))"
    )
    done = subprocess.run([sys.executable, "-c", script + report], check=True, capture_output=True, text=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return {"heavy": HEAVY.intersection(answer["loaded"]), "seconds": answer["seconds"], "output": done.stdout}


@pytest.mark.parametrize("module", _light_modules())
def test_importing_is_light(module: str) -> None:
    assert _run(f"import {module}")["heavy"] == set()


@pytest.mark.parametrize("arguments", [["--help"], ["methods"], ["show", "maze"], ["check", "maze", "--config-only"]])
def test_the_command_answers_within_half_a_second(arguments: list[str]) -> None:
    script = f"""
import sys
from etude.cli.main import main
sys.argv = ["etude", *{arguments!r}]
try:
    status = main()
except SystemExit as leaving:
    status = leaving.code
assert not status, status
"""
    runs = [_run(script) for _ in range(3)]
    assert runs[0]["heavy"] == set()
    assert len(runs[0]["output"].splitlines()) > 1
    assert min(run["seconds"] for run in runs) < 0.5  # of CPU: a busy machine is not our doing
