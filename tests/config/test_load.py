from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from etude.axes.schedules import Ramp
from etude.config.load import dump_toml, explain, find_recipe, load_recipe, shipped_recipes, verdicts
from etude.errors import LegalityError, RecipeError

LEAST: Mapping[str, Any] = {"student": {"model": "s"}, "teacher": {"model": "t"}, "data": {"prompts": "/p.jsonl"}}
LEAST_TOML = 'student.model = "s"\nteacher.model = "t"\ndata.prompts = "p.jsonl"\n'


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def origins(*args: Any) -> dict[str, str]:
    return {setting.key: setting.origin for setting in explain(*args)}


# where a recipe comes from --------------------------------------------------------------------------------------------


def test_from_a_mapping_a_path_and_a_shipped_name(in_folder: Path):
    (in_folder / "mine.toml").write_text(LEAST_TOML)
    assert load_recipe(LEAST).name == "run"
    assert load_recipe("mine.toml").name == "mine"
    assert load_recipe(in_folder / "mine.toml").output == "runs/mine"
    assert load_recipe("maze").name == "maze"
    assert find_recipe("maze") == shipped_recipes()["maze"]


def test_a_file_name_that_is_no_run_name_is_made_one(in_folder: Path):
    for file, name in (
        ("my recipe (2).toml", "my-recipe-2-"),
        ("lr=1.toml", "lr=1"),
        (".hidden.toml", "hidden"),
        ("...toml", "run"),
    ):
        (in_folder / file).write_text(LEAST_TOML)
        assert load_recipe(in_folder / file).name == name


def test_a_byte_order_mark_and_windows_line_ends_are_read(in_folder: Path):
    (in_folder / "mine.toml").write_bytes(b"\xef\xbb\xbf" + LEAST_TOML.replace("\n", "\r\n").encode())
    assert load_recipe("mine.toml").student.model == "s"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("maz", "no shipped recipe is called 'maz', .* did you mean maze?"),
        ("xyzzy", "no shipped recipe is called 'xyzzy', .* shipped are .*maze"),
        ("mine", r"did you mean the file \./mine\.toml\?"),
        ("no/maze.toml", r"recipe file no/maze\.toml does not exist; .*did you mean maze\?"),
        (Path("folder"), "recipe file folder is a folder"),
    ],
)
def test_a_missing_recipe_names_the_nearest(in_folder: Path, source: str | Path, says: str):
    (in_folder / "mine.toml").write_text(LEAST_TOML)
    (in_folder / "folder").mkdir()
    with pytest.raises(RecipeError, match=says):
        load_recipe(source)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"seed = 1\nname = x\n", "bad.toml:2: "),
        (b"seed = 1\nseed = 2", "bad.toml:2: "),
        (b'seed = 1\n\nname = "open', "bad.toml:3: "),
        (b"[student\n", "bad.toml:1: "),
        (b"seed = 1" + b"0" * 5000, "bad.toml: cannot be read as TOML: "),
        (b"seed = " + b"[" * 5000, "bad.toml"),
        (b"seed = 1 #\xff", "bad.toml: byte 10 is not UTF-8 text; save the file as UTF-8"),
    ],
)
def test_malformed_files_name_file_and_line(in_folder: Path, content: bytes, says: str):
    (in_folder / "bad.toml").write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe("bad.toml")
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_relative_paths_start_at_the_recipe_file_and_overrides_where_one_is(in_folder: Path):
    for folder in ("recipes/student", "teacher"):
        (in_folder / folder).mkdir(parents=True)
    text = 'student.model = "student"\nteacher.model = "teacher"\ndata.prompts = "p.jsonl"\noutput = "out"\n'
    (in_folder / "recipes/mine.toml").write_text(text)
    recipe = load_recipe("recipes/mine.toml")
    assert recipe.student.model == str(in_folder / "recipes/student")
    assert recipe.teacher is not None
    assert recipe.teacher.model == "teacher"  # no such folder beside the recipe: a hub name
    assert recipe.data.prompts == str(in_folder / "recipes/p.jsonl")
    assert recipe.output == "out"  # of the current folder, always
    changed = load_recipe("recipes/mine.toml", ["teacher.model=teacher", "data.prompts=p.jsonl"])
    assert changed.teacher is not None
    assert changed.teacher.model == str(in_folder / "teacher")
    assert changed.data.prompts == str(in_folder / "p.jsonl")
    (in_folder / "recipes" / "x.gguf").touch()
    for name, found in {"x.gguf": str(in_folder / "recipes" / "x.gguf"), "y.gguf": "y.gguf"}.items():
        (in_folder / "recipes/mine.toml").write_text(text.replace('"teacher"', f'"{name}"'))
        filed = load_recipe("recipes/mine.toml").teacher
        assert filed is not None
        assert filed.model == found
    (in_folder / "recipes/mine.toml").write_text(text)
    named = load_recipe("recipes/mine.toml", ["reference.model=teacher", "terms.0.teacher=reference"])
    assert named.reference is not None
    assert named.reference.model == str(in_folder / "teacher")


# layers ---------------------------------------------------------------------------------------------------------------


def test_layers_from_weakest_to_strongest():
    source = {**LEAST, "method": "gkd", "sampler": {"student_fraction": 0.25}, "optim": {"learning_rate": 1e-4}}
    recipe = load_recipe(source, ["optim.learning_rate=1e-3", "terms.0.divergence=forward_kl"])
    assert (recipe.sampler.student_fraction, recipe.sampler.other) == (0.25, "dataset")
    assert recipe.optim.learning_rate == 1e-3
    assert recipe.terms[0].divergence == "forward_kl"


def test_where_each_value_comes_from():
    source = {**LEAST, "method": "gkd", "sampler": {"student_fraction": 0.25}}
    found = origins(source, ["terms.0.beta=0.1", "train.steps=3"])
    assert found["method"] == found["student.model"] == found["sampler.student_fraction"] == "recipe"
    assert found["terms.0.support"] == found["terms.0.divergence"] == "method gkd"
    assert found["terms.0.beta"] == found["train.steps"] == "command line"
    assert found["optim.learning_rate"] == found["name"] == found["terms.0.name"] == "default"
    assert origins("maze")["data.task"] == "recipe maze"


def test_a_method_may_be_named_changed_and_taken_away_by_an_override():
    assert load_recipe(LEAST, ["method=gkd"]).terms[0].divergence == "jsd"
    source = {**LEAST, "method": "gkd"}
    assert load_recipe(source, ["method=supervised-kd"]).terms[0].divergence == "forward_kl"
    assert load_recipe(source, ["method="]).terms[0].divergence == "reverse_kl"


def test_an_empty_override_takes_a_key_back_to_its_default():
    source = {**LEAST, "optim": {"final_fraction": 0.5}, "student": {"model": "s", "lora": {"rank": 8}}}
    recipe = load_recipe(source, ["optim.schedule=constant", "optim.final_fraction=", "student.lora="])
    assert recipe.optim.final_fraction == 1.0
    assert recipe.student.lora is None


def test_a_table_can_be_switched_on_by_an_override():
    lora = load_recipe(LEAST, ["student.lora={}"]).student.lora
    assert lora is not None
    assert lora.rank == 32
    lora = load_recipe(LEAST, ["student.lora.rank=4"]).student.lora
    assert lora is not None
    assert lora.rank == 4


def test_a_second_term_by_overrides():
    recipe = load_recipe(LEAST, ["terms.0.divergence=jsd", "terms.1.coefficient=0.1"])
    assert [(term.name, term.coefficient) for term in recipe.terms] == [("jsd", 1.0), ("reverse_kl", 0.1)]


@pytest.mark.parametrize("word", ["nan", "1", "1.5", "true", "2026-01-01", "0.5b"])
def test_text_needs_no_quotes_on_the_command_line(word: str):
    assert load_recipe(LEAST, [f"name={word}"]).name == word
    teacher = load_recipe(LEAST, [f"teacher.model={word}"]).teacher
    assert teacher is not None
    assert teacher.model == word


def test_a_method_steps_back_where_the_recipe_lets_the_student_write_all():
    recipe = load_recipe({**LEAST, "method": "gkd", "sampler": {"student_fraction": 1.0}})
    assert (recipe.sampler.other, recipe.terms[0].divergence) == (None, "jsd")


# complaints -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        # unknown keys
        ("studnet.model=x", "unknown key studnet; did you mean student?"),
        ("optim.learning_rat=1", "unknown key optim.learning_rat; did you mean optim.learning_rate?"),
        ("terms.0.divergance=jsd", "unknown key terms.0.divergance; did you mean terms.0.divergence?"),
        ("learning_rate=1", "unknown key learning_rate; did you mean optim.learning_rate?"),
        ("student.lora.learning_rate=1", "unknown key student.lora.learning_rate; did you mean optim.learning_rate?"),
        ("data.columns.promt=x", "unknown key data.columns.promt; did you mean data.columns.prompt?"),
        ("loss.xyzzy=1", "unknown key loss.xyzzy; loss has temperature, chunk_bytes"),
        # wrong types
        ("optim.learning_rate=fast", 'optim.learning_rate: found "fast" (text), expected a number'),
        ("train.steps=1.5", "train.steps: found 1.5 (a number), expected a whole number"),
        ("train.steps=true", "train.steps: found true, expected a whole number"),
        ("student.dropout=1", "student.dropout: found 1 (a whole number), expected true or false"),
        ("student.keep_layers=3", "student.keep_layers: found 3 (a whole number), expected a list"),
        ('student.keep_layers=["a"]', 'student.keep_layers.0: found "a" (text), expected a whole number'),
        (
            "student.lora.target_modules=3",
            "student.lora.target_modules: found 3 (a whole number), expected text or a list",
        ),
        ("data.columns.prompt=3", "data.columns.prompt: found 3 (a whole number), expected text"),
        ("data.prompts.x=3", "data.prompts: found a table, expected text"),
        ("optim=3", "optim: found 3 (a whole number), expected a table"),
        ("train.steps=2026-01-01", "train.steps: found 2026-01-01 (a date), expected a whole number"),
        # wrong values
        (
            "terms.0.divergence=jds",
            'terms.0.divergence: found "jds" (text), expected one of forward_kl, reverse_kl, jsd',
        ),
        ("terms.0.divergence=jds", "; did you mean jsd?"),
        ("sampler.other=student", 'sampler.other: found "student" (text), expected one of dataset, teacher'),
        ("optim.learning_rate=0", "optim.learning_rate: found 0 (a whole number), expected more than 0"),
        ("optim.learning_rate=nan", "optim.learning_rate: found nan (a number), expected a finite number"),
        ("optim.beta1=1", "optim.beta1: found 1 (a whole number), expected less than 1"),
        ("sampler.top_p=1.5", "sampler.top_p: found 1.5 (a number), expected at most 1"),
        ("seed=-1", "seed: found -1 (a whole number), expected at least 0"),
        ("student.keep_layers=[]", "student.keep_layers: found [] (a list), expected at least 1 entry"),
        ("terms=[]", "terms: found [] (a list), expected at least 1 entry"),
        ('name=""', 'name: found "" (text), expected some text'),
        ("name=[1]", "name: found [1] (a list), expected text"),
        ("name=../../x", 'name: found "../../x" (text), expected letters, digits, -, _, = and, after the first, dots'),
        ("name=..", 'name: found ".." (text), expected letters, digits'),
        ("terms.0.name=a b", 'terms.0.name: found "a b" (text), expected letters, digits, - and _'),
        # refused by the schema's own checks
        (
            "terms.0.beta=0.1",
            'terms.0: beta = 0.1 does nothing here, it counts only when divergence is "jsd" or "alpha_beta"; remove it',
        ),
        ("method=gdk", 'unknown method "gdk"; did you mean gkd?'),
        ("method=[1]", "unknown method [1]; expected one of opd, gkd"),
        ("seed=two\nlines", 'seed: found "two\\nlines" (text), expected a whole number'),
        (
            "seed=a " + "very " * 99 + "long text",
            "very... (text), expected a whole number",
        ),
        ("method=xyzzy", 'unknown method "xyzzy"; expected one of opd, gkd'),
    ],
)
def test_a_complaint_names_layer_key_found_and_expected(override: str, says: str):
    with pytest.raises(RecipeError) as caught:
        load_recipe(LEAST, [override])
    assert says in str(caught.value)
    assert str(caught.value).startswith("command line: ")
    assert "\n" not in str(caught.value)


def test_what_does_nothing_is_laid_to_the_layer_that_wrote_it():
    source = {**LEAST, "method": "seqkd", "sampler": {"other": "teacher"}}
    with pytest.raises(RecipeError, match=r'^recipe: sampler: other = "teacher" does nothing here'):
        load_recipe(source, ["sampler.student_fraction=1.0"])
    with pytest.raises(RecipeError, match="^command line: terms.0: beta = 0.1 does nothing here"):
        load_recipe(source, ["terms.0.beta=0.1"])


@pytest.mark.parametrize(
    ("method", "override", "gone"),
    [
        ("gkd-rl", "terms.0.divergence=reverse_kl", {"terms.0.beta"}),
        ("distillm", "sampler.replay_fraction=0.0", {"sampler.replay_capacity"}),
        ("lightning", "terms.0.importance=ratio", {"terms.0.clip"}),  # what hangs on another key of the method
    ],
)
def test_what_a_method_says_steps_back_where_a_stronger_word_makes_it_idle(method: str, override: str, gone: set[str]):
    source = {**LEAST, "method": method, "data.verifier": "exact"}
    as_published, changed = ({one.key for one in explain(source, changes)} for changes in ([], [override]))
    key = override.partition("=")[0]
    assert {one for one in as_published - changed if not one.startswith(key)} == gone
    alone = load_recipe({**LEAST, "data.verifier": "exact", "stages": [{"method": method}]}, [f"stages.0.{override}"])
    recipe = load_recipe(source, [override])
    assert (alone.stage_recipes[0].terms, alone.stage_recipes[0].sampler) == (recipe.terms, recipe.sampler)


def test_of_a_method_and_a_written_value_the_written_one_is_refused():
    source = {**LEAST, "method": "gkd-rl", "data.verifier": "exact"}
    with pytest.raises(RecipeError, match=r"^command line: terms.0: beta = 0.5 does nothing here"):
        load_recipe(source, ["terms.0.divergence=reverse_kl", "terms.0.beta=0.5"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim.learning_rat = 1\n", "mine.toml: unknown key optim.learning_rat; did you mean optim.learning_rate?"),
        ("train.steps = '3'\n", 'mine.toml: train.steps: found "3" (text), expected a whole number'),
        ("data.task = 'maze'\n", "mine.toml: data: found prompts and task; expected exactly one of"),
    ],
)
def test_a_complaint_names_the_file(in_folder: Path, text: str, says: str):
    (in_folder / "mine.toml").write_text(LEAST_TOML + text)
    with pytest.raises(RecipeError) as caught:
        load_recipe("mine.toml", ["train.epochs=1"])
    assert str(caught.value).startswith(says)


def test_a_missing_key_is_named_with_its_meaning():
    with pytest.raises(RecipeError, match=r"recipe: found no student\.model; expected a name on the hub, a folder, or"):
        load_recipe({**LEAST, "student": {}})
    with pytest.raises(RecipeError, match=r"recipe: found no data; expected where prompts come from"):
        load_recipe({"student": {"model": "s"}, "teacher": {"model": "t"}})


def test_unknown_keys_are_named_before_what_they_cause():
    with pytest.raises(RecipeError, match=r"unknown key student\.modle"):
        load_recipe({**LEAST, "student": {"modle": "s"}})


@pytest.mark.parametrize(
    "overrides",
    [
        ["terms.0.support=sampled", "terms.0.form=k1"],
        ["terms.0.support=sampled", "terms.0.form=k3"],
        ["terms.0.estimator=policy_gradient"],
        ["terms.0.support=sampled", "sampler.top_p=0.9"],
        ["terms.0.support=sampled", "sampler.top_k=9"],
        ["terms.0.support=sampled", "sampler.temperature=0.7"],
        ["terms.0.support=sampled", "loss.temperature=0.7"],
        ["terms.0.support=sampled", "train.epochs=2"],
        ["terms.0.support=sampled", "sampler.student_fraction=0.5"],
        ["terms.0.teacher=label"],
    ],
)
def test_terms_without_the_right_gradient_are_refused(overrides: list[str]):
    with pytest.raises(LegalityError, match=r'^recipe: terms\.0 \("reverse_kl"\) is refused'):
        load_recipe(LEAST, overrides)


def test_each_term_has_a_verdict():
    sampled = {"name": "sampled", "support": "sampled", "estimator": "policy_gradient", "importance": "ppo_clip"}
    recipe = load_recipe({**LEAST, "terms": [{}, sampled]})
    assert {name: [rule.kind for rule in rules] for name, rules in verdicts(recipe).items()} == {
        "reverse_kl": ["exact"],
        "sampled": ["surrogate"],
    }


def test_a_surrogate_has_all_its_reasons():
    judged = {"name": "judged", "support": "sampled", "estimator": "policy_gradient", "importance": "ppo_clip"}
    recipe = load_recipe(
        {**LEAST, "terms": [{**judged, "whiten": True, "reduction": "sequence_mean", "train_truncated": False}]}
    )
    assert [rule.name for rule in verdicts(recipe)["judged"]] == [
        "ppo-clip",
        "shaped-advantages",
        "chosen-by-draw",
        "weighed-by-length",
    ]


# there and back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["method=thinking-machines", "student.lora={}", "student.lora.target_modules=['q_proj', 'v_proj']"],
        ["method=gkd", "terms.1={teacher='label', divergence='forward_kl', sources=['dataset'], name='text'}"],
        ["data.template_options={enable_thinking=false, tools=[{name='a'}]}", "data.system_prompt='''a\n\"b\"'''"],
        ["data.prompts=", "data.dataset=d", "data.eval_split=test", "data.columns={prompt='question', answer='a b'}"],
        ["optim.schedule=constant", "student.keep_layers=[0, 2]", "sampler.stop=['</s>']"],
    ],
)
def test_a_dumped_recipe_loads_again_and_is_equal(in_folder: Path, overrides: list[str]):
    recipe = load_recipe(LEAST, overrides)
    (in_folder / "again.toml").write_text(dump_toml(recipe), encoding="utf-8")
    again = load_recipe("again.toml")
    assert again == recipe
    assert dump_toml(again) == dump_toml(recipe)


# numbers that move with the step --------------------------------------------------------------------------------------

RISING: Mapping[str, Any] = {"start": 0.0, "end": 1.0}


def test_a_ramp_that_names_no_end_ends_with_the_run():
    table = {
        "sampler": {"student_fraction": RISING},
        "terms": [{}, {"name": "x", "coefficient": {**RISING, "first": 3}}],
    }
    for said, steps in ((), 200), (["train.steps=50"], 50), (["train.steps=50", "train.steps="], 200):
        recipe = load_recipe({**LEAST, **table}, said)
        assert recipe.sampler.fraction == Ramp(0.0, 1.0, kind="linear", last=steps)
        assert recipe.terms[1].values()["coefficient"] == Ramp(0.0, 1.0, kind="linear", first=3, last=steps)
        assert load_recipe(tomllib.loads(dump_toml(recipe))) == recipe


def test_where_the_end_of_a_ramp_comes_from():
    table = {**LEAST, "sampler": {"student_fraction": RISING}}
    found = {setting.key: setting for setting in explain(table, ["train.steps=50"])}
    last = found["sampler.student_fraction.last"]
    assert (last.value, last.origin) == (50, "train.steps")
    assert found["sampler.student_fraction.end"].origin == "recipe"
    said = origins(table, ["sampler.student_fraction.last=9"])
    assert said["sampler.student_fraction.last"] == "command line"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("imitkd", "sampler.student_fraction"),
        ("distillm", "sampler.replay_fraction"),
        ("prefix", "terms.0.first_tokens"),
    ],
)
def test_methods_that_move_do_so_over_the_whole_run(name: str, key: str):
    for steps in (7, 1000):
        found = {setting.key: setting.value for setting in explain({**LEAST, "method": name}, [f"train.steps={steps}"])}
        assert found[f"{key}.last"] == steps


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["sampler.student_fraction={start=0.0, end=1.0, kind='step'}"], "a step ramp has end 1.0 and last None"),
        (["sampler.student_fraction={start=0.0, end=1.0, first=50}", "train.steps=50"], "over steps 50 to 50"),
        (["sampler.student_fraction={start=0.0, end=1.0}", "train.steps=0"], "train.steps"),
        (["sampler.student_fraction={start=0.0, end=1.0}", "train.steps=many"], "train.steps"),
        (["sampler.student_fraction={start=0.0}"], "found no sampler.student_fraction.end; expected the value at last"),
        (["sampler.student_fraction={start=0.0, end=1.0, last=0}"], "sampler.student_fraction.last: found 0"),
    ],
)
def test_a_ramp_that_goes_nowhere_is_refused(changes: list[str], sentence: str):
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        load_recipe(LEAST, changes)
