"""From messages and plain text to ids, through the tokenizer's own chat template and nothing else.

The prompt ids are the template's, id for id, with nothing added. An answer out of a dataset becomes the ids that the
template writes after the prompt, so that dataset rows and sampled rows have the same shape. The encoder knows no model,
dataset or loss; `recipes/data.py` makes one from the student's tokenizer and hands its methods to the prompt source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jinja2.exceptions import TemplateError

from etude.errors import DataError, ModelError, RecipeError
from etude.text.control import ControlTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]

_OURS = frozenset({"add_generation_prompt", "continue_final_message", "return_dict", "tokenize"})  # set by the encoder


class PromptEncoder:
    """Encodes prompts and answers with one tokenizer.

    A prompt is a text or a list of messages `{"role": ..., "content": ...}`. With a chat template, a text becomes one
    user turn; without one, a text is encoded by the tokenizer's own call and messages are refused.

    Args:
        tokenizer: the student's.
        system_prompt: a system message to put before each prompt.
        template_options: extra variables of the chat template, such as `{"enable_thinking": False}`.
        stop_ids: the ids that end an answer (`vocabulary.stop_ids`); by default the tokenizer's EOS.

    Raises:
        RecipeError: a system prompt or options without a template to read them, or an option the encoder sets itself.
        DataError: the system prompt holds a control token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._options = dict(template_options or {})
        self._has_template = tokenizer.chat_template is not None
        self._require_readable(system_prompt)
        eos_id = cast("int | None", tokenizer.eos_token_id)
        self._stop_ids: tuple[int, ...] = tuple(stop_ids) or (() if eos_id is None else (eos_id,))
        self._control = self._control_tokens()
        self._system: list[dict[str, str]] = []
        if system_prompt is not None:
            self._control.refuse(system_prompt, "data.system_prompt")
            self._system = [{"role": "system", "content": system_prompt}]

    def encode(self, prompt: str | Messages, where: str = "prompt") -> list[int]:
        """The prompt's ids, up to the place where the model begins to write.

        Args:
            prompt: a text, or messages.
            where: what an error calls the row, such as `prompts.jsonl:12`.

        Returns:
            Exactly `tokenizer.apply_chat_template(messages, add_generation_prompt=True)`, or `tokenizer(text)` where
            there is no template. So a BOS is there once where the template (or else the tokenizer) writes one.

        Raises:
            DataError: the text holds a control token, or the template does not accept the messages.
        """
        if self._has_template:
            ids = self._template_ids(self._checked_messages(prompt, where), where, add_generation_prompt=True)
        else:
            ids = cast(list[int], self._tokenizer(self._checked_text(prompt, where))["input_ids"])
        if not ids:
            raise DataError(f"{where}: the prompt becomes no token at all; write a text, or leave out the row")
        return ids

    def encode_completion(self, prompt: str | Messages, completion: str, where: str = "prompt") -> list[int]:
        """The ids of the dataset's own answer to this prompt, a stop id at the end.

        The conversation is rendered with and without the answer. What the template writes after the prompt, through
        the first stop id, is the completion; a template that writes no end gets the first of the stop ids.

        Args:
            prompt: as given to `encode`; a template may render the same answer differently after another history.
            completion: the answer's text.
            where: what an error calls the row.

        Returns:
            Ids to stand directly after those of `encode`.

        Raises:
            DataError: the answer holds a control token, or the template changes the prompt or the answer when it
                renders them together (thinking taken out of history, say), so that no row could hold both.
            ModelError: the template ends the turn with a token at which the sampler would not stop, or nothing does.
        """
        self._control.refuse(completion, f"{where}: the completion", of_assistant=True)
        if not self._stop_ids:
            raise ModelError("no token ends an answer: set the tokenizer's eos_token, or name one in sampler.stop")
        if not self._has_template:
            return [*self._plain_ids(completion), self._stop_ids[0]]
        before, answer, tail = self._rendered_around(self._checked_messages(prompt, where), completion, where)
        ids = self._ids_after(before, answer + tail)
        # The answer holds no control token, so the first stop id is the template's.
        ends = [place for place, id_ in enumerate(ids) if id_ in self._stop_ids]
        return ids[: ends[0] + 1] if ends else self._with_stop(before, answer, tail)

    # ----------------------------------------------------------------------------------------------------- the template

    def _require_readable(self, system_prompt: str | None) -> None:
        if taken := sorted(_OURS & self._options.keys()):
            raise RecipeError(f"data.template_options sets {taken[0]!r}, which etude sets itself; leave it out")
        if not self._has_template and (system_prompt is not None or self._options):
            key = "system_prompt" if system_prompt is not None else "template_options"
            raise RecipeError(
                f"data.{key} is set, but the student's tokenizer has no chat template to read it; leave it out, or "
                "take a student whose tokenizer has one"
            )

    def _control_tokens(self) -> ControlTokens:
        if not self._has_template:
            return ControlTokens(self._tokenizer, template="", turn_ids=())
        turn_ids = self._template_ids([{"role": "user", "content": "x"}], "one user turn", add_generation_prompt=False)
        return ControlTokens(self._tokenizer, self._tokenizer.get_chat_template(), turn_ids)

    def _template_ids(self, messages: Messages, where: str, *, add_generation_prompt: bool) -> list[int]:
        return cast(list[int], self._apply(messages, where, tokenize=True, add_generation_prompt=add_generation_prompt))

    def _rendered(self, messages: Messages, where: str, *, add_generation_prompt: bool) -> str:
        return cast(str, self._apply(messages, where, tokenize=False, add_generation_prompt=add_generation_prompt))

    def _apply(self, messages: Messages, where: str, **how: bool) -> object:
        conversation = [dict(message) for message in messages]
        try:
            return self._tokenizer.apply_chat_template(conversation, return_dict=False, **how, **self._options)
        except TemplateError as error:
            raise DataError(
                f"{where}: the chat template does not accept these messages ({error}); give them the roles and the "
                "order the template expects"
            ) from error

    # ----------------------------------------------------------------------------------------------- the prompt's texts

    def _checked_text(self, prompt: str | Messages, where: str) -> str:
        if not isinstance(prompt, str):
            raise DataError(
                f"{where}: the prompt is a list of messages, and the student's tokenizer has no chat template to "
                "render it with; write the prompt as one text, or take a student whose tokenizer has one"
            )
        self._control.refuse(prompt, f"{where}: the prompt")
        return prompt

    def _checked_messages(self, prompt: str | Messages, where: str) -> Messages:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system and messages and messages[0]["role"] == "system":
            raise DataError(
                f"{where}: the prompt begins with a system message, and data.system_prompt would put another before "
                "it; keep one of the two"
            )
        for place, message in enumerate(messages, start=1):
            role = message["role"]
            self._control.refuse(role, f"{where}: the role of message {place}")
            self._control.refuse(
                message["content"], f"{where}: message {place} ({role})", of_assistant=role == "assistant"
            )
        return [*self._system, *messages]

    # ------------------------------------------------------------------------------------------------- the answer's ids

    def _plain_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _rendered_around(self, messages: Messages, completion: str, where: str) -> tuple[str, str, str]:
        """The prompt as rendered, the answer after it, and what the template writes behind the answer."""
        answered = [*messages, {"role": "assistant", "content": completion}]
        before = self._rendered(messages, where, add_generation_prompt=True)
        whole = self._rendered(answered, where, add_generation_prompt=False)
        answer = completion.strip()  # many templates strip an answer's edges
        rest = whole.removeprefix(before)
        if not whole.startswith(before) or not rest.lstrip().startswith(answer):
            changed = "the answer" if whole.startswith(before) else "the prompt before it"
            raise DataError(
                f"{where}: with the answer as message {len(answered)} (assistant) the chat template renders {changed} "
                "differently, so prompt and answer would not be what was said; change data.template_options "
                "(enable_thinking, for one), the answers, or the template"
            )
        end = rest.index(answer) + len(answer)
        return before, rest[:end], rest[end:]

    def _ids_after(self, before: str, text: str) -> list[int]:
        """Ids of `text` as the tokenizer writes it after `before`; by itself, where a token would span the seam.

        The prompt is given, so a model can never write a token that begins inside it.
        """
        prompt_ids, whole_ids = self._plain_ids(before), self._plain_ids(before + text)
        count = len(prompt_ids)
        return whole_ids[count:] if whole_ids[:count] == prompt_ids else self._plain_ids(text)

    def _with_stop(self, before: str, answer: str, tail: str) -> list[int]:
        if found := self._control.first_in(tail):
            raise ModelError(
                f"the chat template ends an answer with {found[1]!r}, which is no stop token, so the student would "
                "write on where the data ends; name it in sampler.stop"
            )
        return [*self._ids_after(before, answer), self._stop_ids[0]]
