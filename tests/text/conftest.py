"""Tokenizers made in memory: byte-level BPE trained on a few lines, with the special tokens a test asks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "hello there, how are you today?",
    "the answer is forty-two",
    "user assistant system",
    "think about the answer",
]
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]

Make = Callable[..., PreTrainedTokenizerFast]


def _make(
    *,
    chat_template: str | None = None,
    prepend_bos: bool = False,
    special: list[str] = SPECIAL,
    added: tuple[str, ...] = (),
    eos_token: str | None = "</s>",
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    if prepend_bos:
        bos_id = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos_id)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos_token)
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Make:
    return _make
