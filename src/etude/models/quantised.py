"""Models whose weights take less room: what transformers is told so that it quantises them while it reads them.

GPTQ and AWQ folders, and others saved quantised, say for themselves what they are and are read like any folder; a GGUF
file is unpacked. Here are the kinds that a folder of full weights can be turned into at loading, each with the package
that does it. `backbone.py` calls it; no quantised weight is ever trained.
"""

from __future__ import annotations

from importlib import util
from typing import Any

import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

from etude.errors import ExtraMissing, ModelError

QUANTIZATIONS = {  # and the package that does it, which is the name of our extra as well
    "bitsandbytes-8bit": "bitsandbytes",
    "bitsandbytes-4bit": "bitsandbytes",
    "torchao-int8": "torchao",
}


def require_quantiser(quantization: str) -> None:
    """Refuse before anything is read.

    Raises:
        ModelError: there is no such kind.
        ExtraMissing: its package is not installed.
    """
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"there is no quantization '{quantization}'; write one of {', '.join(QUANTIZATIONS)}")
    package = QUANTIZATIONS[quantization]
    if util.find_spec(package) is None:
        raise ExtraMissing(package, package, f"the quantization {quantization}")


def settings_of(quantization: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is given; empty for a folder that says for itself how it is quantised.

    Args:
        quantization: one of `QUANTIZATIONS`; None: as the files are.
        dtype: of matrix products, and of what is not quantised (embedding, output head, norms).

    Raises:
        ModelError, ExtraMissing: as `require_quantiser`.
    """
    if quantization is None:
        return {}
    require_quantiser(quantization)
    if quantization == "bitsandbytes-8bit":
        config: Any = BitsAndBytesConfig(load_in_8bit=True)
    elif quantization == "bitsandbytes-4bit":  # NF4 with quantised constants, as in QLoRA (Dettmers et al. 2023)
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    else:
        from torchao.quantization import Int8WeightOnlyConfig  # pyright: ignore[reportMissingImports]

        config = TorchAoConfig(Int8WeightOnlyConfig())
    return {"quantization_config": config}
