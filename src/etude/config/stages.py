"""What each stage of a recipe says, laid over the recipe it belongs to.

A stage is a table of changes: what it does not say is the recipe's, and where that would do nothing in this stage it
steps back, while what the stage says itself is checked like a recipe of its own. Three things are not merged key by
key: terms, who writes where a method is named, and the source of prompts. `load.py` is the only caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from etude.config.draft import COMMAND_LINE, Draft, Setting, method_layer
from etude.config.methods import METHODS
from etude.config.noun import Idle, spelled
from etude.config.plain import leaves
from etude.config.schema import Recipe
from etude.config.tables.stages import StageConfig
from etude.errors import RecipeError

STAGE_KEY = re.compile(r"stages\.(\d+)(?:\.(.+))?")  # the whole stage, or a key in it

# Of [sampler], how rows are written; the rest is who writes them, which is a method's to say.
HOW_WRITTEN = frozenset(
    f"sampler.{name}"
    for name in ("temperature", "top_p", "top_k", "max_new_tokens", "samples_per_prompt", "dtype", "rows_per_batch")
) | {"sampler.stop"}
SOURCES_OF_PROMPTS = ("data.prompts", "data.dataset", "data.task")
STORED = ("teacher.scores",)  # outside of [sampler] and the terms, and still a method's to say
OF_METHODS = frozenset(map(method_layer, METHODS))
NOT_INHERITED = ("name", "output", "method")


def split_stages(draft: Draft) -> tuple[Draft, list[Draft]]:
    """The recipe without its stages, and what each stage says, by the keys of a recipe.

    Raises:
        RecipeError: a place among the stages is left out.
    """
    found = {key: match for key in draft.settings if (match := STAGE_KEY.fullmatch(key))}
    if any(key.startswith("stages") and key not in found for key in draft.settings):
        return draft, []  # no array of tables: the schema says so
    whole = Draft({key: setting for key, setting in draft.settings.items() if key not in found})
    count = len(draft.table["stages"]) if found else 0  # complains of gaps
    stages = [Draft() for _ in range(count)]
    for key, match in found.items():
        said = draft.settings[key]
        if match[2]:
            stages[int(match[1])].put(Setting(match[2], said.value, said.origin))
        elif said.value != {}:
            return draft, []  # no table: likewise
    return whole, stages


def laid_over(whole: Draft, said: Draft, method: Draft | None, recipe_method: str | None) -> Draft:
    """The recipe's settings with the stage's over them; those of its method, if it names one, between them."""
    draft = Draft(dict(whole.settings))
    for key in NOT_INHERITED:
        draft.remove(key)
    if method is not None:
        _remove(draft, (key for key in draft.settings if key.startswith("sampler.") and key not in HOW_WRITTEN))
        _remove(draft, (key for key, one in draft.settings.items() if one.origin == recipe_method))
        _remove(draft, (key for key in STORED if _is_of_method(whole, key)))
    if method is not None or said.has("terms"):
        draft.remove("terms")
    if any(key in said.settings for key in SOURCES_OF_PROMPTS):
        _remove(draft, SOURCES_OF_PROMPTS)
    for layer in (method, said):
        for setting in layer.settings.values() if layer else ():
            draft.put(setting)
    return draft


def _is_of_method(whole: Draft, key: str) -> bool:
    """Whether the recipe has what its method says there: a recipe written out whole says it itself."""
    method, said = whole.settings.get("method"), whole.settings.get(key)
    told = dict(leaves(METHODS[method.value].settings)) if method else {}
    return said is not None and key in told and said.value == told[key]


def _remove(draft: Draft, keys: Iterable[str]) -> None:
    for key in list(keys):
        draft.remove(key)


def require_stage_keys(said: Draft, where: str) -> None:
    """Refuse what is one for the whole run."""
    for key, setting in said.settings.items():
        table = key.partition(".")[0]
        if table in Recipe.model_fields and table not in StageConfig.model_fields:
            raise RecipeError(
                f"{setting.origin}: {where}: {table} is the same in all stages; write it outside of [[stages]]"
            )


def validated(draft: Draft, whole: Draft | None = None, **fixed: Any) -> Recipe:
    """The recipe; what does nothing in it and nobody wrote for it is taken out of its draft.

    That is what a method says and a stronger layer has made idle, and what a stage inherits from the `whole` recipe.

    Args:
        draft: of a recipe, or of a stage as a recipe of its own.
        whole: the recipe that the stage belongs to.
        fixed: keys beside the draft's.

    Raises:
        ValidationError: of what is left.
    """
    while True:
        try:
            return Recipe.model_validate(draft.table | fixed)
        except ValidationError as error:
            idle = next((key for key in _idle_keys(error) if _steps_back(draft, whole, key)), None)
            if idle is None:
                raise
            draft.remove(idle)


def _steps_back(draft: Draft, whole: Draft | None, key: str) -> bool:
    """Whether a key that does nothing was written neither in this recipe nor in this stage."""
    return draft.origin(key) in OF_METHODS or (whole is not None and is_inherited(draft, whole, key))


def _idle_keys(error: ValidationError) -> list[str]:
    found = [(detail["loc"], detail.get("ctx", {}).get("error")) for detail in error.errors()]
    return [".".join(map(str, (*place, idle.field))) for place, idle in found if isinstance(idle, Idle)]


def is_inherited(draft: Draft, whole: Draft, key: str) -> bool:
    """Whether a key is set in a stage, or everything below it is, by the recipe alone."""
    held = [one for known, one in draft.settings.items() if known == key or known.startswith(f"{key}.")]
    return bool(held) and all(setting is whole.settings.get(setting.key) for setting in held)


def require_effect(whole: Draft, stages: Sequence[Draft]) -> None:
    """Refuse a change on the command line that no stage takes over: it would do nothing, in silence."""
    for key, setting in whole.settings.items():
        table = key.partition(".")[0]
        changes_stages = setting.origin == COMMAND_LINE and table in StageConfig.model_fields
        if changes_stages and table not in NOT_INHERITED and not any(is_inherited(one, whole, key) for one in stages):
            raise RecipeError(
                f"{COMMAND_LINE}: {key} = {spelled(setting.value)} does nothing here, each stage has its own or no use "
                f"for it; write stages.0.{key}=... for the first, and so on"
            )


def as_stage(recipe: Recipe) -> StageConfig:
    """What a stage's whole recipe says of the stage."""
    return StageConfig.model_validate({name: getattr(recipe, name) for name in StageConfig.model_fields})
