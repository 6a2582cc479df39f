"""Do student and teacher speak the same tokens, and do they mean the same by a prompt? Asked of tokenizers alone.

Nothing here reads a weight. The ids of a prompt come in as lists, so that whoever renders them, the student's template,
the teacher's own or a declared view, is the caller's business (`recipes/check.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from etude.axes.names import Check
from etude.errors import PairError
from etude.preflight.findings import Finding, passed, refused, warned
from etude.text.vocabulary import real_vocabulary, require_same

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AROUND = 3  # tokens shown on either side of the place where two renderings part
# What opens and closes thinking in the templates of Qwen 3, DeepSeek R1, Magistral, Seed and their kin.
_THINKING = re.compile(r"</?\|?(?:\w+:)?(?:think|thinking|thought|reasoning)\|?>|\[/?THINK\]")


def vocabulary(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    *,
    rows: Mapping[str, int | None],
    role: str = "teacher",
) -> list[Finding]:
    """Whether each id means the same token to both, and which tokens play the special parts.

    Args:
        student, teacher: the tokenizers.
        rows: of the output head, by "student" and `role`, filler included; None: not known.
        role: what the second one is called.
    """
    try:
        different = require_same(student, teacher, role=role)
    except PairError as error:
        return [refused("vocabulary", str(error), f"take a {role} with the student's tokenizer")]
    real = real_vocabulary(student)
    filler = {name: count - real for name, count in rows.items() if count is not None and count > real}
    told = "".join(f"; the {name}'s head has {count} rows of filler, which are cut" for name, count in filler.items())
    same = passed("vocabulary", f"all {real} ids mean the same to student and {role}{told}", ids=real, filler=filler)
    return [same, _special_ids(student, different, role)]


def _special_ids(student: PreTrainedTokenizerBase, different: Sequence[str], role: str) -> Finding:
    if different:
        return warned(
            Check.SPECIAL_IDS,
            "; ".join(different),
            f"see that the student ends its answers with a token the {role} uses (stop-token, below); name it in "
            "sampler.stop",
        )
    parts = {part: getattr(student, f"{part}_token") for part in ("bos", "eos", "pad")}
    said = ", ".join(f"{part} {token!r}" for part, token in parts.items() if token is not None) or "there are none"
    return passed(Check.SPECIAL_IDS, f"the same on both sides: {said}", **parts)


def one_bos(ids: Mapping[str, Sequence[int]], tokenizers: Mapping[str, PreTrainedTokenizerBase]) -> Finding:
    """At most one BOS begins a prompt.

    Twice is what a template that writes it and an encoder that adds it make together: nothing fails, every score shifts
    a little (vllm #27486, open-r1 #462).

    Args:
        ids: a prompt's ids by role.
        tokenizers: by role.
    """
    counts = {role: _leading(of_role, tokenizers[role].bos_token_id) for role, of_role in ids.items()}
    twice = [role for role, count in counts.items() if count > 1]
    if twice:
        return refused(
            Check.BOS,
            f"prompts of {' and '.join(twice)} begin with {max(counts.values())} BOS tokens",
            "let the chat template or the tokenizer write it, not both",
            **counts,
        )
    said = ", ".join(f"{role} {'one' if count else 'none'}" for role, count in counts.items())
    return passed(Check.BOS, f"BOS at the start of a prompt: {said}", **counts)


def _leading(ids: Sequence[int], bos_id: object) -> int:
    """How many BOS ids a prompt begins with."""
    return next((place for place, id_ in enumerate(ids) if id_ != bos_id), len(ids))


def same_template(
    student_ids: Sequence[int],
    teacher_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    where: str,
    declared: bool = False,
) -> Finding:
    """Whether the teacher's own rendering of a prompt is what it will be given.

    A teacher asked in another form marks another conversation: a wrong template costs a steady bias (+0.287 nats a
    token in tinker-cookbook #796) that no curve shows.

    Args:
        student_ids: the prompt as the student reads it.
        teacher_ids: the same prompt as the teacher's own tokenizer renders it.
        tokenizer: of either; they share their ids.
        where: what the row is called.
        declared: the recipe says that the teacher is asked in its own words, and does so.
    """
    ours, theirs = (tokenizer.convert_ids_to_tokens(list(ids)) for ids in (student_ids, teacher_ids))
    shown = {"row": where, "student": ours, "teacher": theirs}
    if list(student_ids) == list(teacher_ids):
        return passed(Check.TEMPLATE, f"{where} is the same {len(ours)} ids by both templates", **shown)
    place = _parting(student_ids, teacher_ids)
    around = slice(max(0, place - _AROUND), place + _AROUND + 1)
    said = (
        f"{where} has {len(ours)} ids for the student and {len(theirs)} by the teacher's own template; they part at "
        f"token {place}: {_text(ours[around])} / {_text(theirs[around])}"
    )
    if declared:
        return passed(Check.TEMPLATE, f"declared: {said}", **shown, parting=place)
    return refused(
        Check.TEMPLATE,
        said,
        "give both sides one template, or let the teacher be asked in its own",
        **shown,
        parting=place,
    )


def one_sided_template(role: str) -> Finding:
    """Only one side has a chat template at all, and `role` has none."""
    return warned(
        Check.TEMPLATE,
        f"the {role}'s tokenizer has no chat template and the other's has one",
        f"see that the {role} knows the form of these prompts, or give its tokenizer a template",
    )


def _parting(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _text(tokens: Sequence[str]) -> str:
    return repr(" ".join(tokens)) if tokens else "its end"


def same_thinking(
    student_ids: Sequence[int],
    teacher_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    declared: bool = False,
) -> Finding:
    """Whether both sides begin an answer inside the same kind of block.

    A side that opens a thinking block in front of the answer expects thoughts where the other expects the answer: a
    huge divergence on the first tokens (ms-swift #6813).
    """
    ours, theirs = (_THINKING.findall(cast(str, tokenizer.decode(list(ids)))) for ids in (student_ids, teacher_ids))
    if ours == theirs:
        said = f"both prompts write {' '.join(ours)}" if ours else "no thinking marker in either prompt"
        return passed(Check.THINKING, said, student=ours, teacher=theirs)
    said = f"the student's prompt writes {' '.join(ours) or 'no marker'}, the teacher's {' '.join(theirs) or 'none'}"
    if declared:
        return passed(Check.THINKING, f"declared: {said}", student=ours, teacher=theirs)
    return refused(
        Check.THINKING,
        said,
        "switch thinking on, or off, for both (data.template_options)",
        student=ours,
        teacher=theirs,
    )
