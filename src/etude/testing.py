"""Small stand-ins for tests, yours and ours: tiny models, a tokenizer made in memory, a scripted sampler and teacher.

Everything is made in milliseconds, on the CPU, without a download, and is the same on every machine. The fakes answer
what is written here and nothing else, so that expected values can be worked out by hand. No part of etude imports it.

    folder = tiny_folder(tmp_path / "model")          # a folder `load_backbone` and recipes accept
    student = Student(tiny_backbone("gpt2"))          # the same without a folder
    teacher = CountingTeacher()                       # ln 0.9 for the next number, ln 0.1/9 for any other
    sampler = ScriptedSampler(lambda prompt: [5, 2], stop_ids=(2,))
    recipe = load_recipe(tiny_recipe(tmp_path), ["train.steps=2"])  # a whole run of a second
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from etude.axes.names import FinishReason, Gives, Source
from etude.core.linear import OutputHead
from etude.core.logprobs import next_token_logprobs, pick
from etude.core.records import Prompt, Rollout, Scores, as_ids
from etude.errors import PairError
from etude.models.backbone import TransformersBackbone
from etude.models.decoding import SamplingSettings
from etude.models.roles import AbstractSampler, AbstractStudent, AbstractTeacher
from etude.models.table import TableBackbone
from etude.runtime.seeds import Key

T = TypeVar("T")

Kind = Literal["llama", "gpt2"]
"""llama: rotary positions. gpt2: learned positions and biases."""

PAD_ID, BOS_ID, EOS_ID, UNKNOWN_ID = range(4)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def word_tokenizer(
    num_words: int = 25, *, chat_template: str | None = None, pad_is_eos: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are whole words: four special ones, three roles, and the words w0, w1, ...

    Args:
        num_words: words besides special tokens and roles; the vocabulary has 7 more.
        chat_template: `CHAT_TEMPLATE`, one of your own, or none.
        pad_is_eos: padding and end of text share an id, as in many real models.

    >>> word_tokenizer().encode("user w0 w24 nonsense </s>")
    [5, 7, 31, 3, 2]
    """
    words = (*SPECIAL_TOKENS, *ROLES, *(f"w{number}" for number in range(num_words)))
    backend = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>" if pad_is_eos else "<pad>",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_model(
    kind: Kind = "llama", *, rows: int = 32, seed: int = 0, layers: int = 2, window: int = 64, tied: bool = False
) -> PreTrainedModel:
    """A random model of some ten thousand weights, large enough ones that its distributions are far from even.

    Args:
        kind: the architecture.
        rows: of embedding and output head.
        seed: of the weights; the process's own random state is left alone.
        layers: decoder layers.
        window: longest row it can read.
        tied: embedding and output head are one weight.
    """
    config: Any = _CONFIGS[kind](rows, layers, window)
    config.tie_word_embeddings = tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = _MODELS[kind](config)
    return model.eval()


def _llama(rows: int, layers: int, window: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=rows,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=window,
        initializer_range=0.3,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def _gpt2(rows: int, layers: int, window: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=rows,
        n_embd=16,
        n_layer=layers,
        n_head=2,
        n_positions=window,
        initializer_range=0.3,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


_CONFIGS: dict[Kind, Callable[[int, int, int], Any]] = {"llama": _llama, "gpt2": _gpt2}
_MODELS: dict[Kind, Callable[[Any], Any]] = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel}


def tiny_backbone(
    kind: Kind = "llama", *, tokenizer: PreTrainedTokenizerBase | None = None, **model: Any
) -> TransformersBackbone:
    """`tiny_model(kind, **model)` with a word tokenizer, as a backbone."""
    return TransformersBackbone(tiny_model(kind, **model), tokenizer or word_tokenizer()).eval()


def tiny_folder(
    folder: Path, kind: Kind = "llama", *, tokenizer: PreTrainedTokenizerBase | None = None, **model: Any
) -> str:
    """Save `tiny_model(kind, **model)` and a word tokenizer; returns the folder as a recipe names it."""
    tiny_backbone(kind, tokenizer=tokenizer, **model).save(folder)
    return str(folder)


def tiny_recipe(
    folder: Path, kind: Kind = "llama", *, tokenizer: PreTrainedTokenizerBase | None = None, **model: Any
) -> dict[str, Any]:
    """Settings of a whole run of a second, for `load_recipe`: two tiny models, and 24 prompts with answers.

    Args:
        folder: where models, prompts and the run (`folder / "run"`) go.
        kind: of both models; `tokenizer` and `model` as for `tiny_folder`, the teacher's seed being one more.
    """
    model = {"layers": 1, "seed": 0} | model
    student = tiny_folder(folder / "student", kind, tokenizer=tokenizer, **model)
    teacher = tiny_folder(folder / "teacher", kind, tokenizer=tokenizer, **model | {"seed": model["seed"] + 1})
    rows = [{"prompt": _words(row, 1 + row % 5), "completion": _words(7 * row, 1 + row % 3)} for row in range(24)]
    lines = [json.dumps(row | {"answer": row["completion"]}) + "\n" for row in rows]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return {
        "output": str(folder / "run"),
        "student": {"model": student},
        "teacher": {"model": teacher},
        "data": {"prompts": str(folder / "prompts.jsonl"), "eval_size": 4, "verifier": "exact"},
        "sampler": {"max_new_tokens": 6},
        "train": {"steps": 4, "prompts_per_round": 4},
        "optim": {"learning_rate": 0.01},
        "evaluation": {"every": 0, "show": 2},
        "checkpoint": {"every": 1, "keep": 100},
        "device": {"device": "cpu", "threads": 1},
    }


def _words(first: int, count: int) -> str:
    return " ".join(f"w{(first + place) % 25}" for place in range(count))


def rollout_of(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    row: int = 0,
    stop_ids: Collection[int] = (),
    source: Source = Source.STUDENT,
    version: int = 0,
) -> Rollout:
    """A finished row; it was cut unless its last id is a stop id."""
    return _written(Prompt(as_ids(prompt_ids), row), completion_ids, stop_ids, source, version)


def _written(prompt: Prompt, ids: Sequence[int], stop_ids: Collection[int], source: Source, version: int) -> Rollout:
    certain = torch.zeros(len(ids))  # log 1: what is scripted could not have come out otherwise
    return Rollout(
        prompt=prompt,
        completion_ids=as_ids(ids),
        source=source,
        finish_reason=FinishReason.STOP if ids[-1] in stop_ids else FinishReason.LENGTH,
        version=version,
        behaviour_logprobs=certain,
        raw_logprobs=certain.clone(),
    )


class ScriptedSampler(AbstractSampler):
    """Writes what it is told to.

    >>> echo = ScriptedSampler(lambda prompt: prompt.token_ids[-1:].tolist())
    >>> [echoed] = echo.sample([Prompt(torch.tensor([7, 8, 9]), row=0)], Key(0, "sample", 0, 0))
    >>> echoed.completion_ids.tolist(), echoed.finish_reason.value
    ([9], 'length')

    Args:
        answer: the completion of a prompt, at least one id.
        stop_ids: a completion that ends with one of them has stopped, any other was cut.
        source: whose rows these are.
    """

    def __init__(
        self,
        answer: Callable[[Prompt], Sequence[int]],
        *,
        stop_ids: Collection[int] = (),
        source: Source = Source.STUDENT,
    ) -> None:
        self.answer = answer
        self.stop_ids = stop_ids
        self.source = source
        self.version = 0

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        return [_written(prompt, self.answer(prompt), self.stop_ids, self.source, self.version) for prompt in prompts]

    def refresh(self, student: AbstractStudent, version: int) -> None:
        self.version = version


def sampling_settings(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int = 8,
    stop_ids: tuple[int, ...] = (),
) -> SamplingSettings:
    """The model's own distribution and eight tokens, but for what is said; the class itself has no defaults."""
    return SamplingSettings(temperature, top_p, top_k, max_new_tokens, stop_ids)


def log_table(*probabilities: Sequence[float]) -> TableBackbone:
    """A table, in float64, with these next-token probabilities: one row for each state.

    >>> log_table([0.5, 0.5], [1.0, 0.0]).next_logits(torch.tensor([0, 1])).exp().tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    return TableBackbone(torch.tensor(probabilities, dtype=torch.float64).log().clamp(min=-1000.0))


def counting_logits(base: int = 10, certainty: float = 0.9) -> Tensor:
    """[base, base] float32: after id i comes i + 1 (after the last, 0) with probability `certainty`, else any other id.

    As a `TableBackbone`, a language model whose every number is known.

    >>> counting_logits().softmax(-1)[3, [4, 5]]
    tensor([0.9000, 0.0111])
    """
    logits = torch.full((base, base), math.log((1.0 - certainty) / (base - 1)))
    ids = torch.arange(base)
    logits[ids, (ids + 1) % base] = math.log(certainty)
    return logits


class CountingTeacher(AbstractTeacher):
    """Expects each id to be the one before plus one, modulo `base`, with probability `certainty`.

    By default a completion that counts on is worth ln 0.9 = -0.10536 a token, and a teacher read one place off gives
    itself away with ln(0.1 / 9) = -4.49981.

    >>> rows = [rollout_of([3], [4, 5, 6]), rollout_of([1, 2, 3], [4], row=1)]
    >>> [marks.sampled_logprobs for marks in CountingTeacher().score(rows, frozenset({Gives.SAMPLED_LOGPROBS}), 1.0)]
    [tensor([-0.1054, -0.1054, -0.1054]), tensor([-0.1054])]
    """

    gives = frozenset({Gives.SAMPLED_LOGPROBS, Gives.HIDDEN_STATES})

    def __init__(self, name: str = "teacher", *, base: int = 10, certainty: float = 0.9) -> None:
        self.name = name
        self.base = base
        self._logits = counting_logits(base, certainty)

    def score(self, rollouts: Sequence[Rollout], needs: frozenset[Gives], temperature: float) -> list[Scores]:
        if not needs <= self.gives:
            raise PairError(f"the teacher '{self.name}' does not give {', '.join(sorted(needs - self.gives))}")
        return [self._marks(rollout, needs, temperature) for rollout in rollouts]

    def head(self) -> OutputHead:
        return OutputHead(self._logits.T)

    def _marks(self, rollout: Rollout, needs: frozenset[Gives], temperature: float) -> Scores:
        ids = rollout.token_ids.tolist()
        before = torch.tensor([ids[place - 1] for place in range(rollout.num_prompt_tokens, len(ids))])
        logprobs = next_token_logprobs(self._logits[before], temperature)
        return Scores(
            self.name,
            sampled_logprobs=pick(logprobs, rollout.completion_ids) if Gives.SAMPLED_LOGPROBS in needs else None,
            hidden=functional.one_hot(before, self.base).float() if Gives.HIDDEN_STATES in needs else None,
        )


class _Waits(Exception):
    """A pretend rank has handed in its sums and waits for the others."""


def on_ranks(work: Callable[[int, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], T], size: int) -> list[T]:
    """What `work(rank, total, gather)` returns on each of `size` pretend ranks: they add up, and join, what all have.

    Each is begun anew whenever the tensor it waits for is known, so `work` must do the same every time.

        >>> on_ranks(lambda rank, total, gather: total(gather(torch.tensor([rank]))).tolist(), 3)
        [[0, 3, 6], [0, 3, 6], [0, 3, 6]]

    Raises:
        RuntimeError: the ranks do not take part in the same sums.
    """
    answers: list[Tensor] = []
    while True:
        handed_in: list[tuple[bool, Tensor]] = []  # whether to join it
        done: list[T] = []
        for rank in range(size):
            together = partial(_answer, iter(answers), handed_in)
            with suppress(_Waits):
                done.append(work(rank, partial(together, False), partial(together, True)))
        if not handed_in:
            return done
        if done:
            raise RuntimeError(f"{len(done)} of {size} ranks returned and the others wait for what never comes")
        joins, tensors = {join for join, _ in handed_in}, [mine for _, mine in handed_in]
        if len(joins) > 1:
            raise RuntimeError("some ranks want to add up while others want to join")
        answers.append(torch.cat(tensors) if joins.pop() else torch.stack(tensors).sum(0))


def _answer(known: Iterator[Tensor], handed_in: list[tuple[bool, Tensor]], join: bool, mine: Tensor) -> Tensor:
    answer = next(known, None)
    if answer is None:
        handed_in.append((join, mine.clone()))
        raise _Waits
    return answer.clone()
