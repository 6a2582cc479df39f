"""How long a run will take, from a round and an evaluation tried out.

Every part of the loop is timed by itself and multiplied by how often the run does it; the formula stands in the
evidence. The lengths are those of the student as it is now. While it learns they move, so the worst case, every answer
of the greatest length, is said beside it. A machine that is busy now is taken to be as busy then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.axes.names import Check
from etude.models.roles import AbstractSampler
from etude.models.sampling import InProcessSampler
from etude.preflight.disk import existing
from etude.preflight.findings import Finding, passed
from etude.preflight.rehearsal import Rehearsal, Stopwatch, allocate_state, key_of, rehearse, writing
from etude.runtime.checkpoints import CheckpointStore, save_tensors
from etude.training.evaluation import Evaluation
from etude.training.loop import Parts, due

LEAST_SECONDS, MOST_ROUNDS = 1.0, 8  # a round that is over at once is tried out again, up to so often
EVALUATION_ROWS, EVALUATION_SECONDS = 8, 2.0  # rows evaluated in any case, and how long more of them may take
WRITTEN_BYTES = 32 * 2**20  # of a checkpoint, written on trial

PER_ROUND = ("prompts", "sample", "score", "prepare", "learn", "refresh")
FORMULA = "start + rounds x (prompts + sample + score + prepare + learn + refresh) + evaluations + saves"


@dataclass(frozen=True, slots=True)
class Times:
    """How often a run does what."""

    rounds: int
    evaluations: int
    saves: int

    @classmethod
    def of(cls, parts: Parts) -> Times:
        """Counted as the loop counts."""
        plan, intervals = parts.plan, (parts.evaluate_every, parts.checkpoint_every)
        dues = [sum(due(step, every, plan.steps) for step in range(1, plan.steps + 1)) for every in intervals]
        evaluations = 0 if parts.evaluation is None else 1 + dues[0]  # one before the first step
        return cls(sum(1 for _ in plan.rounds(after=0)), evaluations, dues[1])


@dataclass(frozen=True, eq=False, slots=True)
class Tried:
    """What was timed, in seconds."""

    rehearsal: Rehearsal  # the last one, for its rows
    round: Mapping[str, float]  # by part, the mean of the rounds tried out
    evaluation: float  # of one, all its rows
    save: float  # of one checkpoint


def try_out(parts: Parts, *, max_new_tokens: int, checkpoint_bytes: int) -> Tried:
    """Time a round, an evaluation and a save; leaves weights and run folder as they are.

    Nothing is warmed up: whoever asks has had rows written, marked and trained before, by other checks.

    Args:
        parts: of the run; their optimiser has a state afterwards.
        max_new_tokens: the recipe's, whatever length the parts were built for.
        checkpoint_bytes: size of one.
    """
    allocate_state(parts.learner)  # in a run it is there from the second step on
    tried = [rehearse(parts, max_new_tokens=max_new_tokens)]
    while len(tried) < MOST_ROUNDS and sum(sum(one.seconds.values()) for one in tried) < LEAST_SECONDS:
        tried.append(rehearse(parts, max_new_tokens=max_new_tokens, number=len(tried)))
    means = {part: sum(one.seconds[part] for one in tried) / len(tried) for part in PER_ROUND}
    evaluation = 0.0 if parts.evaluation is None else _evaluation_seconds(parts, parts.evaluation, max_new_tokens)
    return Tried(tried[-1], means, evaluation, save_seconds(parts.saver.folder, checkpoint_bytes))


def _evaluation_seconds(parts: Parts, evaluation: Evaluation, max_new_tokens: int) -> float:
    """Of all its rows, in proportion to those evaluated here."""
    few = copy(evaluation)
    few.sampler = writing(evaluation.sampler, max_new_tokens=max_new_tokens)
    if evaluation.greedy_sampler is not None:
        few.greedy_sampler = writing(evaluation.greedy_sampler, max_new_tokens=max_new_tokens)
    few.key = key_of(parts)

    def seconds(rows: int) -> float:
        few.prompts = evaluation.prompts[:rows]
        watch = Stopwatch(parts.student.backbone.device)
        with watch.span("evaluate"):
            few.run(parts.student, version=0)
        return watch.seconds["evaluate"]

    rows = min(EVALUATION_ROWS, len(evaluation.prompts))
    taken = seconds(rows)
    more = min(int(rows * EVALUATION_SECONDS / taken), side_by_side(evaluation.sampler, len(evaluation.prompts)))
    if more > rows:
        rows, taken = more, seconds(more)
    return taken * len(evaluation.prompts) / rows


def side_by_side(sampler: AbstractSampler, rows: int) -> int:
    """Of so many rows, how many are written at a time."""
    return min(rows, sampler.rows_per_batch) if isinstance(sampler, InProcessSampler) else rows


def save_seconds(folder: Path, checkpoint_bytes: int) -> float:
    """Of a checkpoint, in proportion to a small one written beside the run's folder, flushed, hashed and removed."""
    tried_bytes = max(1, min(checkpoint_bytes, WRITTEN_BYTES))
    place = existing(folder)
    with tempfile.TemporaryDirectory(prefix=".etude-", dir=place) as name:
        tensors, watch = {"weights": torch.zeros(tried_bytes, dtype=torch.uint8)}, Stopwatch(torch.device("cpu"))
        store = CheckpointStore(Path(name), keep=1)
        with watch.span("save"):
            store.save(0, lambda path: save_tensors(path / "tried.safetensors", tensors), {})
        return watch.seconds["save"] * checkpoint_bytes / tried_bytes


def wall_time(times: Times, tried: Tried, *, start_s: float, longest: int) -> Finding:
    """The expected seconds of the whole run, part by part, and about the most they can become.

    Args:
        times: how often what is done.
        tried: how long it took.
        start_s: seconds from the start of a run to its first evaluation.
        longest: tokens of the longest answer there can be.
    """
    round_s, held_out, saving = dict(tried.round), times.evaluations * tried.evaluation, times.saves * tried.save
    total = start_s + times.rounds * sum(round_s.values()) + held_out + saving
    prompt, answer = tried.rehearsal.prompt_tokens, tried.rehearsal.completion_tokens
    longer = {"sample": longest / answer} | dict.fromkeys(
        ("score", "prepare", "learn"), (prompt + longest) / (prompt + answer)
    )
    worst_round = sum(seconds * max(1.0, longer.get(part, 1.0)) for part, seconds in round_s.items())
    worst = start_s + times.rounds * worst_round + held_out * max(1.0, longest / answer) + saving
    spelled = ", ".join(f"{part} {seconds:.2g}" for part, seconds in round_s.items())
    evidence = (
        f"{spoken(total)} as the student writes now, {answer:.0f} tokens an answer, and up to {spoken(worst)} if all "
        f"had {longest}: {FORMULA} = {start_s:.2g} + {times.rounds} x ({spelled}) + {times.evaluations} x "
        f"{tried.evaluation:.2g} + {times.saves} x {tried.save:.2g} seconds; answers get shorter or longer while it "
        "learns, and the machine is taken to be as busy as now"
    )
    figures = {
        "seconds": total,
        "worst_seconds": worst,
        "start": start_s,
        "round": round_s,
        "evaluation": tried.evaluation,
        "save": tried.save,
        "rounds": times.rounds,
        "evaluations": times.evaluations,
        "saves": times.saves,
    }
    return passed(Check.TIME, evidence, **figures)


def spoken(seconds: float) -> str:
    """A duration as people say it.

    >>> spoken(42.4), spoken(600), spoken(9_000), spoken(400_000)
    ('42 s', '10 min', '2.5 h', '4.6 days')
    """
    for size, unit, least in ((86_400, "days", 2 * 86_400), (3_600, "h", 2 * 3_600), (60, "min", 120)):
        if seconds >= least:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"
