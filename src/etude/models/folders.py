"""Model folders and hub names, read through transformers: configuration, tokenizer, weights, and one sentence if not.

Only safetensors and GGUF files are read, code that comes with a folder runs only when the caller says so, and a weight
that is missing is an error. What becomes of a model after that is `models/backbone.py`'s business, which calls this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import util
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging
from transformers.utils.hub import cached_file

from etude.errors import EtudeError, ExtraMissing, ModelError

GGUF = ".gguf"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def local_folder(name: str) -> Path | None:
    """The folder a model's name stands for, if it is one.

    Raises:
        ModelError: the name can only be a folder, or is nearly that of a model folder here, and there is none.
    """
    if name.endswith(GGUF):
        return None  # a file, which holds configuration, tokenizer and weights
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith(("/", ".", "~")):
        raise ModelError(f"there is no folder {name}; name a folder with a model in it, or a model on the hub")
    if "/" not in name and (near := get_close_matches(name, _model_folders(), n=1, cutoff=0.8)):
        raise ModelError(f"there is no folder {name}; did you mean {near[0]}? A model on the hub is named owner/model")
    return None


def _model_folders() -> list[str]:
    """The folders with a model, or an adapter, right here."""
    return [file.parent.name for kind in ("config", "adapter_config") for file in Path().glob(f"*/{kind}.json")]


def read_config(name: str, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration of a decoder-only model.

    Raises:
        ModelError: it cannot be had, or is that of another kind of model.
    """
    with _refusing(name, "configuration"):
        config = AutoConfig.from_pretrained(_place(name), trust_remote_code=trust_remote_code, **_file_within(name))
    if config.is_encoder_decoder:
        raise ModelError(
            f"{name} is an encoder-decoder model ({config.model_type}), and etude trains decoder-only ones; name a "
            "causal language model"
        )
    return config


def silence_dropout(config: PretrainedConfig) -> None:
    """Set every dropout rate to zero; modules built from the configuration are the same in both modes."""
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in part.to_dict().items():
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)


def read_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside a model.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    folder = local_folder(name)
    if folder is not None and not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        # transformers would make an empty tokenizer up for some kinds of model.
        raise ModelError(f"{name} holds no tokenizer; copy the files of the model's own tokenizer into it")
    with _refusing(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(_place(name), trust_remote_code=trust_remote_code, **_file_within(name))


def read_generation_config(name: str) -> GenerationConfig | None:
    """The generation defaults that lie beside a model, if any: read for the stop ids they name, never obeyed."""
    if name.endswith(GGUF):
        return None
    try:
        with _without_retries_told():
            return GenerationConfig.from_pretrained(_place(name))
    except OSError:  # how transformers says that there are none
        return None


def hub_commit(name: str) -> str:
    """The commit of a model on the hub, as it lies in the cache.

    Raises:
        ModelError: it cannot be had.
    """
    with _refusing(name, "configuration"):
        path = cached_file(name, "config.json")
        return Path(str(path)).parent.name  # the cache keeps each commit in a folder of its name


def read_model(engine: Any, name: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """A model with every weight from its files; transformers fills missing ones with random numbers.

    Args:
        engine: a model class of transformers, or `AutoModelForCausalLM`.
        name: folder or hub name.
        dtype: to hold the weights in.
        options: handed on to `from_pretrained`.

    Raises:
        ModelError: it cannot be had, or is incomplete.
    """
    if name.endswith(GGUF):
        options |= _file_within(name) | {"quantization_config": GgufConfig(dequantize=True)}
    with _refusing(name, "weights"), quiet():
        model, report = engine.from_pretrained(
            _place(name), dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    lacking = sorted(str(key) for key in (*report["missing_keys"], *report["mismatched_keys"]))
    if lacking:
        raise ModelError(
            f"the weights of {name} are incomplete: {len(lacking)} are missing or of another shape, {lacking[0]} "
            "first; copy or download the model again"
        )
    return cast(PreTrainedModel, model)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of transformers, which break the lines of a run's own progress."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _without_retries_told() -> Iterator[None]:
    """Without the hub's warning before every retry; what comes of them is told once, as an error."""
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)


def _place(name: str) -> str:
    if name.endswith(GGUF):
        return str(Path(name).expanduser().parent)
    return str(local_folder(name) or name)


def _file_within(name: str) -> dict[str, str]:
    """What names a GGUF file to transformers; nothing for a folder or a hub name.

    Raises:
        ModelError: there is no such file.
        ExtraMissing: what reads it is not installed.
    """
    if not name.endswith(GGUF):
        return {}
    if not Path(name).expanduser().is_file():
        raise ModelError(f"there is no file {name}; name a GGUF file on this machine, a folder, or a model on the hub")
    for package in ("gguf", "accelerate"):
        if util.find_spec(package) is None:
            raise ExtraMissing(package, "gguf", f"the GGUF file {name}")
    return {"gguf_file": Path(name).name}


@contextmanager
def _refusing(name: str, what: str) -> Iterator[None]:
    """One sentence for whatever the engine has to say against a model; what it may raise is not documented."""
    try:
        with _without_retries_told():
            yield
    except EtudeError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        if isinstance(error, ImportError):  # a quantised folder, whose package transformers asks for
            raise ModelError(f"the {what} of {name} need a package that is not installed: {reason}") from None
        if local_folder(name) or name.endswith(GGUF):
            raise ModelError(f"the {what} of {name} cannot be read: {reason}; mend or replace it") from None
        raise ModelError(
            f"'{name}' is no folder here, and its {what} could not be had from the hub: {reason}; check the name and "
            "the connection, or name a folder"
        ) from None
