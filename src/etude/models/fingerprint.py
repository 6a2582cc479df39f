"""What stored rows and scores depend on, as hashes: whose weights they are of, and which ids mean which token.

No weight is loaded: a folder is known by the hash of its files, a model on the hub by its commit. `models/cache.py` and
`models/recorded.py` write them down, `recipes/stored.py` compares them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from etude.models.folders import hub_commit, local_folder
from etude.models.lora import base_of
from etude.models.shipped import resolve

_WEIGHTS = ("*.safetensors", "config.json", "adapter_config.json")  # a changed configuration changes every score


def weights_hash(model: str) -> str:
    """Of what `load_backbone` would load under this name, an adapter's base included.

    Raises:
        ModelError: there is no such model.
    """
    name = resolve(model)
    if Path(name).is_file():  # GGUF
        return _digest(Path(name))
    folder = local_folder(name)
    if folder is None:
        return hashlib.sha256(f"hub {name} {hub_commit(name)}".encode()).hexdigest()
    found = hashlib.sha256()
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        found.update(f"{path.name} {_digest(path)}\n".encode())
    base = base_of(name)
    if base != name:
        found.update(f"base {weights_hash(base)}".encode())
    return found.hexdigest()


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of which id means which token, added ones included."""
    tokens = sorted((id_, token) for token, id_ in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Which ids begin, end and pad a row."""
    return {role: getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
