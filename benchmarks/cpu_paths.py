"""What etude's faster ways through a CPU bring, each beside the plain one, on the shapes of SmolLM2-135M.

No model is needed: weights are random numbers of the right sizes. Sides take turns, medians are printed, and it judges
nothing. docs/performance.md quotes it.

    make bench-cpu
    python benchmarks/cpu_paths.py --threads 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from etude.models.cpu_attention import attention
from etude.models.cpu_packing import packed_product

LAYERS, VOCABULARY, WIDTH, INNER, HEADS, KEY_HEADS, SIZE, ROWS = 30, 49_152, 576, 1536, 9, 3, 64, 8
LAYER = ((WIDTH, WIDTH), (192, WIDTH), (192, WIDTH), (WIDTH, WIDTH), (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))

# Blocks of the size of a step's largest tensors (logits, gradient of the head), freed and asked for again.
FREED = """
import sys, time, torch
from etude.runtime.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
seconds = []
for _ in range(6):
    start = time.perf_counter()
    for _ in range(6):
        torch.empty(100 * 2**20, dtype=torch.uint8).fill_(1)
    seconds.append(time.perf_counter() - start)
print(sorted(seconds)[2])
"""


def milliseconds(sides: dict[str, Callable[[], object]], rounds: int = 9) -> dict[str, float]:
    """Median of each side, which take turns after one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, work in sides.items():
            start = time.perf_counter()
            work()
            if number:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def show(title: str, found: dict[str, float], note: str = "") -> None:
    (plain, before), (ours, after) = found.items()
    print(f"{title:<46}{plain} {before:>7.1f} ms   {ours} {after:>7.1f} ms{after / before:>7.2f}   {note}", flush=True)


@torch.no_grad()
def products() -> None:
    """One token of 8 rows through all linear layers, and through the head."""
    generator = torch.Generator().manual_seed(0)
    for title, shapes in (
        ("products of the layers, a token", LAYER * LAYERS),
        ("head, a token", ((VOCABULARY, WIDTH),)),
    ):
        weights = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        inputs = {width: torch.randn(ROWS, width, generator=generator).bfloat16() for width in (WIDTH, INNER)}
        start = time.perf_counter()
        packed = [packed_product(weight, None, torch.bfloat16) or functional.linear for weight in weights]
        seconds = time.perf_counter() - start

        def plainly(weights: list[Tensor] = weights, inputs: dict[int, Tensor] = inputs) -> list[Tensor]:
            return [functional.linear(inputs[weight.shape[1]], weight) for weight in weights]

        def by_packing(
            weights: list[Tensor] = weights, inputs: dict[int, Tensor] = inputs, packed: list[Any] = packed
        ) -> list[Tensor]:
            return [product(inputs[weight.shape[1]]) for product, weight in zip(packed, weights, strict=True)]

        same = all(a.equal(b) for a, b in zip(plainly(), by_packing(), strict=True))
        note = f"packing {seconds * 1e3:.0f} ms; the bits are {'the same' if same else 'not the same'}"
        show(title, milliseconds({"plain": plainly, "packed": by_packing}), note)


def attentions() -> None:
    """Forward and backward of one layer in bfloat16, causal."""
    layer: Any = nn.Module()
    layer.num_key_value_groups = HEADS // KEY_HEADS
    for rows, length in ((8, 96), (4, 160)):
        tensors = [torch.randn(rows, heads, length, SIZE).bfloat16() for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        leaves = [tensor.requires_grad_() for tensor in tensors]

        def run(function: Callable[..., Any], leaves: list[Tensor] = leaves) -> None:
            function(layer, *leaves, None)[0].sum().backward()

        sides = {"kernel": lambda: run(sdpa_attention_forward), "products": lambda: run(attention)}
        show(f"attention of a layer, {rows} rows of {length}", milliseconds(sides))


def optimisers() -> None:
    """One AdamW step over all weights."""
    shapes = ((VOCABULARY, WIDTH), *(LAYER * LAYERS))
    sides: dict[str, Callable[[], object]] = {}
    for name, fused in (("loop", False), ("fused", True)):
        weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        sides[name] = torch.optim.AdamW(weights, fused=fused).step
    show("AdamW step", milliseconds(sides, rounds=5))


def freed_memory() -> None:
    """600 MiB asked for, written and freed, in a process of its own for each side."""
    found: dict[str, float] = {}
    for mode in ("given back", "kept"):
        command = [sys.executable, "-c", FREED, mode]
        found[mode] = 1e3 * float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    show("600 MiB freed and asked for again", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads")
    for part in (products, attentions, optimisers, freed_memory):
        part()


if __name__ == "__main__":
    main()
