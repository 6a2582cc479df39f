"""Which combinations of the axes have the gradient their name promises: the table, as data.

Every term is a `Point`. `judge` walks `RULES` from top to bottom and returns the first that matches (`reasons`, where
that is a surrogate, every one that matches):

- *exact*: the expected gradient is that of the named objective;
- *surrogate*: it is that of a stated stand-in (a clip, a discount between 0 and 1, advantages a few steps old);
- *refused*: it is zero, or belongs to another objective. The rule says why and what to write instead.

The recipe loader asks before torch is imported, and `core.objective.Objective` asks again, so that a term built by hand
in a notebook meets the same table.

Let y ~ q (the student), p the teacher, c = log q(y) - log p(y). Which coefficient multiplies grad log q(y) decides
everything (derivations in docs/pitfalls.md):

    c         -> grad KL(q || p)                 k1 as a detached reward, k2 as a loss
    1         -> 0                               k1 as a loss
    1 - p/q   -> grad KL(p || q)                 k3 as a loss: forward KL in disguise
    KL(state) -> 0                               a state's divergence as the advantage

    >>> judge(Point(support=Support.FULL, divergence=Divergence.JSD)).kind
    'exact'
    >>> print(judge(Point(support=Support.SAMPLED, form=Form.K1)).reason)
    differentiating k1 = log student - log teacher on the student's own tokens has an expected gradient of zero
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from etude.axes.names import (
    LABEL,
    REWARD,
    Baseline,
    Correctness,
    Divergence,
    Estimator,
    Form,
    Importance,
    Reduction,
    Source,
    Support,
    Tail,
)
from etude.axes.terms import TermValues
from etude.errors import LegalityError

Kind = Literal["exact", "surrogate", "refused"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the rows of a round are written, as far as a term's gradient depends on it."""

    rows: frozenset[Source] = frozenset({Source.STUDENT})  # who writes
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    joint: bool = False  # the teacher has a hand in each token of the student's rows
    stale: bool = False  # some of the student's rows were written by an earlier student: replayed or recorded
    steps_per_round: int = 1  # optimiser steps between two refreshes of the sampler

    @property
    def kept(self) -> str:
        """How many ids a token is drawn from: `whole` (the vocabulary), `several`, or `one`."""
        if self.temperature == 0.0 or self.top_k == 1:
            return "one"
        return "several" if self.top_p < 1.0 or self.top_k > 0 else "whole"


@dataclass(frozen=True, slots=True)
class Point:
    """One term and the sampler it meets, as far as the expected gradient depends on them."""

    label: bool = False  # the teacher is the one-hot label (the row's own ids)
    reward: bool = False  # the teacher is a verifier's number for the whole row
    support: Support = Support.FULL
    divergence: Divergence = Divergence.REVERSE_KL
    estimator: Estimator = Estimator.ANALYTIC
    form: Form | None = None  # sampled support only
    renormalised: bool = False  # sampled support only: both sides over the ids that the sampler's cuts kept
    importance: Importance = Importance.NONE  # policy gradient only
    discount: float = 0.0  # policy gradient only
    tail: Tail | None = None  # top-k support only
    one_id: bool = False  # top-k support that keeps a single id a side
    detached: bool = False  # part of the divergence is held constant on purpose
    shaped: bool = False  # policy gradient only: advantages are centred, scaled, clipped or weighed
    answers: Literal["all", "right", "wrong"] = "all"  # whether rows of one verdict alone are trained, or weigh more
    chosen_by_draw: bool = False  # whether a token is trained depends on what was drawn, there or later in its row
    chosen_by_state: bool = False  # it depends on the state: some states are trained and others not
    reduction: Reduction = Reduction.TOKEN_MEAN
    loss_temperature: float = 1.0  # of both softmaxes in the loss
    sampling: Sampling = Sampling()  # its rows: only those the term meets

    @classmethod
    def of(cls, term: TermValues, sampling: Sampling, loss_temperature: float) -> Point:
        """The point of a term (from a recipe or built by hand) under a sampler."""
        return cls(
            label=term.teacher == LABEL,
            reward=term.teacher == REWARD,
            support=term.support,
            divergence=term.divergence,
            estimator=term.estimator,
            form=term.form,
            renormalised=term.renormalise,
            importance=term.importance,
            discount=term.discount,
            tail=term.tail,
            one_id=term.top_k == 1,
            detached=term.detach_mixture or term.divergence is Divergence.ADAPTIVE_KL,
            shaped=term.length_normalise
            or term.whiten
            or term.baseline in (Baseline.BATCH, Baseline.GROUP)
            or term.advantage_clip is not None
            or term.disagreement_weight is not None,
            answers=_answers(term),
            chosen_by_draw=term.confident_wrong_share is not None
            or not term.train_special
            or not term.train_truncated,  # whether a row is cut is settled by its draws
            chosen_by_state=term.entropy_share is not None or term.teacher_entropy is not None,
            reduction=term.reduction,
            loss_temperature=loss_temperature,
            sampling=replace(sampling, rows=sampling.rows & frozenset(term.sources)),
        )

    @property
    def axes(self) -> Mapping[str, str]:
        """The point in the table's words."""
        return {
            "teacher": "label" if self.label else "reward" if self.reward else "model",
            "support": self.support,
            "tail": (self.tail or "") if self.support is Support.TOP_K else "",
            "kept": ("one" if self.one_id else "several") if self.support is Support.TOP_K else "",
            "divergence": self.divergence,
            "estimator": self.estimator,
            "form": (self.form or self.default_form or "") if self.support is Support.SAMPLED else "",
            "renormalised": self.sampling.kept if self.renormalised else "no",
            "importance": self.importance if self._policy_gradient else "",
            "coefficients": "detached" if self.detached else "differentiated",
            "advantages": ("shaped" if self.shaped else "plain") if self._policy_gradient else "",
            "answers": self.answers,
            "choice": "draw" if self.chosen_by_draw else "state" if self.chosen_by_state else "place",
            "reduction": self.reduction,
            "rows": self._rows,
            "tokens": self._tokens,
            "age": "stale" if self.sampling.stale and Source.STUDENT in self.sampling.rows else "fresh",
            "steps": "several" if self.sampling.steps_per_round > 1 else "one",
            "credit": {0.0: "token", 1.0: "sequence"}.get(self.discount, "discounted"),
        }

    @property
    def default_form(self) -> Form | None:
        """The form whose use is right: k2 differentiated, k1 as a detached reward."""
        if self.support is not Support.SAMPLED:
            return None
        return Form.K2 if self.estimator is Estimator.ANALYTIC else Form.K1

    @property
    def _policy_gradient(self) -> bool:
        return self.estimator is Estimator.POLICY_GRADIENT

    @property
    def _rows(self) -> str:
        """Who wrote the rows the term meets."""
        rows = self.sampling.rows
        if not rows:
            return "none"
        if Source.STUDENT not in rows:
            return "others"
        return "student" if len(rows) == 1 else "mixed"

    @property
    def _tokens(self) -> str:
        """Which distribution the student's rows are drawn from, compared with the one the loss is about."""
        # Renormalised, the loss is about the cut distribution itself; one that both models cut has no such set.
        if self.sampling.kept != "whole" and (self.sampling.joint or not self.renormalised):
            return "truncated"
        if self.sampling.joint and Source.STUDENT in self.sampling.rows:
            return "joint"
        return "own" if self.sampling.temperature == self.loss_temperature else "tempered"


def _answers(term: TermValues) -> Literal["all", "right", "wrong"]:
    if term.correctness is not None:
        return "right" if term.correctness is Correctness.RIGHT else "wrong"
    if term.right_weight == term.wrong_weight:
        return "all"
    return "right" if term.right_weight > term.wrong_weight else "wrong"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table: where it applies (axis: allowed values; an axis left out matches all), and the verdict."""

    name: str
    when: Mapping[str, tuple[str, ...]]
    kind: Kind
    reason: str
    cure: str = ""

    def matches(self, axes: Mapping[str, str]) -> bool:
        return all(axes[axis] in values for axis, values in self.when.items())


_ALL_BUT_FORWARD = tuple(divergence for divergence in Divergence if divergence is not Divergence.FORWARD_KL)
_DRAWN: Mapping[str, tuple[str, ...]] = {"support": ("sampled", "top_k"), "tail": ("", "sampled")}  # a mean over draws
_IN_THE_LIMIT = "; under token_mean for many rows a step, whose number of tokens is drawn as well"
_ALL_BUT_REVERSE = tuple(divergence for divergence in Divergence if divergence is not Divergence.REVERSE_KL)

RULES: tuple[Rule, ...] = (
    Rule(
        "no-rows",
        {"rows": ("none",)},
        "refused",
        "nobody in the term's sources writes a row of the round, so it would train nothing",
        "write sources that the sampler has, or let the sampler write such rows (student_fraction, other)",
    ),
    Rule(
        "label-divergence",
        {"teacher": ("label",), "divergence": _ALL_BUT_FORWARD},
        "refused",
        "a one-hot label has probability zero everywhere but at one id, where only forward KL is the cross-entropy",
        'write divergence = "forward_kl"',
    ),
    Rule(
        "label-support",
        {"teacher": ("label",), "support": ("sampled", "top_k")},
        "refused",
        "the label is the whole distribution (one id has all the mass), so there is nothing to sample or to leave out",
        'write support = "full"',
    ),
    Rule(
        "label-estimator",
        {"teacher": ("label",), "estimator": ("policy_gradient",)},
        "refused",
        "a policy gradient needs the teacher's log-probability of the drawn id, which is minus infinity off the label",
        'write estimator = "analytic"',
    ),
    Rule(
        "label-wrong-rows",
        {"teacher": ("label",), "rows": ("student", "mixed"), "answers": ("wrong",)},
        "refused",
        "cross-entropy on the student's own wrong answers makes them likelier, at the expense of the right ones",
        'write correctness = "right" or a larger right_weight, or let a teacher mark the wrong rows',
    ),
    Rule(
        "label-right-rows",
        {"teacher": ("label",), "rows": ("student", "mixed"), "answers": ("right",)},
        "surrogate",
        "rejection sampling: cross-entropy on the student's own right answers has the gradient of a reward of 1 for "
        "each (for its own draws), and no teacher's",
    ),
    Rule(
        "label-own-rows",
        {"teacher": ("label",), "rows": ("student", "mixed"), "tokens": ("own",)},
        "refused",
        "cross-entropy on tokens the student itself has just drawn has an expected gradient of zero",
        'write sources = ["dataset"] or ["teacher"] for this term',
    ),
    Rule(
        "label-shifted-rows",
        {"teacher": ("label",), "rows": ("student", "mixed"), "tokens": ("tempered", "truncated", "joint")},
        "surrogate",
        "self-training on the student's own shifted samples sharpens what it already says; no teacher's gradient",
    ),
    Rule("label", {"teacher": ("label",)}, "exact", "forward KL to a one-hot label is the cross-entropy"),
    Rule(
        "reward-divergence",
        {"teacher": ("reward",), "divergence": _ALL_BUT_REVERSE},
        "refused",
        "a reward is one number for the whole row and no distribution, so the divergence would change nothing",
        "write no divergence for this term",
    ),
    Rule(
        "reward-support",
        {"teacher": ("reward",), "support": ("full", "top_k")},
        "refused",
        "a reward says nothing about the tokens that were not drawn, so there is no vocabulary to compare over",
        'write support = "sampled" and estimator = "policy_gradient"',
    ),
    Rule(
        "reward-estimator",
        {"teacher": ("reward",), "estimator": ("analytic",)},
        "refused",
        "a reward does not change when the student does until other tokens are drawn: differentiated, it is zero",
        'write estimator = "policy_gradient"',
    ),
    Rule(
        "reward-last-token",
        {"teacher": ("reward",), "credit": ("token",)},
        "refused",
        "the reward comes at the end of the row, and with discount 0 its last token alone would answer for it",
        "write discount = 1, or a discount above 0",
    ),
    Rule(
        "state-value-advantage",
        {"support": ("full", "top_k"), "estimator": ("policy_gradient",)},
        "refused",
        "a state's divergence does not depend on the drawn token, so as an advantage its expected gradient is zero",
        'write support = "sampled" (the log-ratio of the drawn token), or estimator = "analytic"',
    ),
    Rule(
        "renormalised-one",
        {"support": ("top_k",), "tail": ("renormalise",), "kept": ("one",)},
        "refused",
        "renormalised over a single id both sides are certain of it, so the divergence is zero",
        'write top_k = 2 or more, or tail = "bucket"',
    ),
    Rule(
        "sampled-tail-divergence",
        {"support": ("top_k",), "tail": ("sampled",), "divergence": _ALL_BUT_REVERSE},
        "refused",
        "one token drawn by the student stands for the tail of the reverse KL and of no other divergence",
        'write divergence = "reverse_kl", or tail = "bucket"',
    ),
    Rule(
        "bucket",
        {"support": ("top_k",), "tail": ("bucket",)},
        "surrogate",
        "all other ids are lumped into one: the KLs are never more than in full, and the lump has no shape",
    ),
    Rule(
        "renormalise",
        {"support": ("top_k",), "tail": ("renormalise",)},
        "surrogate",
        "the shapes within the kept ids are compared; nothing acts on the probability outside them",
    ),
    Rule(
        "truncate",
        {"support": ("top_k",), "tail": ("truncate",)},
        "surrogate",
        "the sum stops at the kept ids, coefficients detached; forward KL then also pulls all probability onto them",
    ),
    Rule(
        "detached",
        {"support": ("full", "top_k"), "coefficients": ("detached",)},
        "surrogate",
        "the divergence's weights or mixture are held constant, as published; its gradient is not that of its value",
    ),
    Rule(
        "full",
        {"support": ("full",)},
        "exact",
        "the divergence of the whole vocabulary, differentiated at the states the rows visit, these and what they "
        "weigh held fixed",
    ),
    Rule(
        "sampled-divergence",
        {"support": ("sampled",), "divergence": _ALL_BUT_REVERSE},
        "refused",
        "one token drawn by the student estimates the reverse KL and no other divergence",
        'write divergence = "reverse_kl", or support = "full"',
    ),
    Rule(
        "k1-loss",
        {"estimator": ("analytic",), "form": ("k1",)},
        "refused",
        "differentiating k1 = log student - log teacher on the student's own tokens has an expected gradient of zero",
        'write estimator = "policy_gradient" (k1 as a detached reward), or form = "k2"',
    ),
    Rule(
        "k3-loss",
        {"estimator": ("analytic",), "form": ("k3",)},
        "refused",
        "differentiating k3 gives the gradient of the forward KL, whatever its value says",
        'write form = "k2", or support = "full" with divergence = "forward_kl" if forward KL is meant',
    ),
    Rule(
        "k2-reward",
        {"estimator": ("policy_gradient",), "form": ("k2",)},
        "refused",
        "k2 = c^2 / 2 as a reward loses the sign of the log-ratio c, and its expected gradient is no divergence's",
        'write form = "k1"',
    ),
    Rule(
        "k3-reward",
        {"estimator": ("policy_gradient",), "form": ("k3",)},
        "refused",
        "k3 as a reward has the gradient of reverse KL minus forward KL, which vanishes near the teacher",
        'write form = "k1"',
    ),
    Rule(
        "sampled-rows",
        {"rows": ("mixed", "others")},
        "refused",
        "sampled support is an expectation over tokens the student drew, and the term also meets rows it did not write",
        'write sources = ["student"] for this term with student_fraction above 0, or support = "full" where the '
        "teacher is a model",
    ),
    Rule(
        "truncated-sampling",
        {"tokens": ("truncated",)},
        "refused",
        "under top-p, top-k or temperature 0 some tokens can never be drawn, and no importance weight restores them",
        'write top_p = 1, top_k = 0 and a temperature above 0 in [sampler], support = "full" where the teacher is a '
        'model, or support = "sampled" with renormalise = true (both sides over the ids that top_p and top_k keep)',
    ),
    Rule(
        "renormalised-whole",
        {"renormalised": ("whole",)},
        "refused",
        "the sampler leaves no id out, so that renormalising over those it keeps would change nothing",
        "write no renormalise for this term, or top_p below 1 or top_k above 1 in [sampler]",
    ),
    Rule(
        "renormalised-single",
        {"renormalised": ("one",)},
        "refused",
        "temperature 0 and top_k = 1 keep a single id, of which both sides are certain once they are renormalised",
        "write a temperature above 0 and top_k = 0, or 2 and more, in [sampler]",
    ),
    Rule(
        "uncorrected-temperature",
        {"tokens": ("tempered",), "importance": ("none", "")},
        "refused",
        "the tokens are drawn at another temperature than the loss is about, and nothing corrects for it",
        'write estimator = "policy_gradient" with importance = "ratio", equal temperatures in [sampler] and [loss], or '
        'support = "full" where the teacher is a model',
    ),
    Rule(
        "uncorrected-joint",
        {"tokens": ("joint",), "importance": ("none", "")},
        "refused",
        "the teacher had a hand in the tokens, which are not the student's own draws, and nothing corrects for it",
        'write estimator = "policy_gradient" with importance = "ratio", no teacher_share and no teacher_top_k, or '
        'support = "full" where the teacher is a model',
    ),
    Rule(
        "uncorrected-steps",
        {"steps": ("several",), "importance": ("none", "")},
        "refused",
        "after a round's first step its tokens are those of an older student, and nothing corrects for it",
        'write estimator = "policy_gradient" with importance = "ratio", one step a round, or support = "full" where '
        "the teacher is a model",
    ),
    Rule(
        "uncorrected-replay",
        {"age": ("stale",), "importance": ("none", "")},
        "refused",
        "replayed or recorded tokens are those of an older student, and nothing corrects for it",
        'write estimator = "policy_gradient" with importance = "ratio", let the student write (no replay_fraction, no '
        'recorded), or write support = "full" where the teacher is a model',
    ),
    Rule(
        "ppo-clip",
        {"importance": ("ppo_clip",)},
        "surrogate",
        "the clipped ratio bounds the update; without clipped tokens it equals the unclipped ratio",
    ),
    Rule(
        "bounded-ratio",
        {"importance": ("truncated", "masked")},
        "surrogate",
        "the ratio is held between bounds, or its token left out; without such tokens it equals the plain ratio",
    ),
    Rule(
        "shaped-advantages",
        {"advantages": ("shaped",)},
        "surrogate",
        "advantages are centred, scaled, clipped or weighed, which trades the gradient's truth against its noise",
    ),
    Rule(
        "token-ratio-of-rewards",
        {"teacher": ("reward",), "steps": ("several",)},
        "surrogate",
        "after a round's first step the single-token ratio does not see how the tokens around it have changed",
    ),
    Rule(
        "discounted",
        {"estimator": ("policy_gradient",), "credit": ("discounted",)},
        "surrogate",
        "a discount between 0 and 1 trades the token gradient's bias against the sequence gradient's variance",
    ),
    Rule(
        "states-of-an-older-student",
        {"age": ("stale",), "estimator": ("policy_gradient",)},
        "surrogate",
        "a token's ratio corrects its own draw; it does not see that an older student led to its state and goes on",
    ),
    Rule(
        "token-ratio-of-returns",
        {"estimator": ("policy_gradient",), "credit": ("discounted", "sequence"), "tokens": ("tempered", "joint")},
        "surrogate",
        "returns reach over later tokens, whose change of distribution the single-token ratio does not see",
    ),
    Rule(
        "advantages-of-the-first-step",
        {"teacher": ("model",), "estimator": ("policy_gradient",), "steps": ("several",)},
        "surrogate",
        "advantages are those of the student at the round's first step: right there, lagging behind in later steps",
    ),
    Rule(
        "chosen-by-outcome",
        {**_DRAWN, "answers": ("right", "wrong")},
        "surrogate",
        "rows are kept or weighed for how they ended, so of the student's draws only those that led there are averaged",
    ),
    Rule(
        "chosen-by-draw",
        {**_DRAWN, "choice": ("draw",)},
        "surrogate",
        "tokens are kept for what was drawn, so the mean runs over some draws alone: those that looked confident and "
        "wrong, are no special tokens, or led to an answer that was not cut",
    ),
    Rule(
        "returns-of-chosen-states",
        {"estimator": ("policy_gradient",), "credit": ("discounted", "sequence"), "choice": ("state",)},
        "surrogate",
        "chosen states alone are trained and each answers for all the rest of its row: a part of the sequence's "
        "gradient, and no named objective's",
    ),
    Rule(
        "weighed-by-length",
        {**_DRAWN, "reduction": ("sequence_mean",)},
        "surrogate",
        "a token weighs one over a length that its draw helps to decide: good answers are pulled towards short ones, "
        "bad ones towards long ones (the length bias that Dr. GRPO names)",
    ),
    Rule(
        "renormalised-reward",
        {"teacher": ("reward",), "renormalised": ("several",)},
        "exact",
        "the gradient of the expected reward of answers drawn as the sampler draws, the ids it kept held fixed"
        + _IN_THE_LIMIT,
    ),
    Rule(
        "reward",
        {"teacher": ("reward",)},
        "exact",
        "the row's detached reward on each of the student's own tokens: the gradient of the expected reward"
        + _IN_THE_LIMIT,
    ),
    Rule(
        "sampled-tail",
        {"support": ("top_k",)},
        "exact",
        "the kept ids in full and the drawn token for the rest: over the student's draws, the whole gradient"
        + _IN_THE_LIMIT,
    ),
    Rule(
        "renormalised",
        {"renormalised": ("several",)},
        "exact",
        "reverse KL within the ids that the sampler kept, held fixed, both sides rescaled; nothing acts outside them"
        + _IN_THE_LIMIT,
    ),
    Rule(
        "sampled",
        {},
        "exact",
        "a detached log-ratio (or k2, whose update is the same) on the student's own tokens" + _IN_THE_LIMIT,
    ),
)


def judge(point: Point) -> Rule:
    """The first rule of the table that applies to the point; the last one applies to all that is left."""
    axes = point.axes
    return next(rule for rule in RULES if rule.matches(axes))


def reasons(point: Point) -> tuple[Rule, ...]:
    """All that makes a surrogate of the point, in the table's order; of any other point `judge`'s rule alone.

    >>> gradient = Point(support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT, shaped=True, discount=0.5)
    >>> [rule.name for rule in reasons(gradient)]
    ['shaped-advantages', 'discounted']
    """
    first, axes = judge(point), point.axes
    if first.kind != "surrogate":
        return (first,)
    return tuple(rule for rule in RULES if rule.kind == "surrogate" and rule.matches(axes))


def require_legal(point: Point, where: str) -> Rule:
    """`judge`, refusing with one sentence; `where` names the term for the reader, such as "terms.0 (reverse_kl)".

    Raises:
        LegalityError: the combination has no gradient, or another objective's.
    """
    rule = judge(point)
    if rule.kind == "refused":
        raise LegalityError(f"{where} is refused ({rule.name}): {rule.reason}; {rule.cure}.")
    return rule
