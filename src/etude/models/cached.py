"""Writing with a transformers decoder: prompts padded on the left, one forward pass a token, keys and values kept.

It knows how rows are laid out and when they are read; the model itself comes as two functions from `backbone.py`.

Legend: B rows, b rows still written, T positions, D hidden size, V real vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache

from etude.core.collate import pad_rows
from etude.models.roles import AbstractDecoding


class CachedDecoding(AbstractDecoding):
    """Ids are read when logits are asked for, not when they are appended, so that a row's last token costs nothing.

    Args:
        prompt_ids: [P] int64 each.
        cache: empty, of the model's kind.
        read: (ids [B, T], mask of all ids so far, positions [B, T], cache=, use_cache=) -> hidden states [B, T, D].
        logits: hidden states [B, D] -> [B, V].
        device: of the model.
    """

    def __init__(
        self,
        prompt_ids: Sequence[Tensor],
        cache: DynamicCache,
        *,
        read: Callable[..., Tensor],
        logits: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        # Reversed, padded on the right, reversed again: every prompt ends in the last column.
        ids_BT, mask_BT, _ = pad_rows([ids.flip(0) for ids in prompt_ids])
        self._mask_BT = mask_BT.flip(1).to(device)
        self._unread_BT = ids_BT.flip(1).to(device)
        self._positions_BT = (self._mask_BT.cumsum(1) - 1).clamp(min=0)  # of the unread ids
        self._lengths_B = self._mask_BT.sum(1)
        self._cache, self._read, self._logits = cache, read, logits
        self._hidden_BD: Tensor | None = None  # the state after the last id read

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        if self._unread_BT.shape[1]:
            hidden_BTD = self._read(
                self._unread_BT, self._mask_BT, self._positions_BT, cache=self._cache, use_cache=True
            )
            self._hidden_BD = hidden_BTD[:, -1]
            self._unread_BT, self._positions_BT = self._unread_BT[:, :0], self._positions_BT[:, :0]
        assert self._hidden_BD is not None  # a prompt has at least one id
        return self._logits(self._hidden_BD)

    def append(self, ids_B: Tensor) -> None:
        ids_B1 = ids_B.to(self._unread_BT.device)[:, None]
        self._unread_BT = torch.cat([self._unread_BT, ids_B1], dim=1)
        self._positions_BT = torch.cat([self._positions_BT, self._lengths_B[:, None]], dim=1)
        self._mask_BT = torch.cat([self._mask_BT, torch.ones_like(ids_B1)], dim=1)
        self._lengths_B = self._lengths_B + 1

    def keep(self, rows_b: Tensor) -> None:
        rows_b = rows_b.to(self._unread_BT.device)
        self._cache.reorder_cache(cast(torch.LongTensor, rows_b))  # recurrent layers know no other way to drop rows
        self._unread_BT, self._positions_BT = self._unread_BT[rows_b], self._positions_BT[rows_b]
        self._mask_BT, self._lengths_B = self._mask_BT[rows_b], self._lengths_B[rows_b]
        if self._hidden_BD is not None:
            self._hidden_BD = self._hidden_BD[rows_b]
