"""Which tokens a term trains, and how much each of them weighs.

Masks are bool, True where the term trains, made from recorded facts (lengths, source, finish reason, provenance, the
ids that were written), never by comparing ids with a pad id. Weights multiply a mask. Both are detached by
construction: whatever gradient the numbers they are made of carry, a weight carries none, so that nothing is trained to
weigh less. Nothing here depends on the micro-batch a token happens to sit in. Padding never appears: rows have their
own lengths until `collate` puts them side by side. It knows no term, no step and no reduction.

Legend: C completion tokens of one row, R rows, n tokens of a tile, N tokens (or rows) of a round, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from etude.axes.names import Source
from etude.core.divergences import LOG_OF_ZERO
from etude.core.records import Rollout

RIGHT_FROM = 0.5  # a verifier's score from which an answer counts as right


def _numbers(values: Tensor, what: str) -> Tensor:
    """Detached, in float32 at least, infinite ones as large as `LOG_OF_ZERO` makes them anywhere else."""
    if values.isnan().any():
        raise ValueError(f"{what} has {int(values.isnan().sum())} NaN among {values.numel()} values; expected numbers")
    dtype = torch.promote_types(torch.float32, values.dtype)
    return values.detach().to(dtype).clamp(LOG_OF_ZERO, -LOG_OF_ZERO)


# Masks of a row -------------------------------------------------------------------------------------------------------


def position_mask(length: int, *, skip_first: int = 0, first_tokens: int | None = None) -> Tensor:
    """[length] bool: skip_first <= t < first_tokens, t = 0 the first completion token.

    `first_tokens` is also the horizon of prefix distillation, read off a schedule of the step: t < L(step).

    >>> position_mask(5, skip_first=1, first_tokens=3).tolist()
    [False, True, True, False, False]

    Args:
        length: completion tokens of the row.
        skip_first: leading tokens that are not trained.
        first_tokens: tokens after these are not trained; None: all are.

    Raises:
        ValueError: a negative skip, or a horizon that no token of any row is inside of.

    Reference: arXiv 2602.15260 (prefix OPD, growing horizon); Shenfeld et al. 2026, arXiv 2601.19897 (SDFT), whose
    public code may skip leading tokens.
    """
    if skip_first < 0:
        raise ValueError(f"skip_first is {skip_first}; expected 0 or more leading tokens to leave out")
    if first_tokens is not None and first_tokens <= skip_first:
        raise ValueError(f"first_tokens is {first_tokens} with skip_first {skip_first}; no token lies between them")
    positions_C = torch.arange(length)
    return (positions_C >= skip_first) & (positions_C < (length if first_tokens is None else first_tokens))


def id_mask(completion_ids_C: Tensor, left_out_ids: Collection[int]) -> Tensor:
    """[C] bool: False on the given ids, wherever they were written; True elsewhere.

    This says which tokens train, not where a row ends: leaving the stop id out leaves its length as recorded.

    >>> id_mask(torch.tensor([7, 1, 7, 2]), {1, 2}).tolist()
    [True, False, True, False]

    Raises:
        ValueError: a negative id, which no vocabulary has.
    """
    if any(token_id < 0 for token_id in left_out_ids):
        raise ValueError(f"the ids to leave out are {sorted(left_out_ids)}; expected ids of the vocabulary, from 0")
    return ~torch.isin(completion_ids_C, completion_ids_C.new_tensor(sorted(left_out_ids)))


def row_mask(
    rollout: Rollout,
    *,
    sources: Collection[Source],
    train_truncated: bool,
    skip_first: int = 0,
    first_tokens: int | None = None,
    left_out_ids: Collection[int] = (),
    written_C: Tensor | None = None,
) -> Tensor:
    """[C] bool: the completion tokens that all of these let through; by default every one of them.

    The stop id that ended an answer is trained like any other token; a row cut at the limit has none, none is invented.

    Args:
        rollout: the row.
        sources: whose rows are trained; a row of another source has no trained token.
        train_truncated: whether a row cut at the length limit is trained.
        skip_first: leading tokens that are not trained.
        first_tokens: the horizon, tokens after these are not trained; None: to the end.
        left_out_ids: ids that are not trained wherever they were written.
        written_C: [C] bool, True where the writer wrote the token, False where a tool or the environment did; None: the
            writer wrote them all.

    Raises:
        ValueError: `written_C` of another length or dtype, or positions no row has.
    """
    mask_C = position_mask(rollout.num_completion_tokens, skip_first=skip_first, first_tokens=first_tokens)
    if left_out_ids:
        mask_C &= id_mask(rollout.completion_ids, left_out_ids)
    if written_C is not None:
        if written_C.shape != mask_C.shape or written_C.dtype != torch.bool:
            raise ValueError(
                f"written of row {rollout.prompt.row} has shape {tuple(written_C.shape)} and dtype {written_C.dtype}; "
                f"expected one bool for each of its {mask_C.shape[0]} completion tokens"
            )
        mask_C &= written_C
    trained = rollout.source in sources and (train_truncated or not rollout.truncated)
    return mask_C & trained


# Weights of a row -----------------------------------------------------------------------------------------------------


def is_right(score: float) -> bool:
    """Whether a verifier's score counts as a right answer: 0.5 or more.

    >>> [is_right(score) for score in (0.0, 0.49, 0.5, 1.0)]
    [False, False, True, True]

    Raises:
        ValueError: a score outside [0, 1].
    """
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"the verifier's score is {score}; expected 0 (wrong) to 1 (right)")
    return score >= RIGHT_FROM


def perplexity_weights(
    mean_logprobs_R: Tensor,
    groups_R: Tensor,
    *,
    power: float,
    round_logprobs_N: Tensor,
    round_groups_N: Tensor,
) -> Tensor:
    """[R] float64 weights of rows within their groups: perplexity^power, scaled to a mean of 1 over each group.

    PPL = exp(-mean log-probability of the row's tokens), so a row weighs in proportion to exp(-power * mean). SCOPE has
    the student's PPL^(1 / temperature) on right rows (what it barely managed counts most) and the teacher's
    PPL^(-1 / temperature) on wrong ones (it is listened to where it finds the text plausible). A row that is alone in
    its group weighs 1.

    >>> perplexity_weights(
    ...     torch.tensor([0.5, 0.25]).log(),  # perplexities 2 and 4 of these rows, all there are
    ...     torch.tensor([0, 0]),
    ...     power=1.0,
    ...     round_logprobs_N=torch.tensor([0.5, 0.25]).log(),
    ...     round_groups_N=torch.tensor([0, 0]),
    ... )
    tensor([0.6667, 1.3333], dtype=torch.float64)

    Args:
        mean_logprobs_R: [R] nats, of the rows to weigh.
        groups_R: [R] int64, which question of the round each row answers.
        power: not 0; the smaller its size, the more alike the weights.
        round_logprobs_N: [N] nats, of all rows of the round that are compared, these R among them.
        round_groups_N: [N] int64, likewise.

    Raises:
        ValueError: a power of 0 or not finite, shapes that differ, or NaN.

    Reference: Zheng et al. 2026, arXiv 2604.10688 (SCOPE); normalising to mean 1, not to sum 1, keeps a term's scale.
    """
    if power == 0.0 or not math.isfinite(power):
        raise ValueError(f"the power of the perplexity is {power}; expected a finite number other than 0")
    if mean_logprobs_R.shape != groups_R.shape or round_logprobs_N.shape != round_groups_N.shape:
        raise ValueError(
            f"mean log-probabilities and groups have shapes {tuple(mean_logprobs_R.shape)} and "
            f"{tuple(groups_R.shape)}, of the round {tuple(round_logprobs_N.shape)} and "
            f"{tuple(round_groups_N.shape)}; expected one group for each row"
        )
    logits_R = -power * _numbers(mean_logprobs_R, "the mean log-probability").double()
    round_N = -power * _numbers(round_logprobs_N, "the mean log-probability of the round").double()
    compared_RN = groups_R[:, None] == round_groups_N
    totals_R = torch.where(compared_RN, round_N, -math.inf).logsumexp(1)
    return compared_RN.sum(1) * (logits_R - totals_R).exp()


# Weights of a token ---------------------------------------------------------------------------------------------------


def disagreement_weights(log_ratio_C: Tensor, *, largest: float = 1.5, mask_C: Tensor | None = None) -> Tensor:
    """[C] float32 at least: w_t = 1 + (largest - 1) (1 - F_{t-1}), F_{t-1} = sum_{u < t} |c_u| / sum_u |c_u|.

    c = log q(y) - log p(y) of the drawn tokens, q the student, p the teacher. Early tokens weigh most, and the weight
    falls to 1 as the row's disagreement is used up. A row without any disagreement has used up none: F = 0 everywhere.

    >>> disagreement_weights(torch.tensor([1.0, 4.0, 0.5]).log())
    tensor([1.5000, 1.5000, 1.1667])

    Args:
        log_ratio_C: [C] nats.
        largest: weight of the first token, 1 or more.
        mask_C: [C] bool, tokens the term trains; the others add no disagreement. Their own weight is for the mask to
            drop. None: all.

    Raises:
        ValueError: `largest` below 1 or not finite, a mask of another shape, or NaN in a trained token.

    Reference: arXiv 2606.22600 (IW-OPD), which multiplies the detached advantage by it; largest = 1.5 there.
    """
    if not 1.0 <= largest < math.inf:
        raise ValueError(f"the largest disagreement weight is {largest}; expected 1 (no weighting) or more")
    if mask_C is not None and mask_C.shape != log_ratio_C.shape:
        raise ValueError(
            f"the mask has shape {tuple(mask_C.shape)} and the log-ratios {tuple(log_ratio_C.shape)}; expected one each"
        )
    counted_C = log_ratio_C if mask_C is None else torch.where(mask_C, log_ratio_C, 0.0)
    sizes_C = _numbers(counted_C, "the log-ratio").abs()
    used_C = sizes_C.cumsum(0).roll(1)
    total = used_C[:1].clone()  # rolled to the front
    used_C[:1] = 0.0
    return 1.0 + (largest - 1.0) * (1.0 - used_C / total.where(total > 0, 1.0))


def entropy(logprobs_nV: Tensor) -> Tensor:
    """[n] nats, float32 at least: H = -sum_v p_v log p_v, with 0 log 0 = 0. Detached: it decides, it is not trained.

    >>> round(entropy(torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()).item() / math.log(2), 6)  # in bits
    1.75
    """
    dtype = torch.promote_types(torch.float32, logprobs_nV.dtype)
    logprobs_nV = logprobs_nV.detach().to(dtype)
    return logprobs_nV.exp().mul_(logprobs_nV.clamp(min=LOG_OF_ZERO)).sum(-1).neg()


def entropy_gate(teacher_entropy_n: Tensor, threshold: float) -> Tensor:
    """[n] bool: H(teacher) > threshold, in nats: where several next tokens are right and forward KL keeps them all.

    >>> entropy_gate(torch.tensor([0.1, 0.7, 1.3]), 0.7).tolist()
    [False, False, True]

    Raises:
        ValueError: a negative threshold, which every token would pass.

    Reference: arXiv 2603.07079 (entropy-aware OPD): reverse KL on every token, and forward KL on those.
    """
    if not threshold >= 0.0:
        raise ValueError(f"the entropy threshold is {threshold}; expected 0 nats or more")
    return teacher_entropy_n.detach() > threshold


def informative_tokens(
    *, student_entropy_n: Tensor, disagreement_n: Tensor, entropy_threshold: float, disagreement_threshold: float
) -> Tensor:
    """[n] bool: the student is uncertain, or it is confident and wrong.

    H >= entropy_threshold, or else disagreement >= disagreement_threshold; the first test already takes every uncertain
    token, so the second one chooses among the confident. Both thresholds are given: a token is kept or not whatever
    tokens are computed beside it. `informative_thresholds` finds them over a whole round.

    >>> informative_tokens(
    ...     student_entropy_n=torch.tensor([1.2, 0.1, 0.1, 0.1]),
    ...     disagreement_n=torch.tensor([0.0, 3.0, 0.2, -3.0]),
    ...     entropy_threshold=1.0,
    ...     disagreement_threshold=2.0,
    ... ).tolist()
    [True, True, False, False]

    Args:
        student_entropy_n: [n] nats.
        disagreement_n: [n] nats, large where the student is wrong: a divergence at the state, or the log-ratio
            c = log q(y) - log p(y) of the drawn token with its sign, since a student below its teacher is not too sure.
        entropy_threshold: nats; infinite keeps no token for its entropy.
        disagreement_threshold: nats; infinite keeps no token for its disagreement.

    Raises:
        ValueError: NaN in either.

    Reference: Xu et al. 2026, arXiv 2604.14084 (TIP); half of the tokens by entropy there, or under a tenth by being
    confident and wrong.
    """
    uncertain_n = _numbers(student_entropy_n, "the student's entropy") >= entropy_threshold
    return uncertain_n | (_numbers(disagreement_n, "the disagreement") >= disagreement_threshold)


def informative_thresholds(
    student_entropy_N: Tensor, disagreement_N: Tensor, *, entropy_share: float, disagreement_share: float
) -> tuple[float, float]:
    """Entropy and disagreement thresholds of `informative_tokens`, in nats, for the shares to keep of a round.

    `entropy_share` is of all tokens, `disagreement_share` of those that are then left, the confident ones. Call it once
    with every trained token of the round (of all ranks): thresholds of a micro-batch would depend on how it was cut.

    >>> informative_thresholds(
    ...     torch.tensor([2.0, 1.5, 0.25, 0.5]), torch.tensor([9.0, 0.0, 3.0, 1.0]),
    ...     entropy_share=0.5, disagreement_share=0.5,
    ... )
    (1.5, 3.0)

    Raises:
        ValueError: a share outside [0, 1], shapes that differ, or NaN.
    """
    if student_entropy_N.shape != disagreement_N.shape:
        raise ValueError(
            f"the student's entropy has shape {tuple(student_entropy_N.shape)} and the disagreement "
            f"{tuple(disagreement_N.shape)}; expected one each for every token"
        )
    entropy_threshold = share_threshold(student_entropy_N, entropy_share)
    confident_N = _numbers(student_entropy_N, "the student's entropy") < entropy_threshold
    return entropy_threshold, share_threshold(disagreement_N[confident_N], disagreement_share)


def share_threshold(values_N: Tensor, share: float) -> float:
    """The number that `share` of the values reach, to the nearest whole token; infinite where that is none.

    Values equal to the threshold all reach it, so ties can keep more than the share.

    >>> values = torch.tensor([0.5, 3.0, 1.0, 2.0])
    >>> [share_threshold(values, share) for share in (0.0, 0.25, 0.5, 1.0)]
    [inf, 3.0, 2.0, 0.5]

    Raises:
        ValueError: a share outside [0, 1], or NaN among the values.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share of tokens to keep is {share}; expected 0 (none) to 1 (all)")
    num_kept = math.floor(share * values_N.numel() + 0.5)
    if num_kept == 0:
        return math.inf
    ascending_N = _numbers(values_N, "what the tokens are chosen by").sort().values
    return ascending_N[-num_kept].item()
