import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.axes.names import FinishReason, Gives, Source
from etude.core.linear import OutputHead
from etude.core.records import Prompt, Rollout, Scores
from etude.errors import PairError, RecordError
from etude.models.backbone import load_backbone
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.runtime.seeds import Key
from etude.testing import (
    CHAT_TEMPLATE,
    CountingTeacher,
    Kind,
    ScriptedSampler,
    check_teacher,
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


class Faulty(CountingTeacher):
    """Keeps every promise but one."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.backbone = torch.nn.Dropout(0.5).eval()
        self.calls = 0
        if fault == "claims what no term uses":
            self.gives = frozenset({Gives.SAMPLED_LOGPROBS, Gives.LABELS})

    def score(self, rollouts: Sequence[Rollout], needs: frozenset[Gives], temperature: float) -> list[Scores]:
        self.calls += 1
        if self.fault == "answers anything":
            needs = needs & self.gives
        if self.fault == "ignores temperature":
            temperature = 1.0
        if self.fault == "leaves evaluation mode on":
            self.backbone.eval()
        if self.fault == "draws random numbers":
            torch.rand(1)
        marks = super().score(rollouts, needs, temperature)
        if self.fault == "the order of lengths":
            marks.sort(key=lambda mark: -len(mark.sampled_logprobs if mark.sampled_logprobs is not None else ()))
        return [self._spoilt(mark, rollouts, place) for place, mark in enumerate(marks)]

    def head(self) -> OutputHead | None:
        return None if self.fault == "no head" else super().head()

    def _spoilt(self, mark: Scores, rollouts: Sequence[Rollout], place: int) -> Scores:
        sampled, hidden = mark.sampled_logprobs, mark.hidden
        if self.fault == "everything at once" and sampled is not None:
            return replace(mark, hidden=torch.zeros(len(sampled), 10))
        if self.fault == "another name":
            return replace(mark, teacher="somebody")
        if sampled is not None:
            spoilt = {
                "above zero": -sampled,
                "not finite": sampled.masked_fill(sampled < -1, -torch.inf),
                "in training mode": sampled - float(self.backbone.training),
                "a gradient": sampled.clone().requires_grad_(),
                "double precision": sampled.double(),
                "company": sampled - 0.01 * len(rollouts),
                "another number each time": sampled - 1e-7 * self.calls,
                "one short": sampled[1:],
            }
            sampled = spoilt.get(self.fault, sampled)
        if hidden is not None and self.fault == "states shifted by one":
            hidden = hidden.roll(1, 0).roll(1, 1)
        return replace(mark, sampled_logprobs=sampled, hidden=hidden)


class TestCheckTeacher:
    def test_a_sound_one_passes(self) -> None:
        check_teacher(Faulty("none"))
        check_teacher(CountingTeacher(), [rollout_of([1], [2]), rollout_of([1, 2], [3, 5])])

    @pytest.mark.parametrize(
        ("fault", "promise"),
        [
            ("claims what no term uses", "only what a term can use"),
            ("answers anything", "refused with a PairError"),
            ("ignores temperature", r"hidden states and head .* \(row 0 at temperature 2.0\)"),
            ("leaves evaluation mode on", "back in the mode it was in"),
            ("draws random numbers", "random numbers alone"),
            ("the order of lengths", "entry a completion token|in any company"),
            ("no head", "a head, if and only if"),
            ("everything at once", "exactly the needed fields"),
            ("another name", "carry its name"),
            ("above zero", "not above zero"),
            ("not finite", "are finite"),
            ("in training mode", "in evaluation mode"),
            ("a gradient", "have no gradient"),
            ("double precision", "are float32"),
            ("company", "the same in any company"),
            ("another number each time", "the same bits twice"),
            ("one short", "entry a completion token"),
            ("states shifted by one", "hidden states and head give"),
        ],
    )
    def test_each_broken_promise_is_named(self, fault: str, promise: str) -> None:
        rows = [rollout_of([3], [4, 5, 7]), rollout_of([1, 2, 3], [4, 5], row=1), rollout_of([6, 7], [8], row=2)]
        with pytest.raises((AssertionError, RecordError), match=promise):
            check_teacher(Faulty(fault), rows)

    def test_rows_that_could_show_nothing(self) -> None:
        with pytest.raises(ValueError, match="found 2 rows of one length"):
            check_teacher(CountingTeacher(), [rollout_of([1], [2]), rollout_of([2], [3])])
