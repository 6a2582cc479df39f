"""A round tried out: the work of a round, weights as they were, and who writes what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from etude.axes.names import Source
from etude.models.adaptive import AdaptiveFraction
from etude.models.mixture import DatasetSampler, MixtureSampler
from etude.models.replay import ReplaySampler
from etude.preflight.rehearsal import invented_prompts, invented_rollout, own_prompts, rehearse, writers_of
from etude.testing import ScriptedSampler
from etude.training.loop import Parts

Built = Callable[..., Parts]


def test_weights_stay_as_they_are_and_the_optimiser_has_seen_a_gradient(built: Built) -> None:
    parts = built()
    before = {name: weight.clone() for name, weight in parts.student.trainable_parameters().items()}
    found = rehearse(parts, max_new_tokens=6)
    assert set(found.seconds) == {"prompts", "refresh", "sample", "score", "prepare", "learn"}
    assert len(found.rows) == 4
    assert found.learned[0]["gradient/norm"] > 0.0
    assert all(weight.equal(before[name]) for name, weight in parts.student.trainable_parameters().items())
    assert any(state["exp_avg"].any() for state in parts.learner.optimizer.state.values())


def test_the_length_asked_for_holds_whatever_the_parts_were_built_with(built: Built) -> None:
    found = rehearse(built("sampler.max_new_tokens=2"), max_new_tokens=9)
    assert max(row.rollout.num_completion_tokens for row in found.rows) > 2


@pytest.mark.parametrize(
    "changes",
    [
        ["sampler.student_fraction=0.5"],
        ["sampler.student_fraction=0.0", "sampler.other=teacher"],
        ["sampler.teacher_share=0.5"],
        ["train.updates_per_round=2", "train.epochs=2"],
    ],
)
def test_every_way_to_write_is_tried_out(built: Built, changes: list[str]) -> None:
    parts = built(*changes)
    found = rehearse(parts, max_new_tokens=4)
    assert [row.rollout.prompt.row for row in found.rows] == [0, 1, 2, 3]
    assert len(found.learned) == parts.plan.steps_per_round


def test_writers_and_their_shares() -> None:
    """Half of the rows by the student, a quarter of which are handed out again."""
    student, data = ScriptedSampler(lambda prompt: [1]), DatasetSampler()
    mixed = MixtureSampler(ReplaySampler(student, 0.25, rows_kept=1), data, 0.5)
    assert [(writer.source, writer.share) for writer in writers_of(mixed, steps=10)] == [
        (Source.STUDENT, 0.375),
        (Source.DATASET, 0.5),
    ]


def test_a_writer_without_rows_is_none() -> None:
    mixed = MixtureSampler(ScriptedSampler(lambda prompt: [1]), DatasetSampler(), AdaptiveFraction(0.0))
    assert [writer.source for writer in writers_of(mixed, steps=10)] == [Source.DATASET]


def test_invented_rows_have_the_length_asked_for_and_ids_there_are(built: Built) -> None:
    prompts = own_prompts(built())
    invented = invented_prompts(prompts, length=50, vocab_size=32)
    assert [(p.row, p.group) for p in invented] == [(p.row, p.group) for p in prompts]
    row = invented_rollout(invented[1], 20, 32, Source.STUDENT)
    assert row.token_ids.shape == (70,)
    assert torch.equal(row.token_ids, row.token_ids % 32)
    assert len(row.token_ids.unique()) > 16
    assert invented_rollout(invented[1], 20, 32, Source.DATASET).behaviour_logprobs is None
