"""From logits to written rows: the settings, the distribution sampled from, one uniform number a token, the loop.

The loop is ours and takes a next-token distribution, so a model folder's generation defaults have no way in. It knows
no prompt, no seed and no model, only rows that an engine keeps (`AbstractDecoding`); `models/sampling.py` calls it.

Legend: B rows, b rows of them still being written, n tokens of all rows, C completion tokens of a row, V real
vocabulary, K blocks of ids, v ids of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from etude.axes.names import FinishReason
from etude.core.logprobs import next_token_logprobs, pick
from etude.errors import RecipeError
from etude.models.roles import AbstractDecoding

MIN_TEMPERATURE = 0.01  # below it logits / temperature can leave float32; nobody can tell the result from greedy
BLOCK = 256  # ids a block of the inverse CDF; any size is right, 256 is fastest at V = 49,152
NUCLEUS = 1024  # ids ranked at first for top-p; ranking all of 49,152 takes eight times as long


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How a distribution becomes a token. No field has a default: what is not said here does not happen.

    >>> SamplingSettings(temperature=1.0, top_p=0.95, top_k=0, max_new_tokens=64, stop_ids=(2,)).describe()
    {'temperature': 1.0, 'top_p': 0.95, 'top_k': 0, 'max_new_tokens': 64, 'stop_ids': (2,)}

    Raises:
        RecipeError: a value outside its range.
    """

    temperature: float  # 0.0: greedy, the likeliest id with behaviour log-probability 0
    top_p: float  # keep the smallest set of ids that holds this share of the probability; 1.0: all
    top_k: int  # keep this many of the likeliest ids; 0: all
    max_new_tokens: int  # a row that has not stopped by then is cut
    stop_ids: tuple[int, ...]  # writing one of them ends a row; empty: every row is cut at the limit

    def __post_init__(self) -> None:
        temperature = self.temperature
        if not (temperature == 0.0 or (temperature >= MIN_TEMPERATURE and math.isfinite(temperature))):
            expected = f"0 (greedy) or a number of at least {MIN_TEMPERATURE}"
            raise RecipeError(f"sampler.temperature is {temperature}; write {expected}")
        if not 0.0 < self.top_p <= 1.0:
            raise RecipeError(f"sampler.top_p is {self.top_p}; write a share above 0 and up to 1 (1 keeps every id)")
        if self.top_k < 0:
            raise RecipeError(f"sampler.top_k is {self.top_k}; write the number of ids to keep, or 0 to keep all")
        if self.max_new_tokens < 1:
            raise RecipeError(f"sampler.max_new_tokens is {self.max_new_tokens}; write at least 1")
        if any(stop_id < 0 for stop_id in self.stop_ids):
            raise RecipeError(f"the stop ids {self.stop_ids} hold a negative number; token ids count from 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def unchanged(self) -> bool:
        """Whether the model's own distribution is sampled from, so that behaviour and raw log-probs are one."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0

    def describe(self) -> dict[str, Any]:
        """Every value in force, to be printed and stored with the run."""
        return asdict(self)


def sampling_logprobs(logits_BV: Tensor, settings: SamplingSettings) -> Tensor:
    """[B, V] log-probabilities really sampled from: temperature, then top-k, then top-p of what top-k left.

    After each cut the rest is renormalised; what was cut away is -inf. Ids that tie at a cut stay or go together, so
    that no id is favoured for its number. Greedy puts all probability on the likeliest id, the lowest of them in a tie.

        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> top_2 = SamplingSettings(temperature=1.0, top_p=1.0, top_k=2, max_new_tokens=1, stop_ids=())
        >>> sampling_logprobs(logits, top_2).exp()
        tensor([[0.6250, 0.3750, 0.0000]])

    Returns:
        float32, or float64 for float64 logits.
    """
    if settings.greedy:
        certain_BV = torch.full_like(logits_BV, -math.inf, dtype=torch.promote_types(torch.float32, logits_BV.dtype))
        return certain_BV.scatter_(-1, logits_BV.argmax(-1, keepdim=True), 0.0)
    logprobs_BV = next_token_logprobs(logits_BV, settings.temperature)
    if 0 < settings.top_k < logprobs_BV.shape[-1]:
        logprobs_BV = _keep_from(logprobs_BV, logprobs_BV.topk(settings.top_k).values[:, -1:])
    if settings.top_p < 1.0:
        logprobs_BV = _keep_from(logprobs_BV, _nucleus_floor(logprobs_BV, settings.top_p))
    return logprobs_BV


def _keep_from(logprobs_BV: Tensor, floor_B1: Tensor) -> Tensor:
    return logprobs_BV.masked_fill(logprobs_BV < floor_B1, -math.inf).log_softmax(-1)


def _nucleus_floor(logprobs_BV: Tensor, top_p: float) -> Tensor:
    """[B, 1] log-probability of the least likely id within the smallest set that holds `top_p`."""
    ranked_BV = logprobs_BV.topk(min(NUCLEUS, logprobs_BV.shape[-1])).values
    if bool((ranked_BV.exp().sum(-1) < top_p).any()):
        ranked_BV = logprobs_BV.sort(descending=True).values
    probs_BV = ranked_BV.exp()
    likelier_BV = probs_BV.cumsum(-1) - probs_BV  # the mass ranked before each id: 0 for the first, so one always stays
    num_kept_B1 = (likelier_BV < top_p).sum(-1, keepdim=True)
    return ranked_BV.gather(-1, num_kept_B1 - 1)


def inverse_cdf(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """[B] ids: in id order, the first whose cumulative probability exceeds the row's uniform number in [0, 1).

    Two levels, first the block of ids and then the id within it: at V = 49,152 and 64 rows a sixth of the time of one
    cumulative sum over the vocabulary, and a hundredth of `torch.multinomial`. An id of probability zero is never
    taken. Where rounding lets the sums fall short of the uniform number, the last possible id is. Rows need not sum to
    one.

        >>> inverse_cdf(torch.tensor([[0.5, 0.0, 0.5]]).expand(3, 3), torch.tensor([0.49, 0.5, 0.99]))
        tensor([0, 2, 2])
    """
    probs_BV = probs_BV.to(torch.promote_types(torch.float32, probs_BV.dtype))
    uniforms_B = uniforms_B.to(probs_BV)
    vocab_size = probs_BV.shape[-1]
    if vocab_size <= BLOCK:
        cumulative_BV = probs_BV.cumsum(-1)
        return _first_beyond(cumulative_BV, uniforms_B * cumulative_BV[:, -1])
    num_whole = vocab_size // BLOCK
    head_BV, tail_Bv = probs_BV.tensor_split([num_whole * BLOCK], dim=-1)  # views: padding would copy everything
    mass_BK = torch.cat([head_BV.unflatten(-1, (num_whole, BLOCK)).sum(-1), tail_Bv.sum(-1, keepdim=True)], dim=-1)
    cumulative_BK = mass_BK.cumsum(-1)
    target_B = uniforms_B * cumulative_BK[:, -1]
    block_B = _first_beyond(cumulative_BK, target_B)
    earlier_B = pick(functional.pad(cumulative_BK, (1, 0)), block_B)  # the mass of the blocks before
    ids_Bv = block_B[:, None] * BLOCK + torch.arange(BLOCK, device=block_B.device)
    inside_Bv = probs_BV.gather(-1, ids_Bv.clamp(max=vocab_size - 1)).masked_fill(ids_Bv >= vocab_size, 0.0)
    return block_B * BLOCK + _first_beyond(inside_Bv.cumsum(-1), target_B - earlier_B)


def _first_beyond(cumulative_BK: Tensor, target_B: Tensor) -> Tensor:
    """[B] first column whose cumulative sum exceeds the target; such a column has mass of its own.

    The target is held below the total, so that there is one: the last column with mass, if need be.
    """
    below_B = torch.minimum(target_B, cumulative_BK[:, -1] * (1.0 - torch.finfo(cumulative_BK.dtype).eps))
    columns_B = torch.searchsorted(cumulative_BK, below_B[:, None], right=True).squeeze(-1)
    return columns_B.clamp(max=cumulative_BK.shape[-1] - 1)  # no column is beyond NaN; the sampler reports that one


@dataclass(frozen=True, eq=False, slots=True)
class Completion:
    """What was written for one row."""

    ids: Tensor  # [C] int64, its stop id included if it stopped
    behaviour_logprobs: Tensor  # [C] float32
    raw_logprobs: Tensor  # [C] float32
    finish_reason: FinishReason
    kept_ids: Tensor | None = None  # [M] int32: what each id was drawn from, token after token
    kept_lengths: Tensor | None = None  # [C] int32: how many of them are each token's


@dataclass(frozen=True, eq=False, slots=True)
class _Drawn:
    """One token of each row still being written, or of several steps together."""

    rows_n: Tensor  # [n] int64, CPU: whose token it is
    ids_n: Tensor  # [n] int64
    behaviour_n: Tensor  # [n]
    raw_n: Tensor  # [n]
    kept_ids_m: Tensor | None  # [m] int32, CPU, token after token
    kept_lengths_n: Tensor | None  # [n] int32, CPU


@torch.no_grad()
def decode(
    decoding: AbstractDecoding,
    uniforms_BC: Tensor,
    settings: SamplingSettings,
    distribution: Callable[[Tensor], Tensor] | None = None,
    *,
    record_kept: bool = False,
) -> list[Completion]:
    """Write every row until its stop id or the limit: next logits, distribution, one uniform number, id.

    A row leaves the batch in the step in which it ends, and its last token is never fed back. Leaving costs a copy of
    the cache, which an engine that grows its cache by copying makes in every step anyway.

    Args:
        decoding: the rows, their prompts read.
        uniforms_BC: [B, C] in [0, 1), C = `settings.max_new_tokens`: column j is for the j-th token of each row.
        settings: temperature and cuts, length limit and stop ids.
        distribution: [b, V] next logits -> [b, V] probabilities to draw from; None: `sampling_logprobs` under the
            settings. Raw log-probabilities are those of the logits either way.
        record_kept: note for every token which ids it could have been, at 4 bytes an id: meant for a distribution that
            top-p or top-k has cut.

    Returns:
        One completion a row, in the rows' order, on the CPU.
    """
    rows_b = torch.arange(uniforms_BC.shape[0])
    stopped_B = torch.zeros(uniforms_BC.shape[0], dtype=torch.bool)
    stop_ids = torch.tensor(settings.stop_ids, dtype=torch.int64)
    written: list[_Drawn] = []
    for step in range(settings.max_new_tokens):
        logits_bV = decoding.next_logits()
        written.append(_draw(rows_b, logits_bV, uniforms_BC[rows_b, step], settings, distribution, record_kept))
        ids_b = written[-1].ids_n
        stops_b = torch.isin(ids_b.cpu(), stop_ids)
        stopped_B[rows_b] = stops_b
        if stops_b.all() or step + 1 == settings.max_new_tokens:
            break
        if stops_b.any():
            kept_b = torch.nonzero(~stops_b).squeeze(-1)
            rows_b = rows_b[kept_b]
            kept_b = kept_b.to(ids_b.device)
            decoding.keep(kept_b)
            ids_b = ids_b[kept_b]
        decoding.append(ids_b)
    return _by_row(written, stopped_B)


def _draw(
    rows_b: Tensor,
    logits_bV: Tensor,
    uniforms_b: Tensor,
    settings: SamplingSettings,
    distribution: Callable[[Tensor], Tensor] | None,
    record_kept: bool,
) -> _Drawn:
    """Ids, their log-probabilities under the distribution sampled from, and the model's own; [b] each."""
    # In place, and back to logarithms for the drawn ids alone: tensors as wide as the vocabulary are what costs here.
    probs_bV = distribution(logits_bV) if distribution else sampling_logprobs(logits_bV, settings).exp_()
    ids_b = inverse_cdf(probs_bV, uniforms_b)
    behaviour_b = pick(probs_bV, ids_b).log()
    unchanged = settings.unchanged and distribution is None
    raw_b = behaviour_b if unchanged else pick(next_token_logprobs(logits_bV), ids_b)
    if not record_kept:
        return _Drawn(rows_b, ids_b, behaviour_b, raw_b, None, None)
    kept_bV = probs_bV > 0
    lengths_b = kept_bV.sum(-1).int().cpu()
    return _Drawn(rows_b, ids_b, behaviour_b, raw_b, kept_bV.nonzero()[:, 1].int().cpu(), lengths_b)


def _by_row(written: Sequence[_Drawn], stopped_B: Tensor) -> list[Completion]:
    """From what was drawn in each step to one completion a row."""
    in_steps = [(drawn.rows_n, drawn.ids_n, drawn.behaviour_n, drawn.raw_n) for drawn in written]
    rows_n, ids_n, behaviour_n, raw_n = (torch.cat(column).cpu() for column in zip(*in_steps, strict=True))
    order_n = rows_n.argsort(stable=True)  # rows in order, and each row's tokens as they were written
    lengths = rows_n.bincount(minlength=len(stopped_B)).tolist()
    columns = [column[order_n].split(lengths) for column in (ids_n, behaviour_n.float(), raw_n.float())]
    return [
        Completion(
            *(values.clone() for values in row),  # not views, which would keep the whole batch alive
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            kept_ids=kept_ids,
            kept_lengths=kept_lengths,
        )
        for *row, stopped, (kept_ids, kept_lengths) in zip(
            *columns, stopped_B.tolist(), _kept_by_row(written, order_n, lengths), strict=True
        )
    ]


def _kept_by_row(
    written: Sequence[_Drawn], order_n: Tensor, lengths: Sequence[int]
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Of each row the ids that its tokens were drawn from, and how many are each token's; None where not recorded."""
    sets = list[Tensor]()  # of each token, in the order of writing
    for drawn in written:
        if drawn.kept_ids_m is None or drawn.kept_lengths_n is None:
            return [(None, None)] * len(lengths)
        sets += drawn.kept_ids_m.split(drawn.kept_lengths_n.tolist())
    of_rows = [[sets[token] for token in tokens.tolist()] for tokens in order_n.split(list(lengths))]
    return [(torch.cat(row), torch.tensor([len(ids) for ids in row], dtype=torch.int32)) for row in of_rows]
