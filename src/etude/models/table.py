"""A table as a language model: the state is the previous token, and each state has its own row of logits.

The smallest backbone there is. Sampler, teacher, student and the chunked objective run on it unchanged, while
everything about it can be computed exactly by hand; the Markov experiment and many tests stand on that. The table may
have more states than ids: a prompt that ends with such an extra id begins in a state no completion can come back to.

Legend: B rows, T positions, P prompt tokens, S states, V ids that can be written, S >= V.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from etude.core.linear import OutputHead
from etude.errors import ModelError
from etude.models.roles import AbstractBackbone, AbstractDecoding

FILE_NAME = "table.safetensors"


class TableBackbone(AbstractBackbone):
    """The hidden state is the one-hot state and the head's weight is the table, transposed.

    >>> table = TableBackbone(torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]))  # ids 0 and 1, start state 2
    >>> table.decoding([torch.tensor([2]), torch.tensor([2, 0])]).next_logits().tolist()
    [[4.0, 5.0], [0.0, 1.0]]

    Args:
        logits_SV: [S, V] float32 or float64: row s holds the logits of the token after token s. Copied.

    Raises:
        ModelError: the table is not two-dimensional, has fewer states than ids, or holds a number that is not finite.
    """

    context_window = None

    def __init__(self, logits_SV: Tensor) -> None:
        super().__init__()
        if logits_SV.ndim != 2 or logits_SV.shape[0] < logits_SV.shape[1]:
            raise ModelError(
                f"the table has shape {tuple(logits_SV.shape)}; expected [states, ids], a state for each id"
            )
        if not bool(logits_SV.isfinite().all()):
            # A one-hot state multiplies every row of the table, and 0 * -inf is NaN.
            raise ModelError("the table holds logits that are not finite; for an impossible id write -1000")
        self.num_states, self.vocab_size = logits_SV.shape
        self.weight_VS = nn.Parameter(logits_SV.detach().T.contiguous().clone())

    def hidden_states(self, token_ids_BT: Tensor, attention_mask_BT: Tensor, position_ids_BT: Tensor) -> Tensor:
        """[B, T, S] one-hot states; mask and positions change nothing, because a state is one token."""
        return self._states(token_ids_BT)

    def head(self) -> OutputHead:
        return OutputHead(self.weight_VS)

    def decoding(self, prompt_ids: Sequence[Tensor]) -> AbstractDecoding:
        return _TableDecoding(self, torch.stack([ids[-1] for ids in prompt_ids]).to(self.device))

    def next_logits(self, token_ids: Tensor) -> Tensor:
        """[..., V] logits of the token after each of `token_ids`."""
        return self.head().logits(self._states(token_ids))

    def _states(self, token_ids: Tensor) -> Tensor:
        return functional.one_hot(token_ids, self.num_states).to(self.weight_VS.dtype)

    def save(self, folder: Path) -> None:
        """Write the table into a folder that `TableBackbone.load` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"logits_SV": self.weight_VS.detach().T.contiguous()}, folder / FILE_NAME)

    def restore(self, folder: Path) -> None:
        self.load_weights_from(TableBackbone.load(folder))

    @classmethod
    def load(cls, folder: Path) -> TableBackbone:
        """The table that `save` wrote, bit for bit.

        Raises:
            ModelError: there is none in the folder.
        """
        if not (folder / FILE_NAME).is_file():
            raise ModelError(f"{folder} holds no {FILE_NAME}; name a folder that TableBackbone.save wrote")
        return cls(load_file(folder / FILE_NAME)["logits_SV"])


class _TableDecoding(AbstractDecoding):
    """Rows being written: all there is to know of each is its last token."""

    def __init__(self, table: TableBackbone, last_ids_B: Tensor) -> None:
        self._table = table
        self._last_ids_B = last_ids_B

    def next_logits(self) -> Tensor:
        return self._table.next_logits(self._last_ids_B)

    def append(self, ids_B: Tensor) -> None:
        self._last_ids_B = ids_B

    def keep(self, rows_b: Tensor) -> None:
        self._last_ids_B = self._last_ids_B[rows_b]
