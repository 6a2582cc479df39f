"""The floors of the house and the independence of roles: the contracts in pyproject.toml, held here too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_every_contract_is_kept() -> None:
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "4 kept, 0 broken" in done.stdout
