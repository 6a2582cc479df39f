"""Exposure bias in a chain small enough to compute exactly: what on-policy data changes, and which divergence.

Six tokens, four of them on the track and two off it. Teacher and student mostly stay on the track; once off it, the
teacher comes back at once and the student does not know how. A student taught on the teacher's own sequences hardly ever
sees an off-track state, so it never learns to recover; taught on what it writes itself, it does.

Everything runs through the package's own sampler, teacher, objective and reduction, on tables instead of models; only
the measuring is exact, from the transition matrix. `etude experiment markov` calls `main`. The chain and the four
published runs come from a tutorial on generalised knowledge distillation (Agarwal et al. 2023, arXiv 2306.13649), which
prints some of its results; docs/markov.md says what had to be inferred.

Legend: S states (the previous token, or the start), V tokens, T contexts of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from etude.axes.legality import Sampling
from etude.axes.names import Divergence, Estimator, Source, Support
from etude.core.divergences import forward_kl
from etude.core.objective import Objective, Term
from etude.core.records import Prompt, Scored
from etude.models.mixture import MixtureSampler
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.runtime.seeds import Key
from etude.runtime.world import World
from etude.training.learner import Learner
from etude.training.stages import Plan

NUM_ON, NUM_OFF = 4, 2  # tokens on and off the track; the ids on it come first
START = NUM_ON + NUM_OFF  # the state before the first token, with a row of its own in the table
NUM_TOKENS = 20
NUM_ROWS = 16  # a step
NUM_STEPS = 300
LEARNING_RATE = 0.5  # plain SGD


@dataclass(frozen=True, slots=True)
class Measures:
    """What is known about a chain without sampling."""

    off_track: float  # share of off-track tokens among the 20, from the start state
    on_track: float  # probability to stay on the track, mean over its states
    recovery: float  # probability to come back to it, mean over the states off it
    forward_kl: float  # KL(teacher || student) on the teacher's sequences, summed over their 20 tokens, in nats


@dataclass(frozen=True, slots=True)
class Run:
    """One way to train the student."""

    name: str
    student_fraction: (
        float  # share of the rows that the student writes; the teacher writes the others, afresh each step
    )
    term: Term
    published: Mapping[str, float] = field(default_factory=dict[str, float])  # fields of `Measures`, as far as printed


FORWARD_KL, REVERSE_KL = Term(divergence=Divergence.FORWARD_KL), Term(divergence=Divergence.REVERSE_KL)

DIVERGENCE_RUNS = (
    Run("supervised, forward KL", 0.0, FORWARD_KL, {"recovery": 0.37, "forward_kl": 0.362}),
    Run("half and half, forward KL", 0.5, FORWARD_KL),
    Run("on-policy, forward KL", 1.0, FORWARD_KL, {"on_track": 0.965, "recovery": 0.70, "forward_kl": 0.283}),
    Run("on-policy, reverse KL", 1.0, REVERSE_KL, {"on_track": 0.976}),
)
"""The published four: the exact divergence of every visited state."""

ESTIMATOR_RUNS = (
    Run("  by policy gradient", 1.0, Term(support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT)),
    Run("  by k2", 1.0, Term(support=Support.SAMPLED)),
    Run("  of sequences", 1.0, Term(support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT, discount=1.0)),
)
"""On-policy reverse KL estimated from the drawn token alone."""


# The two chains and what can be computed about them ------------------------------------------------------------------


def chain(*, stays: float, returns: float, starts: float) -> TableBackbone:
    """A table whose probabilities of an on-track token are given for the states on the track, off it, and the start.

    Inside each group the probability is spread evenly.

        >>> chain(stays=0.9, returns=0.3, starts=0.95).next_logits(torch.tensor([0, 5])).exp().round(decimals=3).tolist()
        [[0.225, 0.225, 0.225, 0.225, 0.05, 0.05], [0.075, 0.075, 0.075, 0.075, 0.35, 0.35]]
    """
    on_S1 = torch.tensor([stays] * NUM_ON + [returns] * NUM_OFF + [starts], dtype=torch.float64)[:, None]
    probs_SV = torch.cat([(on_S1 / NUM_ON).expand(-1, NUM_ON), ((1.0 - on_S1) / NUM_OFF).expand(-1, NUM_OFF)], dim=1)
    return TableBackbone(probs_SV.log())


def teacher_chain() -> TableBackbone:
    return chain(stays=0.99, returns=0.90, starts=0.99)


def student_chain() -> TableBackbone:
    return chain(stays=0.90, returns=0.30, starts=0.95)


def next_logprobs(table: TableBackbone) -> Tensor:
    """[S, V] log-probabilities of the token after each state."""
    return table.next_logits(torch.arange(table.num_states)).log_softmax(-1)


def visits(probs_SV: Tensor) -> Tensor:
    """[T + 1, S] probability of each state before tokens 1 to T and after the last: powers of the transition matrix."""
    transition_SS = functional.pad(probs_SV, (0, 1))  # no token leads back to the start
    states = [functional.one_hot(torch.tensor(START), START + 1).to(probs_SV.dtype)]
    for _ in range(NUM_TOKENS):
        states.append(states[-1] @ transition_SS)
    return torch.stack(states)


@torch.no_grad()
def measure(student: TableBackbone) -> Measures:
    """The exact figures of a student, or of any other chain in its place."""
    student_SV, teacher_SV = next_logprobs(student), next_logprobs(teacher_chain())
    on_S = student_SV.exp()[:, :NUM_ON].sum(-1)
    kl_S = forward_kl(student_logprobs=student_SV, teacher_logprobs=teacher_SV)
    return Measures(
        off_track=visits(student_SV.exp())[1:, NUM_ON:START].sum(-1).mean().item(),
        on_track=on_S[:NUM_ON].mean().item(),
        recovery=on_S[NUM_ON:START].mean().item(),
        forward_kl=(visits(teacher_SV.exp())[:-1].sum(0) * kl_S).sum().item(),
    )


# Training -----------------------------------------------------------------------------------------------------------


def train_on_samples(run: Run, seed: int) -> TableBackbone:
    """300 steps of 16 sampled rows each: the loop of a real run, in small."""
    student, teacher = Student(student_chain()), FrozenTeacher("teacher", teacher_chain())
    settings = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=NUM_TOKENS, stop_ids=())
    sampler = MixtureSampler(
        InProcessSampler(student.backbone, settings),
        InProcessSampler(teacher_chain(), settings, source=Source.TEACHER),
        run.student_fraction,
    )
    shares = {Source.STUDENT: run.student_fraction, Source.TEACHER: 1.0 - run.student_fraction}
    writers = frozenset(source for source, share in shares.items() if share > 0.0)
    objective = Objective([run.term], sampling=Sampling(rows=writers))
    learner = Learner(
        student,
        objective,
        torch.optim.SGD(student.trainable_parameters().values(), lr=LEARNING_RATE),
        heads={"teacher": teacher.head()},
        plan=Plan(steps=NUM_STEPS),
        rate=lambda step: 1.0,
        world=World(),
        tokens_per_micro_batch=NUM_ROWS * (1 + NUM_TOKENS),
        clip_norm=0.0,
    )
    prompts = [Prompt(torch.tensor([START]), row) for row in range(NUM_ROWS)]
    for step in range(NUM_STEPS):
        rollouts = sampler.sample(prompts, Key(seed, "sample", stage=0, round=step))
        scores = teacher.score(rollouts, objective.needs("teacher"), objective.temperature)
        scored = [Scored(rollout, {"teacher": marks}) for rollout, marks in zip(rollouts, scores, strict=True)]
        for _ in learner.learn(learner.prepare(scored), step, NUM_ROWS):
            sampler.refresh(student, version=step + 1)
    return student.backbone


def train_in_the_limit(run: Run) -> TableBackbone:
    """The same 300 steps with the expected gradient in the place of samples: what infinitely many rows would do."""
    student, teacher_SV = student_chain(), next_logprobs(teacher_chain()).detach()
    optimizer = torch.optim.SGD(student.parameters(), lr=LEARNING_RATE)
    for _ in range(NUM_STEPS):
        student_SV = next_logprobs(student)
        own_TS, teachers_TS = visits(student_SV.detach().exp()), visits(teacher_SV.exp())
        visits_TS = run.student_fraction * own_TS + (1.0 - run.student_fraction) * teachers_TS
        divergence_S = run.term.divergence_fn()(student_logprobs=student_SV, teacher_logprobs=teacher_SV)
        optimizer.zero_grad()
        (visits_TS[:-1].mean(0) * divergence_S).sum().backward()
        optimizer.step()
    return student


# The table ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    measured: Measures  # mean over the seeds
    limit: Measures | None = None  # of the infinite batch
    published: Mapping[str, float] = field(default_factory=dict[str, float])


def run(seeds: Sequence[int] = (0,)) -> list[Row]:
    """Both chains as they are, the four published runs, and the estimators of the last of them."""
    rows = [
        Row(
            "student before",
            measure(student_chain()),
            published={"off_track": 0.225, "on_track": 0.90, "recovery": 0.30},
        ),
        Row("teacher", measure(teacher_chain()), published={"off_track": 0.0109, "on_track": 0.99, "recovery": 0.90}),
    ]
    for one in DIVERGENCE_RUNS + ESTIMATOR_RUNS:
        limit = measure(train_in_the_limit(one)) if one in DIVERGENCE_RUNS else None
        rows.append(
            Row(one.name, _mean([measure(train_on_samples(one, seed)) for seed in seeds]), limit, one.published)
        )
    return rows


def _mean(measures: Sequence[Measures]) -> Measures:
    return Measures(*(fmean(values) for values in zip(*map(astuple, measures), strict=True)))


def main(seeds: Sequence[int] = (0,)) -> None:
    """Run everything and print the table."""
    Console().print(draw(run(seeds), len(seeds)))


def draw(rows: Sequence[Row], num_seeds: int) -> Table:
    """The rows beside what was published, which stands in brackets where there is any."""
    table = Table(
        title="Exposure bias in a Markov chain",
        caption=f"mean of {num_seeds} seed(s), {NUM_STEPS} steps of {NUM_ROWS} rows; published figures in brackets",
    )
    table.add_column("run")
    for title in ("off the track", "infinite batch", "stays on it", "recovers", "forward KL"):
        table.add_column(title, justify="right")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit.off_track:.2%}"
        off_track, *others = (_cell(row, name, form) for name, form in FORMATS.items())
        table.add_row(row.name, off_track, limit, *others)
    return table


FORMATS = {"off_track": ".2%", "on_track": ".3f", "recovery": ".3f", "forward_kl": ".3f"}


def _cell(row: Row, name: str, form: str) -> str:
    published = row.published.get(name)
    measured = format(getattr(row.measured, name), form)
    return measured if published is None else f"{measured} [dim]({published:{form}})[/dim]"
