"""The faults of the field, planted one at a time: the suite's own checks must notice each of them.

A check is a test function of another file, loaded afresh with the fault in place. Each is also run without the fault,
so that what it notices is the fault and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from etude.axes.names import Divergence, Estimator, Form, Importance, Owner, Source, Support, Tail
from etude.core import advantages, divergences, estimators, linear, logprobs, objective, support, tile
from etude.core.linear import OutputHead
from etude.core.objective import Objective
from etude.core.records import Batch, Scored
from etude.core.term import Term
from etude.models import backbone
from etude.models.sampling import InProcessSampler

TESTS = Path(__file__).parents[1]
COLLATE = importlib.import_module("etude.core.collate")  # `etude.core.collate` by attribute is the function
Plant = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], object]


def load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"planted_{Path(file).stem}", TESTS / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The faults ---------------------------------------------------------------------------------------------------------


def student_shifted(patch: pytest.MonkeyPatch) -> None:
    """Student logits are read at the token's own place, where they are about the next one."""
    right = logprobs.predicted_from
    patch.setattr(COLLATE, "predicted_from", lambda prompt, completion: right(prompt, completion) + 1)


def shift_itself(patch: pytest.MonkeyPatch) -> None:
    right = logprobs.predicted_from
    patch.setattr(logprobs, "predicted_from", lambda prompt, completion: right(prompt, completion) + 1)


def prompt_in_the_loss(patch: pytest.MonkeyPatch) -> None:
    """Scores are read from the start of the row, whatever the length of its prompt."""
    patch.setattr(COLLATE, "predicted_from", lambda prompt, completion: torch.arange(completion))


def mask_not_applied(patch: pytest.MonkeyPatch) -> None:
    """The mask is accepted, and everything is trained."""
    patch.setattr(advantages, "row_mask", lambda rollout, **_: torch.ones(rollout.num_completion_tokens, dtype=bool))


def masked_tokens_in_the_divisor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(objective, "row_count", lambda mask, _: mask.shape[0])


def direction_swapped(patch: pytest.MonkeyPatch) -> None:
    forward, reverse = divergences.forward_kl, divergences.reverse_kl
    patch.setattr(divergences, "forward_kl", reverse)
    patch.setattr(divergences, "reverse_kl", forward)


def mixture_weights_swapped(patch: pytest.MonkeyPatch) -> None:
    right = divergences._log_mixture
    patch.setattr(divergences, "_log_mixture", lambda first, second, weight: right(first, second, 1 - weight))


def mean_of_each_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """The loss is divided by the tokens of its own micro-batch."""
    right = Objective.sum

    def own_mean(
        self: Objective, hidden: Tensor, head: OutputHead, batch: Batch, scales: Tensor, heads: Mapping[str, OutputHead]
    ) -> tuple[Tensor, Tensor]:
        return right(self, hidden, head, batch, self.scales(batch.weights_JN.sum(-1).double()), heads)

    patch.setattr(Objective, "sum", own_mean)


def ranks_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Gradients are averaged over ranks and nobody makes up for it."""
    right = objective.term_scales
    patch.setattr(objective, "term_scales", lambda counts, coefficients, world_size: right(counts, coefficients, 1))


def temperature_on_one_side(patch: pytest.MonkeyPatch) -> None:
    """Only the first softmax of each tile, the student's, is tempered."""
    right, calls = logprobs.next_token_logprobs, list[int]()

    def half(logits: Tensor, temperature: float = 1.0) -> Tensor:
        calls.append(1)
        return right(logits, temperature if len(calls) % 2 else 1.0)

    patch.setattr(objective, "next_token_logprobs", half)


def k1_differentiated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(estimators, "form_value", lambda c, form: c)


def k3_differentiated(patch: pytest.MonkeyPatch) -> None:
    right = estimators.form_value
    patch.setattr(estimators, "form_value", lambda c, form: right(c, Form.K3))


def ratio_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The importance ratio is one, with the right gradient: as if every token were the student's own."""
    patch.setattr(
        estimators,
        "importance_ratio",
        lambda *, student_logprobs, behaviour_logprobs: one_with_gradient(student_logprobs),
    )


def one_with_gradient(logprobs: Tensor) -> Tensor:
    return (logprobs - logprobs.detach()).exp()


def advantage_of_the_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    right = estimators.returns
    patch.setattr(estimators, "returns", lambda rewards, discount: right(-rewards, discount))


def tiles_read_the_first_labels(patch: pytest.MonkeyPatch) -> None:
    """Every tile takes the labels and weights of the first one."""
    right = linear._Sums.add_tile

    def from_the_start(
        self: linear._Sums,
        tokens: slice,
        inner: int,
        token_loss: linear.TokenLoss,
        heads: Mapping[str, tuple[OutputHead, Tensor]],
    ) -> None:
        def shifted(student: Tensor, teacher: Mapping[str, Tensor], where: slice) -> tuple[Tensor, Tensor]:
            return token_loss(student, teacher, slice(where.start - tokens.start, where.stop - tokens.start))

        right(self, tokens, inner, shifted, heads)

    patch.setattr(linear._Sums, "add_tile", from_the_start)


def tools_tokens_trained(patch: pytest.MonkeyPatch) -> None:
    """Who wrote a token is recorded, and not looked at."""
    right = advantages.row_mask
    patch.setattr(advantages, "row_mask", lambda rollout, *, written_C, **rest: right(rollout, **rest))


def cross_entropy_on_student_rows(patch: pytest.MonkeyPatch) -> None:
    """A term's sources are read and not applied."""
    right = advantages.row_mask
    patch.setattr(
        advantages, "row_mask", lambda rollout, *, sources, **rest: right(rollout, sources=set(Source), **rest)
    )


def moments_of_the_own_rank(patch: pytest.MonkeyPatch) -> None:
    right = advantages._centre
    patch.setattr(
        advantages, "_centre", lambda term, values, masks, total: right(term, values, masks, lambda sums: sums)
    )


def whitened_last(patch: pytest.MonkeyPatch) -> None:
    """Moments are taken of what is clipped already, so that the bound bounds nothing."""
    returns, clipped = advantages._returns, advantages._clipped
    patch.setattr(
        advantages, "_returns", lambda term, row, mask, reward: clipped(term, returns(term, row, mask, reward), mask)
    )
    patch.setattr(advantages, "_clipped", lambda term, values, mask: values)


def returns_beyond_the_horizon(patch: pytest.MonkeyPatch) -> None:
    right = advantages._returns
    patch.setattr(
        advantages, "_returns", lambda term, row, mask, reward: right(term, row, torch.ones_like(mask), reward)
    )


def whitened_after_the_kl(patch: pytest.MonkeyPatch) -> None:
    """The log-ratio to the teacher is part of the reward before the moments are taken."""
    right = advantages._reward

    def both(term: Term, row: Scored) -> float:
        kl = (row.student_logprobs - row.scores["teacher"].sampled_logprobs).sum().item()
        return right(term, row) - kl

    patch.setattr(advantages, "_reward", both)


def groups_of_the_own_rank(patch: pytest.MonkeyPatch) -> None:
    right = advantages._off_their_groups

    def alone(term: Term, scored: Sequence[Scored], trained: Sequence[bool], rewards: Sequence[float], *_: object):
        doubled = [*scored, *scored]  # nobody is left alone, and the mean stays that of this rank
        own = right(term, doubled, [*trained, *trained], [*rewards, *rewards], lambda mine: mine, lambda mine: mine)
        return own[: len(scored)]

    patch.setattr(advantages, "_off_their_groups", alone)


def reward_at_the_last_token_alone(patch: pytest.MonkeyPatch) -> None:
    right = estimators.returns
    patch.setattr(estimators, "returns", lambda rewards, discount: right(rewards, 0.0))


def baseline_added_with_the_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    """The expected gradient stays right, whatever a state's baseline is: only the values show it."""
    right = tile.reverse_kl
    patch.setattr(tile, "reverse_kl", lambda **logprobs: -right(**logprobs))


def truncated_sum_differentiated(patch: pytest.MonkeyPatch) -> None:
    """The log-ratio carries its gradient, which is nothing over the whole vocabulary and grad Q_K over a part of it."""
    patch.setattr(divergences, "_kl", lambda first, second: (first.exp() * (first - second)).sum(-1))


def bucket_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = support._coarse
    patch.setattr(support, "_coarse", lambda logprobs, ids, repeated, _: right(logprobs, ids, repeated, Tail.TRUNCATE))


def bounds_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(estimators, "_bounded_weight", lambda ratio, importance, bounds: ratio)


def coefficient_of_the_first_step(patch: pytest.MonkeyPatch) -> None:
    right = Term.coefficient_at
    patch.setattr(Term, "coefficient_at", lambda self, step: right(self, 0))


def sampler_never_refreshed(patch: pytest.MonkeyPatch) -> None:
    """Rows are written with the weights of the run's start, under the present version."""
    patch.setattr(InProcessSampler, "refresh", lambda self, student, version: setattr(self, "version", version))


def filler_rows_kept(patch: pytest.MonkeyPatch) -> None:
    """Rows of the head beyond the tokenizer's ids take their share of the softmax."""
    patch.setattr(logprobs, "cut_filler", lambda logits, vocab_size: logits)
    patch.setattr(backbone, "cut_filler", lambda logits, vocab_size: logits)
    patch.setattr(backbone, "_first", lambda tensor, count: tensor)


# Who notices --------------------------------------------------------------------------------------------------------


def values(name: str, expected: float) -> Check:
    def check() -> None:
        module = load("core/test_divergences.py")
        module.test_values(module.ALL.get(name) or getattr(module, name), expected)

    return check


def of_objective(test: str, *arguments: object) -> Check:
    return lambda: getattr(load("core/test_objective.py"), test)(*arguments)


def of_equivalence(test: str, *arguments: object) -> Check:
    def check() -> None:
        module = load("equivalence/test_objective.py")
        getattr(module, test)(module.Reader(), *arguments)

    return check


def outside_the_answers() -> None:
    module = load("core/test_objective.py")
    module.test_outside_the_answers_nothing_counts(module.FULL_TERMS[0], 2**28)


def micro_batches() -> None:
    module = load("equivalence/test_objective.py")
    module.test_1x8_2x4_4x2_and_8x1_are_one_step(module.Reader(), module.TERMS[:1])


def of_truth(test: str, *arguments: object) -> Check:
    return lambda: getattr(load("equivalence/test_estimator_truth.py"), test)(*arguments)


def of_advantages(test: str, *arguments: object) -> Check:
    return lambda: getattr(load("core/test_advantages.py"), test)(*arguments)


def tools_tokens() -> None:
    module = load("core/test_advantages.py")
    module.test_a_tools_tokens_are_not_trained_not_counted_and_earn_nothing(module.policy(), [-1.0, -2.0, -4.0, -8.0])


def refreshed() -> None:
    load("models/test_sampling.py").TestRefresh().test_a_low_precision_copy_follows_when_refreshed()


def filler_of_the_head() -> None:
    load("models/test_backbone.py").TestHead().test_filler_rows_are_cut(264)


def truth(**term: object) -> Check:
    def check() -> None:
        load("equivalence/test_estimator_truth.py").test_drawn_tokens_equal_the_whole_vocabulary(term, 1.0)

    return check


ON_POLICY = Importance.NONE, 1.0
SAMPLED = {"support": Support.SAMPLED}
POLICY = {"support": Support.SAMPLED, "estimator": Estimator.POLICY_GRADIENT}


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (student_shifted, of_objective("test_ragged_rows_each_read_their_own_scores")),
        (student_shifted, outside_the_answers),
        (student_shifted, lambda: load("core/test_collate.py").test_scored_tokens_of_ragged_rows()),
        (
            shift_itself,
            lambda: load("core/test_logprobs.py").test_completion_token_j_is_predicted_at_prompt_plus_j_minus_one(
                3, 2, [2, 3]
            ),
        ),
        (prompt_in_the_loss, outside_the_answers),
        (mask_not_applied, of_objective("test_cut_rows_leave_numerator_divisor_and_metrics_together", False, 25)),
        (
            masked_tokens_in_the_divisor,
            of_objective("test_cut_rows_leave_numerator_divisor_and_metrics_together", False, 25),
        ),
        (direction_swapped, values("forward_kl", 0.625 * math.log(2))),
        (direction_swapped, of_objective("test_loss_temperature", 1.0, 1.905177, 1.992436, 2**28)),
        (mixture_weights_swapped, values("jsd(0.1)", 0.037234)),
        (mixture_weights_swapped, values("skew_reverse_kl", 0.284836)),
        (
            mean_of_each_micro_batch,
            lambda: load("equivalence/test_objective.py").test_ten_and_nine_times_one_make_1_9_and_not_5_5(),
        ),
        (mean_of_each_micro_batch, micro_batches),
        (ranks_forgotten, of_equivalence("test_two_ranks_are_one_step", 4)),
        (temperature_on_one_side, of_objective("test_equal_models_are_at_zero_at_every_temperature", 2.0)),
        (k1_differentiated, truth(**SAMPLED)),
        (k3_differentiated, truth(**SAMPLED)),
        (ratio_forgotten, of_truth("test_ratio_corrects_another_sampling_temperature", 0.5, 1.0)),
        (advantage_of_the_wrong_sign, truth(**POLICY)),
        (tiles_read_the_first_labels, of_equivalence("test_the_budget_changes_nothing", 2_000)),
        (tools_tokens_trained, tools_tokens),
        (tools_tokens_trained, of_truth("test_what_a_tool_wrote_is_no_action_and_costs_nothing", [True, False, True])),
        (
            cross_entropy_on_student_rows,
            of_objective("test_terms_keep_their_own_rows_counts_and_coefficients"),
        ),
        (moments_of_the_own_rank, of_advantages("test_two_ranks_have_the_moments_of_one", 2)),
        (moments_of_the_own_rank, of_equivalence("test_a_round_prepared_on_two_ranks_is_the_round", 3)),
        (whitened_after_the_kl, of_advantages("test_a_reward_is_whitened_before_any_divergence_is_added")),
        (groups_of_the_own_rank, of_advantages("test_two_ranks_have_the_groups_of_one", 2)),
        (reward_at_the_last_token_alone, of_truth("test_a_reward_has_the_gradient_of_its_expectation", *ON_POLICY)),
        (whitened_last, of_advantages("test_whitened_then_clipped_then_weighed")),
        (whitened_last, of_truth("test_clipped_advantages")),
        (returns_beyond_the_horizon, of_advantages("test_what_lies_beyond_the_horizon_has_no_say")),
        (
            baseline_added_with_the_wrong_sign,
            lambda: load("core/test_tile.py").test_the_state_kl_as_a_baseline(None),
        ),
        (
            truncated_sum_differentiated,
            of_truth("test_truncate_has_its_coefficient_detached", Owner.TEACHER, 1),
        ),
        (bucket_forgotten, of_truth("test_bucket_and_renormalise", Divergence.REVERSE_KL, {}, Owner.TEACHER)),
        (bounds_forgotten, of_truth("test_bounded_ratios", Importance.MASKED)),
        (bounds_forgotten, of_truth("test_bounded_ratios", Importance.TRUNCATED)),
        (coefficient_of_the_first_step, of_objective("test_coefficients_move_with_the_step")),
        (sampler_never_refreshed, refreshed),
        (filler_rows_kept, lambda: load("core/test_logprobs.py").test_filler_columns_would_take_nearly_everything()),
        (filler_rows_kept, filler_of_the_head),
    ],
)
def test_noticed(plant: Plant, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
