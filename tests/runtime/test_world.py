from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from etude.errors import UsageError
from etude.runtime.world import World

LAUNCH_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

TWO_RANKS = """
import json, sys, torch
from etude.runtime.world import World

world = World.current()
torch.manual_seed(world.rank)  # each rank begins with other weights: wrap has to make them equal
layer = torch.nn.Linear(2, 1, bias=False)
wrapped = world.wrap(layer)
wrapped(torch.tensor([[1.0, 2.0]]) * (1 + 2 * world.rank)).sum().backward()
counts = torch.tensor([1.0, 10.0 * world.rank], dtype=torch.float64)
world.barrier()
answer = {
    "rank": world.rank,
    "is_main": world.is_main,
    "sum": world.sum(counts).tolist(),
    "counts": counts.tolist(),
    "gathered": world.gather_objects([{"rank": world.rank, "text": "é" * 50 * world.rank}] * (1 + world.rank)),
    "nothing": world.gather_objects([]),
    "values": world.gather(torch.arange(3.0 * world.rank)).tolist(),
    "no values": world.gather(torch.zeros(0)).tolist(),
    "broadcast": world.broadcast_object({"said by": world.rank}),
    "gradient": layer.weight.grad.tolist(),
    "weight": layer.weight.tolist(),
}
world.close()
world.close()
print(json.dumps(answer))
"""


def _without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _run_ranks(script: str, size: int) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": _loopback()},
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size
    return [json.loads(output) for output in outputs]


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def test_two_processes_on_loopback() -> None:
    first, second = _run_ranks(TWO_RANKS, size=2)
    assert (first["rank"], first["is_main"], second["rank"], second["is_main"]) == (0, True, 1, False)
    for answer in (first, second):
        assert answer["sum"] == [2.0, 10.0]
        assert answer["gathered"] == [{"rank": 0, "text": ""}] + [{"rank": 1, "text": "é" * 50}] * 2
        assert answer["nothing"] == []
        assert answer["values"] == [0.0, 1.0, 2.0]
        assert answer["no values"] == []
        assert answer["broadcast"] == {"said by": 0}
        assert answer["gradient"] == [[2.0, 4.0]]  # the mean of (1, 2) and (3, 6)
        assert answer["weight"] == first["weight"]
    assert first["counts"] == [1.0, 0.0]
    assert second["counts"] == [1.0, 10.0]


def test_alone_every_method_is_trivial(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_launcher(monkeypatch)
    world, module, tensor = World.current(), nn.Linear(1, 1), torch.ones(2)
    assert world == World(rank=0, size=1, local_rank=0)
    assert world.is_main
    assert world.wrap(module) is module
    assert world.sum(tensor) is tensor
    assert world.gather(tensor) is tensor
    assert world.gather_objects([1, "two"]) == [1, "two"]
    assert world.broadcast_object({"three": 4}) == {"three": 4}
    world.barrier()
    world.close()


def test_alone_objects_are_held_to_the_same_rule_as_among_many() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        World().gather_objects([object()])


def test_alone_nothing_heavy_is_imported() -> None:
    script = (
        "import sys; from etude.runtime.world import World; world = World.current(); world.barrier(); world.close(); "
        "assert world.gather_objects([1]) == [1]; assert 'torch' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=Path.cwd())


def test_current_reads_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCH_VARIABLES, ("8", "5", "1", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert World.current() == World(rank=5, size=8, local_rank=1)


def test_half_a_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_launcher(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set.*torchrun"):
        World.current()
