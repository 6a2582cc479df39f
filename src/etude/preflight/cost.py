"""What a whole run will compute, counted before its first step: tokens by who reads them and why, and operations.

Counted are the products with weights, two operations a weight and token, six where it is trained (four where it is
frozen and adapters learn): the looked-up rows of an embedding are no product, the output head is one, for completion
tokens only. Attention over earlier tokens, softmax and optimiser are left out, and a mixture of experts counts with all
of them. It knows no recipe: plain numbers come in, the lengths are those a rehearsal saw (`preflight/rehearsal.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from torch import nn

from etude.axes.names import Check
from etude.models.roles import AbstractBackbone
from etude.preflight.findings import Finding, passed

FORMULA = (
    "2 P_T a token scored or written by the teacher, 2 P_S sampled or only marked, 6 P_S trained, the same of prompts "
    "but for the head; P: weights without embeddings, with the head"
)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights a token is multiplied with."""

    body: int  # by every token that is read
    head: int  # by every token whose distribution is asked for: real vocabulary times hidden size

    def operations(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Of one pass forward.

        >>> Weights(body=100, head=10).operations(prompt_tokens=3, completion_tokens=2)
        1040
        """
        return 2 * (self.body * (prompt_tokens + completion_tokens) + self.head * completion_tokens)


def weights_of(backbone: AbstractBackbone, *, trained_only: bool = False) -> Weights:
    """What a token is multiplied with; an embedding's own rows are looked up, and tied ones count once, as the head."""
    head = backbone.head().weight_VD
    # By storage: the head may be the first rows of a larger weight, and so another tensor.
    its_storage = head.untyped_storage().data_ptr()
    looked_up = {id(part.weight) for part in backbone.modules() if isinstance(part, nn.Embedding)}
    body = 0
    head_counts = not trained_only
    for weight in backbone.parameters():
        counts = weight.requires_grad or not trained_only
        if weight.untyped_storage().data_ptr() == its_storage:
            head_counts = counts
        elif id(weight) not in looked_up and counts:
            body += weight.numel()
    return Weights(body, head.numel() if head_counts else 0)


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a run is made of, in plain numbers; rows are those of all processes."""

    rounds: int
    rows: int  # of a round
    prompt: float  # tokens of a row, mean
    completion: float  # likewise
    student_writes: float = 1.0  # share of the rows, those included that both write token by token
    teacher_writes: float = 0.0  # likewise; the rest comes from the dataset or from earlier rounds
    epochs: int = 1  # times a row is trained on
    student_marks: bool = False  # whether the student reads each row once more, without gradient
    evaluations: int = 0
    evaluation_rows: int = 0  # written by the student in each evaluation
    evaluation_greedy_rows: int = 0  # written again, only to be judged
    evaluation_marked: bool = True  # whether the teacher and the student read them

    @property
    def all_rows(self) -> int:
        return self.rounds * self.rows

    @property
    def counted(self) -> dict[str, float]:
        """Completion tokens of the whole run, by what is done with them."""
        tokens = self.all_rows * self.completion
        held_out = self.evaluations * (self.evaluation_rows + self.evaluation_greedy_rows) * self.completion
        return {
            "sampled_by_student": tokens * self.student_writes,
            "sampled_by_teacher": tokens * self.teacher_writes,
            "scored": tokens,
            "trained": tokens * self.epochs,
            "evaluated": held_out,
            "prompt": self.all_rows * self.prompt,
        }


def operations(
    amounts: Amounts, student: Weights, trained: Weights, teachers: Mapping[str, Weights]
) -> dict[str, float]:
    """Of the whole run, by what they are for.

    Args:
        amounts: what is written, scored and trained.
        student: all its weights.
        trained: those of them that learn.
        teachers: those the terms ask; one that writes is called "teacher".
    """
    prompt, completion = amounts.all_rows * amounts.prompt, amounts.all_rows * amounts.completion
    written, marked = amounts.evaluation_rows + amounts.evaluation_greedy_rows, amounts.evaluation_rows
    held_out = amounts.evaluations * amounts.prompt, amounts.evaluations * amounts.completion
    teacher = teachers.get("teacher", Weights(0, 0))
    once = student.operations(prompt, completion)
    evaluated = student.operations(*held_out) * written
    if amounts.evaluation_marked:
        evaluated += (student.operations(*held_out) + teacher.operations(*held_out)) * marked
    return {
        "sampling": amounts.student_writes * once + amounts.teacher_writes * teacher.operations(prompt, completion),
        "scoring": sum(weights.operations(prompt, completion) for weights in teachers.values()),
        "student_marks": once * amounts.student_marks,
        "learning": amounts.epochs * (2 * once + trained.operations(prompt, completion)),
        "evaluating": evaluated,
    }


def cost(
    amounts: Amounts,
    student: AbstractBackbone,
    teachers: Mapping[str, AbstractBackbone],
    *,
    longest: int,
    elsewhere: tuple[str, ...] = (),
) -> Finding:
    """Tokens and operations of the whole run, as they are now and if every answer had the `longest` length.

    Args:
        amounts: what the run is made of, at the lengths seen.
        student: the model that learns.
        teachers: the models of this process that the terms ask, by name.
        longest: tokens of the longest answer there can be.
        elsewhere: teachers whose models are not here; their operations are not counted.
    """
    sizes = weights_of(student), weights_of(student, trained_only=True)
    judges = {name: weights_of(backbone) for name, backbone in teachers.items()}
    parts = operations(amounts, *sizes, judges)
    total, tokens = sum(parts.values()), amounts.counted
    worst = sum(operations(at_length(amounts, longest), *sizes, judges).values())
    missing = f"; not counted: {', '.join(elsewhere)}" if elsewhere else ""
    sampled = in_short(tokens["sampled_by_student"] + tokens["sampled_by_teacher"])
    evidence = (
        f"{in_short(tokens['trained'])} tokens trained, {in_short(tokens['scored'])} scored and {sampled} sampled in "
        f"{amounts.rounds} rounds of {amounts.rows} rows, a mean of {amounts.prompt:.0f} + {amounts.completion:.0f} "
        f"tokens each as the student writes now: {total:.2g} FLOPs, and {worst:.2g} if every answer had {longest} "
        f"tokens ({FORMULA}{missing})"
    )
    weights = {"student": asdict(sizes[0]), "trained": asdict(sizes[1])} | {
        name: asdict(of_one) for name, of_one in judges.items()
    }
    return passed(
        Check.COST, evidence, tokens=tokens, flops=parts, total_flops=total, worst_flops=worst, weights=weights
    )


def at_length(amounts: Amounts, completion: float) -> Amounts:
    """The same run with answers of this length."""
    return replace(amounts, completion=completion)


def in_short(count: float) -> str:
    """A number as people say it.

    >>> in_short(950), in_short(12_345), in_short(2_500_000)
    ('950', '12.3 thousand', '2.5 million')
    """
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:.0f}"
