"""From a recipe file, a shipped recipe's name or a mapping to a checked `Recipe`; torch is never imported.

Four layers, each stronger than the one before: the schema's defaults, the recipe's `method`, the recipe itself, and
`key=value` overrides. What a method says and a stronger layer has made idle is dropped; what a person wrote and would
do nothing is refused. Every error is one sentence that names the layer, the key, what was found and what was expected.
The Python door, the command line and `etude.recipes` call `load_recipe`.

Relative paths (`data.prompts`; `data.dataset` and the `model` of student, teacher and reference where such a folder
exists) are looked up from the folder of the recipe file they stand in, and from the current folder for overrides and
mappings.
`output` is always taken from the current folder: runs belong to where one works, not beside the recipe.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from etude.axes.legality import Point, Rule, reasons, require_legal
from etude.config.complaints import nearest, sentence, suggestion
from etude.config.draft import COMMAND_LINE, Draft, Setting, method_layer, parse_override, without_stage
from etude.config.methods import METHODS
from etude.config.noun import fields_below, noun_within, spelled
from etude.config.plain import is_array, is_table, leaves
from etude.config.schema import Recipe
from etude.config.stages import (
    STAGE_KEY,
    as_stage,
    is_inherited,
    laid_over,
    require_effect,
    require_stage_keys,
    split_stages,
    validated,
)
from etude.config.tables.ramp import RampConfig
from etude.config.tables.stages import UNNAMED, StageConfig
from etude.config.tables.training import TrainConfig
from etude.config.write import dump_toml
from etude.errors import LegalityError, RecipeError

__all__ = ["Setting", "dump_toml", "explain", "load_recipe", "shipped_recipes", "verdicts"]

SHIPPED_FOLDER = Path(__file__).parent.parent / "recipes"

TEXT_KEYS = frozenset(key for key, field in fields_below(Recipe) if cast(object, field.annotation) in (str, str | None))

RAMP_KEYS = frozenset(key for key, field in fields_below(Recipe) if noun_within(field.annotation) is RampConfig)
STEPS_KEY = "train.steps"

RecipeSource = str | Path | Mapping[str, Any]


def load_recipe(source: RecipeSource, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        source: a path (ends in `.toml` or has a slash), the name of a shipped recipe, or the settings themselves.
        overrides: `key=value` with dotted keys; values are read as TOML, bare words as text; `key=` takes a key back to
            its default.

    Raises:
        RecipeError: no such file, not TOML, an unknown key, a wrong type, options that contradict each other.
        LegalityError: a term without a gradient, or with another objective's.
    """
    return _load(source, overrides)[0]


def explain(source: RecipeSource, overrides: Sequence[str] = ()) -> list[Setting]:
    """Every value of the recipe with its origin, in the schema's order. Raises as `load_recipe`."""
    recipe, origin_of = _load(source, overrides)
    table = recipe.model_dump(mode="json", exclude_none=True)
    return [Setting(key, value, origin_of(key) or "default") for key, value in leaves(table)]


def verdicts(recipe: Recipe) -> dict[str, tuple[Rule, ...]]:
    """What the legality table says of each term, by its name; in a recipe with stages by stage/name.

    Several rules where several make a surrogate of it, in the table's order, the one that decides first.

    Raises:
        LegalityError: a term is refused.
    """
    if recipe.stages is not None:
        stages = {stage.name: verdicts(stage) for stage in recipe.stage_recipes}
        return {f"{name}/{term}": rules for name, terms in stages.items() for term, rules in terms.items()}
    points = [Point.of(term.as_term, recipe.sampling, recipe.loss.temperature) for term in recipe.terms]
    for place, (term, point) in enumerate(zip(recipe.terms, points, strict=True)):
        require_legal(point, f'terms.{place} ("{term.name}")')
    return {term.name: reasons(point) for term, point in zip(recipe.terms, points, strict=True)}


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with etude, by name."""
    return {path.stem: path for path in sorted(SHIPPED_FOLDER.glob("*.toml"))}


def _load(source: RecipeSource, overrides: Sequence[str]) -> tuple[Recipe, Callable[[str], str | None]]:
    """The recipe, and which layer each of its keys comes from."""
    name, label, folder, settings = _read(source)
    changes = [_change(text) for text in overrides]
    draft = Draft()
    draft.lay(settings, label, folder)
    _override(draft, changes)
    if method := draft.settings.get("method"):  # known only now: the other layers go over it once more
        draft = _from_method(method)
        draft.lay(settings, label, folder)
        _override(draft, changes)
    draft.lay({} if "name" in draft.settings else {"name": name}, "default", folder)
    whole, said = split_stages(draft)
    stages: dict[str, Any] = {"stages": [StageConfig.model_construct() for _ in said]} if said else {}
    ended = _with_ends(whole)  # not in the whole itself: a stage has its own steps
    try:
        recipe = validated(ended, **stages)
    except ValidationError as error:
        raise RecipeError(sentence(error, lambda key: draft.origin(key) or label)) from None
    if not said:
        _require_legal(recipe, label)
        return recipe, ended.origin
    read = [_stage(whole, part, f"stages.{place}", label) for place, part in enumerate(said)]
    require_effect(whole, [part for _, part in read])
    recipe = recipe.model_copy(update={"stages": tuple(as_stage(stage) for stage, _ in read)})

    def origin_of(key: str) -> str | None:
        match = STAGE_KEY.fullmatch(key)
        if match is None:
            return ended.origin(key)
        part = read[int(match[1])][1]
        return "the recipe's" if is_inherited(part, whole, match[2]) else part.origin(match[2])

    return recipe, origin_of


def _stage(whole: Draft, said: Draft, where: str, label: str) -> tuple[Recipe, Draft]:
    """A stage as a recipe of its own; its complaints name the stage."""
    require_stage_keys(said, where)
    named, recipe_method = said.settings.get("method"), whole.settings.get("method")
    method = _from_method(Setting("method", named.value, f"{named.origin}: {where}")) if named else None
    draft = laid_over(whole, said, method, method_layer(recipe_method.value) if recipe_method else None)
    if "name" not in draft.settings:
        draft.put(Setting("name", named.value if named else UNNAMED, "default"))
    draft = _with_ends(draft)
    try:
        recipe = validated(draft, whole)
    except ValidationError as error:
        raise RecipeError(sentence(error, lambda key: f"{draft.origin(key) or label}: {where}")) from None
    _require_legal(recipe, f"{label}: {where}")
    return recipe, draft


def _with_ends(draft: Draft) -> Draft:
    """The same where each number that moves with the step and does not say where it ends does so with the run.

    A jump has no end to be guessed, and steps that are no number are the schema's to complain of.
    """
    said = draft.settings.get(STEPS_KEY)
    sound = said is not None and type(said.value) is int and said.value > 0
    steps = said.value if said and sound else TrainConfig.model_fields["steps"].default
    ended = Draft(dict(draft.settings))
    for ramp in {key.rpartition(".")[0] for key in draft.settings}:
        kind = draft.settings.get(f"{ramp}.kind")
        is_ramp = re.sub(r"\.\d+\.", ".0.", ramp) in RAMP_KEYS
        if is_ramp and not draft.has(f"{ramp}.last") and not (kind and kind.value == "step"):
            ended.put(Setting(f"{ramp}.last", steps, STEPS_KEY))
    return ended


def _require_legal(recipe: Recipe, label: str) -> None:
    try:
        verdicts(recipe)
    except LegalityError as error:
        raise LegalityError(f"{label}: {error}") from None


def _change(text: str) -> tuple[str, Any]:
    """An override; what looks like a number, a date or a truth value is text where only text can be meant."""
    key, value = parse_override(text)
    if (
        without_stage(key) not in TEXT_KEYS
        or value is None
        or isinstance(value, str)
        or is_array(value)
        or is_table(value)
    ):
        return key, value
    return key, text.partition("=")[2].strip()


def _override(draft: Draft, changes: Sequence[tuple[str, Any]]) -> None:
    for key, value in changes:
        if value is None:
            draft.remove(key)
        else:
            draft.lay({key: value}, COMMAND_LINE, Path.cwd())


def _from_method(method: Setting) -> Draft:
    if not isinstance(method.value, str) or method.value not in METHODS:
        hint = suggestion(str(method.value), METHODS)
        raise RecipeError(f"{method.origin}: unknown method {spelled(method.value)}; {hint}")
    draft = Draft()
    draft.lay(METHODS[method.value].settings, method_layer(method.value), Path.cwd())
    return draft


def _read(source: RecipeSource) -> tuple[str, str, Path, Mapping[str, Any]]:
    """Name of the run if it names none, what errors call the source, where its paths start, and its settings."""
    if isinstance(source, Mapping):
        return "run", "recipe", Path.cwd(), source
    path = find_recipe(source)
    label = f"recipe {source}" if path.parent == SHIPPED_FOLDER else str(source)
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", path.stem).lstrip(".") or "run", label, path.parent, _parse(path, label)


def find_recipe(source: str | Path) -> Path:
    """The file of a recipe named by its path (ends in `.toml` or has a slash) or, if shipped, by its name.

    Raises:
        RecipeError: there is none; names the nearest shipped recipe.
    """
    if isinstance(source, Path) or source.endswith(".toml") or "/" in source or "\\" in source:
        path = Path(source)
        if os.path.isfile(path):  # unlike the method, it does not raise on what cannot be a path
            return path
        found = "is a folder" if os.path.isdir(path) else "does not exist"
        raise RecipeError(f"recipe file {source} {found}; expected a .toml file or a shipped recipe{_near(path.stem)}")
    shipped = shipped_recipes()
    if source in shipped:
        return shipped[source]
    beside = next((f"./{name}" for name in (source, f"{source}.toml") if os.path.isfile(name)), None)
    hint = f"; did you mean the file {beside}?" if beside else _near(source)
    raise RecipeError(f"no shipped recipe is called '{source}', and a recipe file is named by its path{hint}")


def _near(name: str) -> str:
    hint = nearest(name, shipped_recipes())
    return f"; did you mean {hint}?" if hint else f"; shipped are {', '.join(shipped_recipes())}"


def _parse(path: Path, label: str) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{label}: byte {error.start} is not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{label}: cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at line (\d+), column \d+\)", str(error))
        line = place[1] if place else len(text.splitlines())
        message = str(error).removesuffix(" (at end of document)").replace(place[0] if place else "", "")
        raise RecipeError(f"{label}:{line}: {message}") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise RecipeError(f"{label}: cannot be read as TOML: {error}") from None
