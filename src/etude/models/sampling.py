"""Who writes, in this process: the same row for the same key, whatever stands around it.

The numbers a row is drawn with depend on the key and the row's own global number only, so that batches, ranks and
resumes do not change it. The sampler knows no tokenizer, no teacher and no loss; the training loop and the evaluation
call it, and `recipes/build.py` resolves the stop ids once and hands them in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial

import torch
from torch import Tensor

from etude.axes.names import Source
from etude.core.records import Prompt, Rollout
from etude.errors import DataError, NonFiniteError, RecipeError
from etude.models.decoding import Completion, SamplingSettings, decode
from etude.models.forward import evaluating
from etude.models.roles import AbstractBackbone, AbstractDecoding, AbstractSampler, AbstractStudent
from etude.runtime.seeds import Key

__all__ = ["InProcessSampler", "SamplingSettings", "uniforms", "write_in_batches"]


class InProcessSampler(AbstractSampler):
    """Writes with a backbone of this process: the student's own modules, a low-precision copy of them, or the teacher.

    Args:
        backbone: the model that writes.
        settings: how its distributions become tokens.
        source: whose rows these are. A `TEACHER` sampler keeps its weights when the student is refreshed.
        dtype: precision to write in, such as "bfloat16". Another one than the backbone's makes a copy of its weights;
            the same one, or None, shares the modules.
        rows_per_batch: most rows decoded side by side.
        record_kept: keep on each rollout which ids top-p and top-k left to draw each token from, for a term that is
            renormalised over them. They are 4 bytes an id in memory, in a replay store and in a checkpoint; with a
            nucleus of a thousand ids, 4 kB a token.

    Raises:
        RecipeError: a stop id lies beyond the backbone's vocabulary.
    """

    def __init__(
        self,
        backbone: AbstractBackbone,
        settings: SamplingSettings,
        *,
        source: Source = Source.STUDENT,
        dtype: str | None = None,
        rows_per_batch: int = 64,
        record_kept: bool = False,
    ) -> None:
        unknown = [stop_id for stop_id in settings.stop_ids if stop_id >= backbone.vocab_size]
        if unknown:
            raise RecipeError(
                f"stop ids {unknown} lie beyond the vocabulary of {backbone.vocab_size} ids, so they could never be "
                "written; take them from the tokenizer of the model that writes"
            )
        self.settings = settings
        self.source = source
        self.version = 0
        self.rows_per_batch = rows_per_batch
        self.record_kept = record_kept
        self.backbone, self._copied = backbone, False  # the model that writes
        if dtype is not None and dtype != str(next(backbone.parameters()).dtype).removeprefix("torch."):
            self.backbone, self._copied = backbone.copy_as(dtype), True

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        """One rollout a prompt, in the prompts' order.

        Raises:
            DataError: a prompt and `max_new_tokens` together exceed the context window; nothing has been run yet.
            NonFiniteError: the model's logits are not numbers.
        """
        self.require_room(prompts)
        with self.writing():
            return write_in_batches(prompts, self.rows_per_batch, partial(self._write, key=key))

    def with_settings(self, settings: SamplingSettings) -> InProcessSampler:
        """A sampler that writes with the same weights in another way; a low-precision copy is shared by both.

        It records no kept sets: another distribution's are not what a term asks for, and a whole vocabulary a token is.
        """
        other = copy(self)
        other.settings, other.record_kept = settings, False
        return other

    def refresh(self, student: AbstractStudent, version: int) -> None:
        """Write with the student's present weights from now on; a teacher only notes the version it is beside."""
        self.version = version
        if self.source is not Source.STUDENT:
            return
        if self._copied:
            self.backbone.load_weights_from(student.backbone)
        else:
            self.backbone = student.backbone

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around everything that `begin` starts: evaluation mode, and whatever the engine prepares."""
        with evaluating(self.backbone), self.backbone.writing():
            yield

    @torch.no_grad()
    def begin(self, prompts: Sequence[Prompt]) -> AbstractDecoding:
        """Rows after these prompts, nothing written yet."""
        return self.backbone.decoding([prompt.token_ids for prompt in prompts])

    def rollout(self, prompt: Prompt, completion: Completion) -> Rollout:
        """The record of a written row.

        Raises:
            NonFiniteError: its raw log-probabilities, and so the logits, are not numbers.
        """
        if not math.isfinite(completion.raw_logprobs.sum().item()):
            raise self.damaged(prompt)
        return Rollout(
            prompt=prompt,
            completion_ids=completion.ids,
            source=self.source,
            finish_reason=completion.finish_reason,
            version=self.version,
            behaviour_logprobs=completion.behaviour_logprobs,
            raw_logprobs=completion.raw_logprobs,
            kept_ids=completion.kept_ids,
            kept_lengths=completion.kept_lengths,
        )

    def damaged(self, prompt: Prompt) -> NonFiniteError:
        """What to raise when this model's logits were no numbers while a row was written."""
        return NonFiniteError(
            f"while row {prompt.row} was written with weights version {self.version}, the {self.source}'s logits "
            "were not finite; its weights are damaged or too large for this precision: go back to an earlier "
            'checkpoint, or write sampler.dtype = "float32"'
        )

    def require_room(self, prompts: Sequence[Prompt]) -> None:
        """Refuse a prompt that leaves no room in the context window for `max_new_tokens`."""
        window, new_tokens = self.backbone.context_window, self.settings.max_new_tokens
        if window is None:
            return
        for prompt in prompts:
            length = prompt.token_ids.shape[0]
            if length + new_tokens > window:
                raise DataError(
                    f"the prompt of row {prompt.row} has {length} tokens, which with sampler.max_new_tokens = "
                    f"{new_tokens} makes {length + new_tokens}, and the {self.source}'s context window holds {window}; "
                    f"{what_to_lower(length, new_tokens, window)}"
                )

    def _write(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        draws = uniforms(prompts, key, self.settings)
        completions = decode(self.begin(prompts), draws, self.settings, record_kept=self.record_kept)
        return [self.rollout(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]


def what_to_lower(prompt_tokens: int, new_tokens: int, window: int) -> str:
    """The key that is the cause where a prompt and an answer as long as allowed exceed a context window, and to what.

    >>> what_to_lower(3, 500, 64)
    'lower sampler.max_new_tokens to 61 or less'
    """
    answers = f"lower sampler.max_new_tokens to {window - prompt_tokens} or less"
    prompts = f'write data.max_prompt_tokens = {window - new_tokens} or less with long_prompts = "drop" or "cut"'
    if prompt_tokens >= window:
        return prompts if new_tokens < window else "choose shorter prompts and lower sampler.max_new_tokens"
    return answers if new_tokens >= prompt_tokens else f"{prompts}, or {answers}"


def uniforms(prompts: Sequence[Prompt], key: Key, settings: SamplingSettings) -> Tensor:
    """[B, C] float64: one number in [0, 1) for each token each row may write, from the row's own generator."""
    return torch.stack([key.uniforms(prompt.row, settings.max_new_tokens) for prompt in prompts])


def write_in_batches(
    prompts: Sequence[Prompt], rows_per_batch: int, write: Callable[[Sequence[Prompt]], list[Rollout]]
) -> list[Rollout]:
    """One rollout a prompt, in the prompts' order, at most `rows_per_batch` of them written side by side."""
    # The longest first: rows of like length share a batch, and a batch too large for the memory fails at once.
    order = sorted(range(len(prompts)), key=lambda index: -prompts[index].token_ids.shape[0])
    rollouts: dict[int, Rollout] = {}
    for start in range(0, len(order), rows_per_batch):
        indices = order[start : start + rows_per_batch]
        written = write([prompts[index] for index in indices])
        rollouts.update(zip(indices, written, strict=True))
    return [rollouts[index] for index in range(len(prompts))]
