"""What a process takes, seen from within: a block is seen while it is there, and its peak is forgotten when asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from etude.runtime import resident

BLOCK = 128 * 2**20

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is forgotten on Linux only")


@linux
def test_a_peak_is_of_what_came_since() -> None:
    if not resident.restart_peak():
        pytest.skip("this system does not let a process forget its peak")
    before = resident.resident_bytes()
    block = bytes(range(256)) * (BLOCK // 256)
    assert 0.9 * BLOCK < resident.peak_bytes() - before < 1.5 * BLOCK
    del block
    assert resident.peak_bytes() - before > 0.9 * BLOCK
    resident.restart_peak()
    assert resident.peak_bytes() - before < 0.5 * BLOCK


def test_there_is_room_for_what_is_there() -> None:
    assert 0 < resident.resident_bytes() <= resident.room_bytes()


def test_a_containers_limit_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the process has, and what its container has left of 10 MB."""
    most, taken = tmp_path / "most", tmp_path / "taken"
    most.write_text("10000000\n", encoding="ascii")
    taken.write_text("9000000\n", encoding="ascii")
    monkeypatch.setattr(resident, "_LIMITS", ((most, taken),))
    monkeypatch.setattr(resident, "resident_bytes", lambda: 500_000)
    assert resident.room_bytes() == 1_500_000
    most.write_text("max\n", encoding="ascii")
    assert resident.room_bytes() > 10_000_000


def test_without_proc_the_peak_of_the_whole_process_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resident, "_SELF", tmp_path / "nothing")
    assert resident.restart_peak() is False
    assert resident.peak_bytes() == resident.resident_bytes() > 10**6
