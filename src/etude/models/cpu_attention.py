"""Attention over short rows in bfloat16 on a CPU: plain products, which are faster there than torch's kernel.

torch's kernel is made for long rows. Forward and backward of one layer, 9 heads of 64, two threads: 8 rows of 96 tokens
take it 11 ms and plain products 4; 4 rows of 160 take it 12 and 5 (`benchmarks/cpu_paths.py`). Products keep all
scores, the kernel none, so they are used up to a number of scores. Other precisions, devices and settings go to the
kernel.

Registered with transformers under a name of its own; `backbone.py` puts models on it that would use the kernel.

Legend: B rows, H query heads, K key heads, G = H / K query heads a key head, Q queries, S keys, E size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "etude_short_rows"
MOST_SCORES = 2**20  # B H Q S; a layer keeps 2 bytes of each for its backward pass


def use_for_short_rows(model: PreTrainedModel) -> None:
    """Put a model on a CPU on this attention, unless it asks for one of another kind (a soft cap, sinks)."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def attention(
    module: nn.Module,
    query_BHQE: Tensor,
    key_BKSE: Tensor,
    value_BKSE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, called by transformers: by products for short rows in bfloat16, else by torch's kernel.

    The heads that share a key are rows of one product, so that no key is copied. Softmax is torch's, in
    float32 inside.

    Args:
        attention_mask: [B, 1 or H, Q, S], true where a key is seen, or added to the scores; None: causal if Q = S.

    Returns:
        [B, Q, H, E], and no weights.
    """
    num_rows, num_heads, num_queries, size = query_BHQE.shape
    num_keys = key_BKSE.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    understood = attention_mask is not None or num_queries == 1 or (causal and num_queries == num_keys)
    short = num_rows * num_heads * num_queries * num_keys <= MOST_SCORES
    fits = value_BKSE.device.type == "cpu" and value_BKSE.dtype == torch.bfloat16
    if not (short and fits and understood) or dropout or position_bias is not None:
        arguments: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "is_causal": is_causal, **others}
        return sdpa_attention_forward(
            module, query_BHQE, key_BKSE, value_BKSE, attention_mask, position_bias=position_bias, **arguments
        )
    scaled_BHQE = query_BHQE * (size**-0.5 if scaling is None else scaling)
    num_key_heads = key_BKSE.shape[1]
    # [B, K, GQ, E] and [B, K, E, S]; queries and keys may come in float32 from their rotation.
    grouped = scaled_BHQE.to(value_BKSE.dtype).reshape(num_rows, num_key_heads, -1, size)
    scores = grouped @ key_BKSE.to(value_BKSE.dtype).transpose(-1, -2)
    scores_BKGQS = scores.unflatten(2, (num_heads // num_key_heads, num_queries))
    if attention_mask is None and num_queries > 1:
        attention_mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()[None, None]
    if attention_mask is not None:
        scores_BKGQS = _masked(scores_BKGQS, attention_mask)
    weights = scores_BKGQS.softmax(-1).flatten(2, 3)
    attended_BHQE = (weights @ value_BKSE).reshape(num_rows, num_heads, num_queries, -1)
    return attended_BHQE.transpose(1, 2).contiguous(), None


def _masked(scores_BKGQS: Tensor, mask: Tensor) -> Tensor:
    num_key_heads = scores_BKGQS.shape[1]
    of_all_heads = mask.shape[1] == 1
    mask = mask[:, :, None] if of_all_heads else mask.unflatten(1, (num_key_heads, -1))
    if mask.dtype == torch.bool:  # in place: a product does not need its result for the backward pass
        return scores_BKGQS.masked_fill_(~mask, torch.finfo(scores_BKGQS.dtype).min)
    return scores_BKGQS + mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
