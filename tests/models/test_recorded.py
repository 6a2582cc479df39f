from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.axes.names import Source
from etude.core.records import Prompt, Rollout, as_ids
from etude.errors import CheckpointError, RecipeError
from etude.models.mixture import DatasetSampler, MixtureSampler
from etude.models.recorded import BEGUN, MANIFEST, RecordedSampler, Recorder, Recording
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.runtime.checkpoints import put_manifest, read_manifest
from etude.runtime.seeds import Key
from etude.testing import counting_logits, rollout_of

KEY = Key(seed=0, purpose="sample", stage=0, round=0)
FACTS = {"student": "apprentice", "rows": 4, "sampler.temperature": 1.3, "stop ids": [2]}
STUDENT = Student(TableBackbone(counting_logits()))


def written(number: int) -> list[Rollout]:
    return [rollout_of([number, row], [row] * (1 + number), row=row) for row in range(4)]


def recorded(folder: Path, rounds: int = 3) -> Recording:
    recorder = Recorder(folder, FACTS)
    for number in range(rounds):
        recorder.add(number, written(number))
    return recorder.finish(rounds)


def prompts(*rows: int) -> list[Prompt]:
    """Of the run that reads; nothing but the place counts."""
    return [Prompt(as_ids([99]), row=row, completion_ids=as_ids([8])) for row in rows]


def ids(rollouts: list[Rollout]) -> list[tuple[int, list[int], list[int]]]:
    return [(r.prompt.row, r.prompt.token_ids.tolist(), r.completion_ids.tolist()) for r in rollouts]


class TestRows:
    def test_they_are_as_they_were_written(self, tmp_path: Path) -> None:
        sampler = RecordedSampler(recorded(tmp_path))
        sampler.refresh(STUDENT, version=7)
        found = sampler.sample(prompts(0, 1, 2, 3), KEY)
        assert ids(found) == ids(written(0))
        for rollout, expected in zip(found, written(0), strict=True):
            assert (rollout.version, rollout.source) == (0, Source.STUDENT)
            assert rollout.finish_reason is expected.finish_reason
            assert rollout.behaviour_logprobs is not None
            assert rollout.raw_logprobs is not None
        assert sampler.version == 7

    def test_rounds_come_in_turn_and_again(self, tmp_path: Path) -> None:
        sampler = RecordedSampler(recorded(tmp_path))
        for number, expected in enumerate([0, 1, 2, 0, 1]):
            found = sampler.sample(prompts(0, 1, 2, 3), replace(KEY, round=number, stage=1))
            assert ids(found) == ids(written(expected))

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_each_rank_has_its_own(self, tmp_path: Path, size: int) -> None:
        sampler = RecordedSampler(recorded(tmp_path))
        ranks = [sampler.sample(prompts(*range(rank, 4, size)), KEY) for rank in range(size)]
        together = sorted((row for rank in ranks for row in rank), key=lambda rollout: rollout.prompt.row)
        assert ids(together) == ids(written(0))

    def test_they_are_the_students_share_of_a_mixture(self, tmp_path: Path) -> None:
        sampler = MixtureSampler(RecordedSampler(recorded(tmp_path)), DatasetSampler(), 0.5)
        found = sampler.sample(prompts(0, 1, 2, 3), KEY)
        assert {rollout.source for rollout in found} == {Source.STUDENT, Source.DATASET}
        for rollout in found:
            expected = (
                written(0)[rollout.prompt.row].completion_ids if rollout.source is Source.STUDENT else as_ids([8])
            )
            assert rollout.completion_ids.equal(expected)

    def test_a_place_that_was_not_recorded(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"has 4 rows a round, and row 4 is asked for; write the train\.prompts"):
            RecordedSampler(recorded(tmp_path)).sample(prompts(3, 4), KEY)


class TestRecorder:
    def test_what_is_known_of_a_whole_recording(self, tmp_path: Path) -> None:
        recording = recorded(tmp_path)
        assert (recording.rounds, recording.longest, recording.facts) == (3, 5, FACTS)
        assert recording.describe().startswith("3 rounds of 4 rows by apprentice, made 20")

    def test_half_a_recording_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"there is no recording in .*; `etude record`"):
            Recording(tmp_path)
        Recorder(tmp_path, FACTS).add(0, written(0))
        with pytest.raises(RecipeError, match="there is only the beginning of a recording in"):
            Recording(tmp_path)

    def test_it_goes_on_where_it_was_stopped(self, tmp_path: Path) -> None:
        Recorder(tmp_path, FACTS).add(0, written(0))
        (tmp_path / "rounds" / ".saving-round-000001").mkdir()  # a kill in the middle of a round
        recorder = Recorder(tmp_path, FACTS)
        assert [recorder.has(number) for number in range(2)] == [True, False]
        recorder.add(1, written(1))
        assert ids(recorder.finish(2).round(0)) == ids(written(0))

    def test_more_rounds_are_added_and_fewer_take_none_away(self, tmp_path: Path) -> None:
        recorded(tmp_path, 1)
        recorder = Recorder(tmp_path, FACTS)
        recorder.add(1, written(1))
        assert Recording(tmp_path).rounds == 1
        assert recorder.finish(2).rounds == 2
        assert recorder.finish(1).rounds == 2

    def test_another_recording_is_not_mixed_into_it(self, tmp_path: Path) -> None:
        recorded(tmp_path)
        with pytest.raises(
            RecipeError, match=r"in another way \(sampler.temperature: 1.3 there, 1.0 now\); name another"
        ):
            Recorder(tmp_path, FACTS | {"sampler.temperature": 1.0})
        assert Recorder(tmp_path, FACTS | {"student": "the same under another name"}).has(0)

    def test_a_damaged_beginning(self, tmp_path: Path) -> None:
        recorded(tmp_path)
        (tmp_path / BEGUN).write_text("{}")
        with pytest.raises(CheckpointError, match=r"the recording begun in .* is damaged: begun\.json is not the one"):
            Recorder(tmp_path, FACTS)


def cut(folder: Path) -> None:
    path = folder / "rounds/round-000001/rollouts.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def change(folder: Path) -> None:
    path = folder / "rounds/round-000002/rollouts.json"
    path.write_text(path.read_text().replace('"version": 0', '"version": 1'))


def from_the_future(folder: Path) -> None:
    put_manifest(folder / MANIFEST, read_manifest(folder / MANIFEST) | {"format": 99})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, r"rounds/round-000001/rollouts\.safetensors has [\d,]+ bytes"),
        (change, r"rounds/round-000002/rollouts\.json is not the file that was written"),
        (lambda folder: (folder / "rounds/round-000000/rollouts.json").unlink(), r"rollouts\.json is missing"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), r"recording\.json is not the one that was written"),
        (from_the_future, "it has format 99"),
    ],
)
def test_a_damaged_recording_is_refused(tmp_path: Path, damage: Any, words: str) -> None:
    recorded(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=rf"the recording in .* is damaged: .*{words}"):
        Recording(tmp_path)


def test_a_recording_made_in_another_way_is_refused(tmp_path: Path) -> None:
    recording = recorded(tmp_path)
    recording.require({"sampler.temperature": 1.3, "stop ids": [2]})
    with pytest.raises(RecipeError, match=r"\(sampler.temperature: 1.3 there, 1.0 now; rows: 4 there, 8 now\); take"):
        recording.require({"sampler.temperature": 1.0, "stop ids": [2], "rows": 8})
