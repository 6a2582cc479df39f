"""How good the student is now: held-out divergence on its own fresh samples, task accuracy, and the answers themselves.

The held-out reverse KL is measured where it matters for use: on prompts outside the training set, on completions the
student writes now at sampling temperature 1, over the whole vocabulary, as a mean over all their tokens. Each
evaluation of a run draws with the same random numbers, so that differences are the student's.

The loop calls it before the first step, at set intervals, and after the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from etude.core.collate import collate
from etude.core.linear import DEFAULT_CHUNK_BYTES, OutputHead
from etude.core.objective import Objective
from etude.core.records import Prompt, Rollout, Scored, Scores
from etude.core.term import Term
from etude.errors import PairError
from etude.models.forward import evaluating
from etude.models.roles import AbstractBackbone, AbstractSampler, AbstractStudent, AbstractTeacher
from etude.runtime.seeds import Key
from etude.runtime.world import World
from etude.training.learner import micro_batches

Verify = Callable[[Mapping[str, object], str], float]
Decode = Callable[[Sequence[int]], str]
Reward = Callable[[Rollout], float]


@dataclass(frozen=True, slots=True)
class Answer:
    """One held-out prompt and what the student wrote."""

    row: int
    prompt: str
    completion: str
    finish_reason: str
    correct: float | None  # the verifier's score; None without a verifier

    def as_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Metrics of one evaluation, and the answers it showed."""

    metrics: dict[str, float]
    answers: list[Answer]


def score_rows(
    rollouts: Sequence[Rollout],
    teachers: Mapping[str, AbstractTeacher],
    objective: Objective,
    reward: Reward | None = None,
) -> list[Scored]:
    """Every rollout with what each of the objective's teachers says about it, and its reward where a term asks for it.

    Raises:
        PairError: a term asks for rewards and nobody gives them.
    """
    marks: list[dict[str, Scores]] = [{} for _ in rollouts]
    for name in objective.teachers:
        scores = teachers[name].score(rollouts, objective.needs(name), objective.temperature)
        for mark, score in zip(marks, scores, strict=True):
            mark[name] = score
    if not objective.needs_rewards:
        return [Scored(rollout, mark) for rollout, mark in zip(rollouts, marks, strict=True)]
    if reward is None:
        raise PairError("a term trains on rewards and there is no verifier to give them; hand one over")
    return [Scored(rollout, mark, reward=float(reward(rollout))) for rollout, mark in zip(rollouts, marks, strict=True)]


@torch.no_grad()
def measure(
    backbone: AbstractBackbone,
    objective: Objective,
    scored: Sequence[Scored],
    heads: Mapping[str, OutputHead],
    world: World,
    tokens_per_batch: int,
) -> dict[str, float]:
    """The objective's metrics on these rows, without learning from them."""
    rows = objective.prepare(scored)
    sums_M = torch.zeros(len(objective.metric_names), dtype=torch.float64)
    scales_J = objective.scales(objective.counts(rows))
    with evaluating(backbone):
        for group in micro_batches(rows, tokens_per_batch):
            batch = collate(group).to(backbone.device)
            hidden_BTD = backbone.hidden_states(batch.token_ids_BT, batch.attention_mask_BT, batch.position_ids_BT)
            hidden_ND = hidden_BTD.flatten(0, 1)[batch.predicted_from_N]
            sums_M += objective.sum(hidden_ND, backbone.head(), batch, scales_J, heads)[1].cpu()
    return objective.summarise(world.sum(sums_M))


class Evaluation:
    """Held-out measurements of one student against one teacher.

    Args:
        prompts: the held-out prompts, the same on every rank.
        sampler: writes as the student at temperature 1 with the whole vocabulary.
        greedy_sampler: takes the likeliest token; None leaves greedy accuracy out.
        teacher: gives hidden states; None leaves divergence and entropy out (a recipe of cross-entropy alone).
        verify: scores (example, completion text); None leaves accuracy out.
        decode: token ids to text.
        show: how many answers to keep.
        chunk_bytes: budget for tensors as wide as the vocabulary.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        sampler: AbstractSampler,
        greedy_sampler: AbstractSampler | None,
        teacher: AbstractTeacher | None,
        verify: Verify | None,
        decode: Decode,
        seed: int,
        world: World,
        tokens_per_batch: int,
        show: int,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self.prompts = prompts
        self.sampler = sampler
        self.greedy_sampler = greedy_sampler
        self.teacher = teacher
        self.verify = verify
        self.decode = decode
        self.key = Key(seed=seed, purpose="evaluate", stage=0, round=0)
        self.world = world
        self.tokens_per_batch = tokens_per_batch
        self.show = show
        self._objective = Objective([Term(teacher=teacher.name if teacher else "teacher")], chunk_bytes=chunk_bytes)

    def run(self, student: AbstractStudent, version: int) -> EvaluationReport:
        """Measure the student as it is; `version` is the number of steps it has taken."""
        rollouts = self._write(self.sampler, student, self._share(self.prompts), version)
        answers = [self._answer(rollout) for rollout in rollouts]
        metrics = self._means("heldout", rollouts, answers)
        if self.teacher is not None:
            marked = self._marked(self.teacher, student, rollouts)
            metrics["heldout/reverse_kl"] = marked["divergence/reverse_kl"]
            metrics["heldout/entropy"] = marked["student/entropy"]
        if self.greedy_sampler is not None and self.verify is not None:
            greedy = self._write(self.greedy_sampler, student, self._share(_once_each(self.prompts)), version)
            metrics["heldout/accuracy_greedy"] = self._mean([self._answer(r).correct or 0.0 for r in greedy])
        shown = self.world.gather_objects([answer.as_json() for answer in answers if answer.row < self.show])
        return EvaluationReport(metrics, sorted((Answer(**values) for values in shown), key=lambda a: a.row))

    def _share(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those of the prompts that this rank writes to."""
        return list(prompts[self.world.rank :: self.world.size])

    def _write(
        self, sampler: AbstractSampler, student: AbstractStudent, prompts: Sequence[Prompt], version: int
    ) -> list[Rollout]:
        sampler.refresh(student, version)
        return sampler.sample(prompts, self.key)

    def _marked(
        self, teacher: AbstractTeacher, student: AbstractStudent, rollouts: Sequence[Rollout]
    ) -> dict[str, float]:
        """The reverse KL's metrics on what the student has written."""
        head = teacher.head()
        heads = {} if head is None else {teacher.name: head}
        scored = score_rows(rollouts, {teacher.name: teacher}, self._objective)
        return measure(student.backbone, self._objective, scored, heads, self.world, self.tokens_per_batch)

    def _answer(self, rollout: Rollout) -> Answer:
        completion = self.decode(rollout.completion_ids.tolist())
        example = rollout.prompt.example
        asked = example.get("prompt")  # as it was written, where it is a text; else as the template rendered it
        return Answer(
            row=rollout.prompt.row,
            prompt=asked if isinstance(asked, str) else self.decode(rollout.prompt.token_ids.tolist()),
            completion=completion,
            finish_reason=rollout.finish_reason.value,
            correct=None if self.verify is None else self.verify(example, completion),
        )

    def _means(self, where: str, rollouts: Sequence[Rollout], answers: Sequence[Answer]) -> dict[str, float]:
        metrics = {
            f"{where}/length": self._mean([float(rollout.num_completion_tokens) for rollout in rollouts]),
            f"{where}/truncated": self._mean([float(rollout.truncated) for rollout in rollouts]),
        }
        if self.verify is not None:
            metrics[f"{where}/accuracy"] = self._mean([answer.correct or 0.0 for answer in answers])
        return metrics

    def _mean(self, values: Sequence[float]) -> float:
        """Over the values of all ranks."""
        total, count = self.world.sum(torch.tensor([sum(values), float(len(values))], dtype=torch.float64)).tolist()
        return total / count


def _once_each(prompts: Sequence[Prompt]) -> list[Prompt]:
    """One prompt for each distinct question: greedy answers to the same prompt are all the same."""
    return list({prompt.token_ids.numpy().tobytes(): prompt for prompt in reversed(prompts)}.values())[::-1]
