"""From the cards and the first examples of a pair to what the preflight makes of them, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from etude.axes.names import TEACHER, Check
from etude.config.schema import Recipe
from etude.errors import DataError
from etude.preflight.findings import Finding, refused
from etude.preflight.pair import one_bos, one_sided_template, same_template, same_thinking, vocabulary
from etude.recipes.data import Data
from etude.text.chat import PromptEncoder


def pair_findings(recipe: Recipe, data: Data) -> list[Finding]:
    """Vocabulary and special ids of everybody who marks, then BOS, template and thinking of student and teacher."""
    tokenizers = {role: card.tokenizer for role, card in data.cards.items()}
    found: list[Finding] = []
    for role in [role for role in tokenizers if role != "student"]:
        rows = {name: data.cards[name].rows for name in ("student", role)}
        found += vocabulary(data.tokenizer, tokenizers[role], rows=rows, role=role)
    ids = {"student": _rendered(recipe, data, "student")}
    if TEACHER not in tokenizers:
        return [*found, one_bos(_first(ids), tokenizers)]
    bare = [role for role in ("student", TEACHER) if tokenizers[role].chat_template is None]
    if len(bare) == 1:
        return [*found, one_bos(_first(ids), tokenizers), one_sided_template(bare[0])]
    try:
        ids[TEACHER] = _rendered(recipe, data, TEACHER)
    except DataError as error:
        said = f"the teacher's own template refuses a prompt: {error}"
        return [*found, one_bos(_first(ids), tokenizers), refused(Check.TEMPLATE, said, "give both sides one template")]
    return [*found, one_bos(_first(ids), tokenizers), *_renderings(ids, data)]


def _rendered(recipe: Recipe, data: Data, role: str) -> list[list[int]]:
    """The first examples' prompts by a model's own tokenizer."""
    encoder = PromptEncoder(
        data.cards[role].tokenizer,
        system_prompt=recipe.data.system_prompt,
        template_options=recipe.data.template_options,
        stop_ids=data.stop_ids,
    )
    return [encoder.encode(example.prompt, example.where) for example in data.examples]


def _renderings(ids: Mapping[str, Sequence[Sequence[int]]], data: Data) -> list[Finding]:
    """Template and thinking of the first row on which both sides differ; of the first one, where none does."""
    pairs = list(zip(ids["student"], ids[TEACHER], strict=True))
    place = next((place for place, (ours, theirs) in enumerate(pairs) if list(ours) != list(theirs)), 0)
    ours, theirs = pairs[place]
    tokenizer: PreTrainedTokenizerBase = data.tokenizer
    return [
        same_template(ours, theirs, tokenizer, where=data.examples[place].where),
        same_thinking(ours, theirs, tokenizer),
    ]


def _first(ids: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Sequence[int]]:
    return {role: rows[0] for role, rows in ids.items()}
