from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from etude.data.examples import read_jsonl
from etude.experiments.make_smollm2_prompts import PROMPTS_FILE, QUESTIONS_A_TASK, TASKS, main


def test_the_shipped_prompts_are_many_short_and_different() -> None:
    examples = read_jsonl(PROMPTS_FILE)
    sources = Counter(example.fields.get("source", "instruction") for example in examples)
    assert sources == {"instruction": 320} | {f"reasoning_gym:{task}": QUESTIONS_A_TASK for task in TASKS}
    prompts = [str(example.prompt) for example in examples]
    assert len(set(prompts)) == len(prompts)
    assert max(map(len, prompts)) < 800


def test_making_them_again_gives_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="extra 'tasks' is not installed")
    path = Path(shutil.copy(PROMPTS_FILE, tmp_path / "prompts.jsonl"))
    main(path)
    assert path.read_bytes() == PROMPTS_FILE.read_bytes()
