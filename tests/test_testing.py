import math
from pathlib import Path

import pytest
import torch

from etude.axes.names import FinishReason, Gives, Source
from etude.core.records import Prompt
from etude.errors import PairError
from etude.models.backbone import load_backbone
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.runtime.seeds import Key
from etude.testing import (
    CHAT_TEMPLATE,
    CountingTeacher,
    Kind,
    ScriptedSampler,
    counting_logits,
    rollout_of,
    tiny_folder,
    tiny_model,
    word_tokenizer,
)

BOTH = frozenset({Gives.SAMPLED_LOGPROBS, Gives.HIDDEN_STATES})
KEY = Key(seed=0, purpose="sample", stage=0, round=0)


class TestWordTokenizer:
    def test_words_come_and_go_unchanged(self) -> None:
        tokenizer = word_tokenizer()
        assert len(tokenizer) == 32
        assert tokenizer.decode(tokenizer.encode("user w3 w24 w0")) == "user w3 w24 w0"

    def test_padding_may_be_the_end_of_text(self) -> None:
        assert word_tokenizer().pad_token_id == 0
        shared = word_tokenizer(pad_is_eos=True)
        assert shared.pad_token_id == shared.eos_token_id == 2

    def test_the_template_ends_each_turn(self) -> None:
        tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
        turns = [{"role": "user", "content": "w0 w1"}]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert rendered == "user w0 w1 </s> assistant "
        assert word_tokenizer().chat_template is None

    def test_survives_a_folder(self, tmp_path: Path) -> None:
        before = word_tokenizer(chat_template=CHAT_TEMPLATE, pad_is_eos=True)
        after = load_backbone(tiny_folder(tmp_path, tokenizer=before)).tokenizer
        assert after.get_vocab() == before.get_vocab()
        assert (after.chat_template, after.pad_token_id) == (CHAT_TEMPLATE, 2)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_tiny_model_follows_from_its_seed_alone(kind: Kind) -> None:
    before = torch.get_rng_state()
    first, second, other = (list(tiny_model(kind, seed=seed).parameters()) for seed in (3, 3, 4))
    assert torch.get_rng_state().equal(before)
    assert all(mine.equal(theirs) for mine, theirs in zip(first, second, strict=True))
    assert not first[0].equal(other[0])


class TestCounting:
    def test_is_the_same_as_a_table_that_counts(self) -> None:
        """Two ways to the same numbers: a walk along the ids, and a model run in padded batches."""
        rows = [rollout_of([3], [4, 5, 6]), rollout_of([1, 2, 3], [4], row=1), rollout_of([9], [0, 5], row=2)]
        model = FrozenTeacher("teacher", TableBackbone(counting_logits()))
        for temperature in (1.0, 2.0):
            pairs = zip(
                CountingTeacher().score(rows, BOTH, temperature), model.score(rows, BOTH, temperature), strict=True
            )
            for scripted, scored in pairs:
                torch.testing.assert_close(scripted.sampled_logprobs, scored.sampled_logprobs)
                torch.testing.assert_close(scripted.hidden, scored.hidden)
        torch.testing.assert_close(CountingTeacher().head().weight_VD, model.head().weight_VD)

    def test_counts_on_and_off(self) -> None:
        [marks] = CountingTeacher().score([rollout_of([8], [9, 0, 0])], BOTH, 1.0)
        assert marks.sampled_logprobs is not None
        assert marks.sampled_logprobs.tolist() == pytest.approx([math.log(0.9), math.log(0.9), math.log(0.1 / 9)])

    def test_refuses_what_it_does_not_give(self) -> None:
        with pytest.raises(PairError, match="does not give labels"):
            CountingTeacher().score([], frozenset({Gives.LABELS}), 1.0)


class TestScriptedSampler:
    def test_each_row_keeps_its_own_answer(self) -> None:
        prompts = [Prompt(torch.tensor(ids), row) for row, ids in enumerate([[7, 8, 9], [5, 6]])]
        rollouts = ScriptedSampler(lambda prompt: [int(prompt.token_ids[-1]), 2], stop_ids=(2,)).sample(prompts, KEY)
        assert [rollout.completion_ids.tolist() for rollout in rollouts] == [[9, 2], [6, 2]]
        assert [rollout.prompt for rollout in rollouts] == prompts
        assert {rollout.finish_reason for rollout in rollouts} == {FinishReason.STOP}

    def test_what_does_not_stop_was_cut(self) -> None:
        sampler = ScriptedSampler(lambda _: [4, 5], stop_ids=(2,), source=Source.TEACHER)
        [rollout] = sampler.sample([Prompt(torch.tensor([1]), 0)], KEY)
        assert (rollout.finish_reason, rollout.source) == (FinishReason.LENGTH, Source.TEACHER)
