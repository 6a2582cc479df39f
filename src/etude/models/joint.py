"""Rows that student and teacher write together: each token is drawn from a distribution made of both of theirs.

Published samplers toss a coin or draw twice for each token; what they write has a distribution in closed form, and here
it is drawn from directly. So there is one uniform number a token, a row depends on its key only, and the behaviour
log-probability is the logarithm of that distribution. Both models read the same rows in lockstep. This file knows no
loss: what the weight student / behaviour is used for is the objective's business; `recipes/build.py` makes the sampler.

Legend: B rows, b of them side by side, V real vocabulary, K the teacher's likeliest ids; q student, p teacher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from etude.axes.names import Source
from etude.core.records import Prompt, Rollout
from etude.errors import PairError, RecipeError
from etude.models.decoding import Completion, SamplingSettings, decode, sampling_logprobs
from etude.models.roles import AbstractBackbone, AbstractDecoding, AbstractSampler, AbstractStudent
from etude.models.sampling import InProcessSampler, uniforms, write_in_batches
from etude.runtime.seeds import Key


class JointDistribution(Protocol):
    """How two next-token distributions become the one that is drawn from."""

    def __call__(self, *, student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        """[B, V] probabilities from [B, V] log-probabilities."""
        ...


@dataclass(frozen=True, slots=True)
class TokenMixture:
    """pi = alpha p + (1 - alpha) q: each token is the teacher's with probability alpha, the student's otherwise.

    Gu, Dong, Wei, Huang 2023, "MiniLLM: Knowledge Distillation of Large Language Models", section 2.2 (alpha = 0.2).

        >>> import torch
        >>> q, p = torch.tensor([[0.125, 0.5, 0.25, 0.125]]), torch.tensor([[0.5, 0.25, 0.125, 0.125]])
        >>> TokenMixture(alpha=0.2)(student_logprobs=q.log(), teacher_logprobs=p.log())
        tensor([[0.2000, 0.4500, 0.2250, 0.1250]])

    Raises:
        RecipeError: alpha is no share.
    """

    alpha: float  # the teacher's share; 0: the student alone, 1: the teacher alone

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise RecipeError(f"alpha is {self.alpha}; write the teacher's share of the tokens, from 0 to 1")

    def __call__(self, *, student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        """[B, V] probabilities, from [B, V] log-probabilities."""
        return self.alpha * teacher_logprobs.exp() + (1.0 - self.alpha) * student_logprobs.exp()


@dataclass(frozen=True, slots=True)
class Interleaving:
    """The student's token where it is among the teacher's K likeliest, otherwise a draw from the teacher in its place.

    pi(v) = q(v) [v in K] + (1 - q(K)) p(v). Ids that tie at the cut are in K together, so that none is favoured for its
    number. Xu, Han, Wang et al. 2024, "Speculative Knowledge Distillation: Bridging the Teacher-Student Gap Through
    Interleaved Sampling" (K about 25).

        >>> import torch
        >>> q, p = torch.tensor([[0.125, 0.5, 0.25, 0.125]]), torch.tensor([[0.5, 0.25, 0.125, 0.125]])
        >>> Interleaving(teacher_top_k=2)(student_logprobs=q.log(), teacher_logprobs=p.log())
        tensor([[0.3125, 0.5938, 0.0469, 0.0469]])

    Raises:
        RecipeError: K is below 1.
    """

    teacher_top_k: int  # K; the whole vocabulary and above: the student alone

    def __post_init__(self) -> None:
        if self.teacher_top_k < 1:
            raise RecipeError(
                f"teacher_top_k is {self.teacher_top_k}; write how many of the teacher's likeliest ids the student may "
                "write itself, at least 1"
            )

    def __call__(self, *, student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        """[B, V] probabilities, from [B, V] log-probabilities."""
        num_kept = min(self.teacher_top_k, teacher_logprobs.shape[-1])
        # By logarithms: far down, different probabilities have become the same zero.
        refused_BV = teacher_logprobs < teacher_logprobs.topk(num_kept).values[..., -1:]
        student_BV = student_logprobs.exp()
        accepted_BV = student_BV.masked_fill(refused_BV, 0.0)
        # The refused mass itself, not 1 minus the accepted: it is exactly zero where nothing is refused.
        refused_B1 = (student_BV - accepted_BV).sum(-1, keepdim=True)
        return accepted_BV + refused_B1 * teacher_logprobs.exp()


class JointDecoding(AbstractDecoding):
    """The same unfinished rows, kept by two models in lockstep. Its logits are the student's.

    Args:
        student: the rows as the student keeps them.
        teacher: the same rows, as the teacher keeps them.
        distribution: what is made of both.
        settings: the temperature both are drawn with.
    """

    def __init__(
        self,
        student: AbstractDecoding,
        teacher: AbstractDecoding,
        distribution: JointDistribution,
        settings: SamplingSettings,
    ) -> None:
        self._student, self._teacher = student, teacher
        self._distribution, self._settings = distribution, settings

    def next_logits(self) -> Tensor:
        return self._student.next_logits()

    def next_probs(self, student_logits_BV: Tensor) -> Tensor:
        """[B, V] probabilities of the next token, from the student's `next_logits` and the teacher's."""
        return self._distribution(
            student_logprobs=sampling_logprobs(student_logits_BV, self._settings),
            teacher_logprobs=sampling_logprobs(self._teacher.next_logits(), self._settings),
        )

    def append(self, ids_B: Tensor) -> None:
        self._student.append(ids_B)
        self._teacher.append(ids_B)

    def keep(self, rows_b: Tensor) -> None:
        self._student.keep(rows_b)
        self._teacher.keep(rows_b)


class JointSampler(AbstractSampler):
    """Writes each token from student and teacher together. The rows count as the student's.

    Their behaviour log-probabilities are those of the joint distribution; their raw ones are the *student's own*, at
    temperature 1, so that training can compare them with what it computes itself.

    Args:
        student: writes the student's part; its settings, batches and precision hold for the whole.
        teacher: the teacher's model, over the same vocabulary.
        distribution: `TokenMixture` or `Interleaving`, or a function of one's own.

    Raises:
        PairError: the two vocabularies differ in size.
        RecipeError: greedy, top-p or top-k sampling.
    """

    def __init__(self, student: InProcessSampler, teacher: AbstractBackbone, distribution: JointDistribution) -> None:
        if student.backbone.vocab_size != teacher.vocab_size:
            raise PairError(
                f"the student has {student.backbone.vocab_size} ids and the teacher {teacher.vocab_size}, and a token "
                "that both draw must mean the same to both; take a teacher with the student's tokenizer"
            )
        _require_whole(student.settings)
        self.student = student
        self.distribution = distribution
        self.version = student.version
        self._teacher = InProcessSampler(teacher, student.settings, source=Source.TEACHER)
        self._teacher.version = student.version

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        """One rollout a prompt, in the prompts' order.

        Raises:
            DataError: a prompt and `max_new_tokens` together exceed a context window; nothing has been run yet.
            NonFiniteError: the logits of student or teacher are not numbers.
        """
        for writer in (self.student, self._teacher):
            writer.require_room(prompts)
        with self.student.writing(), self._teacher.writing():
            return write_in_batches(prompts, self.student.rows_per_batch, partial(self._write, key=key))

    def refresh(self, student: AbstractStudent, version: int) -> None:
        """Write with the student's present weights from now on; the teacher's stay."""
        self.student.refresh(student, version)
        self._teacher.refresh(student, version)
        self.version = version

    def _write(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        settings = self.student.settings
        decoding = JointDecoding(self.student.begin(prompts), self._teacher.begin(prompts), self.distribution, settings)
        completions = decode(decoding, uniforms(prompts, key, settings), settings, decoding.next_probs)
        return [self._rollout(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]

    def _rollout(self, prompt: Prompt, completion: Completion) -> Rollout:
        rollout = self.student.rollout(prompt, completion)
        if not math.isfinite(completion.behaviour_logprobs.sum().item()):
            raise self._teacher.damaged(prompt)  # the student's logits are sound, or it had raised
        return rollout


def _require_whole(settings: SamplingSettings) -> None:
    """Both distributions are taken as the models have them, but for the temperature."""
    if settings.greedy:
        raise RecipeError(
            "sampler.temperature is 0 (greedy), and tokens that student and teacher write together are drawn; write a "
            "temperature above 0"
        )
    if settings.top_p != 1.0 or settings.top_k != 0:
        raise RecipeError(
            f"sampler.top_p is {settings.top_p} and sampler.top_k is {settings.top_k}, and tokens that student and "
            "teacher write together are drawn from whole distributions; write top_p = 1 and top_k = 0"
        )
