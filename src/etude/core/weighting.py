"""Which tokens a term trains: masks from recorded facts, never from comparing ids.

A row's mask is [C] over its completion tokens, True where the term trains. Padding never appears here: rows have their
own lengths until `collate` puts them side by side. The stop id that ended an answer is part of the completion and is
trained like any other token; a row cut at the limit has none, and none is invented.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from etude.axes.names import Source
from etude.core.records import Rollout


def row_mask(rollout: Rollout, *, sources: Collection[Source], train_truncated: bool) -> Tensor:
    """[C] bool: every completion token, or none where the row's source or its cut end rules it out."""
    trained = rollout.source in sources and (train_truncated or not rollout.truncated)
    return torch.full((rollout.num_completion_tokens,), trained, dtype=torch.bool)
