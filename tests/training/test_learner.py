from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.axes.legality import Sampling
from etude.axes.names import Divergence, Estimator, Reduction, Source, Support
from etude.axes.schedules import Ramp
from etude.core.objective import Objective, Term
from etude.core.records import Rollout, Scored
from etude.errors import NonFiniteError, RecipeError
from etude.models.roles import AbstractStudent
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.runtime.tracking import describe
from etude.runtime.world import World
from etude.testing import CountingTeacher, counting_logits, rollout_of, tiny_backbone
from etude.training.evaluation import score_rows
from etude.training.learner import (
    MAX_EMPTY_ROUNDS,
    MAX_SKIPPED_IN_A_ROW,
    Learner,
    micro_batches,
    seeded,
    without_weight,
)
from etude.training.stages import Plan

STOP = 1
GOLD = Term("gold", teacher="label", divergence=Divergence.FORWARD_KL)
LEAVE_OUT = Term("gold", teacher="label", divergence=Divergence.FORWARD_KL, train_truncated=False)


row_of = partial(rollout_of, source=Source.DATASET)


def learner_of(
    student: AbstractStudent,
    *terms: Term,
    optimizer: Any = None,
    writer: Source = Source.DATASET,
    **options: Any,
) -> Learner:
    weights = student.trainable_parameters().values()
    settings: dict[str, Any] = {
        "heads": {},
        "plan": Plan(steps=20),
        "rate": lambda step: 1.0,
        "world": World(),
        "tokens_per_micro_batch": 1000,
        "clip_norm": 0.0,
        "seed": 0,
    }
    made = torch.optim.SGD(weights, lr=1.0) if optimizer is None else optimizer(weights)
    return Learner(student, Objective(terms, sampling=Sampling(rows=frozenset({writer}))), made, **settings | options)


def prepared(learner: Learner, *rollouts: Rollout) -> list[Scored]:
    return learner.prepare([Scored(rollout, {}) for rollout in rollouts], step=0)


def take(learner: Learner, rows: Sequence[Scored], step: int = 0) -> dict[str, float]:
    """The metrics of one step on all these rows."""
    report = next(iter(learner.learn(rows, step, len(rows))))
    assert report.step == step + 1
    return report.metrics


def weights_of(student: AbstractStudent) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in student.trainable_parameters().items()}


def table(*probabilities: Sequence[float]) -> Student:
    return Student(TableBackbone(torch.tensor(probabilities, dtype=torch.float64).log().clamp(min=-1000)))


class TestMicroBatches:
    ROWS = tuple(Scored(rollout_of([4] * (length - 1), [5], row=row), {}) for row, length in enumerate([2, 9, 3, 3, 5]))

    @pytest.mark.parametrize(
        ("budget", "expected"),
        [
            (1000, [[9, 5, 3, 3, 2]]),
            (18, [[9, 5], [3, 3, 2]]),
            (10, [[9], [5, 3], [3, 2]]),
            (6, [[9], [5], [3, 3], [2]]),
            (1, [[9], [5], [3], [3], [2]]),
        ],
    )
    def test_the_longest_first_within_the_padded_budget(self, budget: int, expected: list[list[int]]) -> None:
        groups = micro_batches(self.ROWS, budget)
        assert [[row.rollout.token_ids.shape[0] for row in group] for group in groups] == expected

    def test_no_row_is_lost_or_repeated(self) -> None:
        groups = micro_batches(self.ROWS, 7)
        assert sorted(row.rollout.prompt.row for group in groups for row in group) == [0, 1, 2, 3, 4]

    def test_no_rows(self) -> None:
        assert micro_batches([], 7) == []


class TestDenominators:
    """Probabilities that make a token cost 10, or 1."""

    DEAR, CHEAP = math.exp(-10), math.exp(-1)
    ONE, NINE = row_of([0], [1], row=0), row_of([1], [1] * 9, row=1)

    def student(self) -> Student:
        return table([1 - self.DEAR, self.DEAR], [1 - self.CHEAP, self.CHEAP])

    @pytest.mark.parametrize("budget", [1000, 1])
    @pytest.mark.parametrize(
        ("reduction", "share_of_one", "share_of_nine"),
        [(Reduction.TOKEN_MEAN, 1 / 10, 9 / 10), (Reduction.SEQUENCE_MEAN, 1 / 2, 1 / 2)],
    )
    def test_one_dear_token_and_nine_cheap_ones(
        self, budget: int, reduction: Reduction, share_of_one: float, share_of_nine: float
    ) -> None:
        student = self.student()
        before = weights_of(student)["weight_VS"]
        term = Term("gold", teacher="label", divergence=Divergence.FORWARD_KL, reduction=reduction)
        learner = learner_of(student, term, tokens_per_micro_batch=budget)
        metrics = take(learner, prepared(learner, self.ONE, self.NINE))
        gradient_VS = before - weights_of(student)["weight_VS"]
        # cross-entropy in the logits: the distribution minus the one-hot token, times its share of the loss
        by_hand_VS = torch.tensor(
            [
                [(1 - self.DEAR) * share_of_one, (1 - self.CHEAP) * share_of_nine],
                [(self.DEAR - 1) * share_of_one, (self.CHEAP - 1) * share_of_nine],
            ],
            dtype=torch.float64,
        )
        torch.testing.assert_close(gradient_VS, by_hand_VS)
        assert metrics["gradient/norm"] == pytest.approx(by_hand_VS.norm().item())
        assert metrics["tokens/gold"] == metrics["tokens/scored"] == 10
        # what is logged stays a mean over tokens
        assert metrics["divergence/gold"] == pytest.approx(1.9)

    @pytest.mark.parametrize(("term", "tokens", "loss"), [(GOLD, 30, 40 / 30), (LEAVE_OUT, 25, 1.0)])
    def test_cut_rows_leave_numerator_count_and_metrics(self, term: Term, tokens: int, loss: float) -> None:
        """25 finished tokens that cost 1, and 5 of a cut row that cost 3 and are the only ones in their state."""
        third = math.exp(-3)
        student = table([1 - self.CHEAP, self.CHEAP, 0.0], [1 - self.CHEAP, self.CHEAP, 0.0], [0.5, 0.5 - third, third])
        finished = [row_of([0], [1] * 5, row=row, stop_ids=(STOP,)) for row in range(5)]
        cut = row_of([2], [2] * 5, row=5, stop_ids=(STOP,))
        before = weights_of(student)["weight_VS"]
        learner = learner_of(student, term, tokens_per_micro_batch=12)
        metrics = take(learner, prepared(learner, *finished, cut))
        change_VS = before - weights_of(student)["weight_VS"]
        assert metrics["tokens/gold"] == metrics["tokens/scored"] == tokens
        assert metrics["divergence/gold"] == pytest.approx(loss)
        assert metrics["student/logprob"] == pytest.approx(-loss)
        assert bool(change_VS[:, 2].any()) == (term is GOLD)
        # 20 of the finished tokens are read in state 1
        torch.testing.assert_close(change_VS[1, 1].item(), (self.CHEAP - 1) * 20 / tokens)

    @pytest.mark.parametrize("budget", [1000, 40, 20, 1])
    def test_no_division_into_micro_batches_changes_the_gradient(self, budget: int) -> None:
        """1 x 8, 2 x 4, ..., 8 x 1 against a loss written plainly: every row alone, unpadded, all logits at once."""
        rollouts = [
            rollout_of(
                list(range(4, 5 + row % 3)), [(5 * row + 3 * place) % 32 for place in range(1 + row % 5)], row=row
            )
            for row in range(8)
        ]
        student = Student(tiny_backbone(layers=1))
        teacher = FrozenTeacher("teacher", tiny_backbone(layers=1, seed=1))
        total, count = torch.zeros(()), 0
        for rollout in rollouts:
            ids_BT = rollout.token_ids[None]
            student_TV = student.backbone.get_submodule("model")(ids_BT).logits[0].log_softmax(-1)
            teacher_TV = teacher.backbone.get_submodule("model")(ids_BT).logits[0].log_softmax(-1)
            scored = slice(rollout.num_prompt_tokens - 1, -1)
            total = total + (student_TV.exp() * (student_TV - teacher_TV))[scored].sum()
            count += rollout.num_completion_tokens
        weights = student.trainable_parameters()
        plain = dict(zip(weights, torch.autograd.grad(total / count, list(weights.values())), strict=True))

        before = weights_of(student)
        learner = learner_of(student, Term(), heads={"teacher": teacher.head()}, tokens_per_micro_batch=budget)
        rows = learner.prepare(score_rows(rollouts, {"teacher": teacher}, learner.objective), step=0)
        metrics = take(learner, rows)
        after = weights_of(student)
        for name, gradient in plain.items():
            torch.testing.assert_close(before[name] - after[name], gradient, atol=1e-6, rtol=1e-6)
        assert metrics["divergence/reverse_kl"] == pytest.approx((total / count).item(), abs=1e-6)


class TestSteps:
    ROWS = tuple(row_of([0], [1] * (row + 1), row=row) for row in range(4))

    def test_updates_and_epochs(self) -> None:
        learner = learner_of(table([0.5, 0.5], [0.5, 0.5]), GOLD, plan=Plan(steps=7, updates_per_round=2, epochs=2))
        rows = prepared(learner, *self.ROWS)
        reports = list(learner.learn(rows, 0, 4))
        assert [report.step for report in reports] == [1, 2, 3, 4]
        assert [report.metrics["tokens/gold"] for report in reports] == [1 + 2, 3 + 4, 1 + 2, 3 + 4]

    def test_from_the_middle_of_a_round_and_to_the_end_of_the_plan(self) -> None:
        learner = learner_of(table([0.5, 0.5], [0.5, 0.5]), GOLD, plan=Plan(steps=7, updates_per_round=2, epochs=2))
        rows = prepared(learner, *self.ROWS)
        assert [(r.step, r.metrics["tokens/gold"]) for r in learner.learn(rows, 1, 4)] == [(2, 7), (3, 3), (4, 7)]
        assert [(r.step, r.metrics["tokens/gold"]) for r in learner.learn(rows, 4, 4)] == [(5, 3), (6, 7), (7, 3)]

    def test_the_gradient_of_a_step_is_of_its_own_rows_alone(self) -> None:
        """Nothing is left over from the step before."""
        student = table([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
        learner = learner_of(student, GOLD, plan=Plan(steps=2, updates_per_round=2), tokens_per_micro_batch=1)
        rows = prepared(learner, *(row_of([state], [0], row=row) for row, state in enumerate([0, 1, 2, 2])))
        steps = learner.learn(rows, 0, 4)
        changed: list[list[bool]] = []
        for _ in range(2):
            before = weights_of(student)["weight_VS"]
            next(steps)
            changed.append((weights_of(student)["weight_VS"] != before).any(0).tolist())
        assert changed == [[True, True, False], [False, False, True]]

    def test_the_rate_is_a_share_of_each_groups_own_peak(self) -> None:
        student = table([0.5, 0.5], [0.5, 0.5])
        twice = torch.nn.Parameter(torch.ones(1))
        optimizer = lambda weights: torch.optim.SGD([{"params": list(weights)}, {"params": [twice], "lr": 0.2}], lr=0.1)  # noqa: E731
        learner = learner_of(student, GOLD, optimizer=optimizer, rate=lambda step: 1 / (step + 1))
        rows = prepared(learner, *self.ROWS)
        for step in range(3):
            metrics = take(learner, rows, step)
            assert metrics["learning_rate"] == pytest.approx(0.1 / (step + 1))
            assert [group["lr"] for group in learner.optimizer.param_groups] == pytest.approx(
                [0.1 / (step + 1), 0.2 / (step + 1)]
            )

    @pytest.mark.parametrize("clip_norm", [0.0, 0.1, 1e6])
    def test_a_long_gradient_is_shortened_and_its_own_length_logged(self, clip_norm: float) -> None:
        student = table([0.5, 0.5], [0.5, 0.5])
        before = weights_of(student)["weight_VS"]
        learner = learner_of(student, GOLD, clip_norm=clip_norm)
        metrics = take(learner, prepared(learner, row_of([0], [1])))
        length = math.sqrt(0.5)  # of (0.5, -0.5)
        assert metrics["gradient/norm"] == pytest.approx(length)
        moved = (before - weights_of(student)["weight_VS"]).norm().item()
        assert moved == pytest.approx(0.1 if clip_norm == 0.1 else length, rel=1e-5)

    def test_every_metric_has_its_row_in_the_table(self) -> None:
        learner = learner_of(table([0.5, 0.5], [0.5, 0.5]), GOLD)
        assert all(describe(name) for name in take(learner, prepared(learner, *self.ROWS)))


class TestPrepare:
    def test_the_student_is_read_only_where_a_term_needs_it(self) -> None:
        student = Student(TableBackbone(counting_logits()))
        rollout = rollout_of([3], [4, 5])
        for term, needed in (
            (Term(support=Support.SAMPLED), False),
            (Term(support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT), True),
        ):
            learner = learner_of(student, term, writer=Source.STUDENT)
            [row] = learner.prepare(score_rows([rollout], {"teacher": CountingTeacher()}, learner.objective), step=0)
            assert (row.student_logprobs is not None) == needed
            assert row.advantages is not None
            assert row.weights is not None
            assert row.weights.tolist() == [[1.0, 1.0]]
            assert row.student_entropy is None
        # student and teacher are the same table, so no token is better than expected
        torch.testing.assert_close(row.student_logprobs, torch.full((2,), math.log(0.9)))
        torch.testing.assert_close(row.advantages, torch.zeros(1, 2), atol=1e-6, rtol=0)


def adam(weights: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1)


class TestNotFinite:
    """Case 36: a gradient that is not a number, in one micro-batch of two."""

    ROWS = (row_of([0], [1], row=0), row_of([1], [0, 1], row=1))

    def run(self, faults: Sequence[float | None], **options: Any) -> tuple[Learner, list[dict[str, float]]]:
        """A step for each fault: None leaves its gradient alone, a value spoils that of the second micro-batch."""
        student = table([0.5, 0.5], [0.25, 0.75])
        learner = learner_of(student, GOLD, optimizer=adam, tokens_per_micro_batch=1, **options)
        rows, metrics = prepared(learner, *self.ROWS), list[dict[str, float]]()
        passes = iter([value for fault in faults for value in (None, fault)])

        def spoil(gradient: Tensor) -> Tensor | None:
            fault = next(passes)
            return None if fault is None else gradient * fault

        student.backbone.get_parameter("weight_VS").register_hook(spoil)
        for step in range(len(faults)):
            metrics.append(take(learner, rows, step))
        return learner, metrics

    @pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
    def test_the_step_is_as_if_it_had_never_been(self, fault: float) -> None:
        undisturbed, _ = self.run([None, None])
        learner, metrics = self.run([None, fault, fault, None])
        assert weights_of(learner.student)["weight_VS"].equal(weights_of(undisturbed.student)["weight_VS"])
        ours, theirs = (deepcopy(made.optimizer.state_dict()["state"]) for made in (learner, undisturbed))
        assert {name: value.tolist() for name, value in ours[0].items()} == {
            name: value.tolist() for name, value in theirs[0].items()
        }
        assert [line["gradient/skipped"] for line in metrics] == [0, 1, 1, 0]
        assert [math.isfinite(line["gradient/norm"]) for line in metrics] == [True, False, False, True]
        assert learner.skipped_in_a_row == 0

    def test_three_in_a_row_end_the_run(self) -> None:
        learner, _ = self.run([math.nan, math.nan, None, math.nan, math.nan, None])
        assert learner.skipped_in_a_row == 0
        with pytest.raises(NonFiniteError, match="the gradient norm was nan in 3 steps in a row; weights are as they"):
            self.run([None] + [math.nan] * MAX_SKIPPED_IN_A_ROW)

    def test_with_a_loss_scale_the_steps_are_the_same(self) -> None:
        plain, _ = self.run([None, None])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaled, metrics = self.run([None, math.inf, None], scaler=scaler)
        assert weights_of(scaled.student)["weight_VS"].equal(weights_of(plain.student)["weight_VS"])
        assert [line["gradient/skipped"] for line in metrics] == [0, 1, 0]
        assert scaler.get_scale() == 2.0**9

    def test_a_norm_that_is_too_large_for_its_type_moves_nothing_under_a_loss_scale(self) -> None:
        """Each gradient is finite, so the scaler itself would step."""
        plain, _ = self.run([None, None])
        scaled, metrics = self.run([None, 1e200, None], scaler=torch.amp.GradScaler("cpu", init_scale=1.0))
        assert weights_of(scaled.student)["weight_VS"].equal(weights_of(plain.student)["weight_VS"])
        assert [line["gradient/skipped"] for line in metrics] == [0, 1, 0]

    def test_a_loss_scale_may_take_longer_to_settle(self) -> None:
        allowed = 10 * MAX_SKIPPED_IN_A_ROW
        learner, _ = self.run([math.inf] * (allowed - 1), scaler=torch.amp.GradScaler("cpu"), plan=Plan(steps=100))
        assert learner.skipped_in_a_row == allowed - 1
        with pytest.raises(NonFiniteError, match=f"in {allowed} steps in a row"):
            self.run([math.inf] * allowed, scaler=torch.amp.GradScaler("cpu"), plan=Plan(steps=100))


class TestNothingToTrain:
    WHOLE, CUT = row_of([0], [0, STOP], stop_ids=(STOP,)), row_of([0], [0, 0], stop_ids=(STOP,))

    def test_the_step_is_left_out_and_counted(self) -> None:
        """An optimiser with momentum and decay would move the weights on a gradient of zero."""
        student = table([0.5, 0.5], [0.5, 0.5])
        learner = learner_of(student, LEAVE_OUT, optimizer=adam)
        take(learner, prepared(learner, self.WHOLE))
        before, state = weights_of(student)["weight_VS"], deepcopy(learner.optimizer.state_dict()["state"])
        metrics = take(learner, prepared(learner, self.CUT), step=1)
        assert weights_of(student)["weight_VS"].equal(before)
        assert learner.optimizer.state_dict()["state"][0]["step"] == state[0]["step"] == 1
        assert (metrics["gradient/skipped"], metrics["gradient/norm"]) == (1, 0)
        assert metrics["tokens/gold"] == metrics["tokens/scored"] == 0
        assert "divergence/gold" not in metrics
        assert all(describe(name) for name in metrics)

    def test_a_row_that_trains_puts_the_count_back(self) -> None:
        learner = learner_of(table([0.5, 0.5], [0.5, 0.5]), LEAVE_OUT)
        for step in range(2 * MAX_EMPTY_ROUNDS):
            kind = self.WHOLE if step % MAX_EMPTY_ROUNDS == 2 else self.CUT
            take(learner, prepared(learner, kind), step)
        assert learner.empty_in_a_row == 0

    @pytest.mark.parametrize(
        ("plan", "steps"),
        [
            (Plan(steps=20), MAX_EMPTY_ROUNDS),
            (Plan(steps=20, updates_per_round=2), 2 * MAX_EMPTY_ROUNDS),
            (Plan(steps=2), 2),  # or else a short run would end as if it had learned something
            (Plan(steps=1), 1),
        ],
    )
    def test_again_and_again_it_ends_the_run(self, plan: Plan, steps: int) -> None:
        learner = learner_of(table([0.5, 0.5], [0.5, 0.5]), LEAVE_OUT, plan=plan)
        rows = prepared(learner, self.CUT, self.CUT)
        for step in range(steps - 1):
            take(learner, rows, step)
        with pytest.raises(
            RecipeError,
            match=rf"no token was trained in {steps} steps in a row; the last one had .* rows by .*, "
            "and term 'gold' has train_truncated = false: change",
        ):
            take(learner, rows, steps - 1)

    @pytest.mark.parametrize(
        ("keys", "said"),
        [
            ({"skip_first": 2}, "skip_first = 2"),
            (
                {"skip_first": 9, "first_tokens": Ramp(10, 16, kind="linear", last=2)},
                "skip_first = 9, first_tokens = 10",
            ),
            ({"sources": {Source.TEACHER}}, 'sources = ["teacher"]'),
            ({"entropy_share": 0.1}, "entropy_share = 0.1"),  # of two tokens: none
            (
                {"train_truncated": False, "sources": {Source.TEACHER}, "entropy_share": 0.1},
                'sources = ["teacher"], train_truncated = false, entropy_share = 0.1',
            ),
        ],
    )
    def test_the_reason_is_what_the_terms_really_say(self, keys: dict[str, Any], said: str) -> None:
        term = Term("gold", teacher="label", divergence=Divergence.FORWARD_KL, **keys)
        writer = max(term.sources)  # of other rows than the one here, which comes from the dataset
        learner = learner_of(table([0.5, 0.5], [0.5, 0.5]), term, plan=Plan(steps=1), writer=writer)
        with pytest.raises(RecipeError) as refused:
            take(learner, prepared(learner, self.WHOLE))
        assert str(refused.value) == (
            "no token was trained in 1 steps in a row; the last one had 1 rows by dataset, the longest of 2 tokens, 0 "
            f"of them cut at max_new_tokens, and term 'gold' has {said}: change what leaves all of them out"
        )

    def test_what_a_tool_wrote_is_nobodys_to_train(self) -> None:
        learner = learner_of(table([0.5, 0.5], [0.5, 0.5]), GOLD, plan=Plan(steps=1))
        row = replace(self.WHOLE, written=torch.tensor([False, False]))
        with pytest.raises(RecipeError, match="term 'gold' has nothing to train in what a tool wrote"):
            take(learner, prepared(learner, row))

    def test_a_row_of_no_weight_may_stand_in_for_one(self) -> None:
        learner = learner_of(table([0.5, 0.5], [0.5, 0.5]), GOLD)
        [row] = prepared(learner, self.WHOLE)
        assert row.weights is not None
        spare = without_weight(row)
        assert spare.weights is not None
        assert spare.weights.tolist() == [[0.0, 0.0]]
        assert row.weights.tolist() == [[1.0, 1.0]]

    def test_rows_of_others_beside_rows_that_train(self) -> None:
        """Half of the rows have a source that the term does not name: they change nothing at all."""
        student, alone = table([0.5, 0.5], [0.5, 0.5]), table([0.5, 0.5], [0.5, 0.5])
        term = Term("gold", teacher="label", divergence=Divergence.FORWARD_KL, sources={Source.DATASET})
        gold = row_of([0], [1])
        mixed, plain = learner_of(student, term, tokens_per_micro_batch=1), learner_of(alone, term)
        with_others = take(mixed, prepared(mixed, gold, rollout_of([1], [1, 0, 1], row=1)))
        assert with_others == take(plain, prepared(plain, gold))
        assert weights_of(student)["weight_VS"].equal(weights_of(alone)["weight_VS"])


class TestDropout:
    ROLLOUTS = (row_of([4, 5], [6, 7, 8]), row_of([9], [10], row=1))

    def gradient(self, step: int, seed: int = 0) -> Tensor:
        student = Student(tiny_backbone("gpt2", layers=1))  # whose dropout rates are 0.1
        before = weights_of(student)
        learner = learner_of(student, GOLD, seed=seed, tokens_per_micro_batch=1)
        take(learner, prepared(learner, *self.ROLLOUTS), step)
        return torch.cat([(before[name] - weight).flatten() for name, weight in weights_of(student).items()])

    def test_it_follows_from_seed_and_place_alone(self) -> None:
        first = self.gradient(step=3)
        torch.rand(17)
        assert self.gradient(step=3).equal(first)
        assert not self.gradient(step=4).equal(first)
        assert not self.gradient(step=3, seed=1).equal(first)

    def test_the_process_draws_on_as_if_nothing_had_been(self) -> None:
        before = torch.get_rng_state()
        self.gradient(step=0)
        assert torch.get_rng_state().equal(before)

    def test_on_mps_its_own_generator_as_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """None is here: the three calls are recorded."""
        calls: list[object] = []
        state = torch.tensor([1, 2, 3], dtype=torch.uint8)
        monkeypatch.setattr("torch.mps.get_rng_state", lambda: state)
        monkeypatch.setattr("torch.mps.manual_seed", calls.append)
        monkeypatch.setattr("torch.mps.set_rng_state", lambda kept: calls.append(kept.tolist()))
        before = torch.get_rng_state()
        with seeded(torch.device("mps"), 7):
            assert calls == [7]
            assert torch.rand(3).equal(torch.rand(3, generator=torch.Generator().manual_seed(7)))
        assert calls == [7, [1, 2, 3]]
        assert torch.get_rng_state().equal(before)

    def test_afterwards_the_student_is_in_evaluation_mode_also_after_an_exception(self) -> None:
        student = Student(tiny_backbone("gpt2", layers=1))
        learner = learner_of(student, GOLD)
        rows = prepared(learner, *self.ROLLOUTS)
        seen: list[bool] = []
        hook = student.backbone.get_submodule("model").register_forward_pre_hook(
            lambda module, _: seen.append(module.training), with_kwargs=False
        )
        decoder = student.backbone.get_submodule("model.transformer")
        inner = decoder.register_forward_pre_hook(lambda module, _: seen.append(module.training))
        take(learner, rows)
        assert seen == [True]
        assert not any(part.training for part in student.backbone.modules())
        inner.remove()
        hook.remove()

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        decoder.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            take(learner, rows, step=1)
        assert not any(part.training for part in student.backbone.modules())

    def test_tokens_are_chosen_once_a_round(self) -> None:
        """Of four states of entropies 0, .33, .50 and .69 nats the two least certain are trained, in whichever step."""
        student = table([1.0, 0.0, 0.0, 0.0], [0.9, 0.1, 0.0, 0.0], [0.8, 0.2, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0])
        half = Term("half", teacher="label", divergence=Divergence.FORWARD_KL, entropy_share=0.5)
        learner = learner_of(student, half, plan=Plan(steps=2, updates_per_round=2))
        rows = prepared(learner, *(row_of([state], [0], row=row) for row, state in enumerate([0, 3, 1, 2])))
        reports = list(learner.learn(rows, 0, 4))
        assert [report.metrics["selected/half"] for report in reports] == [0.5, 0.5]
        assert [report.metrics["tokens/half"] for report in reports] == [1, 1]
        assert [row.weights.tolist() for row in rows if row.weights is not None] == [[[0]], [[1]], [[0]], [[1]]]
        assert all(describe(name) for report in reports for name in report.metrics)
        assert not any("selected" in name for name in take(learner_of(student, GOLD), rows))
