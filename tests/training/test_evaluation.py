from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.axes.legality import Sampling
from etude.axes.names import Divergence, Source
from etude.core.objective import Objective, Term
from etude.core.records import Prompt, Rollout, as_ids
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.runtime.seeds import Key
from etude.runtime.tracking import describe
from etude.runtime.world import World
from etude.testing import CountingTeacher, ScriptedSampler, counting_logits, rollout_of, tiny_backbone
from etude.training.evaluation import Evaluation, measure, score_rows

STOP = 2
STUDENT_P = [[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.25, 0.5, 0.25]]
TEACHER_P = [[0.25, 0.5, 0.25], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]
# KL(student || teacher) in each state: 0.5 ln 2 + 0.25 ln 0.5 where two ids change places, 0 where none does
KL = [0.25 * math.log(2), 0.0, 0.25 * math.log(2)]

PROMPTS = [  # three rows of two questions
    Prompt(as_ids([0]), row=0, example={"answer": "1 2"}),
    Prompt(as_ids([0]), row=1, example={"answer": "1 2"}),
    Prompt(as_ids([1]), row=2, example={"answer": "0"}),
]
WRITTEN = {0: [1, STOP], 1: [1, 1, 1, 0], 2: [0, 0]}  # by row: finished, cut, cut
GREEDY = {0: [1, STOP], 2: [0]}


def table(probabilities: Sequence[Sequence[float]]) -> TableBackbone:
    return TableBackbone(torch.tensor(probabilities, dtype=torch.float64).log())


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def verify(example: Mapping[str, Any], text: str) -> float:
    return float(text == example["answer"])


def evaluation(**changes: Any) -> Evaluation:
    settings: dict[str, Any] = {
        "sampler": ScriptedSampler(lambda prompt: WRITTEN[prompt.row], stop_ids=(STOP,)),
        "greedy_sampler": ScriptedSampler(lambda prompt: GREEDY[prompt.row], stop_ids=(STOP,)),
        "teacher": FrozenTeacher("teacher", table(TEACHER_P)),
        "verify": verify,
        "decode": decode,
        "seed": 0,
        "world": World(),
        "tokens_per_batch": 100,
        "show": 2,
    }
    return Evaluation(PROMPTS, **settings | changes)


class TestByHand:
    def test_every_number(self) -> None:
        report = evaluation().run(Student(table(STUDENT_P)), version=7)
        # states read: 0 1 | 0 1 1 1 | 1 0
        assert report.metrics == pytest.approx(
            {
                "heldout/length": 8 / 3,
                "heldout/truncated": 2 / 3,
                "heldout/accuracy": 1 / 3,
                "heldout/reverse_kl": 3 * KL[0] / 8,
                "heldout/entropy": 1.5 * math.log(2),  # of a half and two quarters, in every state
                "heldout/accuracy_greedy": 2 / 2,  # each question once
            }
        )
        assert all(describe(name) for name in report.metrics)

    def test_the_answers_it_shows(self) -> None:
        report = evaluation().run(Student(table(STUDENT_P)), version=7)
        assert [answer.as_json() for answer in report.answers] == [
            {"row": 0, "prompt": "0", "completion": "1 2", "finish_reason": "stop", "correct": 1.0},
            {"row": 1, "prompt": "0", "completion": "1 1 1 0", "finish_reason": "length", "correct": 0.0},
        ]

    def test_batches_do_not_change_it(self) -> None:
        student = Student(table(STUDENT_P))
        whole, alone = (evaluation(tokens_per_batch=budget).run(student, 0).metrics for budget in (100, 1))
        assert whole == pytest.approx(alone, abs=1e-12)

    @pytest.mark.parametrize(
        ("changes", "missing"),
        [
            ({"teacher": None}, {"heldout/reverse_kl", "heldout/entropy"}),
            ({"greedy_sampler": None}, {"heldout/accuracy_greedy"}),
            ({"verify": None}, {"heldout/accuracy", "heldout/accuracy_greedy"}),
        ],
        ids=["no teacher", "nothing greedy", "no verifier"],
    )
    def test_what_is_not_there_is_left_out(self, changes: dict[str, Any], missing: set[str]) -> None:
        whole = evaluation().run(Student(table(STUDENT_P)), 0)
        report = evaluation(**changes).run(Student(table(STUDENT_P)), 0)
        assert whole.metrics.keys() - report.metrics.keys() == missing
        assert all(whole.metrics[name] == value for name, value in report.metrics.items())
        if "verify" in changes:
            assert {answer.correct for answer in report.answers} == {None}

    def test_both_samplers_write_as_the_student_is_now(self) -> None:
        made = evaluation()
        made.run(Student(table(STUDENT_P)), version=7)
        assert isinstance(made.greedy_sampler, ScriptedSampler)
        assert (made.sampler.version, made.greedy_sampler.version) == (7, 7)

    def test_it_draws_the_same_numbers_each_time_and_never_those_of_training(self) -> None:
        keys: list[Key] = []

        class Noting(ScriptedSampler):
            def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
                keys.append(key)
                return super().sample(prompts, key)

        made = evaluation(sampler=Noting(lambda _: [STOP], stop_ids=(STOP,)), greedy_sampler=None, seed=3)
        for version in (0, 50):
            made.run(Student(table(STUDENT_P)), version)
        assert keys[0] == keys[1]
        assert keys[0].seed == 3
        assert keys[0].purpose != "sample"


class TestOnAModel:
    PROMPTS = tuple(Prompt(as_ids([4 + row, 7]), row=row) for row in range(4))

    def run(self, student: Student, made: Evaluation | None = None, **changes: Any) -> Any:
        settings = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8, stop_ids=(2,))
        made = evaluation(
            sampler=InProcessSampler(student.backbone, settings),
            greedy_sampler=None,
            verify=None,
            teacher=FrozenTeacher("teacher", tiny_backbone(layers=1, seed=1)),
            show=4,
            **changes,
        )
        made.prompts = self.PROMPTS
        return made.run(student, version=0)

    def test_the_same_student_gets_the_same_numbers_again(self) -> None:
        student = Student(tiny_backbone(layers=1))
        first = self.run(student)
        torch.rand(3)
        assert self.run(student) == first

    def test_another_seed_draws_otherwise(self) -> None:
        student = Student(tiny_backbone(layers=1))
        assert self.run(student).answers != self.run(student, seed=1).answers

    def test_nothing_is_learned_and_every_mode_is_as_before(self) -> None:
        student = Student(tiny_backbone("gpt2", layers=1))  # whose dropout rates are 0.1
        still = self.run(student)
        student.backbone.train()
        assert self.run(student) == still
        assert all(part.training for part in student.backbone.modules())
        assert all(weight.grad is None for weight in student.trainable_parameters().values())

    def test_a_student_that_is_its_teacher(self) -> None:
        assert abs(self.run(Student(tiny_backbone(layers=1, seed=1))).metrics["heldout/reverse_kl"]) < 1e-7


class TestScoreRows:
    ROWS = (rollout_of([3], [4, 5, 6]), rollout_of([1, 2], [4], row=1))

    def test_each_row_gets_what_each_teacher_says_of_it(self) -> None:
        teachers = {"sure": CountingTeacher("sure"), "unsure": CountingTeacher("unsure", certainty=0.5)}
        objective = Objective([Term("a", "sure"), Term("b", "unsure", divergence=Divergence.FORWARD_KL)])
        scored = score_rows(self.ROWS, teachers, objective)
        assert [row.rollout for row in scored] == list(self.ROWS)
        for row in scored:
            assert list(row.scores) == ["sure", "unsure"]
            assert {name: marks.teacher for name, marks in row.scores.items()} == {"sure": "sure", "unsure": "unsure"}
            for marks in row.scores.values():
                assert marks.sampled_logprobs is None
                assert marks.hidden is not None
                assert marks.hidden.shape == (row.rollout.num_completion_tokens, 10)

    def test_a_label_asks_nobody(self) -> None:
        gold = Term("gold", "label", divergence=Divergence.FORWARD_KL)
        objective = Objective([Term(), gold], sampling=Sampling(rows=frozenset({Source.DATASET})))
        scored = score_rows(self.ROWS, {"teacher": CountingTeacher()}, objective)
        assert all(list(row.scores) == ["teacher"] for row in scored)


def test_measure_is_the_objective_without_its_gradient() -> None:
    """Any objective: here forward KL from a teacher that counts, to a student that counts less surely."""
    student, teacher = TableBackbone(counting_logits(certainty=0.5)), CountingTeacher()
    objective = Objective([Term(divergence=Divergence.FORWARD_KL)])
    scored = score_rows([rollout_of([3], [4, 5]), rollout_of([1], [2], row=1)], {"teacher": teacher}, objective)
    metrics = measure(student, objective, scored, {"teacher": teacher.head()}, World(), 4)
    assert metrics["divergence/reverse_kl"] == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5))
    assert metrics["tokens/scored"] == 3
    weight: Tensor = student.weight_VS
    assert weight.grad is None
