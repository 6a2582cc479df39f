"""Every test starts from the same place: one thread, no hub, fixed seeds."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported, so before any test module is
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny, and bit-for-bit tests need one fixed count


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    torch.manual_seed(0)
