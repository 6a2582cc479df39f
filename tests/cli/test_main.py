from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from etude import __version__
from etude.axes.legality_page import legality_page
from etude.cli.main import HELP, VERBS, main
from etude.config.load import load_recipe, shipped_recipes
from etude.config.write import toml_text
from etude.errors import NonFiniteError, UsageError
from etude.testing import tiny_recipe

HEAVY = ("torch", "transformers", "numpy", "peft", "datasets", "rich")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Stand-ins for `etude.recipes.run`, `check` and `export` that only note what they are asked."""
    noted: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def note(name: str) -> Any:
        answer: Any = [] if name == "check" else f"{name} was called"
        return lambda *args, **options: noted.append((name, args, options)) or answer

    modules = {"run": ("train",), "check": ("check",), "export": ("export",), "record": ("record",)}
    for module, names in modules.items():
        stand_in = ModuleType(f"etude.recipes.{module}")
        stand_in.__dict__.update({name: note(name) for name in names})
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    return noted


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence a wrong command ends with."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("etude: ")
    assert err.count("\n") == 1
    return err.removeprefix("etude: ").rstrip()


# help and mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_verb(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  etude {verb}" in out for verb in VERBS)
    assert max(map(len, out.splitlines())) <= 120
    assert HELP.startswith("On-policy distillation")


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"quickstart"}))
def test_each_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    assert f"usage: etude {verb}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"etude {__version__}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tarin"], "unknown verb 'tarin'; did you mean train?"),
        (["xyzzy"], "unknown verb 'xyzzy'; expected one of quickstart, train,"),
        (["train"], "train needs a recipe, or all of --student, --teacher and --prompts"),
        (["train", "--student", "s", "--teacher", "t"], "train needs a recipe, or all of"),
        (["train", "maze", "--fersh"], "unrecognized arguments: --fersh; `etude train --help` shows the usage"),
        (["train", "maze", "seed"], "command line: found 'seed'; expected key=value"),
        (["check", "maze", "--config-only", "sed=1"], "command line: unknown key sed; did you mean seed?"),
        (["check"], "a recipe is needed first"),
        (["check", "seed=1"], "a recipe is needed first"),
        (
            ["check", "mase"],
            "no shipped recipe is called 'mase', and a recipe file is named by its path; did you mean maze?",
        ),
        (["show", "none.toml"], "recipe file none.toml does not exist"),
        (["show", "--keys", "optimizer"], "a recipe has no key 'optimizer'; `etude show --keys` lists all"),
        (["methods", "gkd", "--legality"], "--legality is about all methods and gkd was named too"),
        (["methods", "gdk"], "unknown method 'gdk'; did you mean gkd?"),
        (["export"], "the following arguments are required: RUN"),
        (["experiment", "xyzzy"], "unknown experiment 'xyzzy'; expected one of "),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert refused(capsys, *words).startswith(says)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UsageError("a sentence"), 2, "etude: a sentence\n"),
        (NonFiniteError("a sentence"), 1, "etude: a sentence\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "etude: [Errno 13] Permission denied: '/x'\n"),
        (ZeroDivisionError("oh"), 1, "etude: ZeroDivisionError: oh (unexpected, so a fault of etude's;"),
        (KeyboardInterrupt(), 130, "etude: interrupted\n"),
        (KeyboardInterrupt("interrupted after step 3"), 130, "etude: interrupted after step 3\n"),
    ],
)
def test_every_error_has_its_status(
    error: BaseException, status: int, says: str, calls: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
):
    def fail(*_args: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules["etude.recipes.run"], "train", fail, raising=True)
    assert main(["train", "maze"]) == status
    assert capsys.readouterr().err.startswith(says)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ETUDE_DEBUG", "1")
    with pytest.raises(UsageError, match="unknown verb"):
        main(["xyzzy"])


# the verbs ------------------------------------------------------------------------------------------------------------


def test_train_a_recipe_with_changes_wherever_options_stand(calls: list[Any]):
    assert main(["train", "--fresh", "maze", "train.steps=3", "--quiet", "seed=1"]) == 0
    assert calls == [("train", (load_recipe("maze", ["train.steps=3", "seed=1"]),), {"fresh": True, "quiet": True})]


def test_train_without_a_recipe(calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "true").mkdir()  # a name that TOML would read as something else than text
    words = ["--student", "true", "--teacher", "etude:maze-teacher", "--prompts", "p.jsonl", "train.steps=3"]
    assert main(["train", *words]) == 0
    (_, (recipe,), options) = calls[0]
    assert options == {"fresh": False, "quiet": False}
    assert recipe.name == "true-from-etude-maze-teacher"
    assert recipe.student.model == str(tmp_path / "true")
    assert recipe.teacher.model == "etude:maze-teacher"
    assert recipe.data.prompts == str(tmp_path / "p.jsonl")
    assert (recipe.train.steps, recipe.terms[0].divergence, recipe.sampler.student_fraction) == (3, "reverse_kl", 1.0)


def test_the_named_options_change_a_recipe_too(calls: list[Any]):
    assert main(["train", "maze", "--student", "Qwen/Qwen2.5-0.5B"]) == 0
    assert calls[0][1][0].student.model == "Qwen/Qwen2.5-0.5B"


def test_a_recipe_file_with_an_equals_sign_in_its_path(calls: list[Any], tmp_path: Path):
    path = tmp_path / "lr=1.toml"
    path.write_text('student.model = "s"\nteacher.model = "t"\ndata.prompts = "p"\n')
    assert main(["train", str(path), "seed=1"]) == 0
    assert (calls[0][1][0].name, calls[0][1][0].seed) == ("lr=1", 1)


def test_check_config_only_asks_nothing_of_the_run(calls: list[Any], capsys: pytest.CaptureFixture[str]):
    assert main(["check", "maze", "--config-only"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("term reverse_kl: exact gradient: ")
    assert "maze: the recipe is sound" in out
    assert calls == []


def test_check(calls: list[Any], capsys: pytest.CaptureFixture[str]):
    assert main(["check", "maze"]) == 0
    assert calls == [("check", (load_recipe("maze"),), {})]
    out = capsys.readouterr().out
    assert out.startswith("term reverse_kl: exact gradient: ")
    assert out.endswith("maze: pass\n")


class TestCheckOfAPair:
    @pytest.fixture
    def recipe(self, tmp_path: Path) -> Path:
        path = tmp_path / "tiny.toml"
        path.write_text(toml_text(tiny_recipe(tmp_path)), encoding="utf-8")
        return path

    def test_the_table(self, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", str(recipe)]) == 0  # a random student is warned about, not refused
        out = capsys.readouterr().out
        assert re.search(r"^gradient +pass +1 term on \d+ tokens", out, flags=re.MULTILINE)
        assert re.search(r"^ +-> warm-start the student", out, flags=re.MULTILINE)
        assert re.search(r"^\S+prompts.jsonl:1, both: w0$", out, flags=re.MULTILINE)
        assert out.endswith("tiny.toml: warn\n")
        assert not (recipe.parent / "run").exists()

    def test_json(self, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", str(recipe), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["recipe"], report["verdict"]) == (str(recipe), "warn")
        assert report["terms"]["reverse_kl"]["kind"] == "exact"
        [stage] = report["stages"]
        assert (stage["stage"], stage["verdict"]) == (None, "warn")
        by_name = {finding["check"]: finding for finding in stage["findings"]}
        assert by_name["identity"]["figures"]["divergence"] == pytest.approx(0.0, abs=1e-7)  # case 22
        assert by_name["warm-start"]["cure"].startswith("warm-start the student")

    def test_a_refusal_is_the_status(self, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
        copy = f"teacher.model={shutil.copytree(recipe.parent / 'student', recipe.parent / 'copy')}"
        assert main(["check", str(recipe), copy, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["verdict"] == "refuse"
        assert main(["check", str(recipe), copy, 'preflight.allow=["difference"]']) == 0
        assert "(allowed)" in capsys.readouterr().out

    def test_what_cannot_be_read_is_a_finding(self, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", str(recipe), "sampler.max_new_tokens=64", "--json"]) == 2
        [stage] = json.loads(capsys.readouterr().out)["stages"]
        [finding] = stage["findings"]
        assert finding["check"] == "data"
        assert "context window" in finding["evidence"]

    @pytest.mark.parametrize("words", [["--config-only"], []])
    def test_an_illegal_recipe_is_json_too(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", "maze", "terms.0.support=sampled", "terms.0.form=k1", "--json", *words]) == 2
        report = json.loads(capsys.readouterr().out)
        assert report["verdict"] == "refuse"
        assert "k1-loss" in report["stages"][0]["findings"][0]["evidence"]

    def test_config_only_as_json(self, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", "maze", "--config-only", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["terms"]["reverse_kl"]["kind"] == "exact"
        assert calls == []


def test_show_lists_the_shipped_recipes(capsys: pytest.CaptureFixture[str]):
    assert main(["show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    assert all(len(line.split()) > 3 for line in lines)


def test_show_prints_a_recipe_that_is_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["show", "smollm2-prune", "train.steps=3"]) == 0
    out = capsys.readouterr().out
    assert "steps = 3                                       # command line\n" in out
    assert "# recipe smollm2-prune\n" in out
    assert "# default\n" in out
    (tmp_path / "shown.toml").write_text(out, encoding="utf-8")
    assert load_recipe(tmp_path / "shown.toml") == load_recipe("smollm2-prune", ["train.steps=3"])


def test_show_prints_stages_whole_and_says_what_is_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["show", "maze-two-stages", "stages.1.train.steps=3"]) == 0
    out = capsys.readouterr().out
    second = out.split("\n[[stages]]\n")[2]
    for line in (
        'name = "on-policy"                              # recipe maze-two-stages\n',
        "steps = 3                                       # command line\n",
        'divergence = "reverse_kl"                       # method opd\n',
        "learning_rate = 0.002                           # the recipe's\n",
        "clip_norm = 1.0                                 # default\n",
    ):
        assert line in second
    (tmp_path / "shown.toml").write_text(out, encoding="utf-8")
    assert load_recipe(tmp_path / "shown.toml") == load_recipe("maze-two-stages", ["stages.1.train.steps=3"])


def test_check_speaks_of_every_stage(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "maze-two-stages", "--config-only"]) == 0
    out = capsys.readouterr().out
    assert "term 1-warm-up/forward_kl: exact gradient: " in out
    assert "term 2-on-policy/reverse_kl: exact gradient: " in out
    words = [
        "check",
        "maze-two-stages",
        "--config-only",
        "stages.1.terms.0.support=sampled",
        "stages.1.terms.0.form=k1",
    ]
    says = 'recipe maze-two-stages: stages.1: terms.0 ("reverse_kl") is refused (k1-loss)'
    assert refused(capsys, *words).startswith(says)


def test_show_keys_of_stages_points_to_the_tables(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "--keys", "stages"]) == 0
    out = capsys.readouterr().out
    assert 'stages.0.name = "stage"\n    text\n' in out
    assert "stages.0.sampler\n    table\n    Changes to [sampler].\n" in out
    assert "student_fraction" not in out


def test_show_as_written(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "starter", "--as-written"]) == 0
    assert capsys.readouterr().out == shipped_recipes()["starter"].read_text(encoding="utf-8")


def test_show_keys(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "--keys", "optim", "loss"]) == 0
    out = capsys.readouterr().out
    assert "optim.learning_rate = 1e-05\n" in out
    assert "loss.temperature = 1.0\n" in out
    assert "train.steps" not in out


def test_methods(capsys: pytest.CaptureFixture[str]):
    assert main(["methods"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["method", "sampler", "teacher", "support", "divergence", "estimator", "reduction"]
    assert "gkd" in [row.split()[0] for row in table]
    assert main(["methods", "gkd"]) == 0
    assert "arXiv 2306.13649" in capsys.readouterr().out
    assert main(["methods", "--legality"]) == 0
    assert capsys.readouterr().out == legality_page()


def test_record_names_one_folder_for_rows_and_scores(calls: list[Any]):
    assert main(["record", "maze", "--rounds", "3", "seed=1"]) == 0
    (_, (recipe,), options) = calls[0]
    assert options == {"rounds": 3, "quiet": False}
    assert (recipe.sampler.recorded, recipe.teacher.scores, recipe.seed) == ("recordings/maze",) * 2 + (1,)


def test_record_goes_where_the_recipe_or_the_person_says(calls: list[Any]):
    assert main(["record", "lightning", "--quiet"]) == 0
    assert main(["record", "lightning", "teacher.scores=there"]) == 0
    assert main(["record", "lightning", "--output", "there"]) == 0
    found = [(recipe.sampler.recorded, recipe.teacher.scores) for _, (recipe,), _ in calls]
    assert found == [("recordings/lightning",) * 2, ("recordings/lightning", "there"), ("there",) * 2]
    assert calls[0][2] == {"rounds": None, "quiet": True}


def test_what_cannot_be_trained_from_a_recording_is_not_recorded(calls: list[Any], capsys: pytest.CaptureFixture[str]):
    assert 'terms.0 ("reverse_kl") is refused (uncorrected-replay): replayed or recorded tokens' in refused(
        capsys, "record", "maze", "terms.0.support=sampled", "sampler.temperature=1.0"
    )
    assert refused(capsys, "record").startswith("a recipe is needed first")
    assert calls == []


def test_export(calls: list[Any], capsys: pytest.CaptureFixture[str]):
    assert main(["export", "runs/x", "--merge"]) == 0
    assert main(["export", "runs/x", "--to", "there"]) == 0
    assert calls == [
        ("export", (Path("runs/x"),), {"to": Path("runs/x/export"), "merge": True}),
        ("export", (Path("runs/x"),), {"to": Path("there"), "merge": False}),
    ]
    assert capsys.readouterr().out == "export was called\n" * 2


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A folder of experiments, and the words that its quickstart was given."""
    (tmp_path / "quickstart.py").write_text('"""Watch it work.\n\nMore."""\n\ndef main(words): ...\n')
    (tmp_path / "when_it_helps.py").write_text('"""Where the gap closes."""\n\ndef main(words): ...\n')
    (tmp_path / "shared_part.py").write_text('"""Not a command."""\n')
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr("etude.cli.main.EXPERIMENTS_FOLDER", tmp_path)
    given: list[list[str]] = []
    module = ModuleType("etude.experiments.quickstart")
    module.__dict__["main"] = lambda words: given.append(words) or 3
    monkeypatch.setitem(sys.modules, "etude.experiments.quickstart", module)
    return given


@pytest.mark.parametrize("words", [["experiment", "quickstart"], ["quickstart"]])
def test_an_experiment_gets_its_own_words_and_gives_the_status(words: list[str], experiments: list[list[str]]):
    assert main([*words, "--seed", "1", "--help"]) == 3
    assert experiments == [["--seed", "1", "--help"]]


def test_experiments_are_listed_without_being_imported(experiments: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["experiment"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  quickstart     Watch it work.",
        "  when-it-helps  Where the gap closes.",
    ]


# without torch, at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["check", "maze", "--config-only"],
        ["show"],
        ["show", "maze"],
        ["show", "--keys"],
        ["methods"],
        ["methods", "gkd"],
        ["methods", "--legality"],
        ["experiment"],
        ["xyzzy"],
    ],
)
def test_answers_at_once_and_without_torch(words: list[str]):
    program = (
        "import json, resource, sys\n"
        "from etude.cli.main import main\n"
        f"main({words!r})\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(json.dumps({'heavy': heavy, 'seconds': usage.ru_utime + usage.ru_stime}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["heavy"] == []
    # Processor time, which other processes on the machine stretch but little; half a second is the promise.
    assert found["seconds"] < 0.5


def test_python_dash_m(tmp_path: Path):
    command = [sys.executable, "-m", "etude", "check", "none.toml", "--config-only"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("etude: recipe file none.toml does not exist")


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m etude show --keys | head -1"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=os.environ)
    assert ran.stderr == ""
