from __future__ import annotations

import pytest

from etude.errors import DataError, ModelError, RecipeError
from etude.text.chat import PromptEncoder

TURNS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
ASK = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
PLAIN = TURNS + ASK
WITH_BOS = "{{ bos_token }}" + PLAIN
CONVERSATION = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "how are you?\n"},
]


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("template", [PLAIN, WITH_BOS])
@pytest.mark.parametrize("prepend_bos", [False, True])
def test_prompt_ids_are_the_templates_own(make_tokenizer, template: str, prepend_bos: bool) -> None:
    tokenizer = make_tokenizer(chat_template=template, prepend_bos=prepend_bos)
    ids = PromptEncoder(tokenizer).encode(CONVERSATION)
    assert ids == tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True)["input_ids"]
    rendered = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    assert ids == ids_of(tokenizer, rendered)


def test_one_bos_where_both_tokenizer_and_template_write_one(make_tokenizer) -> None:
    tokenizer = make_tokenizer(chat_template=WITH_BOS, prepend_bos=True)
    ids = PromptEncoder(tokenizer).encode("hello")
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(("prepend_bos", "expected"), [(True, 1), (False, 0)])
def test_without_a_template_the_tokenizers_own_call_decides(make_tokenizer, prepend_bos: bool, expected: int) -> None:
    tokenizer = make_tokenizer(prepend_bos=prepend_bos)
    ids = PromptEncoder(tokenizer).encode("hello there")
    assert ids == tokenizer("hello there")["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == expected


def test_a_text_is_one_user_turn_after_the_system_prompt(make_tokenizer) -> None:
    tokenizer = make_tokenizer(chat_template=PLAIN)
    ids = PromptEncoder(tokenizer, system_prompt="be kind").encode("hello")
    assert tokenizer.decode(ids) == "<|system|>be kind<|end|><|user|>hello<|end|><|assistant|>"


def test_template_options_reach_the_template(make_tokenizer) -> None:
    template = PLAIN + "{% if not thinking %}{{ 'quick' }}{% endif %}"
    tokenizer = make_tokenizer(chat_template=template)
    assert tokenizer.decode(PromptEncoder(tokenizer).encode("hello")).endswith("<|assistant|>quick")
    thinking = PromptEncoder(tokenizer, template_options={"thinking": True})
    assert tokenizer.decode(thinking.encode("hello")).endswith("<|assistant|>")


@pytest.mark.parametrize("template", [None, PLAIN])
@pytest.mark.parametrize("token", ["</s>", "<|user|>", "<|a|>"])
def test_a_control_token_in_a_text_is_refused_with_its_place(make_tokenizer, template: str | None, token: str) -> None:
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|a|>"]
    encoder = PromptEncoder(make_tokenizer(chat_template=template, special=special))
    with pytest.raises(
        DataError, match=r"^prompts\.jsonl:7: .* holds the text '.*', which the tokenizer would read as"
    ):
        encoder.encode(f"hi {token}do this", "prompts.jsonl:7")


def test_every_part_of_a_conversation_is_looked_at(make_tokenizer) -> None:
    tokenizer = make_tokenizer(chat_template=PLAIN)
    encoder = PromptEncoder(tokenizer)
    for place, role in enumerate(["system", "user", "assistant", "user"], start=1):
        forged = [dict(message) for message in CONVERSATION]
        forged[place - 1]["content"] += "<|end|>"
        with pytest.raises(DataError, match=rf"f:1: message {place} \({role}\) holds the text '<\|end\|>'"):
            encoder.encode(forged, "f:1")
    with pytest.raises(DataError, match="f:1: the role of message 1"):
        encoder.encode([{"role": "user<|end|>", "content": "hello"}], "f:1")
    with pytest.raises(DataError, match=r"data\.system_prompt holds"):
        PromptEncoder(tokenizer, system_prompt="be kind<|end|>")
    with pytest.raises(DataError, match="f:1: the completion holds"):
        encoder.encode_completion("hello", "fine<|end|>", "f:1")


def test_text_that_only_looks_like_a_control_token_stays_text(make_tokenizer) -> None:
    tokenizer = make_tokenizer(chat_template=PLAIN)
    ids = PromptEncoder(tokenizer).encode("a < /s> and <|users|> and <s >")
    assert tokenizer.decode(ids) == "<|user|>a < /s> and <|users|> and <s ><|end|><|assistant|>"


def test_thinking_tags_are_an_assistants_and_nobody_elses(make_tokenizer) -> None:
    template = PLAIN + "{# <think> and </think> #}"
    added = ("<think>", "</think>", "forty")
    tokenizer = make_tokenizer(chat_template=template, added=added, eos_token="<|end|>")
    encoder = PromptEncoder(tokenizer)
    completion = encoder.encode_completion("forty what?", "<think>count</think>forty-two")
    assert completion == ids_of(tokenizer, "<think>count</think>forty-two<|end|>")
    assert completion[0] == tokenizer.convert_tokens_to_ids("<think>")
    with pytest.raises(DataError, match="'<think>'"):
        encoder.encode("write <think> yourself")


def test_a_turn_marker_that_is_no_special_token_is_refused_in_an_answer(make_tokenizer) -> None:
    template = "{% for m in messages %}{{ ('<U>' if m.role == 'user' else '<A>') + m.content }}{% endfor %}"
    tokenizer = make_tokenizer(
        chat_template=template + "{% if add_generation_prompt %}<A>{% endif %}", added=("<U>", "<A>")
    )
    with pytest.raises(DataError, match="'<U>'"):
        PromptEncoder(tokenizer).encode_completion("hello", "fine <U>and now?")


def test_unknown_words_are_no_control_tokens() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "go": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="</s>")
    encoder = PromptEncoder(tokenizer)
    assert encoder.encode("go west") == [2, 0]
    with pytest.raises(DataError, match=r"'\[UNK\]'"):
        encoder.encode("go [UNK]")
    with pytest.raises(DataError, match="'</s>'"):
        encoder.encode("go </s>")


@pytest.mark.parametrize("template", [PLAIN, WITH_BOS])
def test_prompt_and_completion_are_the_whole_conversation(make_tokenizer, template: str) -> None:
    tokenizer = make_tokenizer(chat_template=template, eos_token="<|end|>", prepend_bos=True)
    encoder = PromptEncoder(tokenizer)
    whole = [*CONVERSATION, {"role": "assistant", "content": "the answer is forty-two"}]
    expected = tokenizer.apply_chat_template(whole)["input_ids"]
    prompt, completion = encoder.encode(CONVERSATION), encoder.encode_completion(CONVERSATION, whole[-1]["content"])
    assert prompt + completion == expected
    assert completion == [*ids_of(tokenizer, "the answer is forty-two"), tokenizer.eos_token_id]


def test_what_the_template_writes_behind_the_stop_id_is_left_out(make_tokenizer) -> None:
    template = TURNS.replace("'<|end|>'", "'<|end|>\n'") + ASK
    tokenizer = make_tokenizer(chat_template=template, eos_token="<|end|>")
    assert PromptEncoder(tokenizer).encode_completion("hello", "fine") == [*ids_of(tokenizer, "fine<|end|>")]


def test_an_answer_gets_an_end_where_the_template_writes_none(make_tokenizer) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}" + ASK.replace(
        "<|assistant|>", "assistant: "
    )
    tokenizer = make_tokenizer(chat_template=template)
    for encoder in (PromptEncoder(tokenizer), PromptEncoder(make_tokenizer(prepend_bos=True))):
        assert encoder.encode_completion("hello", "fine") == [*ids_of(tokenizer, "fine"), tokenizer.eos_token_id]


def test_an_end_of_turn_that_stops_nobody_is_refused(make_tokenizer) -> None:
    tokenizer = make_tokenizer(chat_template=PLAIN)  # its EOS is </s>, the template ends a turn with <|end|>
    with pytest.raises(ModelError, match=r"ends an answer with '<\|end\|>', which is no stop token"):
        PromptEncoder(tokenizer).encode_completion("hello", "fine")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    encoder = PromptEncoder(tokenizer, stop_ids=(tokenizer.eos_token_id, end))
    assert encoder.encode_completion("hello", "fine") == [*ids_of(tokenizer, "fine"), end]
    with pytest.raises(ModelError, match="no token ends an answer"):
        PromptEncoder(make_tokenizer(eos_token=None)).encode_completion("hello", "fine")


def test_a_token_across_the_seam_is_not_written(make_tokenizer) -> None:
    template = "{{ messages[0].content }}th{% if messages[1] %}{{ messages[1].content + eos_token }}{% endif %}"
    tokenizer = make_tokenizer(chat_template=template)
    encoder = PromptEncoder(tokenizer)
    assert len(ids_of(tokenizer, "the")) == 1
    assert encoder.encode("x") == ids_of(tokenizer, "xth")
    assert encoder.encode_completion("x", "e") == [*ids_of(tokenizer, "e"), tokenizer.eos_token_id]


THINKING = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
)


def test_a_template_that_takes_thinking_out_of_history_is_refused_with_the_turn(make_tokenizer) -> None:
    tokenizer = make_tokenizer(chat_template=THINKING, eos_token="<|end|>")
    encoder = PromptEncoder(tokenizer)
    assert tokenizer.decode(encoder.encode("hello")).endswith("<|assistant|><think>")
    with pytest.raises(DataError, match=r"f:3: with the answer as message 4 \(assistant\).* the prompt before it"):
        encoder.encode_completion(CONVERSATION[1:], "r</think>x", "f:3")


def test_a_template_that_puts_an_empty_thought_before_the_answer_is_refused(make_tokenizer) -> None:
    thought = "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    ask = "{% if add_generation_prompt %}<|assistant|>{% if not thinking %}<think></think>{% endif %}{% endif %}"
    template = "{% for m in messages %}<|{{ m.role }}|>" + thought + "{{ m.content }}<|end|>{% endfor %}" + ask
    tokenizer = make_tokenizer(chat_template=template, eos_token="<|end|>")
    with pytest.raises(DataError, match="renders the answer differently"):
        PromptEncoder(tokenizer, template_options={"thinking": True}).encode_completion("hello", "fine")
    assert PromptEncoder(tokenizer).encode_completion("hello", "fine") == ids_of(tokenizer, "fine<|end|>")


def test_a_template_that_changes_the_answer_is_refused(make_tokenizer) -> None:
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content|upper + '<|end|>' }}{% endfor %}" + ASK
    encoder = PromptEncoder(make_tokenizer(chat_template=template, eos_token="<|end|>"))
    with pytest.raises(DataError, match="renders the answer differently"):
        encoder.encode_completion("hello", "fine")


def test_a_template_that_strips_the_answers_edges_is_accepted(make_tokenizer) -> None:
    template = TURNS.replace("m.content", "m.content|trim") + ASK
    tokenizer = make_tokenizer(chat_template=template, eos_token="<|end|>")
    assert PromptEncoder(tokenizer).encode_completion("hello", " fine\n") == ids_of(tokenizer, "fine<|end|>")


def test_what_the_template_refuses_is_said_with_its_place(make_tokenizer) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
    tokenizer = make_tokenizer(chat_template=template)
    with pytest.raises(DataError, match=r"f:9: the chat template does not accept these messages \(no system role\)"):
        PromptEncoder(tokenizer, system_prompt="be kind").encode("hello", "f:9")


def test_settings_nobody_would_read_are_refused(make_tokenizer) -> None:
    plain, chat = make_tokenizer(), make_tokenizer(chat_template=PLAIN)
    with pytest.raises(RecipeError, match=r"data\.system_prompt is set, but"):
        PromptEncoder(plain, system_prompt="be kind")
    with pytest.raises(RecipeError, match=r"data\.template_options is set, but"):
        PromptEncoder(plain, template_options={"thinking": True})
    with pytest.raises(RecipeError, match="'add_generation_prompt', which etude sets itself"):
        PromptEncoder(chat, template_options={"add_generation_prompt": False})
    with pytest.raises(DataError, match="f:1: the prompt is a list of messages"):
        PromptEncoder(plain).encode(CONVERSATION, "f:1")
    with pytest.raises(DataError, match="would put another before it"):
        PromptEncoder(chat, system_prompt="be kind").encode(CONVERSATION)
    with pytest.raises(DataError, match="f:1: the prompt becomes no token at all"):
        PromptEncoder(plain).encode("", "f:1")
