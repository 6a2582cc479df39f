"""Linear layers with their weights packed for a CPU, while a model writes one token a row.

A student that writes reads all of its weights for every token, and a plain product rearranges them for the CPU each
time. Packed once, the same products give the same bits in 0.7 of the time (SmolLM2-135M in bfloat16, 8 rows, two
threads: 22 against 15 ms a token for the layers, 4.3 against 2.4 for the head, by `benchmarks/cpu_paths.py`). Packed
weights are copies: they cost their size in memory while they are in use.

torch packs weights for its own compiler and shows the two operators under private names, so they are asked for first,
and a build without them computes as ever. Nothing here knows a row, a cache or a role; `backbone.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PAYS_FROM = 2**16  # weights of a layer; the time of a smaller one is that of the call
DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 8  # of a typical product; the layout serves any number

Product = Callable[[Tensor], Tensor]


@contextmanager
def packed_layers(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model's linear layers use packed weights; the weights must not change meanwhile.

    Args:
        model: on any device; on another than a CPU nothing happens.
        dtype: of the products, which is that of the weights unless autocast is on.
    """
    with ExitStack() as undo:
        for layer in model.modules():
            if type(layer) is nn.Linear and (product := packed_product(layer.weight, layer.bias, dtype)):
                undo.callback(delattr, layer, "forward")  # the class's own is back when the instance's is gone
                vars(layer)["forward"] = _forward(layer, product, dtype)
        yield


def packed_product(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Product | None:
    """x -> x @ weight.T + bias in that precision, with the weight packed; None where packing does not pay.

    Args:
        weight_OI: [O, I] from I inputs to O outputs.
        bias_O: [O].
    """
    pays = weight_OI.device.type == "cpu" and dtype in DTYPES and weight_OI.numel() >= PAYS_FROM
    if not (pays and _can_pack()):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().to(dtype).contiguous(), _ROWS)
    bias_O = None if bias_O is None else bias_O.detach().to(dtype)

    def product(inputs: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs.to(dtype), packed, bias_O, "none", [], "")

    return product


def _can_pack() -> bool:
    operators: Any = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def _forward(layer: nn.Linear, product: Product, dtype: torch.dtype) -> Product:
    """The layer's forward by way of `product`; as ever where the model asks for another precision."""

    def forward(inputs: Tensor) -> Tensor:
        autocast = torch.is_autocast_enabled("cpu")
        if (torch.get_autocast_dtype("cpu") if autocast else inputs.dtype) == dtype:
            return product(inputs)
        return functional.linear(inputs, layer.weight, layer.bias)

    return forward
