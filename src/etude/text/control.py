"""Control tokens: which ids steer a model instead of saying something, and text that would smuggle one in.

A tokenizer reads `</s>` in a user's message as the end of a text, wherever it came from. Only the chat template may
write such tokens, so text that holds one is refused before any id of it is used. Called by the encoder in `chat.py`,
which knows how the template is rendered; here are the tokens only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from etude.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ControlTokens:
    """The control tokens of one tokenizer and its chat template.

    They are the special tokens, and those added tokens that the template mentions (role markers, thinking tags, tool
    calls). An assistant's own text may hold the latter, except those the template writes around a user's turn: an
    answer with thinking tags in it is an answer, one that forges a turn is not.

    Args:
        tokenizer: whose tokens they are.
        template: the chat template's source, empty if there is none.
        turn_ids: the ids of a user's turn as the template renders it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, turn_ids: Collection[int]) -> None:
        added = tokenizer.added_tokens_decoder
        mentioned = {id_: t.content for id_, t in added.items() if t.content in template and not t.content.isspace()}
        special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        special |= {id_: token.content for id_, token in added.items() if token.special}
        self._tokenizer = tokenizer
        self._forbidden = special | mentioned
        self._forbidden_to_assistant = special | {id_: mentioned[id_] for id_ in mentioned if id_ in turn_ids}

    def first_in(self, text: str, *, of_assistant: bool = False) -> tuple[int, str] | None:
        """Id and spelling of the first forbidden token that `text` by itself would be encoded to, if there is one.

        An unknown word is encoded to the unknown token without spelling it, and is only that: an unknown word.
        """
        forbidden = self._forbidden_to_assistant if of_assistant else self._forbidden
        for id_ in self._tokenizer.encode(text, add_special_tokens=False):
            if id_ in forbidden and (id_ != self._tokenizer.unk_token_id or forbidden[id_] in text):
                return id_, forbidden[id_]
        return None

    def refuse(self, text: str, what: str, *, of_assistant: bool = False) -> None:
        """Raise `DataError` if `text`, called `what` in the message, holds a control token."""
        if found := self.first_in(text, of_assistant=of_assistant):
            id_, spelling = found
            raise DataError(
                f"{what} holds the text {spelling!r}, which the tokenizer would read as its control token {id_}; only "
                "the chat template may write those, so rewrite the text or leave out the row"
            )
