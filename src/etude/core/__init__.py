"""What one token is worth: the maths of distillation on plain tensors. It knows no model, file, config or network.

Use it in a notebook as docs/core.md shows; the names below are its public door.
"""

from etude.axes.names import FinishReason, Source
from etude.core.collate import collate
from etude.core.divergences import (
    adaptive_kl,
    alpha_beta,
    forward_kl,
    jsd,
    reverse_kl,
    skew_forward_kl,
    skew_reverse_kl,
    total_variation,
)
from etude.core.linear import OutputHead, head_sum
from etude.core.objective import Objective
from etude.core.records import Batch, Prompt, Rollout, Scored, Scores
from etude.core.reduction import term_scales
from etude.core.term import Term

__all__ = [
    "Batch",
    "FinishReason",
    "Objective",
    "OutputHead",
    "Prompt",
    "Rollout",
    "Scored",
    "Scores",
    "Source",
    "Term",
    "adaptive_kl",
    "alpha_beta",
    "collate",
    "forward_kl",
    "head_sum",
    "jsd",
    "reverse_kl",
    "skew_forward_kl",
    "skew_reverse_kl",
    "term_scales",
    "total_variation",
]
