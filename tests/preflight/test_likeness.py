"""The student and itself, the student and others, by hand on tables."""

from __future__ import annotations

import pytest
import torch

from etude.axes.names import Gives, Source
from etude.core.divergences import reverse_kl
from etude.core.records import Scores
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.preflight.findings import Verdict
from etude.preflight.likeness import Reading, different, distance, noise_of, same, same_writer
from etude.preflight.tolerance import TOLERANCE, tolerance_of
from etude.runtime.seeds import Key
from etude.testing import counting_logits, rollout_of, tiny_backbone

EXACT, COARSE = TOLERANCE[torch.float32], TOLERANCE[torch.bfloat16]
ROWS = [rollout_of([3], [4, 5]), rollout_of([1, 2], [3], row=1)]
HIDDEN = frozenset({Gives.HIDDEN_STATES})


def reading(certainty: float = 0.9) -> Reading:
    return Reading.of(TableBackbone(counting_logits(certainty=certainty)), ROWS)


def teacher(certainty: float) -> FrozenTeacher:
    return FrozenTeacher("teacher", TableBackbone(counting_logits(certainty=certainty)))


def test_the_distance_is_the_mean_reverse_kl() -> None:
    """Each state is another word, and the same two distributions: .9 and nine times .1 / 9, against .5 and .5 / 9."""
    other = teacher(0.5)
    found = distance(reading(), other.score(ROWS, HIDDEN, 1.0), other.head())
    expected = reverse_kl(
        student_logprobs=counting_logits()[0], teacher_logprobs=counting_logits(certainty=0.5)[0]
    ).item()
    assert found == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(0.9 * 0.587787 - 0.1 * 1.609438, abs=1e-6)  # ln 1.8 and ln 5


def test_a_teacher_of_drawn_tokens_only() -> None:
    """ln .9 - ln .5 at every token."""
    scores = [Scores("t", sampled_logprobs=torch.full((row.num_completion_tokens,), 0.5).log()) for row in ROWS]
    assert distance(reading(), scores, None) == pytest.approx(0.587787, abs=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_noise_is_that_of_padding(kind: str) -> None:
    backbone = tiny_backbone(kind)  # pyright: ignore[reportArgumentType]
    found = Reading.of(backbone, ROWS)
    assert abs(noise_of(backbone, found)) < 1e-6
    for row, logprobs in zip(ROWS, found.logprobs(), strict=True):
        assert logprobs.shape == row.completion_ids.shape


@pytest.mark.parametrize(
    ("found", "noise", "verdict"),
    [(0.0, 0.0, "pass"), (1e-4, 0.0, "refuse"), (1e-4, 1e-4, "pass"), (float("nan"), 0.0, "refuse")],
)
def test_identity(found: float, noise: float, verdict: str) -> None:
    assert same(found, noise, EXACT).verdict == verdict


def test_difference() -> None:
    assert different(0.3, 0.0, EXACT, self_teacher=False).verdict is Verdict.PASS
    assert different(0.0, 0.0, EXACT, self_teacher=False).verdict is Verdict.REFUSE
    assert different(0.0, 0.0, EXACT, self_teacher=True).verdict is Verdict.WARN
    assert different(1e-3, 0.0, COARSE, self_teacher=False).verdict is Verdict.REFUSE  # rounding


class TestSampler:
    def sampled(self, certainty: float = 0.9) -> Reading:
        settings = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=5, stop_ids=())
        sampler = InProcessSampler(TableBackbone(counting_logits(certainty=certainty)), settings)
        rows = sampler.sample([row.prompt for row in ROWS], Key(0, "sample", 0, 0))
        return Reading.of(TableBackbone(counting_logits()), rows)

    def test_the_writer_is_the_learner(self) -> None:
        found = same_writer(self.sampled(), EXACT)
        assert (found.verdict, found.figures["tokens"]) == (Verdict.PASS, 10)

    @pytest.mark.parametrize(("certainty", "verdict"), [(0.897, "warn"), (0.5, "refuse")])
    def test_another_writer(self, certainty: float, verdict: str) -> None:
        assert same_writer(self.sampled(certainty), EXACT).verdict == verdict

    def test_rows_of_others_are_not_compared(self) -> None:
        assert same_writer(reading(), EXACT).verdict is Verdict.REFUSE  # scripted: "certain"
        rows = [rollout_of([3], [4], source=Source.DATASET)]
        assert "no row" in same_writer(Reading.of(TableBackbone(counting_logits()), rows), EXACT).evidence


def test_the_coarsest_precision_decides() -> None:
    table = TableBackbone(counting_logits())
    assert tolerance_of(table) == EXACT
    assert tolerance_of(table, tiny_backbone().copy_as("bfloat16")) == COARSE
