"""What every sampler promises, whoever writes: a class of one's own passes the same tests by joining `SAMPLERS`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.axes.names import FinishReason, Source
from etude.core.records import Prompt, Rollout
from etude.models.adaptive import AdaptiveFraction
from etude.models.joint import Interleaving, JointSampler, TokenMixture
from etude.models.mixture import DatasetSampler, MixtureSampler
from etude.models.replay import ReplaySampler
from etude.models.roles import AbstractSampler, AbstractStudent
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.runtime.seeds import Key

STOP_ID = 5
SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=7, stop_ids=(STOP_ID,))
KEY = Key(seed=0, purpose="sample", stage=0, round=0)


class OwnSampler(AbstractSampler):
    """As a user would write one: a fair die until the stop id, from the row's own generator."""

    version = 0

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        return [self._write(prompt, key) for prompt in prompts]

    def _write(self, prompt: Prompt, key: Key) -> Rollout:
        rolls = torch.randint(0, 6, (SETTINGS.max_new_tokens,), generator=key.generator(prompt.row)).tolist()
        stops = STOP_ID in rolls
        ids = torch.tensor(rolls[: rolls.index(STOP_ID) + 1] if stops else rolls)
        reason = FinishReason.STOP if stops else FinishReason.LENGTH
        logprobs = torch.full((len(ids),), -math.log(6))
        return Rollout(prompt, ids, Source.STUDENT, reason, self.version, logprobs, logprobs)

    def refresh(self, student: AbstractStudent, version: int) -> None:
        self.version = version


def table() -> TableBackbone:
    return TableBackbone(torch.randn(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64))


def teacher() -> TableBackbone:
    return TableBackbone(torch.randn(6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64))


def in_process(**options: object) -> InProcessSampler:
    return InProcessSampler(table(), SETTINGS, **options)  # pyright: ignore[reportArgumentType]


SAMPLERS: dict[str, Callable[[], AbstractSampler]] = {
    "in process": in_process,
    "in process, a row at a time": lambda: in_process(rows_per_batch=1),
    "in process, low precision": lambda: in_process(dtype="bfloat16"),
    "in process, the teacher": lambda: in_process(source=Source.TEACHER),
    "the dataset": DatasetSampler,
    "student and dataset": lambda: MixtureSampler(in_process(), DatasetSampler(), student_fraction=0.5),
    "student and teacher": lambda: MixtureSampler(
        in_process(), in_process(source=Source.TEACHER), student_fraction=0.5
    ),
    "student or teacher for a whole round": lambda: MixtureSampler(
        in_process(), in_process(source=Source.TEACHER), student_fraction=0.5, mix="batch"
    ),
    "student and dataset, by the evaluations": lambda: MixtureSampler(
        in_process(), DatasetSampler(), AdaptiveFraction(0.3, rise=0.4)
    ),
    "student and teacher in each token": lambda: JointSampler(in_process(), teacher(), TokenMixture(0.2)),
    "the student within the teacher's likeliest": lambda: JointSampler(in_process(), teacher(), Interleaving(2)),
    "replay": lambda: ReplaySampler(in_process(), 0.5, rows_kept=2),
    "replay of whole rounds, and the dataset": lambda: MixtureSampler(
        ReplaySampler(in_process(), 0.5, rows_kept=3, max_age=2, mix="batch"), DatasetSampler(), 0.7, mix="batch"
    ),
    "replay of what student and teacher wrote": lambda: ReplaySampler(
        JointSampler(in_process(), teacher(), TokenMixture(0.2)), 0.5, rows_kept=2
    ),
    "one's own": OwnSampler,
}


@pytest.fixture(params=list(SAMPLERS))
def sampler(request: pytest.FixtureRequest) -> AbstractSampler:
    return SAMPLERS[request.param]()


def prompts(count: int = 12) -> list[Prompt]:
    """Of different lengths, each with an answer of the dataset's own."""
    return [
        Prompt(torch.arange(1 + row % 4) % 5, row, completion_ids=torch.tensor([row % 5, STOP_ID]))
        for row in range(count)
    ]


def written(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [rollout.completion_ids.tolist() for rollout in rollouts]


def test_one_rollout_a_prompt_in_their_order(sampler: AbstractSampler) -> None:
    asked = prompts()
    rollouts = sampler.sample(asked, KEY)
    assert all(rollout.prompt is prompt for rollout, prompt in zip(rollouts, asked, strict=True))


def test_no_prompts_no_rollouts(sampler: AbstractSampler) -> None:
    """A rank may have no row in a small round."""
    assert sampler.sample([], KEY) == []


def test_the_same_key_writes_the_same(sampler: AbstractSampler) -> None:
    first = written(sampler.sample(prompts(), KEY))
    sampler.sample(prompts(3), Key(seed=9, purpose="evaluate", stage=0, round=4))
    assert written(sampler.sample(prompts(), KEY)) == first


def test_a_row_does_not_depend_on_its_neighbours(sampler: AbstractSampler) -> None:
    together = written(sampler.sample(prompts(), KEY))
    assert [written(sampler.sample([prompt], KEY))[0] for prompt in prompts()] == together
    assert written(sampler.sample(prompts()[::-1], KEY))[::-1] == together


def test_the_callers_random_state_is_left_alone(sampler: AbstractSampler) -> None:
    before = torch.get_rng_state()
    sampler.sample(prompts(), KEY)
    assert torch.equal(torch.get_rng_state(), before)


def test_stops_and_cuts_are_told_apart(sampler: AbstractSampler) -> None:
    """A stop id is the last token and nowhere else; a row that was cut has none, and none is invented."""
    for rollout in sampler.sample(prompts(), KEY):
        *inner, last = rollout.completion_ids.tolist()
        assert STOP_ID not in inner
        assert rollout.finish_reason is (FinishReason.STOP if last == STOP_ID else FinishReason.LENGTH)
        if rollout.truncated:
            assert rollout.num_completion_tokens == SETTINGS.max_new_tokens


def test_records_lie_on_the_cpu_in_their_types(sampler: AbstractSampler) -> None:
    for rollout in sampler.sample(prompts(), KEY):
        assert (rollout.completion_ids.dtype, rollout.completion_ids.device.type) == (torch.int64, "cpu")
        for logprobs in (rollout.behaviour_logprobs, rollout.raw_logprobs):
            if logprobs is not None:
                assert (logprobs.dtype, logprobs.device.type, logprobs.requires_grad) == (torch.float32, "cpu", False)
                assert (logprobs <= 0).all()


def test_only_the_dataset_gives_no_probabilities(sampler: AbstractSampler) -> None:
    for rollout in sampler.sample(prompts(), KEY):
        assert (rollout.behaviour_logprobs is None) == (rollout.source is Source.DATASET)


def test_the_version_is_stamped(sampler: AbstractSampler) -> None:
    assert sampler.version == 0
    sampler.refresh(Student(table()), version=4)
    assert sampler.version == 4
    assert {rollout.version for rollout in sampler.sample(prompts(), KEY)} == {4}


def rounds(sampler: AbstractSampler, versions: range) -> list[list[list[int]]]:
    """What is written in these rounds of three steps each, one after the other, and an evaluation after each."""
    found: list[list[list[int]]] = []
    for version in versions:
        sampler.refresh(Student(table()), version)
        found.append(written(sampler.sample(prompts(), replace(KEY, round=version // 3))))
        sampler.observe({"heldout/reverse_kl": float(version)})
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_it_remembers_comes_back(name: str, tmp_path: Path) -> None:
    """Also into one that has done something else before."""
    whole, stopped, again = (SAMPLERS[name]() for _ in range(3))
    expected = rounds(whole, range(0, 18, 3))
    assert rounds(stopped, range(0, 9, 3)) == expected[:3]
    stopped.save(tmp_path)
    rounds(again, range(0, 6, 3))
    again.load([tmp_path], lambda row: True)
    assert rounds(again, range(9, 18, 3)) == expected[3:]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (2, 3)])
def test_rows_dealt_over_processes_are_the_same_rows(name: str, before: int, now: int, tmp_path: Path) -> None:
    """However many write, and however many go on with what those remember."""
    expected = SAMPLERS[name]()
    rounds(expected, range(0, 9, 3))
    folders = [tmp_path / str(rank) for rank in range(before)]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        alone = SAMPLERS[name]()
        for version in range(0, 9, 3):
            alone.refresh(Student(table()), version)
            alone.sample(prompts()[rank::before], replace(KEY, round=version // 3))
            alone.observe({"heldout/reverse_kl": float(version)})
        alone.save(folder)
    key = replace(KEY, round=3)
    expected.refresh(Student(table()), 9)
    together = written(expected.sample(prompts(), key))
    for rank in range(now):
        sampler = SAMPLERS[name]()
        sampler.load(folders, lambda row, rank=rank: row % now == rank)
        sampler.refresh(Student(table()), 9)
        assert written(sampler.sample(prompts()[rank::now], key)) == together[rank::now]
