"""A transformers model as a backbone: any decoder-only model with a tokenizer, from a folder or the hub.

The seam to transformers. `generate` is never called and no generation setting of a folder is obeyed. What etude assumes
of an architecture is proved on the model itself: at loading that hidden states and output head give the model's own
logits, before the first decoding that a padded, cached row gives what the row alone gives. What fails is refused by
name. It knows no role, no loss and no recipe; `recipes/build.py` and notebooks call `load_backbone`.

Legend: B rows, T positions, P prompt tokens, V real vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from etude.core.collate import pad_rows
from etude.core.linear import OutputHead
from etude.core.logprobs import cut_filler
from etude.errors import ModelError
from etude.models import lora as adapters
from etude.models.cached import CachedDecoding
from etude.models.cpu_attention import use_for_short_rows
from etude.models.cpu_packing import Product, packed_layers, packed_product
from etude.models.folders import quiet, read_config, read_model, read_tokenizer, silence_dropout
from etude.models.forward import evaluating
from etude.models.lora import LoraSettings
from etude.models.pruning import keep_layers as only_layers
from etude.models.quantised import settings_of
from etude.models.roles import AbstractBackbone, AbstractDecoding
from etude.models.shipped import resolve
from etude.text.vocabulary import real_vocabulary

__all__ = ["LoraSettings", "TransformersBackbone", "load_backbone"]

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
PROBE_TOKENS = 8

# How far two ways to the same logits may differ, as a share of their spread: 16-bit products and, in mixtures of
# experts, a token routed otherwise blur them; a forgotten scale or a misplaced pad moves them by all of it.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}


class TransformersBackbone(AbstractBackbone):
    """Any decoder-only transformers model, with or without peft adapters, and its tokenizer.

    Args:
        model: a causal language model of transformers, or a `PeftModel` around one.
        tokenizer: its tokenizer, which alone says how many ids are real.
        compute_dtype: precision of matrix products, by autocast; None: that of the weights.

    Raises:
        ModelError: an encoder-decoder model, a tokenizer with more ids than the head has rows, or an output head of a
            kind etude does not know.
    """

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, compute_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.compute_dtype = compute_dtype or self.base.dtype
        self.vocab_size = real_vocabulary(tokenizer)
        self.context_window = getattr(self._text_config, "max_position_embeddings", None)
        self._decoding_proved = False
        self._writing = False
        self._packed_head: Product | None = None  # while it writes
        self._require_decoder_only()
        self._require_rows()
        use_for_short_rows(self.base)
        self._prove_head()

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model itself, adapters within its modules."""
        model = self.model.get_base_model() if adapters.is_adapted(self.model) else self.model
        return cast(PreTrainedModel, model)

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The folder's generation defaults: read for the stop ids they name, never obeyed."""
        return self.base.generation_config

    def hidden_states(self, token_ids_BT: Tensor, attention_mask_BT: Tensor, position_ids_BT: Tensor) -> Tensor:
        return self.decode(token_ids_BT, attention_mask_BT, position_ids_BT, use_cache=False)

    def head(self) -> OutputHead:
        output: Any = self.base.get_output_embeddings()
        return OutputHead(
            weight_VD=_first(output.weight, self.vocab_size),
            bias_V=None if getattr(output, "bias", None) is None else _first(output.bias, self.vocab_size),
            scale=_logit_scale(self._text_config),
            softcap=getattr(self._text_config, "final_logit_softcapping", None),
        )

    def decoding(self, prompt_ids: Sequence[Tensor]) -> AbstractDecoding:
        """Begin writing after each of these prompts.

        Raises:
            ModelError: the architecture gives a padded row another distribution than the row alone; found at the first
                call.
        """
        if not self._decoding_proved:
            self._prove_decoding()
            self._decoding_proved = True
        return self._begin(prompt_ids)

    @contextmanager
    def writing(self) -> Iterator[None]:
        if self._writing:
            yield
            return
        head = self.head()
        with packed_layers(self.base, self.compute_dtype):
            self._writing = True
            self._packed_head = packed_product(head.weight_VD, head.bias_V, head.weight_VD.dtype)
            try:
                yield
            finally:
                self._writing, self._packed_head = False, None

    def _begin(self, prompt_ids: Sequence[Tensor]) -> CachedDecoding:
        head = self.head()

        def logits(hidden_BD: Tensor) -> Tensor:
            return head.logits_as_stored(hidden_BD, self._packed_head)

        cache = DynamicCache(config=self.base.config)
        return CachedDecoding(prompt_ids, cache, read=self.decode, logits=logits, device=self.device)

    def save(self, folder: Path) -> None:
        """A plain transformers folder with the tokenizer; with adapters, an adapter folder that names its base."""
        with quiet():
            if adapters.is_adapted(self.model):
                adapters.save_adapters(self.model, folder)
            else:
                self.base.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def restore(self, folder: Path) -> None:
        if adapters.is_adapted(self.model):
            adapters.restore_adapters(self.model, folder)
        else:
            saved = read_model(type(self.base), str(folder), self.base.dtype)
            self.base.load_state_dict(saved.state_dict())

    def copy_as(self, dtype: str) -> TransformersBackbone:
        """A plain model with the effective weights, adapters merged, in this precision throughout."""
        copy = adapters.merged_copy(self.model) if adapters.is_adapted(self.model) else deepcopy(self.base)
        for parameter in copy.parameters():  # and no buffer: see AbstractBackbone.copy_as
            parameter.data = parameter.data.to(_dtype(dtype))
        return TransformersBackbone(copy.requires_grad_(False), self.tokenizer).eval()

    @torch.no_grad()
    def load_weights_from(self, other: AbstractBackbone) -> None:
        """The present weights of `other`, of which this is a copy; its adapters come merged."""
        if not (isinstance(other, TransformersBackbone) and adapters.is_adapted(other.model)):
            return super().load_weights_from(other)
        own = self.base.state_dict()
        for name, weight in adapters.effective_weights(other.model):
            own[name].copy_(weight)

    def effective_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Adapters come merged into the weights they act on."""
        if not adapters.is_adapted(self.model):
            return super().effective_weights()
        return ((f"model.{name}", weight) for name, weight in adapters.effective_weights(self.model))

    def without_adapters(self) -> AbstractContextManager[None]:
        return adapters.switched_off(self.model) if adapters.is_adapted(self.model) else super().without_adapters()

    @property
    def _text_config(self) -> PretrainedConfig:
        return self.base.config.get_text_config(decoder=True)

    @property
    def _architecture(self) -> str:
        return type(self.base).__name__

    def decode(self, token_ids_BT: Tensor, attention_mask_BT: Tensor, position_ids_BT: Tensor, **cache: Any) -> Tensor:
        """[B, T, D] last hidden states of the decoder, the output head not run."""
        decoder: Any = self.base.get_decoder()
        with self._computing():
            output = decoder(
                input_ids=token_ids_BT, attention_mask=attention_mask_BT, position_ids=position_ids_BT, **cache
            )
        if not hasattr(output, "last_hidden_state"):
            raise ModelError(f"{self._architecture} hides its decoder, so its states cannot be had; take another model")
        return output.last_hidden_state

    def _computing(self) -> torch.autocast | nullcontext[None]:
        if self.compute_dtype == self.base.dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def _require_decoder_only(self) -> None:
        if self.base.config.is_encoder_decoder:
            raise ModelError(f"{self._architecture} is an encoder-decoder model; etude trains decoder-only models")

    def _require_rows(self) -> None:
        output: Any = self.base.get_output_embeddings()
        if output is None:
            raise ModelError(f"{self._architecture} has no output head; name a causal language model")
        if output.weight.shape[0] < self.vocab_size:
            raise ModelError(
                f"the tokenizer has {self.vocab_size} ids and the output head of {self._architecture} only "
                f"{output.weight.shape[0]} rows; take the tokenizer that belongs to the model"
            )

    @torch.no_grad()
    def _prove_head(self) -> None:
        """Hidden states and our head must give the model's own logits: an unknown scale would never show later."""
        rows = [tensor.to(self.device) for tensor in pad_rows([self._probe_ids()])]
        with evaluating(self):
            ours_TV = self.head().logits(self.hidden_states(*rows)[0])
            ids_BT, mask_BT, positions_BT = rows
            model: Any = self.base
            with self._computing():
                output = model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=False)
        theirs_TV = cut_filler(output.logits[0], self.vocab_size).to(ours_TV.dtype)
        if not bool(theirs_TV.isfinite().all()):
            raise ModelError(
                f"the logits of {self._architecture} are not finite; its weights are damaged, or too large for "
                f"{str(self.compute_dtype).removeprefix('torch.')}"
            )
        if not self._agree(ours_TV, theirs_TV):
            raise ModelError(
                f"{self._architecture} turns hidden states into logits in a way etude does not know (a scale or a cap "
                "of its own); take another architecture"
            )

    @torch.no_grad()
    def _prove_decoding(self) -> None:
        """A short row beside a long one, padded and cached, must be given the distribution of the short row alone."""
        long_T = self._probe_ids()
        short_T = long_T[: max(2, len(long_T) // 2)]
        alone = [tensor.to(self.device) for tensor in pad_rows([short_T])]
        with evaluating(self), self.writing():
            expected_TV = self.head().logits(self.hidden_states(*alone)[0])
            decoding = self._begin([short_T[:-1], long_T[:-1]])
            first_V = decoding.next_logits()[0]
            decoding.append(torch.stack([short_T[-1], long_T[-1]]))
            second_V = decoding.next_logits()[0]
        if not self._agree(torch.stack([first_V, second_V]), expected_TV[-2:]):
            raise ModelError(
                f"{self._architecture} gives a row another distribution when it is padded on the left, so rows of "
                "different lengths cannot be written side by side; take another architecture"
            )

    def _probe_ids(self) -> Tensor:
        """[T] ids from all over the vocabulary."""
        count = min(PROBE_TOKENS, self.context_window or PROBE_TOKENS)
        return torch.arange(count) * max(1, self.vocab_size // PROBE_TOKENS) % self.vocab_size

    def _agree(self, ours: Tensor, theirs: Tensor) -> bool:
        tolerance = max(TOLERANCE[self.base.dtype], TOLERANCE[self.compute_dtype])
        error, spread = (ours - theirs).pow(2).mean().sqrt(), theirs.std()
        return bool(error <= tolerance * spread)


def load_backbone(
    model: str,
    *,
    dtype: str = "float32",
    compute_dtype: str | None = None,
    device: str | torch.device = "cpu",
    keep_layers: Sequence[int] | None = None,
    lora: LoraSettings | None = None,
    activation_checkpointing: bool = False,
    dropout: bool = False,
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> TransformersBackbone:
    """A model and its tokenizer from a folder, the hub or a shipped name, in evaluation mode.

    Args:
        model: a folder (an adapter folder is merged into its base), a GGUF file (unpacked), a name on the hub, or
            `etude:NAME`.
        dtype: of the weights.
        compute_dtype: of matrix products; None: as the weights.
        keep_layers: decoder layers to keep, from 0, ascending; None: all.
        lora: put fresh adapters on, which alone are trained.
        activation_checkpointing: recompute activations in the backward pass; acts in training mode only.
        dropout: leave the model's own dropout rates as they are; False: all zero, so that both modes are one.
        trust_remote_code: run Python code that comes with the model.
        quantization: one of `quantised.QUANTIZATIONS`, to hold the weights of linear layers in; None: as the files say.

    Raises:
        ModelError: the model cannot be found, read, or used as asked.
        ExtraMissing: adapters without peft, or what a quantised model or a GGUF file is read with.
    """
    name = resolve(model)
    base = adapters.base_of(name)
    config = read_config(base, trust_remote_code)
    tokenizer = read_tokenizer(name, trust_remote_code)
    if not dropout:
        silence_dropout(config)
    options: dict[str, Any] = {"config": config, "trust_remote_code": trust_remote_code}
    quantised = quantization is not None or getattr(config, "quantization_config", None) is not None
    if quantised:  # such weights are put where they belong while they are read, and cannot be cast or moved later
        options |= {"device_map": {"": str(device)}} | settings_of(quantization, _dtype(dtype))
    network = read_model(AutoModelForCausalLM, base, _dtype(dtype), **options)
    if base != name:
        _require_plain(name, lora, keep_layers)
        network = adapters.merge_folder(network, name)
    if keep_layers is not None:
        _require_nameable(lora)
        network = only_layers(network, keep_layers)
    adapted: Any = adapters.add_adapters(network, lora) if lora else network
    if activation_checkpointing:
        _checkpoint_activations(network)
    computing = None if compute_dtype is None else _dtype(compute_dtype)
    placed = adapted if quantised else adapted.to(device)
    return TransformersBackbone(placed, tokenizer, compute_dtype=computing).eval()


def _first(tensor: Tensor, count: int) -> Tensor:
    """Its first rows; itself if it has no more, because the gradient of a slice is a second tensor of all rows."""
    return tensor if tensor.shape[0] == count else tensor[:count]


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"there is no precision '{name}'; write one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _logit_scale(config: PretrainedConfig) -> float:
    """What the logits are multiplied by; families differ in name and sense, and `_prove_head` finds those not here."""
    for name in ("logit_scale", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if isinstance(value, int | float):
            return float(value)
    return 1.0 / float(getattr(config, "logits_scaling", 1.0))


def _checkpoint_activations(model: PreTrainedModel) -> None:
    try:
        model.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError:
        raise ModelError(
            f"{type(model).__name__} cannot recompute activations; write student.activation_checkpointing = false"
        ) from None


def _require_plain(name: str, lora: LoraSettings | None, keep_layers: Sequence[int] | None) -> None:
    if lora is not None or keep_layers is not None:
        raise ModelError(
            f"{name} is an adapter folder, which takes neither student.lora nor student.keep_layers; merge it into a "
            "plain folder first (etude export --merge) and name that"
        )


def _require_nameable(lora: LoraSettings | None) -> None:
    if lora is not None:
        raise ModelError(
            "student.keep_layers and student.lora do not go together, because an adapter folder names its base model "
            "and a shortened one has no name; save the shortened model to a folder first and name that as student.model"
        )
