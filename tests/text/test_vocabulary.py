from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from etude.errors import ModelError, PairError
from etude.text.vocabulary import real_vocabulary, require_same, special_ids, stop_ids


def words(ids: dict[str, int], **roles: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **roles)


SMALL = {"[UNK]": 0, "<s>": 1, "</s>": 2, "<end>": 3, "a": 4, "b": 5}


def test_the_real_vocabulary_counts_added_tokens_and_gaps() -> None:
    tokenizer = words(SMALL, eos_token="</s>")
    assert real_vocabulary(tokenizer) == 6
    tokenizer.add_tokens(["<tool>"])
    assert real_vocabulary(tokenizer) == 7
    assert real_vocabulary(words({**SMALL, "far": 40}, eos_token="</s>")) == 41


def test_equal_maps_pass() -> None:
    assert require_same(words(SMALL, eos_token="</s>"), words(dict(SMALL), eos_token="</s>")) == ()


def test_another_end_token_of_the_same_map_is_said_and_not_refused() -> None:
    base, instruct = words(SMALL, eos_token="</s>"), words(SMALL, eos_token="<end>")
    said = require_same(base, instruct, role="reference")
    assert said == ("the eos_token of the student is '</s>', of the reference '<end>'",)
    assert require_same(base, instruct) == ("the eos_token of the student is '</s>', of the teacher '<end>'",)


def test_permuted_ids_of_equal_size_are_refused() -> None:
    student = {f"w{place}": place for place in range(300)} | {"[UNK]": 300}
    teacher = {f"w{place}": (place + 1) % 300 for place in range(300)} | {"[UNK]": 300}
    with pytest.raises(
        PairError, match=r"301 / 301 tokens, 300 ids differ.*id 0 is 'w0' / 'w299'; id 1 is 'w1' / 'w0'"
    ):
        require_same(words(student), words(teacher))


def test_an_added_token_on_one_side_only_is_refused() -> None:
    student, teacher = words(SMALL), words(SMALL)
    teacher.add_tokens(["<think>"])
    with pytest.raises(PairError, match=r"6 / 7 tokens, 1 ids differ.*id 6 is missing / '<think>'"):
        require_same(student, teacher)


def test_special_ids_are_those_the_tokenizer_marks_so() -> None:
    tokenizer = words(SMALL, eos_token="</s>", additional_special_tokens=["<end>"])
    assert special_ids(tokenizer) == {0, 2, 3}
    tokenizer.add_tokens(["<think>"])
    assert special_ids(tokenizer) == {0, 2, 3}
    tokenizer.add_tokens([AddedToken("<tool>", special=True)])
    assert special_ids(tokenizer) == {0, 2, 3, 7}


def test_stop_ids_are_the_tokenizers_the_folders_and_the_named_ones() -> None:
    tokenizer = words(SMALL, eos_token="</s>", additional_special_tokens=["<end>"])
    assert stop_ids(tokenizer) == (2,)
    assert stop_ids(tokenizer, GenerationConfig(eos_token_id=2)) == (2,)
    assert stop_ids(tokenizer, GenerationConfig(eos_token_id=[3, 2])) == (2, 3)
    assert stop_ids(tokenizer, GenerationConfig(), extra_stop_tokens=["b", "</s>"]) == (2, 5)
    assert stop_ids(words(SMALL), extra_stop_tokens=["<end>"]) == (3,)


def test_no_sampling_field_of_the_folder_is_looked_at() -> None:
    hostile = GenerationConfig(eos_token_id=3, temperature=0.1, top_k=1, suppress_tokens=[4], do_sample=True)
    tokenizer = words(SMALL, eos_token="</s>", additional_special_tokens=["<end>"])
    assert stop_ids(tokenizer, hostile) == (2, 3)


def test_nothing_that_ends_an_answer_is_refused() -> None:
    with pytest.raises(ModelError, match="no token ends an answer"):
        stop_ids(words(SMALL), GenerationConfig())


def test_a_folder_whose_end_id_is_an_ordinary_word_is_refused() -> None:
    """What a folder says whose settings were left at the library's defaults."""
    with pytest.raises(ModelError, match=r"eos_token_id 4, which is no special token of the tokenizer \('a'\)"):
        stop_ids(words(SMALL, eos_token="</s>"), GenerationConfig(eos_token_id=4))


def test_an_extra_stop_must_be_one_token(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert stop_ids(tokenizer, extra_stop_tokens=["\n"]) == (tokenizer.eos_token_id, *newline)
    with pytest.raises(ModelError, match=r"'quite impossible', which is \d+ of its tokens"):
        stop_ids(tokenizer, extra_stop_tokens=["quite impossible"])
    with pytest.raises(ModelError, match="'zebra', which is unknown to the tokenizer"):
        stop_ids(words(SMALL, eos_token="</s>"), extra_stop_tokens=["zebra"])
