"""The loop with parts that note what is asked of them, on a table of ten ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.axes.names import Source
from etude.core.objective import Objective, Term
from etude.core.records import Prompt, Rollout, Scored, as_ids
from etude.errors import PairError
from etude.models.replay import ReplaySampler
from etude.models.roles import AbstractStudent
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.runtime.seeds import Key
from etude.runtime.tracking import Tracker, read_metrics
from etude.runtime.world import World
from etude.testing import CountingTeacher, ScriptedSampler, counting_logits, rollout_of
from etude.training.evaluation import Answer, EvaluationReport
from etude.training.learner import Learner
from etude.training.loop import Parts, describe, due, gather, mean_rewards, train
from etude.training.stages import Plan
from etude.training.state import Saver, State

STOP = 2


class NotingSampler(ScriptedSampler):
    """Writes one answer of two ids to each prompt, and notes every call."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: [int(prompt.token_ids[-1]), STOP], stop_ids=(STOP,))
        self.calls: list[str] = []
        self.heard: list[float] = []

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        rows = [prompt.row for prompt in prompts]
        self.calls.append(f"{key.purpose} seed {key.seed} round {key.round} rows {rows} version {self.version}")
        return super().sample(prompts, key)

    def refresh(self, student: AbstractStudent, version: int) -> None:
        self.calls.append(f"refresh {version}")
        super().refresh(student, version)

    def observe(self, metrics: Mapping[str, float]) -> None:
        self.heard.append(metrics["heldout/reverse_kl"])

    def save(self, folder: Path) -> None:
        (folder / "heard.json").write_text(json.dumps(self.heard))

    def load(self, folders: Sequence[Path], mine: Callable[[int], bool]) -> None:
        self.heard = json.loads((folders[0] / "heard.json").read_text())


@dataclass
class NotingEvaluation:
    """Gives the version as the divergence; may lose its power at one."""

    fails_at: int | None = None
    versions: list[int] = field(default_factory=list)

    def run(self, student: AbstractStudent, version: int) -> EvaluationReport:
        if version == self.fails_at:
            raise KeyboardInterrupt
        self.versions.append(version)
        return EvaluationReport({"heldout/reverse_kl": float(version)}, [Answer(0, "2 + 2 =", "4", "stop", 1.0)])


def prompts(number: int) -> list[Prompt]:
    return [Prompt(as_ids([3 + row, 4 + number % 5]), row=row) for row in range(4)]


def parts_of(folder: Path, plan: Plan, **changes: Any) -> Parts:
    student, objective = Student(TableBackbone(counting_logits(certainty=0.5))), Objective([Term()])
    teacher = CountingTeacher()
    learner = Learner(
        student,
        objective,
        torch.optim.AdamW(student.trainable_parameters().values(), lr=0.1),
        heads={"teacher": teacher.head()},
        plan=plan,
        rate=lambda step: 1.0,
        world=World(),
        tokens_per_micro_batch=6,
        clip_norm=1.0,
        seed=5,
    )
    evaluation: Any = NotingEvaluation()
    parts = Parts(
        student=student,
        sampler=NotingSampler(),
        teachers={"teacher": teacher},
        objective=objective,
        learner=learner,
        prompts=prompts,
        evaluation=evaluation,
        plan=plan,
        saver=Saver(folder, keep=100, world=World(), info={}),
        tracker=Tracker(folder, console=False, total_steps=plan.steps),
        world=World(),
        seed=5,
        evaluate_every=0,
        checkpoint_every=1,
    )
    return replace(parts, **changes)


def run(parts: Parts, state: State | None = None) -> State:
    with parts.tracker:
        return train(parts, state or State())


def calls(parts: Parts) -> list[str]:
    assert isinstance(parts.sampler, NotingSampler)
    return parts.sampler.calls


def weights(parts: Parts) -> Tensor:
    return parts.student.backbone.get_parameter("weight_VS")


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


class TestRounds:
    def test_on_policy_every_round_is_written_with_the_present_weights(self, tmp_path: Path) -> None:
        parts = parts_of(tmp_path, Plan(steps=2))
        state = run(parts)
        assert state.step == 2
        assert calls(parts) == [
            "refresh 0",
            "sample seed 5 round 0 rows [0, 1, 2, 3] version 0",
            "refresh 1",
            "sample seed 5 round 1 rows [0, 1, 2, 3] version 1",
            "refresh 2",
        ]

    def test_the_steps_of_a_round_share_its_rows(self, tmp_path: Path) -> None:
        parts = parts_of(tmp_path, Plan(steps=5, updates_per_round=2))
        run(parts)
        assert [call for call in calls(parts) if call.startswith("refresh")] == [f"refresh {v}" for v in (0, 2, 4, 5)]
        assert sum(call.startswith("sample") for call in calls(parts)) == 3
        lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "tokens/scored" in line]
        assert [line["tokens/scored"] for line in lines] == [4.0] * 5  # half of the round's eight tokens a step
        assert {line["rollout/tokens"] for line in lines} == {8.0}

    def test_teachers_hear_of_each_step_and_where_a_round_ends(self, tmp_path: Path) -> None:
        """Of the first student before it is first measured, of a step before it is saved."""
        heard: list[str] = []

        class Noting(CountingTeacher):
            def begin(self, student: AbstractStudent) -> None:
                heard.append("begin")

            def follow(self, student: AbstractStudent, step: int, *, round_over: bool) -> None:
                heard.append(f"step {step}{' ends the round' if round_over else ''}")

            def save(self, folder: Path) -> None:
                heard.append(f"save {folder.parent.name}/{folder.name}")

        parts = parts_of(tmp_path, Plan(steps=3, updates_per_round=2), teachers={"teacher": Noting()})
        run(parts)
        saves = ["save teachers/teacher"]
        assert heard == ["begin", "step 1", *saves, "step 2 ends the round", *saves, "step 3", *saves]
        checkpoint = parts.saver.store.newest()
        assert checkpoint is not None
        assert not (checkpoint.path / "teachers").exists()  # it had nothing to write
        heard.clear()
        run(parts_of(tmp_path, Plan(steps=4), teachers={"teacher": Noting()}), State(step=3))
        assert heard == ["step 4 ends the round", *saves]

    def test_a_process_writes_the_rows_of_its_rank(self, tmp_path: Path) -> None:
        parts = parts_of(tmp_path, Plan(steps=1), world=World(rank=1, size=2, local_rank=1))
        rows, num_rows = gather(parts, State(), number=3)
        assert [row.rollout.prompt.row for row in rows] == [1, 3]
        assert [row.rollout.prompt.token_ids.tolist() for row in rows] == [[4, 7], [6, 7]]
        assert num_rows == 4

    def test_it_learns(self, tmp_path: Path) -> None:
        """The held-out evaluation is a fake here; the training divergence is not."""
        parts = parts_of(tmp_path, Plan(steps=40))
        run(parts)
        lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "divergence/reverse_kl" in line]
        assert lines[-1]["divergence/reverse_kl"] < 0.1 * lines[0]["divergence/reverse_kl"]

    def test_what_takes_time_is_timed(self, tmp_path: Path) -> None:
        run(parts_of(tmp_path, Plan(steps=2)))
        first, step_1, step_2, last = read_metrics(tmp_path / "metrics.jsonl")
        assert {name for name in first if name.startswith("time/")} == {"time/evaluate_s"}
        inside = {"prompts", "sample", "score", "prepare", "learn", "step"}
        assert {name for name in step_1 if name.startswith("time/")} == {f"time/{span}_s" for span in inside}
        between = {"save", "refresh"}
        assert {name for name in step_2 if name.startswith("time/")} == {f"time/{span}_s" for span in inside | between}
        assert last.keys() == {"step", "heldout/reverse_kl", "time/evaluate_s"}


class TestCadence:
    @pytest.mark.parametrize(
        ("every", "expected"), [(0, [0, 5]), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (9, [0, 5])]
    )
    def test_evaluations(self, tmp_path: Path, every: int, expected: list[int]) -> None:
        parts = parts_of(tmp_path, Plan(steps=5), evaluate_every=every)
        state = run(parts)
        assert isinstance(parts.evaluation, NotingEvaluation)
        assert parts.evaluation.versions == expected
        assert isinstance(parts.sampler, NotingSampler)
        assert parts.sampler.heard == expected
        assert (state.before, state.after) == ({"heldout/reverse_kl": 0.0}, {"heldout/reverse_kl": 5.0})
        lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "heldout/reverse_kl" in line]
        assert [(line["step"], line["heldout/reverse_kl"]) for line in lines] == [(v, v) for v in expected]
        for name, step in (("before", 0), ("after", 5)):
            [answer] = (tmp_path / "samples" / f"{name}.jsonl").read_text().splitlines()
            assert json.loads(answer)["step"] == step

    @pytest.mark.parametrize(("every", "expected"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
    def test_checkpoints(self, tmp_path: Path, every: int, expected: list[int]) -> None:
        run(parts_of(tmp_path, Plan(steps=5), checkpoint_every=every))
        assert checkpoints(tmp_path) == expected

    @pytest.mark.parametrize(
        ("step", "every", "expected"),
        [(1, 0, False), (10, 0, True), (3, 3, True), (4, 3, False), (9, 3, True), (10, 3, True), (0, 3, True)],
    )
    def test_due(self, step: int, every: int, expected: bool) -> None:
        assert due(step, every, steps=10) == expected

    def test_without_an_evaluation(self, tmp_path: Path) -> None:
        state = run(parts_of(tmp_path, Plan(steps=2), evaluation=None, evaluate_every=1))
        assert (state.step, state.before, state.after) == (2, {}, {})
        assert not (tmp_path / "samples").exists()


class TestResume:
    PLAN = Plan(steps=6, updates_per_round=2, epochs=2)
    SECOND_ROUND = "sample seed 5 round 1 rows [0, 1, 2, 3] version 4"

    @pytest.mark.parametrize(
        ("step", "expected"),
        [
            (1, ["refresh 1", "refresh 4", SECOND_ROUND, "refresh 6"]),
            (3, ["refresh 3", "refresh 4", SECOND_ROUND, "refresh 6"]),
            (4, ["refresh 4", SECOND_ROUND, "refresh 6"]),
            (5, ["refresh 5", "refresh 6"]),
        ],
    )
    def test_a_round_that_was_written_is_not_written_again(
        self, tmp_path: Path, step: int, expected: list[str]
    ) -> None:
        whole = parts_of(tmp_path / "whole", self.PLAN)
        run(whole)

        stopped = parts_of(
            tmp_path / "run", self.PLAN, evaluate_every=1, evaluation=NotingEvaluation(fails_at=step + 1)
        )
        with pytest.raises(KeyboardInterrupt):
            run(stopped)
        assert checkpoints(tmp_path / "run") == list(range(1, step + 1))

        again = parts_of(tmp_path / "run", self.PLAN, evaluate_every=1)
        checkpoint = again.saver.store.newest()
        assert checkpoint is not None
        state = again.saver.restore(checkpoint, again.student, again.learner, again.sampler)
        assert (state.pending is None) == (step == 4)
        state = run(again, state)
        assert state.step == 6
        assert weights(again).equal(weights(whole))
        assert calls(again) == expected
        assert isinstance(again.evaluation, NotingEvaluation)
        assert again.evaluation.versions == list(range(step + 1, 7))  # and not again before the first step
        assert isinstance(again.sampler, NotingSampler)
        assert again.sampler.heard == list(range(7))  # the sampler has heard of each once, before and after the stop

    def test_a_finished_run_does_nothing_but_refresh(self, tmp_path: Path) -> None:
        parts = parts_of(tmp_path, self.PLAN)
        before = weights(parts).clone()
        run(parts, State(step=6))
        assert weights(parts).equal(before)
        assert calls(parts) == ["refresh 6"]


def test_describe() -> None:
    """At step 7: one row just written, one by the student of step 4, and one of the dataset's, which has no age."""
    rollouts = [
        rollout_of([3], [4, 5, 2], stop_ids=(2,), version=7),
        rollout_of([3], [4], row=1, stop_ids=(2,), version=4),
        rollout_of([3], [4, 2], row=2, stop_ids=(2,), version=7, source=Source.DATASET),
        rollout_of([3], [4, 2], row=3, stop_ids=(2,), version=7),
    ]
    assert describe([Scored(rollout, {}) for rollout in rollouts], 7, World()) == {
        "rollout/length": 2.0,
        "rollout/truncated": 0.25,
        "rollout/tokens": 8.0,
        "rollout/student": 0.75,
        "rollout/replayed": 0.25,
        "rollout/age": 1.0,
    }


def test_rows_without_a_student_have_no_age() -> None:
    found = describe([Scored(rollout_of([3], [4], source=Source.DATASET), {})], 5, World())
    assert (found["rollout/student"], found["rollout/replayed"], found["rollout/age"]) == (0.0, 0.0, 0.0)


def test_replayed_rows_are_no_mismatch_of_the_sampler(tmp_path: Path) -> None:
    """Their log-probabilities are an older student's: told by their version, and left out of the gap."""
    parts = parts_of(
        tmp_path, Plan(steps=6, updates_per_round=2), sampler=ReplaySampler(NotingSampler(), 1, rows_kept=1)
    )
    run(parts)
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "tokens/scored" in line]
    assert [line["rollout/replayed"] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert [line["rollout/age"] for line in lines] == [0, 0, 2, 2, 4, 4]
    assert [line["tokens/written"] for line in lines] == [4, 4, 0, 0, 0, 0]
    assert ["sampler/logprob_gap" in line for line in lines] == [True] * 2 + [False] * 4


class TestRewards:
    """A verifier that likes odd answers, and a term on nothing else: no teacher at all."""

    TERM = Term("odd", teacher="reward", support="sampled", estimator="policy_gradient", discount=1.0, baseline="batch")

    @staticmethod
    def odd(rollout: Rollout) -> float:
        return float(rollout.completion_ids[0].item() % 2)

    def parts(self, folder: Path, steps: int, **changes: Any) -> Parts:
        objective = Objective([self.TERM])
        parts = parts_of(folder, Plan(steps=steps), objective=objective, teachers={}, reward=self.odd, **changes)
        learner = Learner(
            parts.student,
            objective,
            torch.optim.AdamW(parts.student.trainable_parameters().values(), lr=0.1, weight_decay=0.0),
            heads={},
            plan=parts.plan,
            rate=lambda step: 1.0,
            world=World(),
            tokens_per_micro_batch=6,
            clip_norm=1.0,
            seed=5,
        )
        return replace(parts, learner=learner)

    def test_the_rows_carry_their_rewards_and_the_log_their_mean(self, tmp_path: Path) -> None:
        parts = self.parts(tmp_path, 5)
        before = weights(parts).clone()
        run(parts)
        lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "reward/odd" in line]
        # prompts end with 4 + round % 5, answered with that number
        assert [line["reward/odd"] for line in lines] == [0.0, 1.0, 0.0, 1.0, 0.0]
        assert not any(name.startswith("divergence/") for line in lines for name in line)
        assert weights(parts).equal(before)  # all rows of a round were equally good

    def test_without_a_verifier(self, tmp_path: Path) -> None:
        with pytest.raises(PairError, match="a term trains on rewards and there is no verifier"):
            run(replace(self.parts(tmp_path, 1), reward=None))

    def test_only_rows_that_the_term_trains_are_averaged(self) -> None:
        rows = [
            Scored(rollout_of([3], [4, 5], row=row), {}, torch.tensor([[trained, trained]]), reward=reward)
            for row, (trained, reward) in enumerate([(1.0, 0.25), (0.0, 100.0), (1.0, 0.75)])
        ]
        assert mean_rewards(rows, Objective([self.TERM]), World()) == {"reward/odd": 0.5}
        assert mean_rewards(rows[1:2], Objective([self.TERM]), World()) == {}
        assert mean_rewards(rows, Objective([Term()]), World()) == {}
