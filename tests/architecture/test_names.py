"""Files have a home and a name that says what is in them; the public door is a list; nothing depends on one machine."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

import etude

REPOSITORY = Path(__file__).parents[2]
SOURCE, TESTS = REPOSITORY / "src" / "etude", REPOSITORY / "tests"

NAMELESS = {"common", "helper", "helpers", "misc", "tool", "tools", "util", "utils"}
PUBLIC = [
    "METHODS",
    "EtudeError",
    "Objective",
    "Prompt",
    "Recipe",
    "Rollout",
    "RunError",
    "Summary",
    "Term",
    "UsageError",
    "__version__",
    "dump_toml",
    "load_recipe",
    "train",
]
# For src/etude/__init__.py, the recipe files, a whole recipe gone wrong at the command line, and pairs gone wrong.
BESIDE_A_FILE = {"test_etude.py", "recipes/test_shipped.py", "recipes/test_bad_input.py", "preflight/test_gallery.py"}
WRITTEN_BY_PEOPLE = {".cfg", ".ini", ".ipynb", ".json", ".jsonl", ".md", ".py", ".toml", ".txt", ".yaml", ".yml", ""}
# A folder of somebody's machine; \W before the slash leaves addresses and longer paths alone.
MACHINE_PATH = re.compile(r"(?<![\w.~})/])/(?:work|root|home|tmp|Users|mnt)/")


def _repository_files() -> list[Path]:
    """Everything that belongs to the repository, whatever lies around in hidden and built folders."""
    tops = [path for path in REPOSITORY.iterdir() if path.name not in ("runs", "build", "dist", ".git")]
    folders = [path for path in tops if path.is_dir() and (path.name == ".ci" or not path.name.startswith("."))]
    inside = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    files = [path for path in [*tops, *inside] if path.is_file() and ".egg-info" not in str(path)]
    return sorted(files)


def test_no_file_is_called_by_what_it_is_not() -> None:
    assert [path for path in _repository_files() if path.stem.lower().strip("_") in NAMELESS] == []


def test_tests_mirror_the_source() -> None:
    """`tests/core/test_linear.py` is for `src/etude/core/linear.py`; folders the source lacks are free."""
    homeless = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("test_*.py")
        if (SOURCE / path.relative_to(TESTS).parent / "__init__.py").exists()
        and not (SOURCE / path.relative_to(TESTS).with_name(path.name.removeprefix("test_"))).exists()
    }
    assert homeless <= BESIDE_A_FILE


def test_the_public_door_is_this_list() -> None:
    """Adding a name is a promise: it is made here too."""
    assert etude.__all__ == PUBLIC


def test_every_package_and_module_says_what_it_is_for() -> None:
    modules = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    silent = [path.name for path in modules if not path.read_text(encoding="utf-8").startswith(('"""', 'r"""'))]
    assert silent == []


def test_the_version_is_the_distributions() -> None:
    assert importlib.metadata.version("etude") == etude.__version__


def test_no_file_names_a_folder_of_one_machine() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in _repository_files()
        if path.suffix in WRITTEN_BY_PEOPLE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("path", ["/" + "tmp/a", "'/" + "home/me'", "cd /" + "root/x"])
def test_such_a_folder_is_recognised(path: str) -> None:
    assert MACHINE_PATH.search(path)
    assert not MACHINE_PATH.search("https://example.org/home/me ../work/ runs/tmp/a")
