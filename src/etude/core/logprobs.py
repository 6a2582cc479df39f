"""From logits to next-token log-probabilities: the real-vocabulary cut, the loss temperature, and the only shift.

Legend: B rows, T padded positions, N scored tokens, V real vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cut_filler(logits_NV: Tensor, vocab_size: int) -> Tensor:
    """Cut away the filler columns beyond the tokenizer's vocabulary, *before* any softmax.

    Models pad their embedding to a round number. A filler logit is a real number: left in, it takes probability.

        >>> filler = torch.tensor([[-5.0, -6.0, 0.0, 0.0]])  # two real ids, two filler columns
        >>> cut_filler(filler, 2).softmax(-1)
        tensor([[0.7311, 0.2689]])
        >>> filler.softmax(-1)[0, 2:].sum()
        tensor(0.9954)

    Raises:
        ValueError: the logits have fewer columns than the vocabulary has ids.
    """
    if logits_NV.shape[-1] < vocab_size:
        raise ValueError(f"logits have {logits_NV.shape[-1]} columns for a vocabulary of {vocab_size} ids")
    return logits_NV[..., :vocab_size]


def next_token_logprobs(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature), in float32 at least.

    `temperature` is the *loss* temperature: it applies to student and teacher alike and is independent of the sampling
    temperature. No T^2 factor is put in front of the divergence.

        >>> next_token_logprobs(torch.tensor([0.0, 0.0])).exp()
        tensor([0.5000, 0.5000])

    Returns:
        [..., V] float32, or float64 for float64 logits.
    """
    dtype = torch.promote_types(torch.float32, logits_NV.dtype)
    logits_NV = logits_NV.to(dtype)
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    return torch.log_softmax(logits_NV, dim=-1)


def predicted_from(num_prompt_tokens: int, num_completion_tokens: int) -> Tensor:
    """[C] positions of an unpadded row whose logits predict its completion tokens: the only shift by one in the system.

    The logits at position i are about token i + 1, so completion token j (from 0) is predicted at
    `num_prompt_tokens + j - 1`. Three prompt tokens, two completion tokens:

        >>> predicted_from(3, 2)
        tensor([2, 3])
    """
    return torch.arange(num_completion_tokens) + (num_prompt_tokens - 1)


def pick(logprobs_NV: Tensor, ids_N: Tensor) -> Tensor:
    """[N] log-probability of one id a row.

    >>> pick(torch.tensor([[-0.1, -2.4], [-0.7, -0.8]]), torch.tensor([1, 0]))
    tensor([-2.4000, -0.7000])
    """
    return logprobs_NV.gather(-1, ids_N.unsqueeze(-1)).squeeze(-1)
