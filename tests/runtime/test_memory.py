"""Whether freed memory comes back without the system's help, in a process of its own."""

import subprocess
import sys

import pytest

from etude.runtime.memory import keep_freed_memory

SCRIPT = """
import resource, sys
from etude.runtime.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
import torch
def faults():
    for _ in range(10):
        torch.empty(64 * 2**20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
faults()
before = faults()
print(faults() - before)
"""


def page_faults(mode: str) -> int:
    result = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_a_block_freed_and_asked_for_again_is_not_cleared_again() -> None:
    """Ten blocks of 64 MiB are 160,000 pages of 4 KiB, or 320 of 2 MiB."""
    given_back, kept = page_faults("give back"), page_faults("keep")
    assert given_back > 300
    assert kept < 10


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert keep_freed_memory() is False
