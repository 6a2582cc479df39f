"""What people get wrong, at the command line: one sentence on standard error, status 2, and no weight loaded for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from etude.axes.names import Gives
from etude.cli.main import main
from etude.config.write import toml_text
from etude.errors import PairError
from etude.models.teachers import FrozenTeacher
from etude.testing import tiny_folder, tiny_recipe, word_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that works, `good.toml`, beside its models and prompts."""
    folder = tmp_path_factory.mktemp("bad input")
    settings = tiny_recipe(folder)
    (folder / "good.toml").write_text(toml_text(settings), encoding="utf-8")
    tiny_folder(folder / "another tokenizer", tokenizer=word_tokenizer(24))
    for name, text in {
        "empty": "",
        "blank": "\n  \n",
        "broken": '{"prompt": "w1"}\n{"prompt": "w2"\n',
        "a list": '{"prompt": "w1"}\n["w2"]\n',
        "a number": '{"prompt": "w1"}\n\n{"prompt": 3}\n',
        "no prompt": '{"prompt": "w1"}\n{"question": "w2"}\n',
        "no completion": '{"prompt": "w1"}\n{"prompt": "w2"}\n',
        "a control token": '{"prompt": "w1"}\n{"prompt": "w2 </s> w3"}\n',
        "long": json.dumps({"prompt": "w1 " * 60, "completion": "w2", "answer": "w2"}) + '\n{"prompt": "w1"}\n',
    }.items():
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr("etude.recipes.build.load_backbone", fail)
    monkeypatch.setattr("etude.recipes.export.load_backbone", fail)


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The sentence, with everything that was said besides it held to be nothing."""
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("etude: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("etude: ").rstrip("\n")


FILES = "data.prompts={folder}/%s.jsonl"

WRONG: dict[str, tuple[list[str], str]] = {
    "an unknown key": (["trian.steps=3"], "command line: unknown key trian; did you mean train?"),
    "an unknown key within a table": (["optim.learning_rat=3"], "did you mean optim.learning_rate?"),
    "a wrong type": (["train.steps=many"], "train.steps"),
    "a number out of range": (["sampler.top_p=1.5"], "sampler.top_p"),
    "a device nobody has": (["device.device=tpu"], "device.device"),
    "a device not here": (["device.device=cuda"], 'device.device = "cuda" is not available here'),
    "a precision not here": (["student.compute_dtype=float16"], 'student.compute_dtype = "float16" needs a CUDA card'),
    "a combination without a gradient": (
        ["terms.0.support=sampled", "terms.0.form=k1"],
        "terms.0",
    ),
    "no such prompts file": (
        ["data.prompts=nowhere.jsonl"],
        "nowhere.jsonl: cannot be read (No such file or directory)",
    ),
    "a folder as the prompts file": (["data.prompts={folder}"], "cannot be read (Is a directory)"),
    "an empty file": ([FILES % "empty"], "empty.jsonl:1: holds no row; at least one prompt is needed"),
    "a file of blank lines": ([FILES % "blank"], "blank.jsonl:1: holds no row"),
    "a broken line": ([FILES % "broken"], "broken.jsonl:2: no valid JSON at character"),
    "a list as a line": ([FILES % "a list"], "a list.jsonl:2: the line is a list; expected an object"),
    "a number as a prompt": ([FILES % "a number"], "a number.jsonl:3: 'prompt' is a number; expected a text"),
    "another column": ([FILES % "no prompt"], "no prompt.jsonl:2: no column 'prompt'; name the column"),
    "no completions": (
        [FILES % "no completion", "sampler.student_fraction=0.5", "data.verifier=", "data.eval_size=1"],
        "no completion, which sampler.student_fraction below 1 with rows from the dataset needs in each row",
    ),
    "no answers": ([FILES % "no completion", "data.eval_size=1"], "no answer, which data.verifier"),
    "a control token in a prompt": (
        [FILES % "a control token", "data.verifier=", "data.eval_size=1"],
        "a control token.jsonl:2: ",
    ),
    "more held out than there is": (["data.eval_size=24"], "cannot hold out 24 of 24 rows"),
    "a prompt over the limit": (
        [FILES % "long", "data.max_prompt_tokens=20", "data.verifier=", "data.eval_size=1"],
        "1 of 1 prompts exceed data.max_prompt_tokens = 20: ",
    ),
    "a prompt that leaves no room in the window": (
        [FILES % "long", "data.verifier=", "data.eval_size=1"],
        "the longest prompt has 60 tokens and a completion up to 6, together more than the student's context window",
    ),
    "an unknown verifier": (["data.verifier=eaxct"], "data.verifier names 'eaxct', which is unknown"),
    "an unknown task": (["data.prompts=", "data.eval_size=", "data.verifier=", "data.task=maize"], "data.task names"),
    "a student that is not there": (
        ["student.model=./nowhere"],
        "/nowhere; name a folder with a model",
    ),
    "a student that is on no hub": (
        ["student.model=nobody/nothing"],
        "'nobody/nothing' is no folder here",
    ),
    "a teacher that is not there": (
        ["teacher.model=./nowhere"],
        "/nowhere; name a folder with a model",
    ),
    "a teacher with another tokenizer": (
        ["teacher.model={folder}/another tokenizer"],
        "student and teacher speak different token ids (32 / 31 tokens, 1 ids differ; student / teacher: id 31",
    ),
    "a stop token that is none": (['sampler.stop=["w1 w2"]'], "sampler.stop names 'w1 w2', which is 2 of its tokens"),
    "a system prompt for no template": (["data.system_prompt=w1"], "data.system_prompt is set, but the student's tok"),
    "an unknown method": (["method=gdk"], "did you mean gkd?"),
    "an output that is a file": (["output={folder}/good.toml"], "good.toml is a file; choose another folder"),
    "an output that is somebody's": (
        ["output={folder}"],
        "is not empty and holds no run; choose another output folder",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_recipe_that_cannot_run(
    name: str,
    folder: Path,
    tmp_path: Path,
    nothing_loads: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    changes, sentence = WRONG[name]
    output = [] if "output" in changes[0] else [f"output={tmp_path / 'run'}"]
    words = [change.format(folder=folder) for change in changes] + output
    assert sentence in refused(capsys, "train", folder / "good.toml", *words)
    assert list(tmp_path.iterdir()) == []  # and nothing was written


@pytest.mark.parametrize("verb", ["train", "check"])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.toml"], "recipe file nowhere.toml does not exist; expected a .toml file or a shipped recipe"),
        (["mase"], "no shipped recipe is called 'mase', and a recipe file is named by its path; did you mean maze?"),
        (["maze", "train.steps"], "command line: found 'train.steps'; expected key=value"),
    ],
)
def test_a_recipe_that_is_not_there(
    verb: str, words: list[str], sentence: str, nothing_loads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, verb, *words)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seed = \n", "bad.toml:1: "),
        ('[student]\nmodel = "s"\nmodel = "t"\n', "bad.toml:3: "),
        ('[student]\nmodle = "s"\n', "unknown key student.modle; did you mean student.model?"),
        ("", "student"),
    ],
)
def test_a_recipe_file_that_is_none(
    text: str, sentence: str, tmp_path: Path, nothing_loads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    assert sentence in refused(capsys, "train", tmp_path / "bad.toml")


def test_a_teacher_that_does_not_give_what_the_term_needs(
    folder: Path,
    nothing_loads: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No recipe can ask for one yet; the frozen teacher is made to give less."""
    monkeypatch.setattr(FrozenTeacher, "gives", frozenset({Gives.SAMPLED_LOGPROBS}))
    said = refused(capsys, "train", folder / "good.toml", f"output={tmp_path / 'run'}")
    assert said == (
        "teacher 'teacher' gives sampled_logprobs, and a term needs hidden_states from it; "
        "choose a teacher that gives it, or another support for the term"
    )
    assert PairError.exit_status == 2


def test_rows_that_train_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found while it runs: nobody can know beforehand that every row will be cut."""
    never = ["terms.0.train_truncated=false", "sampler.max_new_tokens=1", "train.prompts_per_round=2", "train.steps=2"]
    words = ["train", folder / "good.toml", f"output={tmp_path / 'run'}", "--quiet", *never]
    sentence = refused(capsys, *words)
    assert sentence == (
        "no token was trained in 2 steps in a row; the last one had 2 rows by student, the longest of 1 tokens, 2 of "
        "them cut at max_new_tokens, and term 'reverse_kl' has train_truncated = false: change what leaves all of them "
        "out"
    )
    assert refused(capsys, *words) == sentence  # it is not a run that can be gone on with
    assert main([*map(str, words[:-4]), "--fresh"]) == 0


def test_what_cannot_be_exported(folder: Path, tmp_path: Path, nothing_loads: None, capsys: Any) -> None:
    assert "holds no run (no recipe.toml)" in refused(capsys, "export", tmp_path)
    shutil.copy(folder / "good.toml", tmp_path / "recipe.toml")
    assert "has no whole checkpoint yet; let the run reach one" in refused(capsys, "export", tmp_path)
    assert "exists already; name another folder with --to" in refused(capsys, "export", tmp_path, "--to", tmp_path)
