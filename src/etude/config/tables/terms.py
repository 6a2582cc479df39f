"""`[[terms]]` and `[loss]`: axes 2 to 6, one summand of the loss each, and what all of them share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from etude.axes.legality import Point
from etude.axes.names import (
    LABEL,
    REWARD,
    Baseline,
    Correctness,
    Divergence,
    Estimator,
    Form,
    Importance,
    Owner,
    Reduction,
    Source,
    Support,
    Tail,
)
from etude.axes.terms import BOUNDED, SKEWED, TermValues, check_term
from etude.config.noun import Many, Noun, OnlyWhen, Word
from etude.config.tables.ramp import RampConfig, ramp_of

_OF_TOP_K = OnlyWhen('support is "top_k"', lambda term: term.support is Support.TOP_K)
_OF_POLICY_GRADIENT = OnlyWhen(
    'estimator is "policy_gradient"', lambda term: term.estimator is Estimator.POLICY_GRADIENT
)


_OF_BOTH_KINDS = OnlyWhen(
    'correctness is left out and teacher is not "reward"',
    lambda term: term.correctness is None and term.teacher != REWARD,
)


def _credit(term: Any) -> float:
    """A reward comes at the end of its row, and every token answers for it."""
    return 1.0 if term.teacher == REWARD else 0.0


class SourceWeightsConfig(Noun):
    """What a row's tokens weigh by who wrote it; a source left out weighs 1."""

    student: float | None = Field(default=None, description="Of rows the student wrote. Left out: 1.")
    dataset: float | None = Field(default=None, description="Of rows from the dataset. Left out: 1.")
    teacher: float | None = Field(default=None, description="Of rows the teacher wrote. Left out: 1.")

    def weights(self) -> dict[Source, float]:
        """Of the sources that were written."""
        given = {source: getattr(self, source.value) for source in Source}
        return {source: weight for source, weight in given.items() if weight is not None}


class TermConfig(Noun):
    """`[[terms]]`: one summand of the loss: which teacher, how much of it, measured how, trained how, on which rows."""

    teacher: Literal["teacher", "reference", "label", "reward"] = Field(
        default="teacher",
        description='The model of [teacher] or of [reference]; the "label": all probability on the row\'s own next '
        'token; or the "reward": the verifier\'s one number for the whole row.',
    )
    extrapolation: Annotated[float | None, OnlyWhen('teacher is "teacher"', lambda term: term.teacher == "teacher")] = (
        Field(
            default=None,
            gt=0,
            description="The power lambda of the target teacher^lambda reference^(1 - lambda); 1.25 in ExOPD (2026). "
            "Left out: 1, the teacher itself.",
        )
    )
    support: Word[Support] = Field(
        default=Support.FULL,
        description="How much of the vocabulary is compared: all of it, the likeliest ids, or only the drawn token.",
    )
    top_k: Annotated[int | None, replace(_OF_TOP_K, default=64)] = Field(
        default=None,
        ge=1,
        description="Ids kept a side, at most all. 64: what trainers with top-k losses ship.",
    )
    owner: Annotated[Word[Owner] | None, replace(_OF_TOP_K, default=Owner.TEACHER)] = Field(
        default=None, description="Whose likeliest ids are kept: the teacher's, the student's, or the union of both."
    )
    tail: Annotated[Word[Tail] | None, replace(_OF_TOP_K, default=Tail.BUCKET)] = Field(
        default=None,
        description="What stands for the other ids: one bucket, nothing (truncate, renormalise), or the drawn token.",
    )
    renormalise: Annotated[bool, OnlyWhen('support is "sampled"', lambda term: term.support is Support.SAMPLED)] = (
        Field(
            default=False,
            description="Rescale both sides to sum to one over the ids that sampler.top_p and top_k left to draw each "
            "token from.",
        )
    )
    divergence: Word[Divergence] = Field(
        default=Divergence.REVERSE_KL,
        description="What is measured at each token. reverse_kl, KL(student || teacher): do what the teacher would.",
    )
    beta: Annotated[
        float | None,
        OnlyWhen(
            'divergence is "jsd" or "alpha_beta"',
            lambda term: term.divergence in (Divergence.JSD, Divergence.ALPHA_BETA),
            default=0.5,
        ),
    ] = Field(
        default=None,
        description="Of jsd the teacher's weight in the mixture, near 0 as forward KL, near 1 as reverse KL; of "
        "alpha_beta the student's power.",
    )
    alpha: Annotated[
        float | None,
        OnlyWhen(
            "divergence is a skew one or alpha_beta",
            lambda term: term.divergence in (*SKEWED, Divergence.ALPHA_BETA),
            default_of=lambda term: 0.1 if term.divergence in SKEWED else 0.5,
        ),
    ] = Field(
        default=None,
        description="Of a skew divergence how much of the first distribution is mixed into the second, 0.1 in DistiLLM "
        "(2024); of alpha_beta the teacher's power.",
    )
    head_mass: Annotated[
        float | None,
        OnlyWhen('divergence is "adaptive_kl"', lambda term: term.divergence is Divergence.ADAPTIVE_KL, default=0.5),
    ] = Field(
        default=None, gt=0, lt=1, description="The teacher's probability that counts as its head. 0.5: AKL (2024)."
    )
    rescale: Annotated[bool, OnlyWhen('divergence is "jsd"', lambda term: term.divergence is Divergence.JSD)] = Field(
        default=False, description="Divide jsd by beta (1 - beta), so that it goes over into the KLs at its ends."
    )
    detach_mixture: Annotated[
        bool,
        OnlyWhen('divergence is "skew_reverse_kl"', lambda term: term.divergence is Divergence.SKEW_REVERSE_KL),
    ] = Field(default=False, description="Hold the student inside the mixture constant, as DistiLLM-2 (2025) does.")
    estimator: Word[Estimator] = Field(
        default=Estimator.ANALYTIC,
        description="analytic differentiates the divergence; policy_gradient takes it as each drawn token's advantage.",
    )
    form: Annotated[
        Word[Form] | None,
        OnlyWhen(
            'support is "sampled" and teacher is not "reward"',
            lambda term: term.support is Support.SAMPLED and term.teacher != REWARD,
            default_of=lambda term: Point(support=term.support, estimator=term.estimator).default_form,
        ),
    ] = Field(
        default=None,
        description="Which function of the log-ratio stands for reverse KL: k2 analytic, k1 policy gradient.",
    )
    discount: Annotated[float, replace(_OF_POLICY_GRADIENT, default_of=_credit)] = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Weight of each later token in a token's return. 0: a token answers for itself. 1: for all that "
        "follows within first_tokens, and in a tool's text for nothing; the default for a reward, which is the row's.",
    )
    length_normalise: Annotated[bool, _OF_POLICY_GRADIENT] = Field(
        default=False, description="Divide each return by the tokens it reaches over, as MiniLLM (2023) does."
    )
    baseline: Annotated[Word[Baseline], _OF_POLICY_GRADIENT] = Field(
        default=Baseline.NONE,
        description="Taken off each return: none, batch (the round's mean, tokens weighed as reduction says), state_kl "
        "(its mean, for the noise); off each reward: group (the mean of the question's samples), as GRPO (2024).",
    )
    whiten: Annotated[bool, _OF_POLICY_GRADIENT] = Field(
        default=False,
        description="Bring the round's returns (baseline group: each group's rewards) to mean 0 and deviation 1; less "
        "where they agree to a ten-thousandth of their size.",
    )
    advantage_clip: Annotated[float | None, _OF_POLICY_GRADIENT] = Field(
        default=None, gt=0, description="Largest size of an advantage, in nats. Left out: as they are."
    )
    disagreement_weight: Annotated[float | None, _OF_POLICY_GRADIENT] = Field(
        default=None,
        gt=1,
        description="Weight of a row's first token, falling to 1 as disagreement adds up, on top of the clip; 1.5 in "
        "IW-OPD. Left out: 1.",
    )
    importance: Annotated[Word[Importance], replace(_OF_POLICY_GRADIENT, default=Importance.RATIO)] = Field(
        default=Importance.NONE,
        description="Correction for tokens that today's student did not draw: none, ratio, ppo_clip, or the ratio held "
        "between bounds (truncated, TIS) or left out beyond them (masked, IcePop).",
    )
    clip: Annotated[
        float | None,
        OnlyWhen('importance is "ppo_clip"', lambda term: term.importance is Importance.PPO_CLIP, default=0.2),
    ] = Field(default=None, gt=0, lt=1, description="The ratio counts within 1 - clip and 1 + clip. 0.2: PPO (2017).")
    bounds: Annotated[
        Many[float] | None,
        OnlyWhen('importance is "truncated" or "masked"', lambda term: term.importance in BOUNDED, default=(0.2, 5.0)),
    ] = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="Lowest and highest ratio. 0.2 and 5: a published recipe of a large run.",
    )
    coefficient: float | RampConfig = Field(
        default=1.0,
        description="The term is multiplied by it in the loss: a number, or a table that moves with the step.",
    )
    sources: Many[Word[Source]] = Field(
        default=tuple(Source), min_length=1, description="Which rows the term trains, by who wrote them."
    )
    train_truncated: bool = Field(
        default=True, description="Train rows that were cut at max_new_tokens. Off: they leave the loss and its count."
    )
    train_special: bool = Field(
        default=True,
        description="Train the tokenizer's special tokens. Off: wherever one was written it leaves the loss and its "
        "count, but for those that end an answer, which are trained as ever.",
    )
    source_weights: SourceWeightsConfig | None = Field(
        default=None,
        description="Weights of whole rows by who wrote them; the count stays that of tokens. Left out: alike.",
    )
    correctness: Annotated[
        Word[Correctness] | None, OnlyWhen('teacher is not "reward"', lambda term: term.teacher != REWARD)
    ] = Field(
        default=None,
        description="Train the rows alone that the verifier calls right (0.5 or more), or those it calls wrong. Left "
        "out: both.",
    )
    right_weight: Annotated[float, _OF_BOTH_KINDS] = Field(
        default=1.0, description="What the tokens of right rows weigh, where both kinds are trained."
    )
    wrong_weight: Annotated[float, _OF_BOTH_KINDS] = Field(
        default=1.0, description="And what those of wrong rows weigh."
    )
    perplexity_temperature: Annotated[
        float | None, OnlyWhen("correctness is written", lambda term: term.correctness is not None)
    ] = Field(
        default=None,
        gt=0,
        description="Weigh each prompt's right rows by the student's perplexity^(1 / this), its wrong rows by the "
        "teacher's^(-1 / this), to a mean of 1, as SCOPE (2026). Left out: alike.",
    )
    skip_first: int = Field(default=0, ge=0, description="Leading tokens of a completion that are not trained.")
    first_tokens: int | RampConfig | None = Field(
        default=None,
        description="The horizon: tokens after these are not trained. A number, below sampler.max_new_tokens where all "
        "rows are written, or a table that moves with the step. Left out: to the end.",
    )
    teacher_entropy: float | None = Field(
        default=None,
        ge=0,
        description="Train only where the teacher's entropy is above this, in nats; with an extrapolation the "
        "entropy of the target instead. Left out: everywhere.",
    )
    entropy_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Train this share of the round's tokens, those where the student is least certain; 0.5 in TIP "
        "(2026). Left out: no choice by it.",
    )
    confident_wrong_share: Annotated[
        float | None, OnlyWhen("teacher is a model", lambda term: term.teacher != LABEL)
    ] = Field(
        default=None,
        gt=0,
        lt=1,
        description="And this share of the other tokens, those the student is surest of against its teacher. Left out: "
        "none of them with entropy_share, else no choice by it.",
    )
    reduction: Word[Reduction] = Field(
        default=Reduction.TOKEN_MEAN,
        description="Mean over all trained tokens of the step, or over each row's tokens first and then over rows, or "
        "the sum. The second bends the gradient of drawn tokens by length.",
    )
    # Last of the fields, because its default is read off one above.
    name: str = Field(
        default_factory=lambda term: REWARD if term["teacher"] == REWARD else str(term["divergence"]),
        pattern=r"^[A-Za-z0-9_-]+$",
        description="Names the term's metrics. Left out: the divergence, or reward.",
    )

    def values(self) -> dict[str, Any]:
        """As a `core.term.Term` has them, key for key: tables that move with the step as ramps, weights by source.

        But for `train_special`, in whose place a term has the ids, which only the tokenizer knows.
        """
        values = {name: ramp_of(getattr(self, name)) for name in type(self).model_fields}
        return values | {"source_weights": self.source_weights.weights() if self.source_weights else {}}

    @property
    def as_term(self) -> TermValues:
        """The same for the axes' checks, which need no torch."""
        return cast(TermValues, SimpleNamespace(**self.values()))

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_term(self.as_term)
        return self


class LossConfig(Noun):
    """`[loss]`: what all terms share."""

    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Divides both models' logits in the loss, with no further factor; not the sampler's.",
    )
    chunk_bytes: int = Field(
        default=256 * 2**20,
        ge=2**20,
        description="Bytes that head and divergence may hold at once; tokens x vocabulary never exists. 256 MiB.",
    )
