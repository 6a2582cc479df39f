from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import ModelError
from etude.models.backbone import load_backbone
from etude.models.card import read_card
from etude.models.lora import LoraSettings
from etude.testing import Kind, tiny_folder, word_tokenizer


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_it_says_what_the_loaded_model_says(tmp_path: Path, kind: Kind) -> None:
    folder = tiny_folder(tmp_path, kind, window=48)
    card, backbone = read_card(folder), load_backbone(folder)
    assert card.context_window == backbone.context_window == 48
    assert card.tokenizer.get_vocab() == backbone.tokenizer.get_vocab()
    assert card.generation_config is not None
    assert card.generation_config.eos_token_id == 2


def test_the_weights_are_not_read(tmp_path: Path) -> None:
    folder = Path(tiny_folder(tmp_path))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "generation_config.json").unlink()
    card = read_card(str(folder))
    assert card.context_window == 64
    assert card.generation_config is None


def test_of_an_adapter_folder_the_base_is_described(tmp_path: Path) -> None:
    base = tiny_folder(tmp_path / "base", window=48)
    load_backbone(base, lora=LoraSettings(rank=2, alpha=4.0)).save(tmp_path / "adapters")
    card = read_card(str(tmp_path / "adapters"))
    assert card.context_window == 48
    assert card.tokenizer.get_vocab() == word_tokenizer().get_vocab()
    assert card.generation_config is not None


def test_a_shipped_model_is_known_by_its_name() -> None:
    assert read_card("etude:maze-student").context_window is not None


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        read_card(str(tmp_path / "nowhere"))
    tiny_folder(tmp_path)
    for path in (*tmp_path.glob("tokenizer*"), *tmp_path.glob("vocab*")):
        path.unlink()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        read_card(str(tmp_path))
