from __future__ import annotations

import pytest

from etude.data.examples import Example
from etude.data.prompts import PromptSource, split
from etude.errors import DataError

BOS, SYSTEM, USER, ASK = 900, 901, 902, 903  # what the toy template writes around the text: four tokens


def encode(prompt: str | list[dict[str, str]], where: str) -> list[int]:
    """One id a character, between BOS, a system mark and turn markers."""
    turns = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return [BOS, SYSTEM, USER, *(ord(letter) for turn in turns for letter in turn), ASK]


def encode_completion(prompt: str | list[dict[str, str]], completion: str, where: str) -> list[int]:
    return [*(ord(letter) for letter in completion), 2]


def examples(*prompts: str | list[dict[str, str]], completion: str | None = None) -> list[Example]:
    return [Example(p, completion, None, {"number": n}, f"f.jsonl:{n}") for n, p in enumerate(prompts, start=1)]


def source(rows: list[Example], *, limit: int = 100, seed: int = 0, **options) -> PromptSource:
    return PromptSource(rows, encode, encode_completion, seed=seed, max_prompt_tokens=limit, **options)


def numbers(prompts) -> list[int]:
    return [prompt.example["number"] for prompt in prompts]


TEN = examples(*(f"prompt {n}" for n in range(10)))


def test_a_batch_is_a_function_of_seed_stage_and_round() -> None:
    first, second = source(TEN), source(TEN)
    second.batch(stage=0, round=5, prompts=4)  # drawn before, and of no effect
    for round_ in range(6):
        assert numbers(first.batch(0, round_, 4)) == numbers(second.batch(0, round_, 4))
    walk = [numbers(first.batch(0, round_, 10)) for round_ in range(3)]
    assert walk[0] != walk[1] != walk[2]
    assert numbers(first.batch(1, 0, 10)) != walk[0]
    assert numbers(source(TEN, seed=1).batch(0, 0, 10)) != walk[0]


@pytest.mark.parametrize("size", [3, 4, 10, 25])
def test_each_prompt_comes_once_an_epoch(size: int) -> None:
    rounds = [numbers(source(TEN).batch(0, round_, size)) for round_ in range(20)]
    drawn = [number for round_ in rounds for number in round_]
    for epoch in range(len(drawn) // 10):
        assert sorted(drawn[epoch * 10 : epoch * 10 + 10]) == list(range(1, 11))


def test_rows_are_numbered_and_samples_of_a_prompt_stand_together() -> None:
    batch = source(TEN).batch(0, 3, prompts=3, samples_per_prompt=2)
    assert [prompt.row for prompt in batch] == [0, 1, 2, 3, 4, 5]
    drawn = numbers(batch)
    assert drawn[::2] == drawn[1::2]
    assert len(set(drawn)) == 3
    assert [prompt.group for prompt in batch] == [0, 0, 1, 1, 2, 2]
    # The same question twice in a round is asked twice, of two groups.
    assert [prompt.group for prompt in source(TEN[:1]).batch(0, 0, prompts=2, samples_per_prompt=2)] == [0, 0, 1, 1]


def test_evaluation_prompts_are_fixed() -> None:
    fixed = source(TEN).fixed(3, samples_per_prompt=2)
    assert numbers(fixed) == [1, 1, 2, 2, 3, 3]
    assert [prompt.row for prompt in fixed] == list(range(6))
    assert numbers(source(TEN).fixed(64)) == list(range(1, 11))


def test_a_prompt_keeps_its_own_completion_and_fields() -> None:
    rows = [Example(f"p{n}", f"c{n}", None, {"number": n}, f"f:{n}") for n in range(8)]
    for prompt in source(rows).batch(0, 0, 8):
        number = str(prompt.example["number"])
        assert prompt.token_ids.tolist() == encode("p" + number, "")
        assert prompt.completion_ids is not None
        assert prompt.completion_ids.tolist() == encode_completion("", "c" + number, "")


def test_completions_are_left_out_where_nobody_trains_on_them() -> None:
    rows = examples("one", completion="1")
    quiet = PromptSource(rows, encode, seed=0, max_prompt_tokens=10)
    assert quiet.fixed(1)[0].completion_ids is None
    assert (quiet.longest_prompt, quiet.longest_completion) == (7, 0)
    assert source(examples("one")).fixed(1)[0].completion_ids is None
    assert source(rows).longest_completion == 2


# Prompts of 15, 16, 17 and 200 tokens with a limit of 16.
LONG = examples(*(letter * (length - 4) for letter, length in zip("abcd", (15, 16, 17, 200), strict=True)))


def test_stop_names_the_rows() -> None:
    with pytest.raises(
        DataError, match=r"2 of 4 prompts exceed .* = 16: f\.jsonl:3 \(17 tokens\), f\.jsonl:4 \(200 tokens\); raise"
    ):
        source(LONG, limit=16)
    with pytest.raises(DataError, match=r"10 of 10 prompts .*f\.jsonl:5 \(12 tokens\) and 5 more; raise"):
        source(TEN, limit=3)


def test_drop_leaves_the_rows_out_and_counts_them() -> None:
    dropping = source(LONG, limit=16, long_prompts="drop")
    assert (len(dropping), dropping.dropped, dropping.cut) == (2, 2, 0)
    for prompt in dropping.batch(0, 0, 2):
        assert prompt.token_ids[-2].item() == ord("ab"[prompt.example["number"] - 1])
    with pytest.raises(DataError, match="no prompt is left: 4 given, 4 dropped"):
        source(LONG, limit=3, long_prompts="drop")


def test_cut_shortens_the_text_and_keeps_what_the_template_wrote() -> None:
    cutting = source(LONG, limit=16, long_prompts="cut")
    assert (len(cutting), cutting.dropped, cutting.cut) == (4, 0, 2)
    assert [prompt.token_ids.shape[0] for prompt in cutting.fixed(4)] == [15, 16, 16, 16]
    for prompt in cutting.fixed(4):
        assert prompt.token_ids[:3].tolist() == [BOS, SYSTEM, USER]
        assert prompt.token_ids[-1].item() == ASK


def test_cut_takes_the_last_user_message_only() -> None:
    talk = [
        {"role": "system", "content": "kind"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "abcdefgh"},
    ]
    cutting = source(examples(talk), limit=19, long_prompts="cut")
    text = "".join(chr(id_) for id_ in cutting.fixed(1)[0].token_ids[3:-1].tolist())
    assert text == "kindfirstyesabc"
    assert talk[-1]["content"] == "abcdefgh"
    with pytest.raises(DataError, match=r"f\.jsonl:1: longer than data\.max_prompt_tokens = 16 even without"):
        source(examples(talk), limit=16, long_prompts="cut")
    with pytest.raises(DataError, match=r"f\.jsonl:1: too long, and no message is a user's to cut"):
        source(examples(talk[:1]), limit=5, long_prompts="cut")


def test_the_completion_is_rendered_after_the_prompt_as_cut() -> None:
    seen: list[str | list[dict[str, str]]] = []

    def watch(prompt: str | list[dict[str, str]], completion: str, where: str) -> list[int]:
        seen.append(prompt)
        return [2]

    rows = examples("abcdef", completion="x")
    PromptSource(rows, encode, watch, seed=0, max_prompt_tokens=7, long_prompts="cut")
    assert seen == ["abc"]


def test_nothing_to_read_is_refused() -> None:
    with pytest.raises(DataError, match="no prompt is left: 0 given"):
        source([])


def test_a_split_shares_no_row_and_depends_on_the_seed() -> None:
    training, held_out = split(TEN, 3, seed=0)
    assert len(held_out) == 3
    assert sorted([*training, *held_out], key=TEN.index) == TEN
    assert [TEN.index(example) for example in held_out] == sorted(TEN.index(example) for example in held_out)
    assert split(TEN, 3, seed=0) == (training, held_out)
    assert any(split(TEN, 3, seed=seed)[1] != held_out for seed in range(1, 5))
    for count in (0, 10):
        with pytest.raises(DataError, match=f"cannot hold out {count} of 10 rows"):
            split(TEN, count, seed=0)
