"""Low-rank adapters: put on, read out as plain weights, saved and taken back. The only importer of peft.

A model with adapters is a `PeftModel`; what the base model would be with them merged is computed here without touching
either, so that a sampler can write with a plain copy while the adapters go on learning. `models/backbone.py` calls it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from etude.errors import ExtraMissing, ModelError
from etude.models.folders import local_folder
from etude.runtime.seeds import derive

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ADAPTER = "default"  # peft's own name for the first adapter; there is only one
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """What is put beside the frozen weights."""

    rank: int
    alpha: float  # the adapter's output is multiplied by alpha / rank
    dropout: float = 0.0  # before the adapter, in training mode
    target_modules: str | Sequence[str] = "all-linear"  # names of modules; "all-linear": every linear one but the head
    seed: int = 0  # of the first values


def add_adapters(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """The model with fresh adapters, which alone are trainable; its output is unchanged until they are trained.

    Raises:
        ExtraMissing: peft is not installed.
        ModelError: the modules named do not exist, or the output head is among them.
    """
    peft = _peft("student.lora")
    targets = settings.target_modules
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    with _without_known_warnings(), torch.random.fork_rng(devices=[]):  # peft draws from the process's generator
        torch.manual_seed(derive(settings.seed, "lora"))
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ModelError(
                f"student.lora.target_modules = {targets!r} does not fit {type(model).__name__}: "
                f'{str(error).splitlines()[0]}; name modules it has, or write "all-linear"'
            ) from None
    _refuse_on_head(model, targets)
    return adapted


def _refuse_on_head(model: PreTrainedModel, targets: object) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise ModelError(
            f"student.lora.target_modules = {targets!r} puts an adapter on the output head, whose weight the loss "
            'reads as it is; leave the head out ("all-linear" does)'
        )


def is_adapted(model: nn.Module) -> TypeGuard[PeftModel]:
    """Whether these are a base model and adapters; asks without importing peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


@contextmanager
def switched_off(model: PeftModel) -> Iterator[None]:
    """Inside, the base model alone acts; afterwards, also after an exception, each adapter is as it was.

    peft's own way freezes every adapter and thaws all of them again, whether they were learning or not.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in model.modules() if isinstance(part, BaseTunerLayer)]
    were_on = [not layer.disable_adapters for layer in layers]
    learning = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer, was_on in zip(layers, were_on, strict=True):
            layer.enable_adapters(was_on)
        for weight, learns in learning:
            weight.requires_grad_(learns)


def effective_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """(name in the base model, weight with its adapter merged), one after the other; the model stays as it is."""
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    layers: dict[str, Any] = {name: part for name, part in base.named_modules() if isinstance(part, LoraLayer)}
    # Most adapters are on a module's weight; one on a stack of experts names its parameter.
    adapted = {_plain(f"{name}.{getattr(part, 'parameter_name', 'weight')}"): part for name, part in layers.items()}
    for key, weight in base.state_dict().items():
        if ".lora_" in key:
            continue
        name = _plain(key)
        yield name, weight + adapted[name].get_delta_weight(ADAPTER) if name in adapted else weight


def _plain(name: str) -> str:
    """A parameter's name without the layers that peft put around it."""
    return name.replace(".base_layer", "")


def merged_copy(model: PeftModel) -> PreTrainedModel:
    """A plain model of its own, with the adapters merged into its weights."""
    copy = deepcopy(model)
    return copy.merge_and_unload()  # pyright: ignore[reportCallIssue]: handed on to the tuner


def save_adapters(model: PeftModel, folder: Path) -> None:
    """An adapter folder, which names its base model."""
    # peft would otherwise look the base model up on the hub, to learn whether its embedding was resized.
    model.save_pretrained(str(folder), save_embedding_layers=False)


def restore_adapters(model: PeftModel, folder: Path) -> None:
    """Take back the adapter weights of a folder that `save_adapters` wrote, bit for bit."""
    from peft import load_peft_weights, set_peft_model_state_dict

    set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))


def base_of(name: str) -> str:
    """The model whose weights a name means: of an adapter folder the base it names, of any other name itself.

    Raises:
        ModelError: the adapter folder names no base model.
    """
    folder = local_folder(name)
    if folder is None or not (folder / CONFIG_FILE).is_file():
        return name
    base = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ModelError(f"the adapter folder {name} names no base model; write it into its {CONFIG_FILE}")
    return base


def merge_folder(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The base model with the adapter of a folder merged into its weights, trainable like any other."""
    peft = _peft(f"the adapter folder {name}")
    with _without_known_warnings():
        merged = peft.PeftModel.from_pretrained(model, str(local_folder(name))).merge_and_unload()
    return merged.requires_grad_(True)  # peft froze it, and merging leaves it so


@contextmanager
def _without_known_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # peft asks transformers by a name that transformers has given up.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        # GPT-2 stores its weights transposed; peft sees it, does the right thing and says so.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        # For stacks of experts peft writes rank and alpha patterns of its own and then misses modules of that name.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        yield


def _peft(purpose: str) -> ModuleType:
    try:
        import peft
    except ImportError:
        raise ExtraMissing("peft", "lora", purpose) from None
    return peft
