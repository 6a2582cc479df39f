from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.axes.names import Source
from etude.axes.schedules import Ramp
from etude.core.records import Prompt, Rollout, as_ids
from etude.errors import RecipeError
from etude.models.mixture import DatasetSampler, Mix, MixtureSampler
from etude.models.replay import ReplaySampler
from etude.models.roles import AbstractSampler, AbstractStudent
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.runtime.seeds import Key
from etude.testing import ScriptedSampler, counting_logits

KEY = Key(seed=0, purpose="sample", stage=0, round=0)
STUDENT = Student(TableBackbone(counting_logits()))


class Counting(ScriptedSampler):
    """Writes its version and the row, and counts the rows it is asked for."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: [self.version, prompt.row])
        self.asked = 0

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        self.asked += len(prompts)
        return super().sample(prompts, key)


def prompts(number: int, count: int = 8) -> list[Prompt]:
    """Those of a round: each says of which, and has an answer and an example of its own."""
    return [
        Prompt(as_ids([number, row]), row=row, completion_ids=as_ids([9]), example={"round": number, "day": date.min})
        for row in range(count)
    ]


def replay(
    fraction: float | Ramp = 0.5, *, rows_kept: int = 100, max_age: int | None = None, mix: Mix = "row"
) -> ReplaySampler:
    return ReplaySampler(Counting(), fraction, rows_kept=rows_kept, max_age=max_age, mix=mix)


def play(sampler: AbstractSampler, rounds: range, *, steps: int = 1, count: int = 8) -> list[list[Rollout]]:
    """The rollouts of these rounds, each of so many optimiser steps."""
    found: list[list[Rollout]] = []
    for number in rounds:
        sampler.refresh(STUDENT, version=number * steps)
        found.append(sampler.sample(prompts(number, count), replace(KEY, round=number)))
    return found


def ages(rounds: Sequence[Sequence[Rollout]], *, steps: int = 1) -> list[list[int]]:
    return [[number * steps - rollout.version for rollout in rows] for number, rows in enumerate(rounds)]


def facts(rollouts: Sequence[Rollout]) -> list[tuple[int, int, list[int], list[int]]]:
    return [(r.prompt.row, r.version, r.prompt.token_ids.tolist(), r.completion_ids.tolist()) for r in rollouts]


class TestWhatIsReplayed:
    def test_a_replayed_row_is_as_it_was_written(self) -> None:
        found = play(replay(), range(6))
        replayed = [(number, r) for number, rows in enumerate(found) for r in rows if r.version < number]
        assert len(replayed) > 10
        for _, rollout in replayed:
            then, row = rollout.version, rollout.prompt.row
            assert rollout.prompt.token_ids.tolist() == [then, row]  # its own prompt
            assert rollout.completion_ids.tolist() == [then, row]
            assert rollout.source is Source.STUDENT
            assert rollout.behaviour_logprobs is not None
            assert rollout.raw_logprobs is not None
            assert rollout.prompt.completion_ids is not None

    def test_every_row_keeps_its_place(self) -> None:
        for rows in play(replay(), range(6)):
            assert [rollout.prompt.row for rollout in rows] == list(range(8))

    def test_a_fresh_row_is_the_students_own(self) -> None:
        """With everything its example holds; what is kept for later holds what a checkpoint can."""
        found = play(replay(), range(6))
        for number, rows in enumerate(found):
            for rollout in rows:
                assert rollout.prompt.token_ids.tolist()[0] == rollout.version
                fresh = rollout.version == number
                assert rollout.prompt.example == {"round": rollout.version} | ({"day": date.min} if fresh else {})

    def test_the_first_round_is_all_fresh_and_so_is_a_share_of_zero(self) -> None:
        assert ages(play(replay(1.0), range(1))) == [[0] * 8]
        assert {age for rows in ages(play(replay(0.0), range(5))) for age in rows} == {0}

    def test_a_share_of_one_writes_nothing_more(self) -> None:
        sampler = replay(1.0)
        assert ages(play(sampler, range(4))) == [[0] * 8, [1] * 8, [2] * 8, [3] * 8]
        assert isinstance(sampler.student, Counting)
        assert sampler.student.asked == 8

    def test_the_share_is_the_one_asked_for(self) -> None:
        """100 rounds of 30: three standard deviations are 3 * sqrt(0.3 * 0.7 / 3000) = 0.025."""
        found = [age > 0 for rows in ages(play(replay(0.3, rows_kept=4), range(101), count=30))[1:] for age in rows]
        assert math.isclose(sum(found) / len(found), 0.3, abs_tol=0.025)

    def test_every_kept_row_has_the_same_chance(self) -> None:
        """Round 4 after four all fresh: 1/4 each; three standard deviations are 3 * sqrt(3/16 / 2000) = 0.029."""
        fresh_then_all = Ramp(0.0, 1.0, kind="step", last=4)
        found = play(replay(fresh_then_all), range(5), count=2000)
        shares = Counter(rollout.version for rollout in found[4])
        assert sorted(shares) == [0, 1, 2, 3]
        assert all(math.isclose(number / 2000, 0.25, abs_tol=0.029) for number in shares.values())

    def test_a_ramp_of_the_steps_taken(self) -> None:
        """DistiLLM's: 1 - step / total of the student's rows are fresh."""
        sampler = replay(Ramp(0.0, 1.0, kind="linear", last=10))
        shares = [sum(age > 0 for age in rows) / 500 for rows in ages(play(sampler, range(11), count=500))]
        assert shares[0] == 0.0
        assert shares[10] == 1.0
        for number, share in enumerate(shares):
            assert math.isclose(share, number / 10, abs_tol=3 * math.sqrt(0.25 / 500))


class TestBounds:
    @pytest.mark.parametrize(("max_age", "oldest"), [(2, 2), (3, 2), (4, 4), (7, 6)])
    def test_nothing_is_handed_out_beyond_its_age(self, max_age: int, oldest: int) -> None:
        """Rounds of two steps each: rows are 2, 4, 6, ... steps old."""
        found = ages(play(replay(0.5, max_age=max_age), range(60), steps=2), steps=2)
        assert max(age for rows in found for age in rows) == oldest

    @pytest.mark.parametrize("rows_kept", [1, 3])
    def test_the_newest_are_kept(self, rows_kept: int) -> None:
        """Of each place; a row is fresh often enough that none but the newest is old."""
        sampler = replay(0.2, rows_kept=rows_kept)
        written: dict[int, list[int]] = {row: [] for row in range(8)}
        for number, rows in enumerate(play(sampler, range(60))):
            for rollout in rows:
                mine = written[rollout.prompt.row]
                if rollout.version == number:
                    mine.append(number)
                else:
                    assert rollout.version in mine[-rows_kept:]

    def test_what_is_dropped_is_gone_from_the_store(self, tmp_path: Path) -> None:
        sampler = replay(0.5, rows_kept=2, max_age=3)
        play(sampler, range(20))
        sampler.save(tmp_path)
        other = replay(1.0)
        other.load([tmp_path], lambda row: True)
        other.refresh(STUDENT, 20)
        for place in range(50):
            for rollout in other.sample(prompts(20), replace(KEY, round=place)):
                assert rollout.version >= 16  # three steps before the last round, 19
        assert len(sampler._kept) == 8
        assert max(map(len, sampler._kept.values())) <= 3  # two earlier ones and the present one

    @pytest.mark.parametrize("changes", [{"rows_kept": 0}, {"max_age": 0}])
    def test_a_store_that_never_has_anything(self, changes: dict[str, Any]) -> None:
        with pytest.raises(RecipeError, match="has nothing to replay; write at least 1"):
            replay(0.5, **changes)

    def test_there_is_no_third_way(self) -> None:
        with pytest.raises(RecipeError, match="no mix 'token'; write one of row, batch"):
            replay(mix="token")  # pyright: ignore[reportArgumentType]


class TestWhoDecides:
    def test_until_the_next_refresh_the_key_alone(self) -> None:
        """A row asked for twice is the same row, and it is kept once."""
        sampler, once = replay(), replay()
        play(sampler, range(4))
        play(once, range(4))
        key = replace(KEY, round=4)
        for made in (sampler, once):
            made.refresh(STUDENT, 4)
        first = facts(sampler.sample(prompts(4), key))
        sampler.sample(prompts(4)[3:5], replace(KEY, round=9))
        assert facts(sampler.sample(prompts(4), key)) == first == facts(once.sample(prompts(4), key))
        assert [facts(sampler.sample([prompt], key))[0] for prompt in prompts(4)] == first

    @pytest.mark.parametrize("size", [2, 3, 8])
    @pytest.mark.parametrize("mix", ["row", "batch"])
    def test_any_number_of_processes(self, size: int, mix: Mix) -> None:
        """Each with its own store and its own rows: together they have what one has."""
        whole, ranks = replay(mix=mix, rows_kept=2), [replay(mix=mix, rows_kept=2) for _ in range(size)]
        for number, expected in enumerate(play(whole, range(12))):
            for rank, sampler in enumerate(ranks):
                sampler.refresh(STUDENT, number)
                mine = sampler.sample(prompts(number)[rank::size], replace(KEY, round=number))
                assert facts(mine) == facts(expected[rank::size])

    def test_the_draw_changes_with_seed_stage_and_round(self) -> None:
        def drawn(key: Key) -> tuple[int, ...]:
            sampler = replay()
            play(sampler, range(5), count=30)
            sampler.refresh(STUDENT, 5)
            return tuple(rollout.version for rollout in sampler.sample(prompts(5, 30), key))

        assert len({drawn(replace(KEY, **{name: 1})) for name in ("seed", "stage", "round")} | {drawn(KEY)}) == 4

    def test_by_batch_all_rows_or_none(self) -> None:
        found = [{age > 0 for age in rows} for rows in ages(play(replay(mix="batch"), range(30)))]
        assert found[0] == {False}
        assert all(len(replayed) == 1 for replayed in found)
        assert {True} in found
        assert {False} in found[1:]

    def test_the_process_draws_on_as_if_nothing_had_been(self) -> None:
        before = torch.get_rng_state()
        play(replay(), range(3))
        assert torch.get_rng_state().equal(before)

    def test_refresh_reaches_the_student(self) -> None:
        sampler = replay()
        sampler.refresh(STUDENT, 9)
        assert (sampler.version, sampler.student.version) == (9, 9)


class Remembering(ScriptedSampler):
    """A sampler of one's own that has something to remember."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: [self.count])
        self.count = 0

    def refresh(self, student: AbstractStudent, version: int) -> None:
        super().refresh(student, version)
        self.count += 1

    def save(self, folder: Path) -> None:
        (folder / "count").write_text(str(self.count))

    def load(self, folders: Sequence[Path], mine: object) -> None:
        self.count = int((folders[0] / "count").read_text())


def test_inner_samplers_are_saved_and_hear_too(tmp_path: Path) -> None:
    def made() -> tuple[Remembering, MixtureSampler]:
        inner = Remembering()
        return inner, MixtureSampler(ReplaySampler(inner, 0.5, rows_kept=1), DatasetSampler(), 0.5)

    (inner, sampler), (other, again) = made(), made()
    play(sampler, range(3))
    sampler.save(tmp_path)
    again.load([tmp_path], lambda row: True)
    assert other.count == inner.count == 3
