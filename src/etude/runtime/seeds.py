"""Named random generators, all derived from one seed.

Every random number of a run is a function of (seed, purpose, stage, round, row) and of nothing else: not of the batch
around the row, the number of ranks, what was drawn before, or a resume. So no random state has to be saved. Generators
live on the CPU whatever the device, which makes the numbers the same on every machine.

    >>> key = Key(seed=0, purpose="sample", stage=0, round=7)
    >>> a, b = key.uniforms(row=3, count=2), key.uniforms(row=3, count=2)
    >>> bool((a == b).all())
    True
    >>> bool((a == key.uniforms(row=4, count=2)).any())
    False
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor


def derive(*parts: object) -> int:
    """A 63-bit seed from any printable parts; the same parts give the same seed on every machine and version."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Key:
    """Where in a run we are, as far as randomness is concerned."""

    seed: int  # the recipe's seed
    purpose: str  # "sample", "evaluate", "prompts", ...: one word for each use
    stage: int  # index of the stage
    round: int  # index of the round within the stage

    def generator(self, row: int) -> Generator:
        """A fresh torch generator for one global row."""
        import torch

        return torch.Generator("cpu").manual_seed(derive(self.seed, self.purpose, self.stage, self.round, row))

    def uniforms(self, row: int, count: int) -> Tensor:
        """[count] float64 in [0, 1): one number for each token the row may write."""
        import torch

        return torch.rand(count, generator=self.generator(row), dtype=torch.float64)
