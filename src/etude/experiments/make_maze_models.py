"""Make the shipped maze models again: a teacher that knows the way from everywhere, a student that knows only the map.

Both are ordinary Llama models with a word-level tokenizer, trained in plain torch on walks that `etude.data.maze` makes
and saved as folders that transformers loads. `etude experiment make-maze-models` (`make maze-models`) calls `main`; it
takes some minutes on one thread. Another machine rounds differently and gets other weights of the same quality.

Legend: B rows, T positions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from etude.axes.names import Schedule
from etude.core.records import Prompt, as_ids
from etude.data.maze import CELLS, END, MAX_MOVES, ROUTES, Route, corrected_walk, random_walk, verify
from etude.models.backbone import TransformersBackbone, load_backbone
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.models.shipped import MAZE_MODELS
from etude.runtime.seeds import Key, derive
from etude.text.chat import PromptEncoder
from etude.training.stages import learning_rate_factor

PAD, UNKNOWN, BEGIN = "<pad>", "<unknown>", "<begin>"
ID_OF = {word: id_ for id_, word in enumerate((PAD, UNKNOWN, BEGIN, END, *CELLS))}
TEMPLATE = (  # begin, the user's words as they are; then the assistant's, and the end
    "{{ bos_token }}{% for message in messages %} {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %} {{ eos_token }}{% endif %}{% endfor %}"
)
CONTEXT = 64  # tokens; begin, goal, start, 44 moves and the end are 48
NOISE = 0.15  # share of random moves in what the teacher reads
ROWS = 64  # walks a step
LEARNING_RATE = 2e-3
WARMUP_STEPS = 10
UNLABELLED = -100  # torch's mark for a place whose prediction is not trained

Lesson = Callable[[Route, Random], tuple[list[str], list[str]]]  # -> the words that are read, the word to say at each


def map_lesson(route: Route, random: Random) -> tuple[list[str], list[str]]:
    """Say what comes next in a random walk, which nobody can know: what can be learned is where the walls are."""
    walk = random_walk(route, random)
    return walk, walk


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What one model is, and what it is taught."""

    name: str  # its folder's
    layers: int
    width: int
    heads: int
    lesson: Lesson
    steps: int


TEACHER = Blueprint("teacher", layers=3, width=96, heads=4, lesson=partial(corrected_walk, noise=NOISE), steps=1200)
# The student is to begin as students do, fluent but not perfect: after 400 steps 95 % of its moves are legal. After
# 1,500 it hardly ever runs into a wall, and so recovers from most of its mistakes without having been taught to.
STUDENT = Blueprint("student", layers=2, width=32, heads=2, lesson=map_lesson, steps=400)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word, a token; `r3c9 r5c0` from the user becomes begin, goal, start."""
    backend = Tokenizer(WordLevel(ID_OF, unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model(blueprint: Blueprint) -> LlamaForCausalLM:
    """The untrained model; its weights are drawn by its name."""
    torch.manual_seed(derive("maze models", blueprint.name))
    config = LlamaConfig(
        vocab_size=len(ID_OF),
        hidden_size=blueprint.width,
        intermediate_size=3 * blueprint.width,
        num_hidden_layers=blueprint.layers,
        num_attention_heads=blueprint.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=ID_OF[PAD],
        bos_token_id=ID_OF[BEGIN],
        eos_token_id=ID_OF[END],
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, blueprint: Blueprint) -> None:
    """Cross-entropy on the lesson's words, AdamW with warm-up and linear decay to a tenth."""
    random = Random(derive("maze models", blueprint.name, "walks"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    factor = partial(
        learning_rate_factor,
        steps=blueprint.steps,
        warmup_steps=WARMUP_STEPS,
        schedule=Schedule.LINEAR,
        final_fraction=0.1,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(blueprint.steps):
        token_ids_BT, labels_BT = batch(blueprint.lesson, random)
        logits_BTV = model(input_ids=token_ids_BT).logits
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=UNLABELLED)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


def batch(lesson: Lesson, random: Random) -> tuple[Tensor, Tensor]:
    """What is read and what is to be said at each place, [B, T] int64 both, padded on the right."""
    read, said = list[list[int]](), list[list[int]]()
    for route in random.choices(ROUTES, k=ROWS):
        words, labels = lesson(route, random)
        read.append([ID_OF[word] for word in (BEGIN, route.goal, route.start, *words[:-1])])
        said.append([UNLABELLED, UNLABELLED, *(ID_OF[word] for word in labels)])  # the first comes after the start
    return padded(read, ID_OF[PAD]), padded(said, UNLABELLED)


def padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """[B, T] of rows of any length. Nothing attends to what stands on its right, so no attention mask is needed."""
    return pad_sequence([as_ids(row) for row in rows], batch_first=True, padding_value=filler)


def accuracy(folder: Path, temperature: float) -> float:
    """Share of all routes that the model of a folder walks rightly, as etude's own sampler lets it write."""
    backbone = load_backbone(str(folder))
    encoder = PromptEncoder(backbone.tokenizer)
    prompts = [Prompt(as_ids(encoder.encode(route.prompt)), row) for row, route in enumerate(ROUTES)]
    settings = SamplingSettings(
        temperature=temperature, top_p=1.0, top_k=0, max_new_tokens=MAX_MOVES + 1, stop_ids=(ID_OF[END],)
    )
    rollouts = InProcessSampler(backbone, settings, rows_per_batch=len(ROUTES)).sample(prompts, Key(0, "maze", 0, 0))
    texts = [str(backbone.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)) for rollout in rollouts]
    return fmean(verify({"prompt": route.prompt}, text) for route, text in zip(ROUTES, texts, strict=True))


def main(words: Sequence[str] = ()) -> int:
    """Make both models, and say how well they walk."""
    parser = argparse.ArgumentParser(
        prog="etude experiment make-maze-models", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--output", type=Path, default=MAZE_MODELS, help="folder (default: where the shipped ones lie)")
    folder = parser.parse_args(list(words)).output
    torch.set_num_threads(1)  # models this small are slower on two
    console = Console()
    for blueprint in (TEACHER, STUDENT):
        started = time.monotonic()
        model = make_model(blueprint)
        train(model, blueprint)
        TransformersBackbone(model, make_tokenizer()).save(folder / blueprint.name)
        sampled, greedy = (accuracy(folder / blueprint.name, temperature) for temperature in (1.0, 0.0))
        console.print(
            f"{blueprint.name}: {model.num_parameters():,} parameters, {time.monotonic() - started:.0f} s; "
            f"walks {sampled:.3f} of {len(ROUTES)} routes rightly at T = 1, {greedy:.3f} greedily"
        )
    return 0
