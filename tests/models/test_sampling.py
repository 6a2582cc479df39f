"""The in-process sampler."""

import math
from collections.abc import Sequence

import pytest
import torch

from etude.axes.names import FinishReason, Source
from etude.core.records import Prompt
from etude.errors import DataError, NonFiniteError, RecipeError
from etude.models.sampling import InProcessSampler, SamplingSettings, dataset_rollouts
from etude.models.table import TableBackbone
from etude.runtime.seeds import Key

KEY = Key(seed=0, purpose="sample", stage=0, round=0)


def settings(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int = 8,
    stop_ids: tuple[int, ...] = (),
) -> SamplingSettings:
    return SamplingSettings(temperature, top_p, top_k, max_new_tokens, stop_ids)


def prompt(*ids: int, row: int = 0) -> Prompt:
    return Prompt(torch.tensor(ids), row)


def log_table(*rows: Sequence[float]) -> TableBackbone:
    """A table with these next-token probabilities."""
    return TableBackbone(torch.tensor(rows, dtype=torch.float64).log())


class TestInProcessSampler:
    def test_shares_at_temperature_1(self) -> None:
        sampler = InProcessSampler(log_table(*[[0.5, 0.3, 0.2]] * 3), settings(max_new_tokens=1), rows_per_batch=1000)
        rollouts = sampler.sample([prompt(0, row=row) for row in range(3000)], KEY)
        shares = torch.cat([rollout.completion_ids for rollout in rollouts]).bincount(minlength=3) / 3000
        torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.03, rtol=0)

    def test_the_order_is_the_prompts_own(self) -> None:
        """Each prompt ends in another state, and each state allows one id only."""
        table = log_table([0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0])
        prompts = [prompt(*range(length), row=length) for length in (2, 4, 1, 3)]
        rollouts = InProcessSampler(table, settings(max_new_tokens=2), rows_per_batch=2).sample(prompts, KEY)
        assert [rollout.prompt for rollout in rollouts] == prompts
        assert [rollout.completion_ids.tolist() for rollout in rollouts] == [[2, 3], [0, 1], [1, 2], [3, 0]]

    def test_no_prompts_give_no_rollouts(self) -> None:
        assert InProcessSampler(log_table([1.0]), settings()).sample([], KEY) == []

    def test_source_and_version_travel_with_each_row(self) -> None:
        sampler = InProcessSampler(log_table([1.0]), settings(), source=Source.TEACHER)
        (rollout,) = sampler.sample([prompt(0)], KEY)
        assert (rollout.source, rollout.version) == (Source.TEACHER, 0)

    def test_another_round_or_row_is_another_draw(self) -> None:
        sampler = InProcessSampler(log_table(*[[0.25] * 4] * 4), settings(max_new_tokens=40))
        (first,) = sampler.sample([prompt(0)], KEY)
        (other_row,) = sampler.sample([prompt(0, row=1)], KEY)
        (other_round,) = sampler.sample([prompt(0)], Key(seed=0, purpose="sample", stage=0, round=1))
        assert not torch.equal(first.completion_ids, other_row.completion_ids)
        assert not torch.equal(first.completion_ids, other_round.completion_ids)

    def test_a_prompt_without_room_is_refused_before_any_forward(self) -> None:
        table = log_table([1.0])
        table.context_window = 20
        sampler = InProcessSampler(table, settings(max_new_tokens=4))
        sampler.sample([prompt(*[0] * 16)], KEY)
        table.decoding = None  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(DataError, match="row 7 has 17 tokens.*max_new_tokens = 4 makes 21.*window holds 20"):
            sampler.sample([prompt(0), prompt(*[0] * 17, row=7)], KEY)

    def test_stop_ids_beyond_the_vocabulary_are_refused(self) -> None:
        with pytest.raises(RecipeError, match=r"stop ids \[5\].*vocabulary of 2 ids"):
            InProcessSampler(log_table([0.5, 0.5], [0.5, 0.5]), settings(stop_ids=(1, 5)))

    def test_damaged_weights_are_named(self) -> None:
        sampler = InProcessSampler(TableBackbone(torch.full((2, 2), math.nan)), settings())
        with pytest.raises(NonFiniteError, match="row 3 .*version 0"):
            sampler.sample([prompt(0, row=3)], KEY)


class TestDatasetRollouts:
    def test_the_datasets_own_answer(self) -> None:
        answer = torch.tensor([4, 5, 2])
        (rollout,) = dataset_rollouts([Prompt(torch.tensor([1]), 0, completion_ids=answer)], version=3)
        assert rollout.completion_ids is answer
        assert (rollout.source, rollout.finish_reason, rollout.version) == (Source.DATASET, FinishReason.STOP, 3)
        assert rollout.behaviour_logprobs is None
        assert rollout.raw_logprobs is None

    def test_a_row_without_an_answer_is_named(self) -> None:
        with pytest.raises(DataError, match="row 9 has no completion"):
            dataset_rollouts([prompt(1, row=9)], version=0)
