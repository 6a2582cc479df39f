from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.data.maze import CELLS, END, GOALS, NEIGHBOURS, Route, best_word
from etude.experiments import make_maze_models
from etude.experiments.make_maze_models import (
    ID_OF,
    STUDENT,
    TEACHER,
    UNLABELLED,
    Blueprint,
    accuracy,
    batch,
    make_model,
    make_tokenizer,
    map_lesson,
    train,
)
from etude.models.shipped import MAZE_MODELS
from etude.text.chat import PromptEncoder

BOTH = pytest.mark.parametrize("blueprint", [TEACHER, STUDENT], ids=lambda blueprint: blueprint.name)


def test_a_prompt_becomes_begin_goal_start_and_an_answer_its_cells_and_the_end() -> None:
    tokenizer = make_tokenizer()
    encoder = PromptEncoder(tokenizer)
    assert tokenizer.convert_ids_to_tokens(encoder.encode("r3c9 r5c0")) == ["<begin>", "r3c9", "r5c0"]
    answer = encoder.encode_completion("r3c9 r5c0", "r5c1 r4c1")
    assert tokenizer.convert_ids_to_tokens(answer) == ["r5c1", "r4c1", END]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "r5c1 r4c1"
    assert sorted(tokenizer.get_vocab()) == sorted([*CELLS, "<pad>", "<unknown>", "<begin>", END])


def test_the_labels_are_what_to_say_after_each_word_read() -> None:
    words = {id_: word for word, id_ in ID_OF.items()}
    token_ids_BT, labels_BT = batch(TEACHER.lesson, Random(0))
    for ids, labels in zip(token_ids_BT.tolist(), labels_BT.tolist(), strict=True):
        assert labels[:2] == [UNLABELLED, UNLABELLED]
        begin, goal, start, *_ = (words[id_] for id_ in ids)
        assert begin == "<begin>"
        assert words[labels[2]] == best_word(goal, start)
        for id_, label in zip(ids[2:], labels[2:], strict=True):
            if words[id_] == "<pad>":
                assert label == UNLABELLED
            else:
                assert words[label] == best_word(goal, words[id_])


def test_the_map_lesson_says_the_walk_itself() -> None:
    words, labels = map_lesson(Route("r3c9", "r1c9"), Random(0))
    assert words == labels


def test_training_lowers_the_loss_and_is_the_same_each_time() -> None:
    blueprint = dataclasses.replace(STUDENT, steps=20)
    first, again, untrained = (make_model(blueprint) for _ in range(3))
    train(first, blueprint)
    train(again, blueprint)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True))
    assert loss_of(first, blueprint) < loss_of(untrained, blueprint) - 0.1


def loss_of(model: torch.nn.Module, blueprint: Blueprint) -> float:
    token_ids_BT, labels_BT = batch(blueprint.lesson, Random(1))
    with torch.no_grad():
        logits_BTV = model(input_ids=token_ids_BT).logits
    loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=UNLABELLED)
    return loss.item()


def test_main_makes_both_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TEACHER", "STUDENT"):
        blueprint = getattr(make_maze_models, name)
        monkeypatch.setattr(make_maze_models, name, dataclasses.replace(blueprint, width=8, steps=1))
    assert make_maze_models.main(["--output", str(tmp_path)]) == 0
    for name in ("teacher", "student"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.hidden_size == 8
    assert capsys.readouterr().out.count("routes rightly") == 2


@BOTH
def test_the_shipped_folders_are_what_the_script_would_write(blueprint: Blueprint) -> None:
    model = AutoModelForCausalLM.from_pretrained(MAZE_MODELS / blueprint.name)
    fresh = make_model(blueprint)
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in fresh.named_parameters()
    }
    shipped, made = AutoTokenizer.from_pretrained(MAZE_MODELS / blueprint.name), make_tokenizer()
    assert shipped.get_vocab() == made.get_vocab()
    assert shipped.chat_template == made.chat_template
    assert shipped.special_tokens_map == made.special_tokens_map


def test_the_shipped_folders_are_small() -> None:
    assert sum(path.stat().st_size for path in MAZE_MODELS.rglob("*") if path.is_file()) < 4_000_000


def test_the_shipped_teacher_knows_the_way_and_the_student_does_not() -> None:
    assert accuracy(MAZE_MODELS / "teacher", 1.0) >= 0.96
    assert accuracy(MAZE_MODELS / "teacher", 0.0) >= 0.99
    assert accuracy(MAZE_MODELS / "student", 1.0) <= 0.1


def test_the_shipped_student_mostly_knows_the_map() -> None:
    model = AutoModelForCausalLM.from_pretrained(MAZE_MODELS / "student")
    token_ids_BT, _ = batch(STUDENT.lesson, Random(2))
    words = {id_: word for word, id_ in ID_OF.items()}
    with torch.no_grad():
        probs_BTV = model(input_ids=token_ids_BT).logits.softmax(-1)
    legal = [
        probs_BTV[row, place, [ID_OF[word] for word in NEIGHBOURS[words[id_]]]].sum().item()
        for row, ids in enumerate(token_ids_BT.tolist())
        for place, id_ in enumerate(ids)
        if place >= 2 and words[id_] in NEIGHBOURS and words[id_] not in GOALS
    ]
    assert 0.85 < fmean(legal) < 0.99
