"""Distributions renormalised over the ids that a sampler's top-p and top-k kept, a set of its own for every token.

The sets are ragged: one token's has a single id, another's thousands. A batch holds their ids one after the other, and
only a tile of a few tokens is ever laid out as wide as its largest set. It knows no term and no row; `core.tile` calls
it, and whoever marks finished rows.

Legend: n tokens of a tile, N tokens of a batch, V vocabulary, K ids of the largest set of a tile, M ids of all N sets,
m ids of a tile's sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from etude.core.divergences import LOG_OF_ZERO


@dataclass(frozen=True, eq=False, slots=True)
class KeptSets:
    """The kept sets of the N tokens of a batch; a token that no sampler cut has an empty one."""

    ids_M: Tensor  # [M] int32, each token's one after the other
    lengths: tuple[int, ...]  # of the N sets; plain numbers, so that no tile waits for a device
    starts: tuple[int, ...]  # N + 1 places in `ids_M`: where each set begins, and where the last one ends

    @classmethod
    def of(cls, ids_M: Tensor, lengths: Sequence[int]) -> KeptSets:
        """From ids and the number of them that belongs to each token.

        >>> KeptSets.of(torch.tensor([4, 7, 1]), [2, 0, 1]).starts
        (0, 2, 2, 3)
        """
        return cls(ids_M, tuple(lengths), (0, *itertools.accumulate(lengths)))

    def to(self, device: torch.device | str) -> KeptSets:
        """The same sets on another device."""
        return KeptSets(self.ids_M.to(device), self.lengths, self.starts)

    def logprobs(self, logprobs_nV: Tensor, tokens: slice) -> Tensor:
        """[n, K] of the kept ids of these tokens, `LOG_OF_ZERO` at least; it also fills what a smaller set lacks.

        >>> sets = KeptSets.of(torch.tensor([2, 0, 1]), [1, 2])
        >>> logprobs = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]).log()
        >>> sets.logprobs(logprobs, slice(0, 2)).exp()
        tensor([[0.2500, 0.0000],
                [0.5000, 0.5000]])
        """
        lengths = list(self.lengths[tokens])
        ids_m = self.ids_M[self.starts[tokens.start] : self.starts[tokens.start + len(lengths)]].long()
        sets = torch.split(ids_m, lengths)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        ids_nK = pad_sequence(list(sets), batch_first=True, padding_value=-1)
        kept_nK = logprobs_nV.gather(-1, ids_nK.clamp(min=0)).clamp(min=LOG_OF_ZERO)
        return kept_nK.masked_fill(ids_nK < 0, LOG_OF_ZERO)

    def log_mass(self, logprobs_nV: Tensor, tokens: slice) -> Tensor:
        """[n] log of the probability on the kept ids; 0 for a token without a set, which nothing was taken from.

        >>> sets = KeptSets.of(torch.tensor([2, 0]), [2, 0])
        >>> sets.log_mass(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log(), slice(0, 2)).exp()
        tensor([0.7000, 1.0000])
        """
        return _log_mass(self.logprobs(logprobs_nV, tokens), self.lengths[tokens])

    def renormalised(self, logprobs_nV: Tensor, tokens: slice) -> Tensor:
        """[n, K] log-probabilities that sum to one over each kept set; the places a smaller set lacks stay zero.

        >>> sets = KeptSets.of(torch.tensor([0, 1, 0]), [2, 1])
        >>> sets.renormalised(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log(), slice(0, 2)).exp()
        tensor([[0.6250, 0.3750],
                [1.0000, 0.0000]])
        """
        kept_nK = self.logprobs(logprobs_nV, tokens)
        return kept_nK - _log_mass(kept_nK, self.lengths[tokens])[:, None]


def _log_mass(kept_nK: Tensor, lengths: Sequence[int]) -> Tensor:
    if kept_nK.shape[-1] == 0:
        return kept_nK.new_zeros(kept_nK.shape[0])
    empty_n = torch.tensor([length == 0 for length in lengths], device=kept_nK.device)
    return torch.where(empty_n, 0.0, kept_nK.logsumexp(-1))
