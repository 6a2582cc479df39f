from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from etude.errors import ModelError
from etude.models.fingerprint import special_ids, vocabulary_hash, weights_hash
from etude.testing import tiny_folder, word_tokenizer


def test_a_copy_has_the_hash_and_other_weights_have_another(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model", layers=1)
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "notes.txt").write_text("no weight")
    assert len(weights_hash(model)) == 64
    assert weights_hash(str(tmp_path / "copy")) == weights_hash(model)
    assert weights_hash(tiny_folder(tmp_path / "other", layers=1, seed=1)) != weights_hash(model)


def test_a_changed_configuration_is_another_model(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model", layers=1)
    before = weights_hash(model)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 1.0}))
    assert weights_hash(model) != before


def test_an_adapters_base_counts(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_folder(base, layers=1)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    before = weights_hash(str(adapter))
    assert before != weights_hash(str(base))
    shutil.rmtree(base)
    tiny_folder(base, layers=1, seed=1)
    assert weights_hash(str(adapter)) != before


def test_a_shipped_model_and_none() -> None:
    assert weights_hash("etude:maze-teacher") != weights_hash("etude:maze-student")
    with pytest.raises(ModelError, match="there is no folder"):
        weights_hash("./nowhere")


def test_which_id_means_which_token() -> None:
    assert vocabulary_hash(word_tokenizer()) == vocabulary_hash(word_tokenizer(pad_is_eos=True))
    assert vocabulary_hash(word_tokenizer()) != vocabulary_hash(word_tokenizer(26))
    assert special_ids(word_tokenizer()) == {"bos": 1, "eos": 2, "pad": 0}
    assert special_ids(word_tokenizer(pad_is_eos=True)) == {"bos": 1, "eos": 2, "pad": 2}


def test_a_model_on_the_hub_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes: list[str] = []
    for commit in ("1f", "2e", "1f"):
        path = f"cache/models--owner--model/snapshots/{commit}/config.json"
        monkeypatch.setattr("etude.models.folders.cached_file", lambda name, file, path=path: path)
        hashes.append(weights_hash("owner/model"))
    assert hashes[0] == hashes[2] != hashes[1]
