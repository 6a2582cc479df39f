from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.axes.names import FinishReason, Source
from etude.core.records import Prompt, Rollout, as_ids
from etude.errors import DataError, RecipeError
from etude.models.adaptive import AdaptiveFraction
from etude.models.mixture import DatasetSampler, Mix, MixtureSampler
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.runtime.seeds import Key
from etude.testing import ScriptedSampler, counting_logits

KEY = Key(seed=0, purpose="sample", stage=0, round=0)


def prompts(count: int) -> list[Prompt]:
    """Each has an answer of its own, and the sampler below echoes the prompt."""
    return [Prompt(as_ids([row]), row=row, completion_ids=as_ids([1000 + row, 2])) for row in range(count)]


def mixture(student_fraction: float = 0.5, mix: Mix = "row") -> MixtureSampler:
    return MixtureSampler(ScriptedSampler(lambda prompt: [prompt.row]), DatasetSampler(), student_fraction, mix=mix)


def writers(rollouts: list[Rollout]) -> dict[int, Source]:
    return {rollout.prompt.row: rollout.source for rollout in rollouts}


class TestDatasetSampler:
    def test_hands_out_each_rows_own_completion(self) -> None:
        sampler = DatasetSampler()
        sampler.refresh(Student(TableBackbone(counting_logits())), version=4)
        for prompt, rollout in zip(prompts(3), sampler.sample(prompts(3), KEY), strict=True):
            assert rollout.completion_ids.tolist() == [1000 + prompt.row, 2]
            assert (rollout.source, rollout.finish_reason) == (Source.DATASET, FinishReason.STOP)
            assert rollout.version == 4
            assert rollout.behaviour_logprobs is None  # nobody sampled it
            assert rollout.raw_logprobs is None

    def test_a_row_without_one_is_refused(self) -> None:
        with pytest.raises(DataError, match="row 7 of the round has no completion.*data.columns"):
            DatasetSampler().sample([Prompt(as_ids([1]), row=7)], KEY)


class TestMixture:
    def test_every_row_keeps_its_place_and_its_own_completion(self) -> None:
        rollouts = mixture().sample(prompts(40), KEY)
        assert [rollout.prompt.row for rollout in rollouts] == list(range(40))
        for rollout in rollouts:
            row = rollout.prompt.row
            expected = [row] if rollout.source is Source.STUDENT else [1000 + row, 2]
            assert rollout.completion_ids.tolist() == expected
        assert set(writers(rollouts).values()) == {Source.STUDENT, Source.DATASET}

    def test_the_share_is_the_one_asked_for(self) -> None:
        """3,000 draws: three standard deviations are 3 * sqrt(0.3 * 0.7 / 3000) = 0.025."""
        sampler = mixture(0.3)
        found = [
            source
            for number in range(30)
            for source in writers(sampler.sample(prompts(100), replace(KEY, round=number))).values()
        ]
        share = found.count(Source.STUDENT) / len(found)
        assert math.isclose(share, 0.3, abs_tol=0.025)

    @pytest.mark.parametrize(("fraction", "source"), [(1.0, Source.STUDENT), (0.0, Source.DATASET)])
    def test_at_the_ends_one_of_them_writes_all(self, fraction: float, source: Source) -> None:
        assert set(writers(mixture(fraction).sample(prompts(50), KEY)).values()) == {source}

    def test_a_rows_writer_depends_on_no_row_around_it(self) -> None:
        """Ranks, order and company: each row alone, two shares as two ranks have them, and backwards."""
        rows, sampler = prompts(20), mixture()
        together = writers(sampler.sample(rows, KEY))
        alone = [writers(sampler.sample([row], KEY)) for row in rows]
        shares = [writers(sampler.sample(rows[rank::2], KEY)) for rank in range(2)]
        assert {row: source for part in alone for row, source in part.items()} == together
        assert shares[0] | shares[1] == together
        assert writers(sampler.sample(rows[::-1], KEY)) == together

    def test_the_draw_changes_with_seed_stage_and_round(self) -> None:
        found = [
            tuple(writers(mixture().sample(prompts(30), key)).values())
            for key in (KEY, replace(KEY, seed=1), replace(KEY, stage=1), replace(KEY, round=1))
        ]
        assert len(set(found)) == 4

    def test_who_writes_is_not_drawn_with_the_numbers_the_row_is_written_with(self) -> None:
        """Or else the student would write the rows whose first tokens are the early ids."""
        drawn = {row: KEY.uniforms(row, 1).item() < 0.5 for row in range(200)}
        found = {row: source is Source.STUDENT for row, source in writers(mixture().sample(prompts(200), KEY)).items()}
        agreeing = sum(drawn[row] == found[row] for row in drawn) / len(drawn)
        assert 0.35 < agreeing < 0.65

    def test_no_prompts(self) -> None:
        assert mixture().sample([], KEY) == []

    def test_refresh_reaches_both(self) -> None:
        sampler = mixture()
        sampler.refresh(Student(TableBackbone(counting_logits())), version=9)
        assert (sampler.version, sampler.student.version, sampler.other.version) == (9, 9, 9)
        assert {rollout.version for rollout in sampler.sample(prompts(10), KEY)} == {9}

    def test_there_is_no_third_way(self) -> None:
        with pytest.raises(RecipeError, match="no mix 'token'; write one of row, batch"):
            mixture(mix="token")  # pyright: ignore[reportArgumentType]


class TestMixtureByBatch:
    """One coin a round: all rows are the student's, or none."""

    @staticmethod
    def writer(key: Key, *rows: int, student_fraction: float = 0.5) -> Source:
        asked = prompts(max(rows) + 1)
        rollouts = mixture(student_fraction, "batch").sample([asked[row] for row in rows], key)
        (source,) = set(writers(rollouts).values())
        return source

    def test_one_writes_all_rows_of_a_round_and_both_have_their_turn(self) -> None:
        found = [self.writer(replace(KEY, round=number), *range(50)) for number in range(20)]
        assert set(found) == {Source.STUDENT, Source.DATASET}

    def test_the_share_of_rounds_is_the_one_asked_for(self) -> None:
        """1,000 rounds: three standard deviations are 3 * sqrt(0.3 * 0.7 / 1000) = 0.043."""
        sampler, (row, *_) = mixture(0.3, "batch"), prompts(1)
        found = [sampler.sample([row], replace(KEY, round=number))[0].source for number in range(1000)]
        assert math.isclose(found.count(Source.STUDENT) / 1000, 0.3, abs_tol=0.043)

    @pytest.mark.parametrize(("fraction", "source"), [(1.0, Source.STUDENT), (0.0, Source.DATASET)])
    def test_at_the_ends_one_of_them_writes_always(self, fraction: float, source: Source) -> None:
        keys = [replace(KEY, round=number) for number in range(20)]
        assert {self.writer(key, 0, 1, student_fraction=fraction) for key in keys} == {source}

    def test_every_rank_has_the_same_coin(self) -> None:
        """Whatever rows it has, also none; and nothing drawn before, as after a resume, has a say."""
        for number in range(10):
            key = replace(KEY, round=number)
            assert len({self.writer(key, *range(rank, 40, 4)) for rank in range(4)} | {self.writer(key, 7)}) == 1
        assert mixture(mix="batch").sample([], KEY) == []

    def test_the_coin_changes_with_seed_and_stage(self) -> None:
        def rounds(**changes: int) -> list[Source]:
            return [self.writer(replace(KEY, round=number, **changes), 0) for number in range(30)]

        assert len({tuple(rounds()), tuple(rounds(seed=1)), tuple(rounds(stage=1))}) == 3


class TestAdaptive:
    """The share follows what evaluations measure: here 0, then 1."""

    @staticmethod
    def made() -> MixtureSampler:
        phi = AdaptiveFraction(0.0, rise=1.0, tolerance=0.5)
        return MixtureSampler(ScriptedSampler(lambda prompt: [prompt.row]), DatasetSampler(), phi)

    def test_it_hears_of_evaluations(self) -> None:
        sampler, found = self.made(), list[set[Source]]()
        for divergence in (1.0, 1.25, 1.5):
            sampler.observe({"heldout/reverse_kl": divergence})
            found.append(set(writers(sampler.sample(prompts(20), KEY)).values()))
        assert found == [{Source.DATASET}, {Source.DATASET}, {Source.STUDENT}]

    def test_what_it_heard_comes_back(self, tmp_path: Path) -> None:
        sampler, again = self.made(), self.made()
        for divergence in (1.0, 2.0):
            sampler.observe({"heldout/reverse_kl": divergence})
        sampler.save(tmp_path)
        again.load([tmp_path], lambda row: True)
        assert again.adaptive == sampler.adaptive
        assert set(writers(again.sample(prompts(20), KEY)).values()) == {Source.STUDENT}

    def test_another_share_hears_nothing_and_writes_no_file(self, tmp_path: Path) -> None:
        sampler = mixture()
        sampler.observe({})
        sampler.save(tmp_path)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        sampler.load([tmp_path], lambda row: True)


def test_the_process_draws_on_as_if_nothing_had_been() -> None:
    before = torch.get_rng_state()
    mixture().sample(prompts(10), KEY)
    assert torch.get_rng_state().equal(before)
