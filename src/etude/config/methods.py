"""The named points of the axes: what the field's method names mean, as recipe fragments.

A recipe that says `method = "gkd"` starts from that row's settings, and whatever else it says overrides them. A row
states every axis it stands for, and nothing about models, data, size or learning rate. A method is listed only if
today's axes express it; where the published one differs, its note says how. `etude methods` prints this table.

    >>> METHODS["sft"].axes["teacher"]
    'label'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Method:
    """One named point."""

    name: str
    line: str  # what it does
    settings: Mapping[str, Any]  # a fragment of a recipe
    source: str  # authors, year, where to read it
    note: str = ""  # where the published method differs, and its other values

    @property
    def axes(self) -> dict[str, str]:
        """The six axes in the order of the equation, read off the settings."""
        sampler, term = self.settings["sampler"], self.settings["terms"][0]
        share, other = sampler["student_fraction"], sampler.get("other", "dataset")  # as in the schema
        writers = {0.0: other, 1.0: "student"}.get(share, f"student {share:.0%}, {other} {1 - share:.0%}")
        return {"sampler": writers} | {axis: term[axis] for axis in TERM_AXES}


TERM_AXES = ("teacher", "support", "divergence", "estimator", "reduction")


def _term(divergence: str, *, teacher: str = "teacher", support: str = "full", estimator: str = "analytic") -> Any:
    return {
        "teacher": teacher,
        "support": support,
        "divergence": divergence,
        "estimator": estimator,
        "reduction": "token_mean",
    }


_ROWS = (
    Method(
        "opd",
        "on-policy distillation: the student writes, the teacher marks the whole vocabulary, reverse KL",
        {"sampler": {"student_fraction": 1.0}, "terms": [_term("reverse_kl")]},
        "Agarwal et al. (2023), arXiv 2306.13649: GKD with lambda 1 and reverse KL",
        "What a recipe without a method does.",
    ),
    Method(
        "gkd",
        "generalised knowledge distillation: half the rows from the student, half from the data, JSD",
        {"sampler": {"student_fraction": 0.5}, "terms": [_term("jsd")]},
        "Agarwal et al. (2023), arXiv 2306.13649",
        "The paper tosses one coin a batch; here one is tossed a row. Its other values: student_fraction 0 and 1 (the "
        "best), beta 0.1 and 0.9, forward_kl, reverse_kl.",
    ),
    Method(
        "thinking-machines",
        "the student writes, the log-ratio of each drawn token is its advantage: only one number a token is needed",
        {
            "sampler": {"student_fraction": 1.0, "temperature": 1.0, "samples_per_prompt": 4},
            "terms": [_term("reverse_kl", support="sampled", estimator="policy_gradient")],
        },
        "Lu and Thinking Machines Lab (2025), thinkingmachines.ai/blog/on-policy-distillation",
        "Discount 0 and the importance ratio are the defaults of policy_gradient.",
    ),
    Method(
        "supervised-kd",
        "word-level distillation: the teacher marks the data's own completions, forward KL",
        {"sampler": {"student_fraction": 0.0}, "terms": [_term("forward_kl")]},
        "Hinton et al. (2015), arXiv 1503.02531; on language models Sanh et al. (2019), arXiv 1910.01108",
    ),
    Method(
        "seqkd",
        "sequence-level distillation: cross-entropy on what the teacher writes",
        {
            "sampler": {"student_fraction": 0.0, "other": "teacher"},
            "terms": [_term("forward_kl", teacher="label")],
        },
        "Kim and Rush (2016), arXiv 1606.07947",
        "The paper decodes each prompt once, by beam search; here the teacher samples afresh in every round.",
    ),
    Method(
        "sft",
        "supervised fine-tuning: cross-entropy on the data's own completions; needs no teacher",
        {
            "sampler": {"student_fraction": 0.0},
            "terms": [_term("forward_kl", teacher="label")],
        },
        "maximum likelihood; as forward KL to a one-hot label it is a point of the same axes",
    ),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _ROWS}
