from pathlib import Path

import pytest

from etude.errors import ModelError
from etude.models.backbone import load_backbone
from etude.models.card import read_card
from etude.models.lora import LoraSettings
from etude.testing import EOS_ID, tiny_folder


def test_says_what_loading_would_say(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, window=48)
    card, backbone = read_card(folder), load_backbone(folder)
    assert card.tokenizer.get_vocab() == backbone.tokenizer.get_vocab()
    assert card.context_window == backbone.context_window == 48
    assert card.generation_config is not None
    assert card.generation_config.eos_token_id == EOS_ID


def test_reads_no_weights(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "generation_config.json").unlink()
    assert read_card(folder).generation_config is None


def test_an_adapter_folder_is_described_by_its_base(tmp_path: Path) -> None:
    base = tiny_folder(tmp_path / "base", window=48)
    load_backbone(base, lora=LoraSettings(rank=2, alpha=4.0)).save(tmp_path / "adapter")
    assert read_card(str(tmp_path / "adapter")).context_window == 48


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        read_card(str(tmp_path / "nowhere"))
