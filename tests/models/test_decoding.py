"""The pure functions between logits and written rows, and the loop that uses them."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from etude.axes.names import FinishReason
from etude.errors import RecipeError
from etude.models import decoding
from etude.models.decoding import SamplingSettings, decode, inverse_cdf, sampling_logprobs
from etude.models.roles import AbstractDecoding
from etude.testing import log_table
from etude.testing import sampling_settings as settings


class TestSettings:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -1.0),
            ("temperature", 1e-6),
            ("temperature", math.nan),
            ("temperature", math.inf),
            ("top_p", 0.0),
            ("top_p", 1.01),
            ("top_p", math.nan),
            ("top_k", -1),
            ("max_new_tokens", 0),
            ("stop_ids", (3, -1)),
        ],
    )
    def test_nonsense_is_refused_by_name(self, field: str, value: object) -> None:
        with pytest.raises(RecipeError, match=field.replace("_", "[_ ]")):
            settings(**{field: value})  # pyright: ignore[reportArgumentType]

    def test_no_field_has_a_default(self) -> None:
        with pytest.raises(TypeError):
            SamplingSettings(1.0, 1.0, 0, 8)  # pyright: ignore[reportCallIssue]

    def test_describe_shows_every_value(self) -> None:
        assert settings(temperature=0.7, top_k=5, stop_ids=(2, 7)).describe() == {
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 5,
            "max_new_tokens": 8,
            "stop_ids": (2, 7),
        }


class TestSamplingLogprobs:
    PROBS = (0.4, 0.3, 0.2, 0.1)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, PROBS),
            ({"temperature": 0.5}, (16 / 30, 9 / 30, 4 / 30, 1 / 30)),
            ({"top_k": 2}, (4 / 7, 3 / 7, 0, 0)),
            ({"top_k": 4}, PROBS),
            ({"top_k": 9}, PROBS),
            ({"top_p": 0.3}, (1, 0, 0, 0)),
            ({"top_p": 0.41}, (4 / 7, 3 / 7, 0, 0)),
            ({"top_p": 0.75}, (4 / 9, 3 / 9, 2 / 9, 0)),
            # 0.75 of what top-k left is 0.75 * 0.9 = 0.675 of the whole: two ids hold 0.7
            ({"top_k": 3, "top_p": 0.75}, (4 / 7, 3 / 7, 0, 0)),
            # temperature first: 16/30 alone holds a half
            ({"temperature": 0.5, "top_p": 0.5}, (1, 0, 0, 0)),
            ({"temperature": 0.0}, (1, 0, 0, 0)),
            ({"temperature": 0.0, "top_k": 3, "top_p": 0.9}, (1, 0, 0, 0)),
        ],
    )
    def test_by_hand(self, changes: dict[str, float], expected: Sequence[float]) -> None:
        order = torch.tensor([2, 0, 3, 1])  # the likeliest id need not come first
        logits = torch.tensor([self.PROBS], dtype=torch.float64).log()[:, order] + 3.0
        logprobs = sampling_logprobs(logits, settings(**changes))  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(logprobs.exp(), torch.tensor([expected], dtype=torch.float64)[:, order])
        assert torch.equal(logprobs.isneginf(), torch.tensor([expected])[:, order] == 0)

    def test_ties_at_a_cut_stay_together(self) -> None:
        logits = torch.tensor([[0.2, 0.4, 0.2, 0.2]]).log()
        for cut in (settings(top_k=2), settings(top_p=0.5)):
            torch.testing.assert_close(sampling_logprobs(logits, cut), logits)

    def test_greedy_takes_the_lowest_of_a_tie(self) -> None:
        logprobs = sampling_logprobs(torch.tensor([[1.0, 3.0, 3.0]]), settings(temperature=0.0))
        assert logprobs.tolist() == [[-math.inf, 0.0, -math.inf]]

    def test_nucleus_wider_than_the_first_ranking(self) -> None:
        vocab_size = 3 * decoding.NUCLEUS
        flat_and_peaked = torch.zeros(2, vocab_size, dtype=torch.float64)
        flat_and_peaked[0] = torch.linspace(0, 1e-6, vocab_size)
        flat_and_peaked[1, 5] = 50.0
        kept = ~sampling_logprobs(flat_and_peaked, settings(top_p=0.5)).isneginf()
        assert kept[0].sum() == vocab_size // 2
        assert kept[0, vocab_size // 2 :].all()
        assert kept[1].nonzero().tolist() == [[5]]

    def test_half_precision_is_lifted(self) -> None:
        logits = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
        assert sampling_logprobs(logits, settings()).dtype == torch.float32
        assert sampling_logprobs(logits, settings(temperature=0.0)).dtype == torch.float32


class TestInverseCdf:
    def test_boundaries_belong_to_the_id_above(self) -> None:
        probs = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)
        uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999], dtype=torch.float64)
        assert inverse_cdf(probs.expand(6, 3), uniforms).tolist() == [0, 0, 1, 1, 2, 2]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_probability_zero_is_never_taken(self, dtype: torch.dtype) -> None:
        probs = torch.zeros(1, 1000, dtype=dtype)
        probs[0, [3, 700, 701]] = torch.tensor([0.5, 0.25, 0.25], dtype=dtype)
        uniforms = torch.tensor([0.0, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
        assert inverse_cdf(probs.expand(4, -1), uniforms).tolist()[:2] == [3, 700]
        assert inverse_cdf(probs.expand(4, -1), uniforms).tolist()[2:] == [701, 701]

    def test_never_runs_off_the_end_when_the_sum_falls_short(self) -> None:
        short = torch.zeros(1, 600)
        short[0, :400] = 0.9 / 400
        assert inverse_cdf(short, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [399]

    @pytest.mark.parametrize("vocab_size", [1, 6, 256, 257, 1000])
    def test_equals_one_cumulative_sum(self, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        probs = torch.rand(200, vocab_size, generator=generator, dtype=torch.float64).pow(4)
        probs /= probs.sum(-1, keepdim=True)
        uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
        expected = [int((row.cumsum(0) <= u).sum()) for row, u in zip(probs, uniforms, strict=True)]
        assert inverse_cdf(probs, uniforms).tolist() == expected

    def test_float64_resolves_what_float32_cannot(self) -> None:
        probs = torch.tensor([[1 - 1e-12, 1e-12]], dtype=torch.float64)
        uniforms = torch.tensor([1 - 5e-13], dtype=torch.float64)
        assert inverse_cdf(probs, uniforms).tolist() == [1]


class ScriptedDecoding(AbstractDecoding):
    """Writes the given ids whatever the uniforms say, and records how it was used."""

    def __init__(self, *scripts: Sequence[int]) -> None:
        self.scripts = [list(script) for script in scripts]
        self.step = 0
        self.appended: list[list[int]] = []
        self.kept: list[list[int]] = []

    def next_logits(self) -> Tensor:
        logits = torch.full((len(self.scripts), 10), -math.inf, dtype=torch.float64)
        for row, script in enumerate(self.scripts):
            logits[row, script[self.step]] = 0.0
        return logits

    def append(self, ids_B: Tensor) -> None:
        assert ids_B.tolist() == [script[self.step] for script in self.scripts]
        self.appended.append(ids_B.tolist())
        self.step += 1

    def keep(self, rows_b: Tensor) -> None:
        self.kept.append(rows_b.tolist())
        self.scripts = [self.scripts[row] for row in rows_b.tolist()]


class TestDecode:
    def test_stopped_cut_and_stopped_at_once(self) -> None:
        """Pad and stop share id 2; nothing after the first is written, and no stop id is invented at the cut."""
        scripted = ScriptedDecoding([5, 6, 2, 2, 2], [5, 6, 7, 8, 9], [2, 2, 2, 2, 2])
        first, second, third = decode(scripted, torch.rand(3, 5), settings(max_new_tokens=5, stop_ids=(2,)))
        assert first.ids.tolist() == [5, 6, 2]
        assert second.ids.tolist() == [5, 6, 7, 8, 9]
        assert third.ids.tolist() == [2]
        reasons = [completion.finish_reason for completion in (first, second, third)]
        assert reasons == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
        assert [len(completion.raw_logprobs) for completion in (first, second, third)] == [3, 5, 1]

    def test_rows_leave_when_they_end_and_their_last_token_is_not_fed_back(self) -> None:
        scripted = ScriptedDecoding([5, 6, 2], [5, 6, 7], [2])
        decode(scripted, torch.rand(3, 3), settings(max_new_tokens=3, stop_ids=(2,)))
        assert scripted.kept == [[0, 1]]
        assert scripted.appended == [[5, 5], [6, 6]]

    def test_a_stop_at_the_limit_is_a_stop(self) -> None:
        (completion,) = decode(ScriptedDecoding([5, 2]), torch.rand(1, 2), settings(max_new_tokens=2, stop_ids=(2,)))
        assert completion.finish_reason is FinishReason.STOP

    def test_ends_when_every_row_has(self) -> None:
        scripted = ScriptedDecoding([3, 9], [3, 8])
        decode(scripted, torch.rand(2, 100), settings(max_new_tokens=100, stop_ids=(8, 9)))
        assert scripted.appended == [[3, 3]]

    def test_without_stop_ids_every_row_is_cut(self) -> None:
        completions = decode(
            log_table([0.5, 0.5], [0.5, 0.5]).decoding([torch.tensor([0])] * 4),
            torch.rand(4, 6),
            settings(max_new_tokens=6),
        )
        assert {len(completion.ids) for completion in completions} == {6}
        assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}

    def test_behaviour_and_raw_logprobs_by_hand(self) -> None:
        """Squaring (.5, .3, .2) gives (.25, .09, .04); top-k 2 keeps (25/34, 9/34)."""
        table = log_table([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2])
        uniforms = torch.tensor([[0.7, 0.99]], dtype=torch.float64)
        chosen = settings(temperature=0.5, top_k=2, max_new_tokens=2)
        (completion,) = decode(table.decoding([torch.tensor([0])]), uniforms, chosen)
        assert completion.ids.tolist() == [0, 1]
        torch.testing.assert_close(completion.behaviour_logprobs, torch.tensor([25 / 34, 9 / 34]).log())
        torch.testing.assert_close(completion.raw_logprobs, torch.tensor([0.5, 0.3]).log())

    def test_greedy_is_a_certain_choice(self) -> None:
        table = log_table([0.2, 0.8, 0.0], [0.0, 0.1, 0.9], [0.6, 0.4, 0.0])
        (completion,) = decode(
            table.decoding([torch.tensor([0])]), torch.rand(1, 4), settings(temperature=0.0, max_new_tokens=4)
        )
        assert completion.ids.tolist() == [1, 2, 0, 1]
        assert completion.behaviour_logprobs.tolist() == [0.0] * 4
        torch.testing.assert_close(completion.raw_logprobs, torch.tensor([0.8, 0.9, 0.6, 0.8]).log())
