"""Exposure bias in a Markov chain: what on-policy data changes, in a world small enough to compute exactly.

Six tokens, four of them on the track and two off it. Teacher and student mostly stay on the track; once off it, the
teacher comes back at once and the student does not know how. A student taught on the teacher's own sequences hardly
ever sees an off-track state, so it never learns to recover; taught on what it writes itself, it does.

Everything runs through the package's own sampler, teacher, objective and learner, on tables instead of models; only the
measuring is exact, from the transition matrix. `etude experiment markov` calls `main`. The chain and the first four
runs were published in an explainer of generalised knowledge distillation (Agarwal et al. 2023), with some results and
without three details, which those results settle: the start is a state of its own (on the track with .95 for the
student, .99 for the teacher), probability is spread evenly inside each group, and forward KL is summed over the tokens.

Legend: S states (the previous token, or the start), V tokens, T contexts of a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import fmean

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from etude.axes.legality import Sampling
from etude.axes.names import Divergence, Estimator, Source, Support
from etude.core.divergences import forward_kl
from etude.core.objective import Objective, Term
from etude.core.records import Prompt
from etude.models.mixture import MixtureSampler
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.runtime.seeds import Key
from etude.runtime.world import World
from etude.training.evaluation import score_rows
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
    student_fraction: float  # share of rows the student writes; the teacher writes the others, afresh each step
    term: Term
    published: Mapping[str, str] = field(default_factory=dict[str, str])  # fields of `Measures`, as printed there


FORWARD_KL, REVERSE_KL = Term(divergence=Divergence.FORWARD_KL), Term(divergence=Divergence.REVERSE_KL)

DIVERGENCE_RUNS = (
    Run("supervised, forward KL", 0.0, FORWARD_KL, {"recovery": "0.37", "forward_kl": "0.362"}),
    Run("half each, forward KL", 0.5, FORWARD_KL),
    Run("on-policy, forward KL", 1.0, FORWARD_KL, {"on_track": "0.965", "recovery": "0.70", "forward_kl": "0.283"}),
    Run("on-policy, reverse KL", 1.0, REVERSE_KL, {"on_track": "0.976", "recovery": "0.70-0.71"}),
)
"""The published four: the exact divergence of every visited state."""

ESTIMATOR_RUNS = (
    Run("- by policy gradient", 1.0, Term(support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT)),
    Run("- by k2", 1.0, Term(support=Support.SAMPLED)),
    Run("- of whole sequences", 1.0, Term(support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT, discount=1.0)),
)
"""On-policy reverse KL estimated from the drawn token alone."""


# The two chains and what can be computed about them ------------------------------------------------------------------


def chain(*, stays: float, returns: float, starts: float) -> TableBackbone:
    """A table whose probabilities of an on-track token are given for the states on the track, off it, and the start.

    Inside each group the probability is spread evenly.

        >>> table = chain(stays=0.9, returns=0.3, starts=0.95)
        >>> next_logprobs(table)[[0, 5]].exp().round(decimals=3).tolist()
        [[0.225, 0.225, 0.225, 0.225, 0.05, 0.05], [0.075, 0.075, 0.075, 0.075, 0.35, 0.35]]
    """
    on_S1 = torch.tensor([stays] * NUM_ON + [returns] * NUM_OFF + [starts], dtype=torch.float64)[:, None]
    probs_SV = torch.cat([(on_S1 / NUM_ON).expand(-1, NUM_ON), ((1.0 - on_S1) / NUM_OFF).expand(-1, NUM_OFF)], dim=1)
    return TableBackbone(probs_SV.log())


def teacher_chain() -> TableBackbone:
    """Hardly ever leaves the track, and comes back at once."""
    return chain(stays=0.99, returns=0.90, starts=0.99)


def student_chain() -> TableBackbone:
    """Leaves the track more often, and stays away: the student before training."""
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
    table = student_chain()
    student, teacher = Student(table), FrozenTeacher("teacher", teacher_chain())
    settings = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=NUM_TOKENS, stop_ids=())
    sampler = MixtureSampler(
        InProcessSampler(table, settings),
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
        seed=seed,
    )
    prompts = [Prompt(torch.tensor([START]), row) for row in range(NUM_ROWS)]
    for step in range(NUM_STEPS):
        rollouts = sampler.sample(prompts, Key(seed, "sample", stage=0, round=step))
        rows = learner.prepare(score_rows(rollouts, {"teacher": teacher}, objective), step)
        for report in learner.learn(rows, step, NUM_ROWS):
            sampler.refresh(student, version=report.step)
    return table


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


FORMATS = {"off_track": ".2%", "on_track": ".3f", "recovery": ".3f", "forward_kl": ".3f"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    measured: Measures  # mean over the seeds
    published: Mapping[str, str]
    limit: Measures | None = None  # with infinitely many rows


def run(seeds: Sequence[int] = (0,)) -> list[Row]:
    """Both chains as they are, the four published runs, and the last of them from drawn tokens alone."""
    student, teacher = measure(student_chain()), measure(teacher_chain())
    rows = [
        Row("student before", student, {"off_track": "22.5%", "on_track": "0.90", "recovery": "0.30"}),
        Row("teacher", teacher, {"off_track": "1.09%", "on_track": "0.99", "recovery": "0.90"}),
    ]
    for one in DIVERGENCE_RUNS + ESTIMATOR_RUNS:
        limit = measure(train_in_the_limit(one)) if one in DIVERGENCE_RUNS else None
        trained = [measure(train_on_samples(one, seed)) for seed in seeds]
        means = Measures(*(fmean(values) for values in zip(*map(astuple, trained), strict=True)))
        rows.append(Row(one.name, means, one.published, limit))
    return rows


def draw(rows: Sequence[Row], num_seeds: int) -> Table:
    """The rows, each above what was published about it."""
    table = Table(
        title="Exposure bias in a Markov chain",
        caption=f"{NUM_STEPS} steps of {NUM_ROWS} rows, seeds 0 to {num_seeds - 1}; limit: infinitely many rows",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("run", no_wrap=True)
    for title in ("off track", "limit", "on track", "recovery", "forward KL"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        off_track, *others = (format(getattr(row.measured, name), form) for name, form in FORMATS.items())
        table.add_row(row.name, off_track, "" if row.limit is None else f"{row.limit.off_track:.2%}", *others)
        if row.published:
            off_track, *others = (row.published.get(name, "") for name in FORMATS)
            table.add_row("  published", off_track, "", *others, style="dim")
    return table


def main(words: Sequence[str] = ()) -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="etude experiment markov", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="average over seeds 0 to N - 1 (default: 1)")
    num_seeds = parser.parse_args(list(words)).seeds
    Console().print(draw(run(range(num_seeds)), num_seeds))
    return 0
