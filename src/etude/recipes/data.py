"""From `[data]` to prompts: examples are read, rendered, encoded and checked before any weight is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from etude.axes.names import Source
from etude.config.schema import Recipe
from etude.config.tables.data import DataConfig
from etude.core.records import Prompt, Rollout
from etude.data.examples import Example, read_dataset, read_jsonl, require_completions
from etude.data.prompts import PromptSource, split
from etude.data.tasks import Verify, load_task, load_verifier
from etude.errors import DataError
from etude.models.card import ModelCard, read_card
from etude.text.chat import PromptEncoder
from etude.text.vocabulary import require_same, special_ids, stop_ids

PROBED_ROWS = 8  # examples whose rendering is compared on both sides
DEFAULT_EVAL_ROWS = 64  # held out when the recipe does not say; a tenth of the rows if that is less


@dataclass(frozen=True, slots=True)
class Data:
    """What a run reads, in the student's ids."""

    tokenizer: PreTrainedTokenizerBase  # the student's
    stop_ids: tuple[int, ...]  # what ends an answer, resolved once
    train: PromptSource
    held_out: list[Prompt]
    dropped: int  # prompts left out as too long, held-out ones included
    cut: int  # and shortened ones
    verify: Verify | None
    warnings: tuple[str, ...]  # what is odd about the pair and no reason to refuse it, a sentence each
    cards: Mapping[str, ModelCard]  # of student, teacher and reference, as far as there are any
    examples: tuple[Example, ...]  # the first ones trained on, as they were read

    def prompts_of_round(self, recipe: Recipe, stage: int, number: int) -> list[Prompt]:
        """All ranks' prompts of a round, rows numbered from 0."""
        return self.train.batch(stage, number, recipe.train.prompts_per_round, recipe.sampler.samples_per_prompt)

    @property
    def fingerprint(self) -> str:
        """A hash of every id a run reads, so that changed data are noticed."""
        found = hashlib.sha256()
        for prompts in (self.train.fixed(len(self.train)), self.held_out):
            for prompt in prompts:
                completion = [] if prompt.completion_ids is None else prompt.completion_ids.tolist()
                found.update(f"{prompt.token_ids.tolist()} {completion}\n".encode())
            found.update(b"\n")
        return found.hexdigest()

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokenizer's special ids, but for those that end an answer: an answer's end is part of it."""
        return special_ids(self.tokenizer) - set(self.stop_ids)

    def describe(self) -> str:
        """How many prompts there are, and what became of those that are too long."""
        text = f"prompts: {len(self.train)} to train on, {len(self.held_out)} held out"
        fates = {"dropped": self.dropped, "cut": self.cut}
        return text + "".join(f", {count} {fate} as too long" for fate, count in fates.items() if count)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without control tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def reward(self, rollout: Rollout) -> float:
        """What the verifier gives the text of a rollout's completion."""
        assert self.verify is not None  # the schema asks for a verifier where a term trains on rewards
        return self.verify(rollout.prompt.example, self.decode(rollout.completion_ids.tolist()))


def read_data(recipe: Recipe) -> Data:
    """Read, split, encode and check.

    Raises:
        PairError: student and teacher do not speak the same ids.
        DataError: a row is not what it should be, does not fit, or lacks a column the recipe needs.
    """
    config = recipe.data
    cards = {"student": read_card(recipe.student.model, trust_remote_code=recipe.student.trust_remote_code)}
    tokenizer = cards["student"].tokenizer
    warnings: tuple[str, ...] = ()
    if recipe.teacher is not None and recipe.teacher.model is not None:
        cards["teacher"] = read_card(recipe.teacher.model, trust_remote_code=recipe.teacher.trust_remote_code)
        warnings = require_same(tokenizer, cards["teacher"].tokenizer)
    if recipe.reference is not None and recipe.asks_reference:
        model, trusted = recipe.reference.model, recipe.reference.trust_remote_code
        cards["reference"] = read_card(model, trust_remote_code=trusted)
        warnings += require_same(tokenizer, cards["reference"].tokenizer, role="reference")
    stops = stop_ids(tokenizer, cards["student"].generation_config, recipe.sampler.stop)
    if not all(term.train_special for term in recipe.terms) and special_ids(tokenizer) <= set(stops):
        warnings += ("train_special = false leaves nothing out: all that the tokenizer marks special ends an answer",)
    training, held_out, verify = read_examples(config, recipe.seed)
    if recipe.rewarded and config.verifier is not None:
        load_verifier(config.verifier, training)  # the examples trained on need answers as well
    needs_completions = Source.DATASET in recipe.sampler.writers
    if needs_completions:
        require_completions(training, "sampler.student_fraction below 1 with rows from the dataset")
    encoder = PromptEncoder(
        tokenizer,
        system_prompt=config.system_prompt,
        template_options=config.template_options,
        stop_ids=stops,
    )

    def source(examples: Sequence[Example], completions: bool) -> PromptSource:
        return PromptSource(
            examples,
            encoder.encode,
            encoder.encode_completion if completions else None,
            seed=recipe.seed,
            max_prompt_tokens=config.max_prompt_tokens,
            long_prompts=config.long_prompts,
        )

    train = source(training, needs_completions)
    evaluated = source(held_out, completions=False)
    require_room(
        cards,
        max(train.longest_prompt, evaluated.longest_prompt),
        max(recipe.sampler.max_new_tokens, train.longest_completion),
    )
    return Data(
        tokenizer=tokenizer,
        stop_ids=stops,
        train=train,
        held_out=evaluated.fixed(recipe.evaluation.prompts, recipe.evaluation.samples_per_prompt),
        dropped=train.dropped + evaluated.dropped,
        cut=train.cut + evaluated.cut,
        verify=verify,
        warnings=warnings,
        cards=cards,
        examples=tuple(training[:PROBED_ROWS]),
    )


def read_examples(config: DataConfig, seed: int) -> tuple[list[Example], list[Example], Verify | None]:
    """Training examples, held-out examples, and the judge of their answers if there is one."""
    if config.task is not None:
        assert config.task_size is not None  # the schema fills both for a task
        assert config.eval_task_size is not None
        task = load_task(config.task, count=config.task_size + config.eval_task_size, seed=seed)
        return *split(task.examples, config.eval_task_size, seed=seed), task.verify
    training = _read(config, config.prompts, config.dataset, config.split)
    if config.eval_prompts is not None or config.eval_split is not None:
        held_out = _read(config, config.eval_prompts, config.eval_dataset or config.dataset, config.eval_split)
    else:
        rows = config.eval_size or min(DEFAULT_EVAL_ROWS, max(1, len(training) // 10))
        training, held_out = split(training, rows, seed=seed)
    if config.verifier is None:
        return training, held_out, None
    return training, held_out, load_verifier(config.verifier, held_out)


def _read(config: DataConfig, file: str | None, dataset: str | None, part: str | None) -> list[Example]:
    columns: Mapping[str, str] = {str(name): column for name, column in config.columns.items()}
    if file is not None:
        return read_jsonl(file, columns)
    assert dataset is not None  # the schema asks for exactly one source
    return read_dataset(dataset, config.dataset_config, part or "train", columns)


def require_room(cards: Mapping[str, ModelCard], longest_prompt: int, longest_completion: int) -> None:
    """Prompt and completion must fit the context window of student and teacher, checked before the weights are read."""
    for role, card in cards.items():
        if card.context_window is not None and longest_prompt + longest_completion > card.context_window:
            raise DataError(
                f"the longest prompt has {longest_prompt} tokens and a completion up to {longest_completion}, together "
                f"more than the {role}'s context window of {card.context_window}; lower sampler.max_new_tokens or "
                "data.max_prompt_tokens, or drop long prompts"
            )
