"""What can be known before step 1: the one place where a recipe's parts are built to be judged, not to be trained.

`etude check` goes all the way: the recipe's legality, files and lengths, the pair's tokens and templates, and then, on
a few of the user's own prompts and with the weights loaded, everything of `etude.preflight`. `etude train` does the
part that costs a handful of short forward passes and stops before step 1 where it must.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from etude.axes.names import TEACHER, Check, Gives, Source
from etude.config.schema import Recipe
from etude.core.records import Prompt, Rollout
from etude.errors import DataError, EtudeError, ModelError, PairError
from etude.models.backbone import load_backbone
from etude.models.cache import CachedTeacher
from etude.models.mixture import DatasetSampler
from etude.models.roles import AbstractBackbone, AbstractSampler, AbstractTeacher
from etude.models.sampling import InProcessSampler
from etude.models.shipped import resolve
from etude.models.teachers import InProcessTeacher
from etude.preflight.answers import stop_probabilities, stop_token, warm_start
from etude.preflight.estimates import estimates
from etude.preflight.findings import Finding, Verdict, passed, refused, warned, with_allowed, worst
from etude.preflight.gradient import gradient
from etude.preflight.likeness import Reading, different, distance, noise_of, same, same_writer
from etude.preflight.rehearsal import writing
from etude.preflight.scores import Plain, aligned, echo, marks_of, read_marks, repeated, trimmed, uneven
from etude.preflight.tolerance import Tolerance, tolerance_of
from etude.recipes.build import (
    build,
    from_disk,
    gives_of,
    load_reference,
    objective_of,
    require_gives,
    require_ids,
    require_rows,
    sampling_settings,
)
from etude.recipes.data import Data, read_data
from etude.recipes.devices import choose_device
from etude.recipes.folder import require_places, with_students_of_runs
from etude.recipes.pair import pair_findings
from etude.recipes.stored import open_recording, open_scores
from etude.recipes.teachers import require_teacher
from etude.runtime.seeds import Key
from etude.runtime.tracking import Tracker
from etude.runtime.world import World
from etude.training.evaluation import score_rows
from etude.training.loop import Parts

PROBE_PROMPTS = 4  # of the first round
PROBE_TOKENS = 32  # of an answer, and of all rows whose gradient is compared
GREEDY_PROMPTS = 2  # of them, answered once more to see where an answer ends
START_PROMPTS, START_TOKENS = 2, 8  # at the start of a run, where nothing is sampled


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found of a recipe, or of one of its stages."""

    stage: str | None  # its name; None: the recipe has no stages
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    def as_json(self) -> dict[str, Any]:
        """All of it, for `--json`."""
        found = [finding.as_json() for finding in self.findings]
        return {"stage": self.stage, "verdict": str(self.verdict), "findings": found}


@contextmanager
def named(recipe: Recipe, place: int) -> Iterator[None]:
    """What goes wrong inside says in which stage; without stages it says what it says."""
    try:
        yield
    except (EtudeError, KeyboardInterrupt) as error:
        if recipe.stages is not None and str(error):
            error.args = (f'stages.{place} ("{recipe.stages[place].name}"): {error}',)
        raise


def check(recipe: Recipe) -> list[Checked]:
    """Everything that can be known before step 1, of the recipe or of each of its stages."""
    try:
        require_places(recipe, fresh=False)
    except EtudeError as error:
        return [Checked(None, (_refusal(error, "recipe"),))]
    return [
        Checked(
            None if recipe.stages is None else stage.name, tuple(with_allowed(_check(stage, place), _allowed(stage)))
        )
        for place, stage in enumerate(recipe.stage_recipes)
    ]


def _allowed(recipe: Recipe) -> frozenset[str]:
    return frozenset(str(name) for name in recipe.preflight.allow)


@dataclass(frozen=True, eq=False, slots=True)
class Readable:
    """What a recipe reads before any weight."""

    recipe: Recipe  # with a checkpoint's student in the place of each run's folder
    data: Data
    said: tuple[str, ...]  # of checkpoints, of the pair, of rows and scores made beforehand; a sentence each


def require_readable(recipe: Recipe, world: World) -> Readable:
    """What can be found out before any weight is read: terms, device, data, lengths, rows and scores on disk.

    Raises:
        UsageError: the run could not start; the sentence says why and what to do.
    """
    recipe, checkpoints = with_students_of_runs(recipe)
    objective = objective_of(recipe)
    require_gives(objective, gives_of(recipe))
    device = choose_device(recipe, world)
    require_teacher(recipe, device)
    data = read_data(recipe)
    require_ids(recipe, data)
    recording = open_recording(recipe, data, sampling_settings(recipe, data.stop_ids))
    scores = open_scores(recipe, TEACHER, objective.needs(TEACHER), data, device)
    places = (f"{role}.model: {place}" for role, place in checkpoints.items())
    return Readable(recipe, data, (*places, *data.warnings, *from_disk(recording, scores, recipe.has_teacher_model)))


def _check(recipe: Recipe, place: int) -> Iterator[Finding]:
    world, began = World(), time.perf_counter()
    try:
        require_rows(recipe, world)
        read = require_readable(recipe, world)
    except EtudeError as error:
        yield _refusal(error, "recipe")
        return
    recipe, data = read.recipe, read.data
    yield from _read_findings(recipe, data, read.said)
    yield from pair_findings(recipe, data)
    try:
        parts = build(recipe, folder=Path(recipe.output), world=world, tracker=_silent(recipe), stage=place, data=data)
    except EtudeError as error:
        yield _refusal(error, "models")
        return
    start_s = time.perf_counter() - began
    yield from probe_findings(recipe, parts, data)
    yield from estimate_findings(recipe, parts, data, start_s)


def _refusal(error: EtudeError, otherwise: str) -> Finding:
    """An exception as a finding: its sentence says what was found and what to do."""
    kinds = {DataError: "data", ModelError: "models", PairError: "vocabulary"}
    return refused(next((name for kind, name in kinds.items() if isinstance(error, kind)), otherwise), str(error))


def _silent(recipe: Recipe) -> Tracker:
    return Tracker(None, console=False, total_steps=recipe.train.steps)


def _is_student(sampler: AbstractSampler) -> bool:
    """Whether the student writes all rows by itself."""
    return isinstance(sampler, InProcessSampler) and sampler.source is Source.STUDENT


def _briefly(sampler: AbstractSampler) -> AbstractSampler:
    """The same writer with answers of a probe's length, whatever the recipe's are."""
    known = getattr(sampler, "student", sampler)  # of two who write together, the one whose settings count
    most = known.settings.max_new_tokens if isinstance(known, InProcessSampler) else PROBE_TOKENS
    return writing(sampler, max_new_tokens=min(PROBE_TOKENS, most))


def _read_findings(recipe: Recipe, data: Data, said: Sequence[str]) -> Iterator[Finding]:
    """What was read without weights: terms, sampling, data, lengths."""
    objective = objective_of(recipe)
    kinds = ", ".join(f"{t.name} {v.kind}" for t, v in zip(objective.terms, objective.verdicts, strict=True))
    told = (*recipe.warnings, *objective.warnings)
    if told:
        yield warned("recipe", "; ".join(told), "see docs/legality.md", terms=kinds)
    else:
        yield passed("recipe", f"every term has a gradient: {kinds}", terms=kinds)
    settings = sampling_settings(recipe, data.stop_ids).describe()
    yield passed("sampling", ", ".join(f"{name} {value}" for name, value in settings.items()), **settings)
    longest = data.train.longest_prompt
    windows = {role: card.context_window for role, card in data.cards.items()}
    room = max(recipe.sampler.max_new_tokens, data.train.longest_completion)
    yield passed(
        "data",
        "; ".join([data.describe(), *said])
        + f"; the longest has {longest} tokens and an answer up to {room}, of "
        + ", ".join(f"{window} ({role})" for role, window in windows.items()),
        longest_prompt=longest,
        longest_completion=room,
        windows=windows,
        dropped=data.dropped,
        cut=data.cut,
    )


# the weights are loaded -----------------------------------------------------------------------------------------------


def start_findings(recipe: Recipe, parts: Parts) -> list[Finding]:
    """What a run proves of its teachers before step 1, in a few short forward passes and without a sample."""
    prompts = by_length(parts.prompts(0), PROBE_PROMPTS)
    rows = uneven(echo(prompts, min(START_TOKENS, recipe.sampler.max_new_tokens))[:START_PROMPTS])
    found: list[Finding] = []
    for name, teacher in teachers_here(parts).items():
        found += _score_findings(parts, name, teacher, rows)
        if name == TEACHER and _most(teacher):
            scores = teacher.score(rows, _most(teacher), 1.0)
            apart = distance(Reading.of(parts.student.backbone, rows), scores, teacher.head())
            own = _self_teacher(recipe)
            found.append(different(apart, 0.0, _pair_tolerance(parts, teacher), self_teacher=own))
    return found


def by_length(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The shortest prompts of a round, and of those with one length the first: a probe need not wait for long ones."""
    return sorted(prompts, key=lambda prompt: prompt.token_ids.shape[0])[:count]


@dataclass(frozen=True, eq=False, slots=True)
class Probe:
    """A recipe's parts and a few rows that its student has written."""

    recipe: Recipe
    parts: Parts
    data: Data
    prompts: Sequence[Prompt]
    own: InProcessSampler  # the student's
    key: Key
    reading: Reading  # the student's, of its samples
    noise: float  # nats a token, by which the student differs from itself

    @classmethod
    def of(cls, recipe: Recipe, parts: Parts, data: Data) -> Probe:
        prompts = by_length(parts.prompts(0), PROBE_PROMPTS)
        key = Key(recipe.seed, "preflight", parts.plan.stage, 0)
        parts.sampler.refresh(parts.student, 0)
        assert parts.evaluation is not None  # build makes one
        own = _briefly(parts.sampler if _is_student(parts.sampler) else parts.evaluation.sampler)
        assert isinstance(own, InProcessSampler)  # likewise
        reading = Reading.of(parts.student.backbone, own.sample(prompts, key))
        noise = noise_of(parts.student.backbone, reading.first(2))
        return cls(recipe, parts, data, prompts, own, key, reading, noise)


def probe_findings(recipe: Recipe, parts: Parts, data: Data) -> Iterator[Finding]:
    """Everything that the weights say on a few of the user's own prompts."""
    try:
        probe = Probe.of(recipe, parts, data)
    except EtudeError as error:
        yield refused(Check.SAMPLER, str(error))
        return
    yield same_writer(probe.reading, tolerance_of(parts.student.backbone, probe.own.backbone))
    yield from _guarded(Check.IDENTITY, lambda: [_identity(probe)])
    # Somebody's own words besides: what a model writes itself, it may expect so well that a shift would not show.
    spoken = echo(probe.prompts, min(START_TOKENS, recipe.sampler.max_new_tokens))
    rows = [*uneven(probe.reading.rollouts), spoken[0]]
    here = teachers_here(parts)
    for name, teacher in here.items():
        yield from _guarded(Check.ALIGNMENT, partial(_score_findings, parts, name, teacher, rows))
    if TEACHER in here:
        yield from _guarded(Check.DIFFERENCE, lambda: _student_and_teacher(probe, here[TEACHER]))
        yield from _guarded(Check.STOP, lambda: _stop(probe, here[TEACHER]))
    absent = sorted(parts.teachers.keys() - here.keys())
    if absent:
        said = f"of the {absent[0]} there are stored scores only, so this was not looked at"
        skipped = (Check.ALIGNMENT, Check.REPETITION, Check.DIFFERENCE, Check.WARM_START, Check.STOP, Check.GRADIENT)
        yield from (passed(check, said) for check in skipped)
    else:
        yield from _guarded(Check.GRADIENT, lambda: [_gradient(probe)])


def teachers_here(parts: Parts) -> dict[str, AbstractTeacher]:
    """Those that can be asked about any row, past what is stored of them: a probe's rows belong in no store."""
    asked = {
        name: teacher.inner if isinstance(teacher, CachedTeacher) else teacher
        for name, teacher in parts.teachers.items()
    }
    return {name: teacher for name, teacher in asked.items() if teacher is not None}


def _guarded(check: str, work: Callable[[], Sequence[Finding]]) -> Sequence[Finding]:
    """What was found; an error that explains itself is a refusal of this check."""
    try:
        return work()
    except EtudeError as error:
        return [refused(check, str(error))]


def _score_findings(parts: Parts, name: str, teacher: AbstractTeacher, rows: Sequence[Rollout]) -> list[Finding]:
    """Alignment and repetition of one teacher."""
    needs = parts.objective.needs(name)
    tolerance = _pair_tolerance(parts, teacher)
    first = marks_of(teacher, rows, needs)
    found = [repeated(teacher, rows, needs, tolerance, first)]
    backbone = backbone_of(teacher)
    if backbone is None:
        return found
    assert isinstance(teacher, InProcessTeacher)  # it has a backbone
    with teacher.marking():
        plain = [Plain.of(backbone, row.prompt.token_ids, row.completion_ids) for row in rows]
    return [aligned(name, first, plain, tolerance), *found]


def backbone_of(teacher: AbstractTeacher) -> AbstractBackbone | None:
    """The model behind a teacher of this process; None where it marks elsewhere or otherwise."""
    return teacher.backbone if isinstance(teacher, InProcessTeacher) else None


def _most(teacher: AbstractTeacher) -> frozenset[Gives]:
    """What says most of a row."""
    return teacher.gives & {Gives.HIDDEN_STATES} or teacher.gives & {Gives.SAMPLED_LOGPROBS}


def _pair_tolerance(parts: Parts, teacher: AbstractTeacher) -> Tolerance:
    backbone = backbone_of(teacher)
    return tolerance_of(parts.student.backbone, *([] if backbone is None else [backbone]))


def _self_teacher(recipe: Recipe) -> bool:
    """Whether the recipe itself says that the teacher begins as the student: one model for both, or made of it."""
    config = recipe.teacher
    if config is None:
        return False
    if config.model is None:
        return config.weights in ("base", "live", "ema")
    same_model = resolve(config.model) == resolve(recipe.student.model)
    return same_model and config.step == recipe.student.step


def _identity(probe: Probe) -> Finding:
    """The student as it begins, loaded once more as a frozen teacher; gone again afterwards."""
    alone = probe.recipe.model_copy(update={"reference": None})
    second = load_reference(alone, choose_device(probe.recipe, World()), load_backbone, None)
    reading = probe.reading.first(2)
    scores = second.score(reading.rollouts, _most(second), 1.0)
    tolerance = tolerance_of(probe.parts.student.backbone, second.backbone)
    return same(distance(reading, scores, second.head()), probe.noise, tolerance)


def _student_and_teacher(probe: Probe, teacher: AbstractTeacher) -> list[Finding]:
    """How far apart they are, and what the teacher makes of the student's samples."""
    if not _most(teacher):
        said = f"the {teacher.name} gives no score of a token, so this was not looked at"
        return [passed(Check.DIFFERENCE, said), passed(Check.WARM_START, said)]
    rows = probe.reading.rollouts
    scores = teacher.score(rows, _most(teacher), 1.0)
    apart = distance(probe.reading, scores, teacher.head())
    marks = next(iter(read_marks(teacher, rows, scores).values()))
    tolerance = _pair_tolerance(probe.parts, teacher)
    return [
        different(apart, probe.noise, tolerance, self_teacher=_self_teacher(probe.recipe)),
        warm_start(probe.reading.logprobs(), marks, probe.parts.student.backbone.vocab_size),
    ]


def _stop(probe: Probe, teacher: AbstractTeacher) -> list[Finding]:
    """Of the student's greedy answers, and of the dataset's own where rows come from there."""
    if Gives.HIDDEN_STATES not in teacher.gives:
        return [passed(Check.STOP, f"the {teacher.name} gives no distribution, so this was not looked at")]
    greedy = probe.own.with_settings(replace(probe.own.settings, temperature=0.0)).sample(
        probe.prompts[:GREEDY_PROMPTS], probe.key
    )
    given = DatasetSampler().sample([p for p in probe.prompts if p.completion_ids is not None], probe.key)
    found: list[Finding] = []
    stops, spelled = probe.data.stop_ids, probe.data.tokenizer.convert_ids_to_tokens
    for whose, rows in (("the student's greedy answers", greedy), ("the dataset's answers", given)):
        if rows:
            probabilities, likeliest = stop_probabilities(teacher, rows, stops)
            names, instead = spelled(list(stops)), spelled(likeliest)
            found.append(stop_token(rows, probabilities, stops, names=names, likeliest=instead, whose=whose))
    return found


def _gradient(probe: Probe) -> Finding:
    """Rows of everybody who writes in this recipe, marked and prepared as for a step."""
    parts = probe.parts
    rows: list[Rollout] = []
    if _is_student(parts.sampler):
        rows += probe.reading.rollouts
    else:
        for writer in _writers(parts.sampler):
            rows += _briefly(writer).sample(probe.prompts, probe.key)
    rollouts = trimmed(rows, max(1, PROBE_TOKENS // len(rows)))
    prepared = parts.learner.prepare(score_rows(rollouts, teachers_here(parts), parts.objective, parts.reward), 0)
    backbone = parts.student.backbone
    return gradient(parts.objective, backbone, prepared, parts.learner.heads, tolerance_of(backbone))


def estimate_findings(recipe: Recipe, parts: Parts, data: Data, start_s: float) -> Iterator[Finding]:
    """What the run will take of disk, time and memory, tried out on these parts; the last that is asked of them."""
    here = teachers_here(parts)
    absent = sorted(parts.teachers.keys() - here.keys())
    if absent:
        said = f"of the {absent[0]} there are stored scores only, so no round was tried out"
        for check in (Check.DISK, Check.DETERMINISM, Check.TIME, Check.COST, Check.MEMORY):
            yield passed(check, said)
        return
    try:
        yield from estimates(
            replace(parts, teachers=here),
            {name: model for name, teacher in here.items() if (model := backbone_of(teacher)) is not None},
            longest_prompt=data.train.longest_prompt,
            longest_completion=max(recipe.sampler.max_new_tokens, data.train.longest_completion),
            max_new_tokens=recipe.sampler.max_new_tokens,
            start_s=start_s,
        )
    except EtudeError as error:
        yield refused(Check.TIME, f"a round could not be tried out: {error}")


def _writers(sampler: AbstractSampler) -> list[AbstractSampler]:
    """Those who write rows themselves, not those who only choose among them."""
    return [writer for part in sampler.parts.values() for writer in _writers(part)] or [sampler]
