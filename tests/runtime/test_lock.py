from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from etude.errors import RecipeError
from etude.runtime.lock import LOCK_FILE, locked, locked_in_turn

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is held there")


def test_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with locked(folder):
        with pytest.raises(RecipeError, match=f"another process is training in {folder}; wait"), locked(folder):
            pytest.fail("held twice")
        (folder / "recipe.toml").touch()
    with locked(folder):
        pass
    assert [path.name for path in folder.iterdir()] == ["recipe.toml"]


@pytest.mark.parametrize("made_before", [False, True])
def test_a_folder_in_which_nothing_came_about_is_as_before(tmp_path: Path, made_before: bool) -> None:
    folder = tmp_path / "run"
    if made_before:
        folder.mkdir()
    with pytest.raises(ZeroDivisionError), locked(folder):
        raise ZeroDivisionError
    assert folder.exists() == made_before


def test_a_killed_holder_holds_no_longer(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from etude.runtime.lock import locked\n"
        "with locked(Path(sys.argv[1])): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == 9
    assert (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path):
        pass


def test_a_file_system_without_locks_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path), locked(tmp_path):
        pass


def test_in_turn_everybody_comes_in(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            with locked_in_turn(tmp_path, timeout_s=60):
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20


def test_a_turn_that_does_not_come(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(RecipeError, match=r"another process has been writing in .* for 0 s; wait for it, or name"),
        locked_in_turn(tmp_path, timeout_s=0),
    ):
        pass
