"""Both notebooks run from top to bottom, with the maze in place of what needs a GPU or the hub."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SMALL = """
RECIPE = "maze"
OVERRIDES = ["output={output}", "train.steps=3", "train.prompts_per_round=8", "evaluation.prompts=8"]
"""


@pytest.mark.parametrize("name", ["quickstart", "gsm8k"])
def test_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[0].source.startswith("RECIPE = ")
    code[0].source = SMALL.format(output=tmp_path / "run")

    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    assert (tmp_path / "run" / "summary.json").is_file()
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert code[-1].outputs[0].data["text/plain"].strip("'").endswith("student")


def test_gsm8k_notebook_names_its_recipe() -> None:
    notebook = nbformat.read(NOTEBOOKS / "gsm8k.ipynb", as_version=4)
    assert 'RECIPE = "gsm8k-qwen2.5-0.5b-16gb"' in notebook.cells[1].source
