"""The one place where a recipe becomes objects, and where needs are matched with gives.

In order of cost, so that nothing heavy is loaded for a recipe that cannot run: terms against teachers, tokenizers
against each other, data against columns and lengths, and only then weights. Everything below this floor takes plain
arguments and never sees a recipe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from etude.axes.names import REFERENCE, TEACHER, Gives, Source
from etude.config.schema import Recipe
from etude.config.tables.terms import TermConfig
from etude.core.objective import Objective
from etude.core.term import Term
from etude.errors import PairError, RecipeError
from etude.models.adaptive import AdaptiveFraction
from etude.models.backbone import LoraSettings, load_backbone
from etude.models.cache import CachedTeacher, ScoreStore
from etude.models.joint import Interleaving, JointSampler, TokenMixture
from etude.models.mixture import DatasetSampler, MixtureSampler
from etude.models.recorded import RecordedSampler, Recording
from etude.models.replay import ReplaySampler
from etude.models.roles import AbstractSampler, AbstractTeacher
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.models.student import Student
from etude.models.teachers import FrozenTeacher, InProcessTeacher
from etude.preflight.findings import require
from etude.recipes.data import Data, read_data
from etude.recipes.devices import Device, choose_device, choose_threads
from etude.recipes.folder import with_students_of_runs
from etude.recipes.pair import pair_findings
from etude.recipes.stored import fingerprint, open_recording, open_scores, stored_kinds
from etude.recipes.teachers import Load, backbones, loading_once, require_teacher, teacher_of
from etude.recipes.teachers import gives_of as gives_of_teacher
from etude.runtime.tracking import Tracker
from etude.runtime.world import World
from etude.text.vocabulary import real_vocabulary
from etude.training.evaluation import Evaluation
from etude.training.learner import Learner
from etude.training.loop import Parts
from etude.training.stages import Plan, learning_rate_factor
from etude.training.state import Saver


def build(
    recipe: Recipe,
    *,
    folder: Path,
    world: World,
    tracker: Tracker,
    stage: int = 0,
    start: Path | None = None,
    data: Data | None = None,
) -> Parts:
    """Everything a run, or its stage of this index, is made of; `start` holds the student that the stage begins with.

    `data` are the recipe's, where they have been read and the pair has been judged.

    Raises:
        UsageError: something does not fit; the sentence says what, where and what to do.
    """
    recipe, checkpoints = with_students_of_runs(recipe)
    require_gives(objective_of(recipe), gives_of(recipe))
    require_rows(recipe, world)
    device = choose_device(recipe, world)
    require_teacher(recipe, device)
    if data is None:
        data = read_data(recipe)
        require_ids(recipe, data)
        require(pair_findings(recipe, data), recipe.preflight.allow)
    objective = objective_of(recipe, data.special_ids)
    settings = sampling_settings(recipe, data.stop_ids)
    recording = open_recording(recipe, data, settings)
    scores = open_scores(recipe, TEACHER, objective.needs(TEACHER), data, device)
    student = load_student(recipe, device)
    require_window(student, recording)
    load = loading_once(load_backbone)
    teacher = load_teacher(recipe, device, student, load)  # None: there is none, or its stored scores are all of it
    reference = load_reference(recipe, device, load, start) if REFERENCE in objective.teachers else None
    teachers = {model.name: model for model in (teacher, reference) if model is not None}
    if scores is not None:
        teachers[TEACHER] = CachedTeacher(teacher, scores, name=TEACHER, device=device.name)
    require_gives(objective, {name: model.gives for name, model in teachers.items()})
    choose_threads(recipe.device.threads, num_parameters(student, *teachers.values()))
    found = [f"{role}.model: {place}" for role, place in checkpoints.items()]
    said = (data.describe(), *recipe.warnings, *objective.warnings, *data.warnings, f"sampling: {settings.describe()}")
    for line in (*found, *said, *from_disk(recording, scores, recipe.has_teacher_model)):
        tracker.say(line)
    own = InProcessSampler(
        student.backbone,
        settings,
        dtype=device.sampler_dtype,
        rows_per_batch=recipe.sampler.rows_per_batch,
        record_kept=objective.needs_kept_sets,
    )
    read = fingerprint(data, recording, scores)
    plan = Plan(recipe.train.steps, recipe.train.updates_per_round, recipe.train.epochs, stage)
    return Parts(
        student=student,
        sampler=sampler_of(recipe, own, teacher, recording),
        teachers=teachers,
        objective=objective,
        learner=learner_of(recipe, student, objective, teachers, plan, world, device),
        prompts=partial(data.prompts_of_round, recipe, plan.stage),
        evaluation=evaluation_of(recipe, data, own, teacher, world),
        plan=plan,
        saver=Saver(
            folder, keep=recipe.checkpoint.keep, world=world, info=facts_of(settings, device, read, checkpoints)
        ),
        tracker=tracker,
        world=world,
        seed=recipe.seed,
        evaluate_every=recipe.evaluation.every,
        checkpoint_every=recipe.checkpoint.every,
        reward=None if data.verify is None else data.reward,
    )


def objective_of(recipe: Recipe, special_ids: Collection[int] = ()) -> Objective:
    """The recipe's terms; refuses what has no gradient. Before the tokenizer is read, special ids are unknown."""
    return Objective(
        [term_of(term, special_ids) for term in recipe.terms],
        sampling=recipe.sampling,
        temperature=recipe.loss.temperature,
        chunk_bytes=recipe.loss.chunk_bytes,
    )


def term_of(config: TermConfig, special_ids: Collection[int] = ()) -> Term:
    """Key for key: a term's recipe keys are the arguments of `Term`, but for special tokens, which become their ids."""
    values = config.values()
    trains_them = values.pop("train_special")
    return Term(**values, left_out_ids=() if trains_them else special_ids)


def gives_of(recipe: Recipe) -> dict[str, frozenset[Gives]]:
    """What each teacher gives, by name."""
    gives = {REFERENCE: FrozenTeacher.gives}  # the student can always be its own reference
    if recipe.teacher is None:
        return gives
    stored = recipe.teacher.weights == "model" and recipe.teacher.model is None
    return gives | {TEACHER: stored_kinds(recipe, TEACHER) if stored else gives_of_teacher(recipe.teacher)}


def require_gives(objective: Objective, gives: Mapping[str, frozenset[Gives]]) -> None:
    """Match what terms need with what teachers give, before any weight is loaded."""
    for name in objective.teachers:
        missing = objective.needs(name) - gives.get(name, frozenset())
        if missing:
            has = ", ".join(sorted(gives.get(name, ()))) or "nothing"
            raise PairError(
                f"teacher '{name}' gives {has}, and a term needs {', '.join(sorted(missing))} from it; "
                "choose a teacher that gives it, or another support for the term"
            )


def require_rows(recipe: Recipe, world: World) -> None:
    """Each process writes at least one row of every round."""
    rows = recipe.train.prompts_per_round * recipe.sampler.samples_per_prompt
    if rows < world.size:
        raise RecipeError(
            f"a round has {rows} rows (train.prompts_per_round x sampler.samples_per_prompt), too few for "
            f"{world.size} processes; raise either key or start fewer of them"
        )


def require_ids(recipe: Recipe, data: Data) -> None:
    """No term and no sampler keeps more ids than there are: it would be the whole vocabulary under another name."""
    vocab_size = real_vocabulary(data.tokenizer)
    if recipe.sampler.top_k >= vocab_size:
        raise RecipeError(
            f"sampler.top_k = {recipe.sampler.top_k} cuts nothing, the vocabulary has {vocab_size} ids; lower it, or "
            "write top_k = 0"
        )
    for place, term in enumerate(recipe.terms):
        if term.top_k is not None and term.top_k > vocab_size:
            raise RecipeError(
                f'terms.{place} ("{term.name}") has top_k = {term.top_k} and the vocabulary {vocab_size} ids; lower '
                'top_k, or write support = "full"'
            )


def require_window(student: Student, recording: Recording | None) -> None:
    """Recorded rows must fit the student that reads them."""
    window = student.backbone.context_window
    if recording is not None and window is not None and recording.longest > window:
        raise PairError(
            f"the longest row of the recording in {recording.folder} has {recording.longest} tokens, and the student "
            f"reads at most {window}; name another recording, or another student"
        )


def from_disk(recording: Recording | None, scores: ScoreStore | None, has_teacher_model: bool) -> Iterator[str]:
    """What is said about rows and scores that were made beforehand."""
    if recording is not None:
        yield f"recorded rows: {recording.describe()}"
    if scores is not None:
        yield f"stored scores: {scores.describe()}" if scores.kinds else f"scores will be stored in {scores.folder}"
    if scores is not None and not has_teacher_model:
        yield (
            "no teacher's weights are loaded: the held-out divergence is left out, and a row without a stored score "
            "stops the run (teacher.model = ... measures the one and marks the other)"
        )


def facts_of(
    settings: SamplingSettings, device: Device, read: str, checkpoints: Mapping[str, str]
) -> dict[str, object]:
    """What the recipe left open and this run decided or found: kept with each checkpoint."""
    return {
        "threads": torch.get_num_threads(),
        "device": asdict(device),
        "sampling": settings.describe(),
        "data": read,
        "checkpoints": dict(checkpoints),
    }


def num_parameters(*models: Student | AbstractTeacher) -> int:
    """Of the largest model."""
    return max(sum(p.numel() for p in backbone.parameters()) for backbone in backbones(models))


def load_student(recipe: Recipe, device: Device) -> Student:
    """The model of [student], ready to learn."""
    config = recipe.student
    backbone = load_backbone(
        config.model,
        dtype=config.dtype,
        compute_dtype=device.compute_dtype,
        device=device.name,
        keep_layers=config.keep_layers,
        lora=adapters_of(recipe),
        activation_checkpointing=config.activation_checkpointing,
        dropout=config.dropout,
        trust_remote_code=config.trust_remote_code,
    )
    return Student(backbone, tokens_per_batch=recipe.train.tokens_per_micro_batch)


def adapters_of(recipe: Recipe) -> LoraSettings | None:
    """What [student.lora] puts on; None: all weights are trained."""
    lora = recipe.student.lora
    return None if lora is None else LoraSettings(**lora.model_dump(), seed=recipe.seed)


def load_teacher(recipe: Recipe, device: Device, student: Student | None, load: Load) -> AbstractTeacher | None:
    """Who [teacher] says marks, in the precision it computes in; None where nobody's weights are needed."""
    config = recipe.teacher
    if config is None or (config.weights == "model" and config.model is None):
        return None
    return teacher_of(config, TEACHER, recipe=recipe, device=device, student=student, load=load)


def load_reference(recipe: Recipe, device: Device, load: Load, start: Path | None) -> FrozenTeacher:
    """The frozen model of [reference]; where it is left out, the student as the run, or its stage, begins.

    That is the model of [student] before new adapters, which change nothing yet, or with the weights or adapters of
    `start`, taken as the student takes them: the last checkpoint of the stage before, the same at every resume.
    """
    config = recipe.reference
    begun = config is None and start is not None
    read = load_backbone if begun else load  # what takes other weights on must be nobody else's
    backbone = read(
        config.model if config else recipe.student.model,
        dtype=config.dtype if config and config.dtype != "auto" else device.compute_dtype,
        device=device.name,
        keep_layers=None if config else recipe.student.keep_layers,
        lora=adapters_of(recipe) if begun else None,
        trust_remote_code=config.trust_remote_code if config else recipe.student.trust_remote_code,
    )
    if begun and start is not None:
        backbone.restore(start)
    return FrozenTeacher(REFERENCE, backbone, tokens_per_batch=recipe.train.tokens_per_micro_batch)


def sampling_settings(recipe: Recipe, stop_ids: tuple[int, ...]) -> SamplingSettings:
    """Every field the sampler uses, said outright; the model folder adds none but the ids that end an answer."""
    config = recipe.sampler
    return SamplingSettings(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
        stop_ids=stop_ids,
    )


def sampler_of(
    recipe: Recipe, own: InProcessSampler, teacher: AbstractTeacher | None, recording: Recording | None = None
) -> AbstractSampler:
    """Who writes the rows of a round: the student, the dataset, the teacher, or a mixture."""
    config = recipe.sampler
    if recording is not None:
        writes: AbstractSampler | None = RecordedSampler(recording)
    else:
        writes = replaying(recipe, student_sampler(recipe, own, teacher)) if config.student_writes else None
    if recipe.sampler.other is Source.TEACHER:
        assert isinstance(teacher, InProcessTeacher)  # the schema asks for one
        other: AbstractSampler | None = InProcessSampler(
            teacher.backbone, own.settings, source=Source.TEACHER, rows_per_batch=recipe.sampler.rows_per_batch
        )
    else:
        other = DatasetSampler() if recipe.sampler.other is Source.DATASET else None
    if writes is None or other is None:
        alone = writes or other
        assert alone is not None  # below 1, the schema names who writes the rest
        return alone
    adaptive = config.adaptive and AdaptiveFraction(config.fraction.start, **config.adaptive.model_dump())
    return MixtureSampler(writes, other, adaptive or config.fraction, mix=config.mix)


def replaying(recipe: Recipe, writes: AbstractSampler) -> AbstractSampler:
    """The student's rows as they are written, or a share of them replayed."""
    config = recipe.sampler
    if config.replay_capacity is None:
        return writes
    rows = recipe.train.prompts_per_round * config.samples_per_prompt
    return ReplaySampler(
        writes, config.replay, rows_kept=config.replay_capacity // rows, max_age=config.max_age, mix=config.mix
    )


def student_sampler(recipe: Recipe, own: InProcessSampler, teacher: AbstractTeacher | None) -> AbstractSampler:
    """Who writes the student's rows: the student alone, or with the teacher's hand in each token."""
    if not recipe.sampler.joint:
        return own
    assert isinstance(teacher, InProcessTeacher)  # the schema asks for one
    share, top_k = recipe.sampler.teacher_share, recipe.sampler.teacher_top_k
    together = Interleaving(top_k) if share is None and top_k is not None else TokenMixture(share or 0.0)
    return JointSampler(own, teacher.backbone, together)


def learner_of(
    recipe: Recipe,
    student: Student,
    objective: Objective,
    teachers: Mapping[str, AbstractTeacher],
    plan: Plan,
    world: World,
    device: Device,
) -> Learner:
    """AdamW over what is trainable, and the steps it takes."""
    config = recipe.optim
    optimizer = torch.optim.AdamW(
        student.trainable_parameters().values(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,  # one pass over memory: a fifth of the time on a CPU
    )
    heads = {name: head for name, teacher in teachers.items() if (head := teacher.head()) is not None}
    rate = partial(
        learning_rate_factor,
        steps=plan.steps,
        warmup_steps=config.warmup_steps,
        schedule=config.schedule,
        final_fraction=config.final_fraction,
    )
    return Learner(
        student,
        objective,
        optimizer,
        heads=heads,
        plan=plan,
        rate=rate,
        world=world,
        tokens_per_micro_batch=recipe.train.tokens_per_micro_batch,
        clip_norm=config.clip_norm,
        seed=recipe.seed,
        scaler=torch.amp.GradScaler("cuda") if device.needs_scaler else None,
    )


def evaluation_of(
    recipe: Recipe, data: Data, own: InProcessSampler, teacher: AbstractTeacher | None, world: World
) -> Evaluation:
    """Held-out measurements: the student's own distribution, whatever the recipe samples with."""
    plain = replace(own.settings, temperature=1.0, top_p=1.0, top_k=0)
    greedy = data.verify is not None and recipe.evaluation.greedy
    compared = teacher is not None and Gives.HIDDEN_STATES in teacher.gives  # over the whole vocabulary
    if recipe.sampler.adaptive is not None and not compared:
        raise PairError(
            "[sampler.adaptive] follows the held-out divergence from the teacher, which takes hidden states, and this "
            "teacher gives none; remove it or take another teacher"
        )
    return Evaluation(
        data.held_out,
        sampler=own.with_settings(plain),
        greedy_sampler=own.with_settings(replace(plain, temperature=0.0)) if greedy else None,
        teacher=teacher if compared else None,
        verify=data.verify,
        decode=data.decode,
        seed=recipe.seed,
        world=world,
        tokens_per_batch=recipe.train.tokens_per_micro_batch,
        show=recipe.evaluation.show,
        chunk_bytes=recipe.loss.chunk_bytes,
    )
