"""One file for each outside engine. Adding an engine adds a file, and a line here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "etude"

ENGINES = {
    "accelerate": "runtime/world.py",
    "bitsandbytes": "models/quantised.py",
    "datasets": "data/examples.py",
    "httpx": "runtime/http.py",
    "matplotlib": "data/maze_picture.py",
    "peft": "models/lora.py",
    "reasoning_gym": "data/tasks.py",
    "torch.distributed": "runtime/world.py",
    "torchao": "models/quantised.py",
    "vllm": "models/vllm.py",
}


def imported(source: str) -> Iterator[str]:
    """Dotted names a module imports or reaches by attributes, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_is_known_to_one_file(engine: str) -> None:
    importers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(f"{name}.".startswith(f"{engine}.") for name in imported(path.read_text(encoding="utf-8")))
    }
    assert importers <= {ENGINES[engine]}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "def f():\n    import torch.distributed.fsdp",
        "import torch\ntorch.distributed.barrier()",
    ],
)
def test_every_way_in_is_seen(source: str) -> None:
    assert any(f"{name}.".startswith("torch.distributed.") for name in imported(source))
