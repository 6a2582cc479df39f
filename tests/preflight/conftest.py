"""A pair that can count, trained in a second: what the preflight should find nothing against, and can be spoiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from etude.models.backbone import TransformersBackbone
from etude.testing import tiny_model, word_tokenizer

ROWS = 40  # of embedding and head; the tokenizer has 33 ids
WORDS = 25
TEMPLATE = (
    "{{ '<s> ' }}{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)

Tokenizer = Callable[..., PreTrainedTokenizerFast]


def tokenizer_of(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Words w0, w1, ... and a thinking marker that the templates of this pair leave alone."""
    tokenizer = word_tokenizer(WORDS, chat_template=template)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def counting_model(steps: int, seed: int, rows: int = ROWS) -> Any:
    """Trained to answer a word with the two words after it: a warm-started student after 60 steps, a teacher at 200."""
    model: Any = tiny_model(rows=rows, seed=seed, layers=1)
    tokenizer = tokenizer_of()
    texts = [f"<s> user w{i} </s> assistant w{(i + 1) % WORDS} w{(i + 2) % WORDS} </s>" for i in range(WORDS)]
    ids_BT = torch.tensor([tokenizer.encode(text) for text in texts])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        logits_BTV = model(input_ids=ids_BT).logits[:, 4:-1]
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 5:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `student`, `teacher` and `prompts.jsonl`."""
    folder = tmp_path_factory.mktemp("pair")
    for name, steps in (("student", 60), ("teacher", 200)):
        TransformersBackbone(counting_model(steps, seed=len(name)), tokenizer_of()).eval().save(folder / name)
    rows = [{"prompt": f"w{i}", "completion": f"w{(i + 1) % WORDS} w{(i + 2) % WORDS}"} for i in range(WORDS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def make_tokenizer() -> Tokenizer:
    """Of that pair, with another template perhaps."""
    return tokenizer_of


@pytest.fixture
def settings(pair: Path) -> dict[str, Any]:
    """A recipe for that pair, to be loaded from within its folder."""
    return {
        "output": str(pair / "run"),
        "student": {"model": "student"},
        "teacher": {"model": "teacher"},
        "data": {"prompts": "prompts.jsonl", "eval_size": 4},
        "sampler": {"max_new_tokens": 6},
        "train": {"steps": 1, "prompts_per_round": 4},
        "device": {"device": "cpu", "threads": 1},
    }
