"""What is known of a model before its weights are read: tokenizer, context window, the stop ids its folder names."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from etude.models.folders import read_config, read_generation_config, read_tokenizer
from etude.models.lora import base_of
from etude.models.shipped import resolve


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as its small files describe it."""

    tokenizer: PreTrainedTokenizerBase
    context_window: int | None  # longest row it can read; None: no limit
    generation_config: GenerationConfig | None  # read for the stop ids it names, never obeyed
    rows: int | None = None  # of embedding and output head, filler included, as the settings say


def read_card(model: str, *, trust_remote_code: bool = False) -> ModelCard:
    """Tokenizer, context window and generation defaults of what `load_backbone` would load.

    Raises:
        ModelError: the model cannot be found or read.
    """
    name = resolve(model)
    base = base_of(name)
    config = read_config(base, trust_remote_code).get_text_config(decoder=True)
    return ModelCard(
        tokenizer=read_tokenizer(name, trust_remote_code),
        context_window=getattr(config, "max_position_embeddings", None),
        generation_config=read_generation_config(base),
        rows=getattr(config, "vocab_size", None),
    )
