"""From examples to the prompts of each round, given how to encode them.

Everything is encoded once, at the start, so that a prompt that is too long, a template that refuses a row or a
smuggled control token stops the run before its first step. Which prompts a round has is a function of the seed, the
stage and the round alone. The source knows no tokenizer: `recipes/data.py` hands it the methods of `PromptEncoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from etude.core.records import Prompt, as_ids
from etude.data.examples import Example, Message
from etude.errors import DataError
from etude.runtime.seeds import Key

Encode = Callable[[str | list[Message], str], list[int]]  # (prompt, where) -> prompt ids
EncodeCompletion = Callable[[str | list[Message], str, str], list[int]]  # (prompt, completion, where) -> ids

_SHOWN = 5  # rows an error names before it only counts


class PromptSource:
    """Encoded examples, and which of them each round has.

    Args:
        examples: at least one.
        encode: prompt and its place to ids, as `PromptEncoder.encode`.
        encode_completion: prompt, completion and place to ids, as `PromptEncoder.encode_completion`; None leaves
            completions out, for runs whose rows the dataset does not write.
        seed: the recipe's.
        max_prompt_tokens: longest prompt, template included.
        long_prompts: what to do with a longer one. "stop" refuses the data and names the rows; "drop" leaves the row
            out; "cut" shortens the end of the last user message until the whole prompt fits, so that the template
            with its BOS, system message and turn markers stays as it is.

    Attributes:
        dropped, cut: how many rows met that fate.

    Raises:
        DataError: no example is left, a prompt is too long under "stop", or one cannot be cut to fit.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        encode: Encode,
        encode_completion: EncodeCompletion | None = None,
        *,
        seed: int,
        max_prompt_tokens: int,
        long_prompts: Literal["stop", "drop", "cut"] = "stop",
    ) -> None:
        self._seed = seed
        self._encode = encode
        self._encode_completion = encode_completion
        self._limit = max_prompt_tokens
        self.dropped = 0
        self.cut = 0
        self._prompts: list[Prompt] = []
        too_long: list[str] = []
        for example in examples:
            prompt, ids = example.prompt, encode(example.prompt, example.where)
            if len(ids) > max_prompt_tokens:
                if long_prompts != "cut":
                    too_long.append(f"{example.where} ({len(ids)} tokens)")
                    continue
                prompt, ids = self._cut_to_fit(example)
                self.cut += 1
            self._prompts.append(self._made(example, prompt, ids))
        if too_long and long_prompts == "stop":
            raise DataError(_too_long(too_long, len(examples), max_prompt_tokens))
        self.dropped = len(too_long)
        if not self._prompts:
            raise DataError(f"no prompt is left: {len(examples)} given, {self.dropped} dropped as too long")

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(prompt.token_ids.shape[0] for prompt in self._prompts)

    @property
    def longest_completion(self) -> int:
        """Tokens of the longest completion, its stop id included; 0 if there are none."""
        return max(0 if p.completion_ids is None else p.completion_ids.shape[0] for p in self._prompts)

    def batch(self, stage: int, round: int, prompts: int, samples_per_prompt: int = 1) -> list[Prompt]:
        """The prompts of one round: a function of (seed, stage, round) and of nothing drawn before.

        Rounds walk through one random order of all prompts after another, so that each prompt comes once an epoch.

        Args:
            stage: index of the stage.
            round: index of the round within it.
            prompts: different prompts a round, the same number in each round of the stage.
            samples_per_prompt: how often each is repeated; repetitions stand side by side.

        Returns:
            `prompts * samples_per_prompt` prompts, their rows and groups numbered from 0.
        """
        places = range(round * prompts, (round + 1) * prompts)
        epochs = {epoch: self._order(stage, epoch) for epoch in {place // len(self) for place in places}}
        chosen = (self._prompts[epochs[place // len(self)][place % len(self)]] for place in places)
        return _numbered(chosen, samples_per_prompt)

    def fixed(self, count: int, samples_per_prompt: int = 1) -> list[Prompt]:
        """The first `count` prompts (all, if there are fewer) in their own order, for evaluation."""
        return _numbered(self._prompts[:count], samples_per_prompt)

    def _order(self, stage: int, epoch: int) -> list[int]:
        key = Key(seed=self._seed, purpose="prompts", stage=stage, round=epoch)
        return torch.randperm(len(self), generator=key.generator(row=0)).tolist()

    def _made(self, example: Example, prompt: str | list[Message], ids: list[int]) -> Prompt:
        completion_ids = None
        if self._encode_completion is not None and example.completion is not None:
            completion_ids = as_ids(self._encode_completion(prompt, example.completion, example.where))
        return Prompt(token_ids=as_ids(ids), row=0, completion_ids=completion_ids, example=example.fields)

    def _cut_to_fit(self, example: Example) -> tuple[str | list[Message], list[int]]:
        """The prompt with as many characters of its last user message as fit, by bisection, and its ids."""
        length = len(_last_user_text(example))
        fits, too_many = 0, length
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if len(self._encode(_shortened(example, middle), example.where)) <= self._limit:
                fits = middle
            else:
                too_many = middle
        if not fits:
            raise DataError(
                f"{example.where}: longer than data.max_prompt_tokens = {self._limit} even without the text of its "
                "last user message; raise the limit, or set data.long_prompts = 'drop'"
            )
        prompt = _shortened(example, fits)
        return prompt, self._encode(prompt, example.where)


def split(examples: Sequence[Example], count: int, *, seed: int) -> tuple[list[Example], list[Example]]:
    """Hold out `count` examples, drawn by the seed.

    Returns:
        The training examples and the held-out ones, each in the order given.

    Raises:
        DataError: nothing would be left to train on, or nothing would be held out.
    """
    if not 0 < count < len(examples):
        raise DataError(
            f"cannot hold out {count} of {len(examples)} rows: both parts need at least one; change data.eval_size, or "
            "give held-out prompts of their own"
        )
    generator = Key(seed=seed, purpose="split", stage=0, round=0).generator(row=0)
    held_out = set(torch.randperm(len(examples), generator=generator)[:count].tolist())
    return (
        [example for place, example in enumerate(examples) if place not in held_out],
        [example for place, example in enumerate(examples) if place in held_out],
    )


def _numbered(prompts: Iterable[Prompt], samples_per_prompt: int) -> list[Prompt]:
    repeated = (prompt for prompt in prompts for _ in range(samples_per_prompt))
    return [replace(prompt, row=row, group=row // samples_per_prompt) for row, prompt in enumerate(repeated)]


def _last_user_text(example: Example) -> str:
    if isinstance(example.prompt, str):
        return example.prompt
    return example.prompt[_last_user(example.prompt, example.where)]["content"]


def _shortened(example: Example, length: int) -> str | list[Message]:
    if isinstance(example.prompt, str):
        return example.prompt[:length]
    place = _last_user(example.prompt, example.where)
    message = {**example.prompt[place], "content": example.prompt[place]["content"][:length]}
    return [*example.prompt[:place], message, *example.prompt[place + 1 :]]


def _last_user(messages: list[Message], where: str) -> int:
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        raise DataError(f"{where}: too long, and no message is a user's to cut; set data.long_prompts = 'drop'")
    return places[-1]


def _too_long(rows: Sequence[str], of: int, limit: int) -> str:
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return (
        f"{len(rows)} of {of} prompts exceed data.max_prompt_tokens = {limit}: {', '.join(rows[:_SHOWN])}{more}; raise "
        "the limit, or set data.long_prompts to 'drop' or 'cut'"
    )
