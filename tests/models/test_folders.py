"""A folder or name that is no model is refused in one sentence, and nothing of it is run or made up."""

from logging import WARNING
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, GenerationConfig, T5Config, T5ForConditionalGeneration
from transformers.utils import logging

from etude.errors import ModelError
from etude.models.backbone import load_backbone
from etude.models.folders import local_folder, quiet, read_config, read_generation_config
from etude.testing import Kind, tiny_folder, tiny_model


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no folder .*nowhere; name a folder"):
        load_backbone(str(tmp_path / "nowhere"))


def test_no_such_model_on_the_hub() -> None:
    with pytest.raises(ModelError, match=r"'some/model' is no folder here, and its configuration could not be had"):
        load_backbone("some/model")


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
def test_a_typo_in_a_folder_here_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat-student").mkdir()
    assert local_folder("chat-studnt") is None  # no model in it: not what was meant
    (tmp_path / "chat-student" / file).touch()
    with pytest.raises(ModelError, match=r"there is no folder chat-studnt; did you mean chat-student\?"):
        load_backbone("chat-studnt")
    assert local_folder("gpt2") is local_folder("owner/chat-studnt") is None


def test_the_hubs_retries_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool] = []

    def read(*_: object, **__: object) -> None:
        heard.append(hub_logging.get_logger("huggingface_hub.utils._http").isEnabledFor(WARNING))
        raise OSError("no connection")

    before = hub_logging.get_verbosity()
    monkeypatch.setattr(AutoConfig, "from_pretrained", read)
    monkeypatch.setattr(GenerationConfig, "from_pretrained", read)
    with pytest.raises(ModelError, match="could not be had from the hub: no connection"):
        read_config("some/model", trust_remote_code=False)
    assert read_generation_config("some/model") is None
    assert heard == [False, False]
    assert hub_logging.get_verbosity() == before


def test_no_such_shipped_model() -> None:
    with pytest.raises(ModelError, match="no model 'etude:nothing' comes with etude"):
        load_backbone("etude:nothing")


def test_encoder_decoder(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=0, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"encoder-decoder model \(t5\)"):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_no_tokenizer(tmp_path: Path, kind: Kind) -> None:
    tiny_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_backbone(str(tmp_path))


def test_broken_settings(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="the configuration of .* cannot be read: .*not a valid JSON"):
        load_backbone(folder)


def test_pickled_weights(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="the weights of .* cannot be read: .*no file named model.safetensors"):
        load_backbone(folder)


def test_garbage_weights(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage" * 10)
    with pytest.raises(ModelError, match="the weights of .* cannot be read"):
        load_backbone(folder)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = tiny_model()
    weights = {name: weight for name, weight in model.state_dict().items() if "norm.weight" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ModelError, match=r"incomplete: 5 are missing .*, model\.layers\.0\.input_layernorm"):
        load_backbone(folder)


def test_code_that_comes_with_a_folder_is_not_run(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    settings = (
        (tmp_path / "config.json")
        .read_text()
        .replace('"model_type": "llama"', '"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}')
    )
    (tmp_path / "config.json").write_text(settings)
    with pytest.raises(ModelError, match="the configuration of .* cannot be read"):
        load_backbone(folder)
    assert not (tmp_path / "marker").exists()


def test_progress_bars_come_back() -> None:
    shown = logging.is_progress_bar_enabled()
    with quiet():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled() == shown
