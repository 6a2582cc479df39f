"""The table of combinations as a page: `docs/legality.md`, printed by `etude methods --legality`.

Everything but the introduction is read off `legality.RULES`; a test holds the committed page to what is printed here.
Knows no term and no recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from etude.axes.legality import RULES, Rule
from etude.axes.names import Divergence, Estimator, Form, Importance, Reduction, Support, Tail

# What each word of the table's second column is about; in the order of `Point.axes`.
AXES: Mapping[str, str] = {
    "teacher": "a `model`, the one-hot `label`, or a verifier's `reward` for the whole row",
    "support": "how much of the vocabulary is compared: `full`, `top_k`, `sampled`",
    "tail": "what stands for the ids that top-k support does not keep",
    "kept": "top-k support that keeps `one` id a side, or `several`",
    "divergence": "what is measured between teacher and student",
    "estimator": "`analytic` differentiates it, `policy_gradient` takes it as an advantage",
    "form": "under sampled support: which function of c stands for the reverse KL",
    "renormalised": "under sampled support with `renormalise`: how many ids the sampler's cuts keep (`several`, `one`, "
    "the `whole` vocabulary); else `no`",
    "importance": "under policy gradient: the correction for tokens that today's student did not draw",
    "coefficients": "`detached` where part of the divergence is held constant (`adaptive_kl`, `detach_mixture`), else "
    "`differentiated`",
    "advantages": "`shaped` where they are centred over the batch or the group, whitened, divided by length, clipped "
    "or weighed, else `plain`",
    "answers": "what a verifier's verdict on a row changes: `right` where right rows alone are trained or weigh more, "
    "`wrong` likewise, else `all`",
    "choice": "what decides whether a token is trained: what was drawn, there or later (`draw`: "
    "`confident_wrong_share`, `train_special`, `train_truncated`), the `state` (`entropy_share`, `teacher_entropy`), "
    "or its `place` in the row at most",
    "reduction": "what a token weighs: 1 over the trained tokens of the step (`token_mean`), 1 over those of its row, "
    "then 1 over the rows (`sequence_mean`), 1 (`sum`)",
    "rows": "who wrote the rows the term meets: the `student`, `others`, both (`mixed`), nobody (`none`)",
    "tokens": "what the student's rows are drawn from: its `own` distribution at the loss temperature, the same at "
    "another temperature (`tempered`), cut by top-p, top-k or temperature 0 (`truncated`, unless the loss "
    "is renormalised over the same ids), or written together with the teacher (`joint`)",
    "age": "`stale` where rows of an earlier round may be replayed, else `fresh`",
    "steps": "optimiser steps on the rows of a round: `one` or `several` (updates_per_round x epochs)",
    "credit": "what a token answers for: itself (`token`, discount 0), all that follows (`sequence`, discount 1), or "
    "something between (`discounted`)",
}

_VALUES: Mapping[str, type[StrEnum]] = {
    "support": Support,
    "tail": Tail,
    "divergence": Divergence,
    "estimator": Estimator,
    "form": Form,
    "importance": Importance,
    "reduction": Reduction,
}

_INTRODUCTION = """\
# Which combinations have a gradient

A term of the loss is a point of the [axes](method.md), and not every point has the gradient that its name promises.
Before any weight is loaded etude looks each term up in the table below; `etude check RECIPE` prints what it found.
The table is data, `etude.axes.legality.RULES`, and this page is what `etude methods --legality` prints.

## Why

Let y be a token that the student q draws, p the teacher, and c = log q(y) - log p(y). Whatever an implementation
computes, its update multiplies grad log q(y) by some coefficient, and the mean over the draw decides. A coefficient
that does not depend on y has the mean zero, because the probabilities sum to one: sum over y of q(y) grad log q(y) =
grad 1 = 0.

| coefficient of grad log q(y) | expected gradient | where it comes from |
|---|---|---|
| c | of KL(q &#124;&#124; p) | k1 = c as a detached reward, or k2 = c²/2 as a loss |
| 1 | zero | k1 as a loss |
| 1 - p(y)/q(y) | of KL(p &#124;&#124; q) | k3 = exp(-c) - 1 + c as a loss |
| p(y)/q(y) - 1 + c | of KL(q &#124;&#124; p) minus KL(p &#124;&#124; q) | k3 as a detached reward |
| the divergence of the state | zero | a state's value as the advantage |

The mean is over q's own draws. Tokens of another distribution b need the weight q(y)/b(y), and no weight brings back
a token that b never draws. Full support sums over the vocabulary and draws nothing, so it does not ask who wrote the
token, only which states were visited, and whatever decides what a state weighs (a length, a verdict, a cut) is given
like the state itself. A mean over drawn tokens has no such freedom: what the draw helps to decide bends the mean. That
goes for the divisor. Averaged within each row (`sequence_mean`) a token weighs one over a length that it may have
ended; averaged over the step (`token_mean`) it weighs 1/N, and N is drawn as well, which fades as a step has more rows
and with a single row is the same as the row's own mean. Summed (`sum`) nothing is bent. Zeros and other objectives of
the refusals are those of the sum.

[Pitfalls](pitfalls.md#losses-whose-gradient-is-not-what-their-name-says) has
the derivations with numbers, and the test suite shows each verdict by enumerating every sequence of a small
vocabulary.

## Verdicts

- **exact**: the expected gradient is that of the named objective, at the states that the rows visit.
- **surrogate**: it is that of a stand-in, which the reason states. `etude check` prints every rule that makes one of a
  term, not only the first.
- **refused**: it is zero, or belongs to another objective. The recipe ends with the reason and with what to write
  instead.
"""


def legality_page() -> str:
    """The whole page, in Markdown."""
    words = [_row(f"`{axis}`", text) for axis, text in AXES.items()]
    rules = [
        _row(f"`{rule.name}`", _where(rule), f"**{rule.kind}**", rule.reason, rule.cure.removeprefix("write "))
        for rule in RULES
    ]
    return "\n".join(
        [
            _INTRODUCTION,
            "## The words\n",
            *_heading("word", "of a term and the rows it meets"),
            *words,
            "\n## The table\n",
            "Rules are read from the top and the first that applies decides, so each speaks of what the rules above it "
            "have left.\n",
            *_heading("rule", "where", "verdict", "because", "write instead"),
            *rules,
            "",
        ]
    )


def _heading(*cells: str) -> list[str]:
    return [_row(*cells), "|" + "---|" * len(cells)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _where(rule: Rule) -> str:
    """Where a rule applies, in words.

    >>> _where(next(rule for rule in RULES if rule.name == "label-divergence"))
    'teacher: `label`; divergence: all but `forward_kl`'
    """
    return "; ".join(f"{axis}: {_among(axis, values)}" for axis, values in rule.when.items()) or "whatever is left"


def _among(axis: str, values: tuple[str, ...]) -> str:
    others = [value for value in _VALUES.get(axis, ()) if value not in values]
    if len(others) == 1 and len(values) > len(others) + 1:
        return f"all but `{others[0]}`"
    return " or ".join(f"`{value}`" if value else "does not apply" for value in values)
