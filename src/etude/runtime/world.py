"""The processes that work together on one run: how many, which one this is, and what they tell each other.

`torchrun` and `accelerate launch` describe the world in environment variables; without them it is this process alone,
and then every method is trivial and `torch.distributed` is never imported. The process group starts with the first
word exchanged, gloo between CPUs, NCCL between CUDA tensors, and lasts until the process ends: a launcher's meeting
place serves one. Knows no model and no batch; the only importer of `torch.distributed`.

    >>> world = World()
    >>> world.is_main, world.gather_objects([{"row": 0}])
    (True, [{'row': 0}])
"""

from __future__ import annotations

import atexit
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class World:
    """One process's view of all of them. Every rank must make the same calls in the same order."""

    rank: int = 0  # this process, 0 <= rank < size
    size: int = 1  # processes in all, over all machines
    local_rank: int = 0  # this process on its own machine: the index of its GPU

    @classmethod
    def current(cls) -> World:
        """The world this process was launched into. Raises `UsageError` where its description is incomplete."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UsageError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']} in the environment but {', '.join(missing)} is not set; "
                "start several processes with `torchrun` or `accelerate launch`, or unset WORLD_SIZE"
            )
        return cls(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes files and speaks to the person."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; `tensor` itself is left as it is."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        self._distributed().all_reduce(total)
        return total

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self._distributed().barrier()

    def gather(self, values_N: Tensor) -> Tensor:
        """The entries of all ranks' one-dimensional tensors (on the CPU, of one dtype), in the order of ranks."""
        if self.size == 1:
            return values_N
        import torch

        return torch.cat(self._all_gather(values_N))

    def gather_objects(self, objects: list[Any]) -> list[Any]:
        """All ranks' lists, one after the other in the order of ranks, on every rank.

        Objects are JSON values, whatever the size of the world: nothing that arrives over a socket is unpickled.
        """
        return [value for part in self._all_texts(json.dumps(objects)) for value in json.loads(part)]

    def broadcast_object(self, value: Any) -> Any:
        """The main process's `value` (a JSON value) on every rank; the others' is ignored."""
        return json.loads(self._all_texts(json.dumps(value if self.is_main else None))[0])

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose backward averages gradients over ranks: DDP, or the module itself in a world of one.

        Weights are made equal to the main process's at this moment. The average is corrected to a sum in one place,
        core/reduction.py.
        """
        if self.size == 1:
            return module
        self._distributed()
        from torch.nn.parallel import DistributedDataParallel

        device = next(module.parameters()).device
        return DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # one copy of the gradients, not two
        )

    def close(self) -> None:
        """Take leave of the others; harmless where nothing was started."""
        if self.size > 1 and self._torch_distributed().is_initialized():
            self._torch_distributed().destroy_process_group()

    def _all_texts(self, text: str) -> list[str]:
        """Every rank's text, in the order of ranks."""
        if self.size == 1:
            return [text]
        import torch

        payload = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return [part.numpy().tobytes().decode() for part in self._all_gather(payload)]

    def _all_gather(self, values_N: Tensor) -> list[Tensor]:
        """Every rank's values, in the order of ranks: lengths first, then values padded to the longest."""
        import torch

        distributed = self._distributed()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        distributed.all_gather(lengths, torch.tensor([values_N.numel()]))
        longest = max(int(length) for length in lengths)
        parts = [values_N.new_zeros(longest) for _ in range(self.size)]
        if longest > 0:
            distributed.all_gather(parts, torch.cat([values_N, values_N.new_zeros(longest - values_N.numel())]))
        return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def _distributed(self) -> ModuleType:
        """`torch.distributed` with its process group running."""
        distributed = self._torch_distributed()
        if not distributed.is_initialized():
            import torch

            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            distributed.init_process_group(backend, rank=self.rank, world_size=self.size)
            atexit.register(self.close)
        return distributed

    @staticmethod
    def _torch_distributed() -> ModuleType:
        from torch import distributed

        return distributed
