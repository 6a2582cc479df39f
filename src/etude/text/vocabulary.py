"""Do two tokenizers speak the same ids, how many of them are real, and which end an answer?

The vocabulary is the tokenizer's own id map, added tokens included; the rows a model pads its embeddings with are no
part of it. Nothing here looks at weights or knows whose tokenizer it is beyond the words student, teacher and
reference; `recipes/data.py` asks before weights are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from etude.errors import ModelError, PairError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

_SHOWN = 3  # differing ids an error shows: enough to recognise a shift, few enough for one sentence
_ROLES = ("bos_token", "eos_token", "pad_token")


def real_vocabulary(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of ids that can mean something: the largest id of the id map, added tokens included, plus one.

    Not `config.vocab_size`, which is a number of embedding rows and often rounded up; the rows beyond are filler whose
    logits mean nothing.

    Returns:
        V, such that each token's id is below V.
    """
    return max(tokenizer.get_vocab().values()) + 1


def require_same(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, role: str = "teacher"
) -> tuple[str, ...]:
    """Refuse a pair whose ids do not mean the same tokens, one by one; equal sizes prove nothing.

    Which of the shared tokens plays the part of BOS, EOS or padding may differ: a base student of an instruct teacher
    is the usual case. That changes no token's meaning, but a student may end its answers with a token the teacher
    never uses, so it is said. `role` is what the second one is called.

    Returns:
        A sentence for each special token that the two choose differently; empty if there is none.

    Raises:
        PairError: the id maps differ; shows both sizes and the first ids that differ.
    """
    ours, theirs = _tokens_by_id(student), _tokens_by_id(teacher)
    differing = sorted(id_ for id_ in ours.keys() | theirs.keys() if ours.get(id_) != theirs.get(id_))
    if differing:
        shown = "; ".join(f"id {id_} is {_named(ours, id_)} / {_named(theirs, id_)}" for id_ in differing[:_SHOWN])
        raise PairError(
            f"student and {role} speak different token ids ({len(ours)} / {len(theirs)} tokens, {len(differing)} ids "
            f"differ; student / {role}: {shown}), and each id must mean the same token to both; take a {role} of the "
            "student's own family, with the same tokenizer"
        )
    tokens = [(token, getattr(student, token), getattr(teacher, token)) for token in _ROLES]
    return tuple(
        f"the {token} of the student is {our_token!r}, of the {role} {their_token!r}"
        for token, our_token, their_token in tokens
        if our_token != their_token
    )


def stop_ids(
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None = None,
    extra_stop_tokens: Sequence[str] = (),
) -> tuple[int, ...]:
    """The ids that end an answer, resolved once for sampling, training and decoding alike.

    They are the tokenizer's EOS, the end ids of the folder's generation settings (the only thing etude reads there: no
    sampling field is), and the tokens named besides.

    Args:
        tokenizer: of the model that writes.
        generation_config: the model folder's, if it has one; its `eos_token_id` may be one id or a list.
        extra_stop_tokens: strings, each of which must be exactly one token.

    Returns:
        At least one id, without repetition, the tokenizer's EOS first.

    Raises:
        ModelError: there is none; an extra one is not one token; or the generation settings name an ordinary word,
            as a folder does whose settings were left at the library's defaults.
    """
    eos_id = cast("int | None", tokenizer.eos_token_id)
    found = [] if eos_id is None else [eos_id]
    found += _folder_stop_ids(tokenizer, generation_config)
    found += [_stop_id(tokenizer, token) for token in extra_stop_tokens]
    if not found:
        raise ModelError(
            "no token ends an answer: the tokenizer has no eos_token and the folder's generation_config.json no "
            "eos_token_id; set the tokenizer's eos_token, or name one of its tokens in sampler.stop"
        )
    return tuple(dict.fromkeys(found))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of tokens that the tokenizer marks special: BOS, EOS, padding, role markers and the like.

    An added token it does not mark so, as many a thinking tag, is a word like any other.
    """
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset({*tokenizer.all_special_ids, *added})


def _tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {id_: token for token, id_ in tokenizer.get_vocab().items()}


def _named(tokens: dict[int, str], id_: int) -> str:
    return repr(tokens[id_]) if id_ in tokens else "missing"


def _folder_stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> list[int]:
    named = None if generation_config is None else generation_config.eos_token_id
    ids: list[int] = [named] if isinstance(named, int) else list(named or ())
    marked = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for id_ in ids:
        if id_ not in marked:
            raise ModelError(
                f"the folder's generation settings give eos_token_id {id_}, which is no special token of the tokenizer "
                f"({_named(_tokens_by_id(tokenizer), id_)}), so answers would end at an ordinary word; write the right "
                f"id, probably {tokenizer.eos_token_id}, into config.json and generation_config.json"
            )
    return ids


def _stop_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    vocabulary = tokenizer.get_vocab()
    if token in vocabulary:
        return vocabulary[token]
    ids = tokenizer.encode(token, add_special_tokens=False)  # as text: "\n" is one token under another spelling
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        found = "unknown to the tokenizer" if tokenizer.unk_token_id in ids else f"{len(ids)} of its tokens"
        raise ModelError(f"sampler.stop names {token!r}, which is {found}; a stop token must be exactly one token")
    return ids[0]
