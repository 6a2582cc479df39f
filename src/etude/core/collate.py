"""Rows of different lengths side by side: from prepared rows to one padded `Batch`.

Padding goes on the right, positions count real tokens from 0, and masks come from recorded lengths. The columns of the
N scored tokens are flat, so that no reduction ever runs over padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from etude.axes.names import Source
from etude.core.kept import KeptSets
from etude.core.logprobs import predicted_from
from etude.core.records import Batch, Rollout, Scored, TeacherColumns
from etude.errors import RecordError

PAD = 0  # any valid id: padded places are masked in attention and never scored


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask and positions of rows padded on the right; each [B, T] int64.

    >>> ids, mask, positions = pad_rows([torch.tensor([7, 8]), torch.tensor([5, 6, 7])])
    >>> ids.tolist(), mask.tolist(), positions.tolist()
    ([[7, 8, 0], [5, 6, 7]], [[1, 1, 0], [1, 1, 1]], [[0, 1, 0], [0, 1, 2]])
    """
    lengths = [row.shape[0] for row in rows]
    shape = (len(rows), max(lengths))
    ids_BT = torch.full(shape, PAD, dtype=torch.int64)
    mask_BT = torch.zeros(shape, dtype=torch.int64)
    positions_BT = torch.zeros(shape, dtype=torch.int64)
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids_BT[b, :length] = row
        mask_BT[b, :length] = 1
        positions_BT[b, :length] = torch.arange(length)
    return ids_BT, mask_BT, positions_BT


def _teacher_columns(rows: Sequence[Scored], name: str, kept: Sequence[Tensor]) -> TeacherColumns:
    """One teacher's marks, the scored tokens of all rows one after the other; `kept` are bool masks [C] a row."""

    def column(field: str, values: Sequence[Tensor | None]) -> Tensor | None:
        given = [value[keep] for value, keep in zip(values, kept, strict=True) if value is not None]
        if len(given) not in (0, len(rows)):
            raise RecordError(f"teacher '{name}' gave {field} for {len(given)} of a batch's {len(rows)} rows")
        return torch.cat(given) if given else None

    scores = [row.scores[name] for row in rows]
    return TeacherColumns(
        sampled_logprobs_N=column("sampled_logprobs", [score.sampled_logprobs for score in scores]),
        hidden_ND=column("hidden", [score.hidden for score in scores]),
        kept_mass_N=column("kept_mass", [score.kept_mass for score in scores]),
    )


def kept_sets(rollouts: Sequence[Rollout], scored: Sequence[Tensor] | None = None) -> KeptSets | None:
    """The kept sets of the rows' tokens, one after the other; None where no row carries any.

    Args:
        rollouts: a row without kept sets has an empty one for every token.
        scored: bool masks [C] a row of the tokens to take; None: all of them.
    """
    ids, lengths = list[Tensor](), list[int]()
    for r, rollout in enumerate(rollouts):
        of_row_C = rollout.kept_lengths
        if of_row_C is None or rollout.kept_ids is None:
            of_row_C = torch.zeros(rollout.num_completion_tokens, dtype=torch.int32)
        taken_C = torch.ones_like(of_row_C, dtype=torch.bool) if scored is None else scored[r]
        if rollout.kept_ids is not None:
            ids.append(rollout.kept_ids[taken_C.repeat_interleave(of_row_C.long())])
        lengths += of_row_C[taken_C].tolist()  # pyright: ignore[reportUnknownMemberType]
    return KeptSets.of(torch.cat(ids), lengths) if ids else None


def _own_logprobs(rollout: Rollout, version: int | None) -> Tensor | None:
    """[C] What the writer said of its own tokens, where it is comparable with the trainer: the present student's."""
    present = rollout.source is Source.STUDENT and version in (None, rollout.version)
    return rollout.raw_logprobs if present else None


def collate(rows: Sequence[Scored], *, version: int | None = None) -> Batch:
    """One batch of prepared rows. Scored tokens are those at least one term trains.

    A batch in which no term trains anything still holds one token (with weight zero), so that a rank without work takes
    part in the step like any other.

    Args:
        rows: prepared.
        version: of the student that the sampler wrote with in this round: the log-probabilities that an earlier one
            gave to a replayed row differ from the trainer's for no fault of the sampler's. None: every row is new.

    Raises:
        RecordError: a row was not prepared, or a teacher marked some of the rows only.
    """
    ids_BT, mask_BT, positions_BT = pad_rows([row.rollout.token_ids for row in rows])
    width = ids_BT.shape[1]
    weights, advantages, kept = list[Tensor](), list[Tensor](), list[Tensor]()
    for row in rows:
        if row.weights is None or row.advantages is None:
            raise RecordError(f"row {row.rollout.prompt.row} was not prepared: call Objective.prepare before collate")
        if row.scores.keys() != rows[0].scores.keys():
            raise RecordError(
                f"row {row.rollout.prompt.row} has scores of {sorted(row.scores)} and another row of its batch of "
                f"{sorted(rows[0].scores)}; every row of a batch is marked by the same teachers"
            )
        weights.append(row.weights)
        advantages.append(row.advantages)
        kept.append((row.weights != 0).any(dim=0))
    if not any(keep.any() for keep in kept):
        kept[0] = torch.arange(kept[0].shape[0]) == 0
    rollouts = [row.rollout for row in rows]
    lengths = [rollout.num_completion_tokens for rollout in rollouts]

    def column(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value[..., keep] for value, keep in zip(values, kept, strict=True)], dim=-1)

    def optional(values: Sequence[Tensor | None], fill: float) -> Tensor:
        return column(
            [torch.full((n,), fill) if v is None else v.float() for v, n in zip(values, lengths, strict=True)]
        )

    return Batch(
        token_ids_BT=ids_BT,
        attention_mask_BT=mask_BT,
        position_ids_BT=positions_BT,
        predicted_from_N=column(
            [b * width + predicted_from(r.num_prompt_tokens, lengths[b]) for b, r in enumerate(rollouts)]
        ),
        target_ids_N=column([rollout.completion_ids for rollout in rollouts]),
        weights_JN=column(weights),
        advantages_JN=column(advantages),
        behaviour_logprobs_N=optional([rollout.behaviour_logprobs for rollout in rollouts], 0.0),
        raw_logprobs_N=optional([_own_logprobs(rollout, version) for rollout in rollouts], float("nan")),
        teachers={name: _teacher_columns(rows, name, kept) for name in rows[0].scores},
        kept=kept_sets(rollouts, kept),
    )
