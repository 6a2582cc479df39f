"""What a run will cost, all of it: the disk, the hours, the operations, the same bits twice, and the memory.

The one door for whoever checks a recipe. The parts' student is what it was afterwards, to the bit, and the optimiser
begins anew; but time and memory are those of a process that has done nothing else, so other checks had better come
before that free what they loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from etude.axes.names import Source
from etude.core.records import Prompt
from etude.models.joint import JointSampler
from etude.models.roles import AbstractBackbone
from etude.preflight.cost import Amounts, cost
from etude.preflight.determinism import determinism
from etude.preflight.disk import checkpoint_bytes, disk
from etude.preflight.duration import Times, try_out, wall_time
from etude.preflight.findings import Finding
from etude.preflight.footprint import memory
from etude.preflight.rehearsal import Rehearsal, writers_of
from etude.training.loop import Parts


def estimates(
    parts: Parts,
    teachers: Mapping[str, AbstractBackbone],
    *,
    longest_prompt: int,
    longest_completion: int,
    max_new_tokens: int,
    start_s: float,
    room_bytes: int | None = None,
    free_bytes: int | None = None,
) -> Iterator[Finding]:
    """Disk, determinism, time, cost and memory of the run these parts are for.

    Args:
        parts: of the run, in whatever length of answers they were built.
        teachers: by name, the models behind its teachers, as far as they are in this process.
        longest_prompt: tokens of the longest prompt there is.
        longest_completion: tokens of the longest answer that can be written or is given.
        max_new_tokens: the most that is written.
        start_s: seconds from the start of a run to its first evaluation: imports, data, weights.
        room_bytes: memory there is for this process; None: asked.
        free_bytes: on the disk of the run's folder; None: asked.
    """
    times, one_bytes = Times.of(parts), checkpoint_bytes(parts)
    keep, folder = parts.saver.store.keep, parts.saver.folder
    yield disk(folder, one_bytes, keep=keep, saves=times.saves, free_bytes=free_bytes)
    yield determinism(parts, max_new_tokens=max_new_tokens)  # its two small rounds warm up what is timed next
    tried = try_out(parts, max_new_tokens=max_new_tokens, checkpoint_bytes=one_bytes)
    yield wall_time(times, tried, start_s=start_s, longest=longest_completion)
    amounts = amounts_of(parts, times, tried.rehearsal)
    here = {name: backbone for name, backbone in teachers.items() if name in parts.teachers}
    elsewhere = tuple(sorted(set(parts.objective.teachers) - set(here)))
    yield cost(amounts, parts.student.backbone, here, longest=longest_completion, elsewhere=elsewhere)
    yield memory(parts, longest_prompt=longest_prompt, longest_completion=longest_completion, room_bytes=room_bytes)


def amounts_of(parts: Parts, times: Times, seen: Rehearsal) -> Amounts:
    """What the run is made of, at the lengths of the round that was tried out."""
    writers = writers_of(parts.sampler, parts.plan.steps)
    by_teacher = [w for w in writers if w.source is Source.TEACHER or isinstance(w.sampler, JointSampler)]
    evaluation = parts.evaluation
    judged = evaluation is not None and evaluation.greedy_sampler is not None
    return Amounts(
        rounds=times.rounds,
        rows=len(parts.prompts(0)),
        prompt=seen.prompt_tokens,
        completion=seen.completion_tokens,
        student_writes=sum(writer.share for writer in writers if writer.source is Source.STUDENT),
        teacher_writes=sum(writer.share for writer in by_teacher),
        epochs=parts.plan.epochs,
        student_marks=parts.objective.needs_student_logprobs or parts.objective.needs_student_entropy,
        evaluations=times.evaluations,
        evaluation_rows=0 if evaluation is None else len(evaluation.prompts),
        evaluation_greedy_rows=_questions(evaluation.prompts) if evaluation is not None and judged else 0,
        evaluation_marked=evaluation is not None and evaluation.teacher is not None,
    )


def _questions(prompts: Sequence[Prompt]) -> int:
    """How many different ones there are."""
    return len({prompt.token_ids.numpy().tobytes() for prompt in prompts})
