"""Write the reasoning questions into the prompts file of the `smollm2` recipes; the instructions there stay.

The file then holds everything, so that running a recipe needs no further package. After a change of the tasks below,
run `python -m etude.experiments.make_smollm2_prompts` (extra `tasks`); it replaces the questions it wrote before.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from etude.data.examples import read_jsonl
from etude.data.tasks import load_task

PROMPTS_FILE = Path(str(files("etude.recipes") / "prompts" / "short_instructions.jsonl"))
TASKS = (  # short questions of different kinds
    "basic_arithmetic",
    "calendar_arithmetic",
    "family_relationships",
    "fraction_simplification",
    "gsm_symbolic",
    "leg_counting",
    "letter_counting",
    "simple_equations",
    "spell_backward",
    "syllogism",
)
QUESTIONS_A_TASK = 8
SEED = 0


def main(path: Path = PROMPTS_FILE) -> None:
    """Keep the instructions of the file, and put the questions after them, each with its answer and its source."""
    rows: list[dict[str, str]] = [{"prompt": e.fields["prompt"]} for e in read_jsonl(path) if "source" not in e.fields]
    for task in TASKS:
        source = f"reasoning_gym:{task}"
        for example in load_task(source, count=QUESTIONS_A_TASK, seed=SEED).examples:
            rows.append({"prompt": str(example.prompt), "answer": str(example.answer), "source": source})
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(rows)} prompts, {len(TASKS) * QUESTIONS_A_TASK} of them from reasoning-gym")


if __name__ == "__main__":
    main()
