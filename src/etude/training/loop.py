"""The synchronous loop, one screen: prompts, rollouts, scores, steps, again.

Everything that varies (who writes, who judges, what is learned, where it is saved) is an object handed in; the number
of steps taken is the whole state. `recipes/build.py` makes the parts, `recipes/run.py` calls `train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from etude.axes.names import REWARD, Source
from etude.core.objective import Objective
from etude.core.records import Prompt, Scored
from etude.models.roles import AbstractSampler, AbstractStudent, AbstractTeacher
from etude.runtime.seeds import Key
from etude.runtime.tracking import Tracker
from etude.runtime.world import World
from etude.training.evaluation import Evaluation, EvaluationReport, Reward, score_rows
from etude.training.learner import Learner
from etude.training.stages import Plan
from etude.training.state import Saver, State


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    student: AbstractStudent
    sampler: AbstractSampler
    teachers: Mapping[str, AbstractTeacher]  # by name
    objective: Objective
    learner: Learner
    prompts: Callable[[int], Sequence[Prompt]]  # round -> the round's prompts, all ranks', rows numbered from 0
    evaluation: Evaluation | None
    plan: Plan
    saver: Saver
    tracker: Tracker
    world: World
    seed: int
    evaluate_every: int  # steps; 0: only before and after
    checkpoint_every: int  # steps; 0: only at the end
    reward: Reward | None = None  # judges a whole row, where a term asks for that


def train(parts: Parts, state: State) -> State:
    """Run from `state` to the end of the plan; the state is that of the last checkpoint, or fresh."""
    if state.step == 0:
        for teacher in parts.teachers.values():
            teacher.begin(parts.student)
        state.before = evaluate(parts, state, "before").metrics
    parts.sampler.refresh(parts.student, version=state.step)
    for number in parts.plan.rounds(after=state.step):
        rows, num_rows = gather(parts, state, number)
        for report in parts.tracker.timed("learn", parts.learner.learn(rows, state.step, num_rows)):
            state.step = report.step
            described = describe(rows, parts.plan.first_step(number), parts.world)
            described |= mean_rewards(rows, parts.objective, parts.world)
            measured = due(state.step, parts.evaluate_every, parts.plan.steps)
            parts.tracker.record(state.step, report.metrics | described, more=measured and parts.evaluation is not None)
            state.pending = rows if parts.plan.place_of(state.step) else None
            for teacher in parts.teachers.values():
                teacher.follow(parts.student, state.step, round_over=state.pending is None)
            if measured:
                state.after = evaluate(parts, state, "after").metrics
            if due(state.step, parts.checkpoint_every, parts.plan.steps):
                with parts.tracker.span("save"):
                    parts.saver.save(state, parts.student, parts.learner, parts.sampler, parts.teachers)
        with parts.tracker.span("refresh"):
            parts.sampler.refresh(parts.student, version=state.step)
    return state


def gather(parts: Parts, state: State, number: int) -> tuple[list[Scored], int]:
    """This rank's prepared rows of a round, and how many rows the round has over all ranks."""
    with parts.tracker.span("prompts"):
        prompts = parts.prompts(number)
        mine = [prompt for prompt in prompts if prompt.row % parts.world.size == parts.world.rank]
    if state.pending is not None:  # a resume inside the round: its rows were saved, not to be written anew
        return state.pending, len(prompts)
    with parts.tracker.span("sample"):
        rollouts = parts.sampler.sample(mine, Key(parts.seed, "sample", parts.plan.stage, number))
    with parts.tracker.span("score"):
        scored = score_rows(rollouts, parts.teachers, parts.objective, parts.reward)
    with parts.tracker.span("prepare"):
        return parts.learner.prepare(scored, state.step), len(prompts)


def evaluate(parts: Parts, state: State, name: str) -> EvaluationReport:
    """Measure the student as it is, tell the sampler, and keep the answers under `samples/`."""
    if parts.evaluation is None:
        return EvaluationReport({}, [])
    with parts.tracker.span("evaluate"):
        report = parts.evaluation.run(parts.student, version=state.step)
    parts.tracker.record(state.step, report.metrics)
    parts.sampler.observe(report.metrics)
    parts.saver.keep_answers(name, state.step, report.answers)
    return report


def due(step: int, every: int, steps: int) -> bool:
    """At the end always, and every so many steps before it (0: never)."""
    return step == steps or (every > 0 and step % every == 0)


def describe(rows: Sequence[Scored], first_step: int, world: World) -> dict[str, float]:
    """Length, ends and age of the rollouts of a round that begins at `first_step`, over all ranks."""
    rollouts = [row.rollout for row in rows]
    ages = [first_step - rollout.version for rollout in rollouts if rollout.source is Source.STUDENT]
    sums = [
        len(rollouts),
        sum(rollout.num_completion_tokens for rollout in rollouts),
        sum(rollout.truncated for rollout in rollouts),
        len(ages),
        sum(age > 0 for age in ages),
        sum(ages),
    ]
    count, tokens, truncated, own, replayed, age = world.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
    return {
        "rollout/length": tokens / count,
        "rollout/truncated": truncated / count,
        "rollout/tokens": tokens,
        "rollout/student": own / count,
        "rollout/replayed": replayed / count,
        "rollout/age": age / max(own, 1.0),
    }


def mean_rewards(rows: Sequence[Scored], objective: Objective, world: World) -> dict[str, float]:
    """Of each term on rewards, the mean over the round's rows that it trains, over all ranks."""
    metrics = dict[str, float]()
    for j, term in enumerate(objective.terms):
        if term.teacher == REWARD:
            trained = [row.reward or 0.0 for row in rows if row.weights is not None and bool(row.weights[j].any())]
            sums = torch.tensor([len(trained), sum(trained)], dtype=torch.float64)
            count, reward = world.sum(sums).tolist()
            if count:
                metrics[f"reward/{term.name}"] = reward / count
    return metrics
