"""The in-process sampler."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from etude.axes.names import FinishReason, Source
from etude.core.logprobs import pick
from etude.core.records import Prompt, Rollout
from etude.errors import DataError, NonFiniteError, RecipeError
from etude.models.backbone import TransformersBackbone, load_backbone
from etude.models.decoding import sampling_logprobs
from etude.models.sampling import InProcessSampler
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.runtime.seeds import Key
from etude.testing import log_table
from etude.testing import sampling_settings as settings

KEY = Key(seed=0, purpose="sample", stage=0, round=0)


def prompt(*ids: int, row: int = 0) -> Prompt:
    return Prompt(torch.tensor(ids), row)


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
        table = log_table([0.5, 0.5], [0.5, 0.5])
        with torch.no_grad():
            table.weight_VS[:, 0] = math.nan
        sampler = InProcessSampler(table, settings())
        with pytest.raises(NonFiniteError, match="row 3 .*version 0"):
            sampler.sample([prompt(0, row=3)], KEY)

    def test_dropout_is_off_and_every_mode_comes_back(self) -> None:
        table = WithDropout(torch.randn(9, 8))
        sampler = InProcessSampler(table, settings(max_new_tokens=30))
        table.eval()
        (quiet,) = sampler.sample([prompt(8)], KEY)
        table.train()
        table.frozen.eval()
        (rollout,) = sampler.sample([prompt(8)], KEY)
        assert torch.equal(rollout.completion_ids, quiet.completion_ids)
        assert torch.equal(rollout.raw_logprobs, quiet.raw_logprobs)  # pyright: ignore[reportArgumentType]
        assert (table.training, table.dropout.training, table.frozen.training) == (True, True, False)

    def test_modes_come_back_after_an_exception(self) -> None:
        table = WithDropout(torch.full((2, 2), 1.0))
        with torch.no_grad():
            table.weight_VS.fill_(math.inf)
        with pytest.raises(NonFiniteError):
            InProcessSampler(table, settings()).sample([prompt(0)], KEY)
        assert (table.training, table.dropout.training) == (True, True)


class WithDropout(TableBackbone):
    """Half of each state's logits are gone in training mode."""

    def __init__(self, logits_SV: torch.Tensor) -> None:
        super().__init__(logits_SV)
        self.dropout, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5)

    def _states(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(super()._states(token_ids))


class TestRefresh:
    def test_shared_modules_follow_the_student_at_once(self) -> None:
        table = log_table([1.0, 0.0], [1.0, 0.0])
        sampler = InProcessSampler(table, settings(max_new_tokens=2), dtype="float64")
        overwrite(table, [0.0, 1.0])
        sampler.refresh(Student(table), version=5)
        (rollout,) = sampler.sample([prompt(0)], KEY)
        assert (rollout.completion_ids.tolist(), rollout.version) == ([1, 1], 5)

    def test_a_low_precision_copy_follows_when_refreshed(self) -> None:
        table = log_table([1.0, 0.0], [1.0, 0.0])
        sampler = InProcessSampler(table, settings(max_new_tokens=2), dtype="bfloat16")
        overwrite(table, [0.0, 1.0])
        assert sampler.sample([prompt(0)], KEY)[0].completion_ids.tolist() == [0, 0]
        sampler.refresh(Student(table), version=1)
        assert sampler.sample([prompt(0)], KEY)[0].completion_ids.tolist() == [1, 1]
        assert (table.weight_VS.dtype, table.weight_VS.requires_grad) == (torch.float64, True)

    def test_low_precision_is_what_the_logprobs_say(self) -> None:
        """0.3 in bfloat16 is 0.30078125: the recorded log-probability is that of the copy, not the student's."""
        table = TableBackbone(torch.tensor([[0.3, 0.0]] * 2))
        (rollout,) = InProcessSampler(table, settings(), dtype="bfloat16").sample([prompt(0)], KEY)
        expected = torch.tensor([0.30078125, 0.0]).log_softmax(-1)[rollout.completion_ids]
        torch.testing.assert_close(rollout.behaviour_logprobs, expected)

    def test_a_teacher_keeps_its_weights(self) -> None:
        teacher, student = log_table([1.0, 0.0], [1.0, 0.0]), log_table([0.0, 1.0], [0.0, 1.0])
        sampler = InProcessSampler(teacher, settings(max_new_tokens=2), source=Source.TEACHER)
        sampler.refresh(Student(student), version=3)
        (rollout,) = sampler.sample([prompt(0)], KEY)
        assert (rollout.completion_ids.tolist(), rollout.version) == ([0, 0], 3)


def overwrite(table: TableBackbone, probs: Sequence[float]) -> None:
    with torch.no_grad():
        table.weight_VS.copy_(torch.tensor(probs)[:, None].log().clamp(min=-1000.0))


# On a transformers model: padding, cache and precision have a say ----------------------------------------------------

LENGTHS = (3, 9, 1, 6, 4, 12, 2, 7, 5, 1)  # of the prompts


def tokenizer_of(vocab_size: int) -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(vocab_size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))


def tiny_llama(dtype: torch.dtype, *, vocab_size: int = 61, num_rows: int = 64) -> TransformersBackbone:
    """Two layers at random, with an output head peaked enough for rows to be told apart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=num_rows,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    model: Any = LlamaForCausalLM(config)
    return TransformersBackbone(model.to(dtype).eval(), tokenizer_of(vocab_size))


def prompts_of_all_lengths() -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    return [Prompt(torch.randint(0, 61, (length,), generator=generator), row) for row, length in enumerate(LENGTHS * 2)]


def ids(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [rollout.completion_ids.tolist() for rollout in rollouts]


class TestOnTransformers:
    SETTINGS = settings(max_new_tokens=24, stop_ids=(3, 5))

    def sampler(self, dtype: torch.dtype, rows_per_batch: int = 64) -> InProcessSampler:
        return InProcessSampler(tiny_llama(dtype), self.SETTINGS, rows_per_batch=rows_per_batch)

    def test_a_row_is_the_same_alone_and_among_others(self) -> None:
        prompts = prompts_of_all_lengths()
        alone = self.sampler(torch.float64, rows_per_batch=1).sample(prompts, KEY)
        reasons = {rollout.finish_reason for rollout in alone}
        assert reasons == {FinishReason.STOP, FinishReason.LENGTH}  # so that rows leave batches at different times
        for rows_per_batch in (2, 7, 64):
            together = self.sampler(torch.float64, rows_per_batch).sample(prompts[::-1], KEY)[::-1]
            assert ids(together) == ids(alone)
            for one, other in zip(together, alone, strict=True):
                torch.testing.assert_close(one.raw_logprobs, other.raw_logprobs)
                torch.testing.assert_close(one.behaviour_logprobs, other.behaviour_logprobs)

    def test_two_ranks_write_what_one_writes(self) -> None:
        prompts = prompts_of_all_lengths()
        one = self.sampler(torch.float64).sample(prompts, KEY)
        first, second = self.sampler(torch.float64), self.sampler(torch.float64)
        assert ids(first.sample(prompts[:11], KEY) + second.sample(prompts[11:], KEY)) == ids(one)

    def test_recorded_logprobs_are_the_models_own(self) -> None:
        """Against one unpadded pass over prompt and completion, the last prompt position predicting the first token."""
        backbone = tiny_llama(torch.float64)
        chosen = settings(temperature=0.7, top_k=20, max_new_tokens=9, stop_ids=(3,))
        for rollout in InProcessSampler(backbone, chosen).sample(prompts_of_all_lengths(), KEY):
            with torch.no_grad():
                logits_TV = backbone.base(rollout.token_ids[None]).logits[0, :, :61]
            logits_CV = logits_TV[rollout.num_prompt_tokens - 1 : -1]
            raw_C = pick(logits_CV.log_softmax(-1), rollout.completion_ids)
            torch.testing.assert_close(rollout.raw_logprobs, raw_C.float())
            behaviour_C = pick(sampling_logprobs(logits_CV, chosen), rollout.completion_ids)
            torch.testing.assert_close(rollout.behaviour_logprobs, behaviour_C.float())

    def test_filler_rows_are_never_written(self) -> None:
        """The head has 264 rows for 261 ids, and the three fillers would win most draws."""
        backbone = tiny_llama(torch.float32, vocab_size=261, num_rows=264)
        with torch.no_grad():
            backbone.base.lm_head.weight[261:] *= 20.0
        sampler = InProcessSampler(backbone, settings(max_new_tokens=50), rows_per_batch=200)
        rollouts = sampler.sample([prompt(row % 261, row=row) for row in range(200)], KEY)
        drawn = torch.cat([rollout.completion_ids for rollout in rollouts])
        assert len(drawn) == 10_000
        assert drawn.max() <= 260

    def test_generation_defaults_of_the_folder_have_no_say(self, tmp_path: Path) -> None:
        save_one_step_model(tmp_path, (0.5, 0.3, 0.2))
        (tmp_path / "generation_config.json").write_text(json.dumps(HOSTILE))
        sampler = InProcessSampler(load_backbone(str(tmp_path)), settings(max_new_tokens=2), rows_per_batch=1500)
        rollouts = sampler.sample([prompt(row % 3, row=row) for row in range(1500)], KEY)
        drawn = torch.cat([rollout.completion_ids for rollout in rollouts])
        torch.testing.assert_close(
            drawn.bincount(minlength=3) / len(drawn), torch.tensor([0.5, 0.3, 0.2]), atol=0.03, rtol=0
        )

    def test_how_often_rounding_changes_a_token(self) -> None:
        """Alone against in a batch: the rate is printed (pytest -s), and exactly zero in double precision."""
        prompts = prompts_of_all_lengths()
        rates: dict[str, float] = {}
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            alone = ids(self.sampler(dtype, rows_per_batch=1).sample(prompts, KEY))
            rates[str(dtype)] = flip_rate(alone, ids(self.sampler(dtype).sample(prompts, KEY)))
        print({name: f"{rate:.3%}" for name, rate in rates.items()})
        assert rates["torch.float64"] == 0.0
        assert rates["torch.float32"] < 0.01
        assert rates["torch.bfloat16"] < 0.2


HOSTILE = {
    "do_sample": True,
    "temperature": 0.1,
    "top_k": 1,
    "top_p": 0.001,
    "repetition_penalty": 1.3,
    "min_new_tokens": 5,
    "suppress_tokens": [1],
    "eos_token_id": 0,
}


def save_one_step_model(folder: Path, probs: Sequence[float]) -> None:
    """A Llama whose next-token distribution is `probs` whatever it has read: one embedding for all, silent layers."""
    config = LlamaConfig(
        vocab_size=len(probs),
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=8,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        layer: Any = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        # The last norm leaves a vector of ones, so a row of the head adds up to its logit.
        model.lm_head.weight.copy_(torch.tensor(probs).log()[:, None] / 4)
    model.save_pretrained(folder)
    tokenizer_of(len(probs)).save_pretrained(folder)


def flip_rate(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> float:
    """Share of draws that differ among those made after the same tokens."""
    flips = draws = 0
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one, other, strict=False):
            draws += 1
            if a != b:
                flips += 1
                break
    return flips / draws
