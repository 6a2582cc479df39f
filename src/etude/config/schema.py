"""What a person may write in a recipe: one frozen table per noun, and the only home of every default.

A field's description says what it is, its unit, and where its default comes from; `etude show --keys` prints them. The
checks here need nothing but the recipe itself: one source of data, a teacher where one is asked for, no option that
would do nothing. Whether a term has the gradient its name promises is the table's business in `etude.axes.legality`;
`load.py` asks it. Nothing below the recipes floor sees these classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from etude.axes.legality import Point, Sampling
from etude.axes.names import Divergence, Estimator, Form, Importance, Reduction, Schedule, Source, Support
from etude.config.noun import Many, Noun, OnlyWhen, Word, spelled

Precision = Literal["auto", "float32", "bfloat16", "float16"]

_SKEWED = (Divergence.SKEW_FORWARD_KL, Divergence.SKEW_REVERSE_KL)


class LoraConfig(Noun):
    """`[student.lora]`: train low-rank adapters and leave the model's own weights as they are."""

    rank: int = Field(
        default=32, ge=1, description="Rank of the adapters. 32: the middle of the 8 to 128 that labs publish."
    )
    alpha: float = Field(
        default=64,
        gt=0,
        description="The adapter's output is multiplied by alpha / rank. 64: twice the rank, as most recipes.",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout before the adapters; counts only with student.dropout = true."
    )
    target_modules: str | Many[str] = Field(
        default="all-linear",
        description='Names of the layers that get an adapter; "all-linear" is every linear layer but the output head.',
    )


class StudentConfig(Noun):
    """`[student]`: who learns."""

    model: str = Field(description="A name on the hub, a folder, or a shipped model (etude:maze-student).")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of its weights; adapters are float32. In bfloat16 an update under 0.2 % of a weight is lost.",
    )
    compute_dtype: Precision = Field(
        default="auto",
        description="Of matrix products in both passes. auto: float32 on cpu and mps; on cuda bfloat16, or "
        "float16 with a loss scaler where the card has no bfloat16.",
    )
    keep_layers: Many[Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        min_length=1,
        description="Build the student from these layers of the model only, counted from 0. Left out: all of them.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Recompute activations in the backward pass: less memory, about a third more time a step.",
    )
    dropout: bool = Field(
        default=False,
        description="Let the model's own dropout act in training. Off: the teacher's marks are signal enough.",
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model folder.")
    lora: LoraConfig | None = Field(default=None, description="Train adapters. Left out: full fine-tuning.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.keep_layers is not None and list(self.keep_layers) != sorted(set(self.keep_layers)):
            raise ValueError(
                f"keep_layers = {spelled(self.keep_layers)} names a layer twice or out of order; write each kept layer "
                "once, ascending"
            )
        if self.lora and self.lora.dropout > 0 and not self.dropout:
            raise ValueError(
                f"lora.dropout = {self.lora.dropout} does nothing while dropout = false; "
                "remove it or write dropout = true"
            )
        return self


class TeacherConfig(Noun):
    """`[teacher]`: who marks; frozen, always in evaluation mode."""

    model: str = Field(description="A name on the hub, a folder, or a shipped model (etude:maze-teacher).")
    dtype: Precision = Field(default="auto", description="Of weights and products. auto: the student's compute_dtype.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model folder.")


_OF_ROWS = OnlyWhen("prompts come from a file or a dataset", lambda data: data.task is None)
_OF_FILE = OnlyWhen("prompts come from a file", lambda data: data.prompts is not None)
_OF_DATASET = OnlyWhen("dataset is given", lambda data: data.dataset is not None)
_OF_TASK = OnlyWhen("task is given", lambda data: data.task is not None)


class DataConfig(Noun):
    """`[data]`: where prompts come from, how they are rendered, and which are held out."""

    prompts: str | None = Field(
        default=None, description="A JSONL file, one example a line. One of prompts, dataset, task."
    )
    dataset: str | None = Field(
        default=None, description="A dataset on the hub, or a local folder. One of prompts, dataset, task."
    )
    dataset_config: Annotated[str | None, _OF_DATASET] = Field(
        default=None, description="The dataset's configuration, if it has any."
    )
    split: Annotated[str | None, replace(_OF_DATASET, default="train")] = Field(
        default=None, description="The dataset's split to train on."
    )
    task: str | None = Field(
        default=None,
        description='Questions with a verifier: "maze", "reasoning_gym:NAME" or "package.module:function". '
        "One of prompts, dataset, task.",
    )
    task_size: Annotated[int | None, replace(_OF_TASK, default=1000)] = Field(
        default=None, ge=1, description="Questions to train on."
    )
    columns: Annotated[dict[Literal["prompt", "completion", "answer"], str], _OF_ROWS] = Field(
        default={}, description="Which column is the prompt, the completion, the answer, where it is named differently."
    )
    verifier: Annotated[str | None, _OF_ROWS] = Field(
        default=None,
        description='How evaluation compares a text with the answer column: "exact", "number" (the last in both) or '
        '"package.module:function". Left out: no accuracy. A task brings its own.',
    )
    system_prompt: str | None = Field(default=None, description="A system message before every prompt.")
    template_options: dict[str, Any] = Field(
        default={}, description="Extra arguments of the chat template, such as enable_thinking = false."
    )
    max_prompt_tokens: int = Field(default=512, ge=1, description="Longest prompt, in tokens of the rendered template.")
    long_prompts: Literal["stop", "drop", "cut"] = Field(
        default="stop",
        description="What becomes of longer ones: stop before step 1, drop the row, or cut its last message's end.",
    )
    eval_prompts: Annotated[str | None, _OF_FILE] = Field(default=None, description="A JSONL file of held-out prompts.")
    eval_dataset: Annotated[str | None, _OF_DATASET] = Field(
        default=None, description="Another dataset for the held-out prompts; needs eval_split."
    )
    eval_split: Annotated[str | None, _OF_DATASET] = Field(
        default=None, description="The split that holds the held-out prompts."
    )
    eval_task_size: Annotated[int | None, replace(_OF_TASK, default=64)] = Field(
        default=None, ge=1, description="Questions held out, beside those of task_size."
    )
    eval_size: Annotated[
        int | None,
        OnlyWhen(
            "held-out rows are split off a file or a dataset: without task, eval_prompts and eval_split",
            lambda data: data.task is None and data.eval_prompts is None and data.eval_split is None,
        ),
    ] = Field(
        default=None,
        ge=1,
        description="Rows split off as held-out prompts. Left out: 64, or a tenth of the rows if that is less.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [key for key in ("prompts", "dataset", "task") if getattr(self, key) is not None]
        if len(given) != 1:
            found = "none of them" if not given else " and ".join(given)
            raise ValueError(f"found {found}; expected exactly one of prompts, dataset and task")
        if self.eval_dataset is not None and self.eval_split is None:
            raise ValueError(f'eval_dataset = {spelled(self.eval_dataset)} needs eval_split beside it, such as "test"')
        return self


class SamplerConfig(Noun):
    """`[sampler]`: who writes the rows that are trained on, and how."""

    student_fraction: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Probability that the student writes a row; one seeded coin a row. 1: on-policy, best in GKD.",
    )
    other: Annotated[
        Literal[Source.DATASET, Source.TEACHER] | None,
        OnlyWhen("student_fraction is below 1", lambda sampler: sampler.student_fraction < 1, default=Source.DATASET),
    ] = Field(
        default=None,
        description='Where the remaining rows come from: the "dataset"\'s own completions, or the "teacher".',
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Of sampling only; loss.temperature is separate. 1: the student's own distribution.",
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the likeliest tokens of this total probability. 1: all."
    )
    top_k: int = Field(default=0, ge=0, description="Sample from this many likeliest tokens. 0: all.")
    max_new_tokens: int = Field(
        default=256, ge=1, description="Longest completion, in tokens; longer ones are cut there."
    )
    samples_per_prompt: int = Field(default=1, ge=1, description="Completions of each prompt in a round.")
    dtype: Precision = Field(
        default="auto",
        description="Of the copy that writes; the gap to the student's log-probs is measured. auto: compute_dtype.",
    )
    rows_per_batch: int = Field(
        default=64, ge=1, description="Rows written side by side; sets memory, and the result only by rounding."
    )
    stop: Many[str] = Field(
        default=(), description="Tokens that end a completion, beside the tokenizer's and the model's own."
    )

    @property
    def writers(self) -> frozenset[Source]:
        """Who may write a row of a round."""
        writers = {Source.STUDENT} if self.student_fraction > 0 else set[Source]()
        return frozenset(writers | {self.other} if self.other else writers)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.student_fraction == 0 and self.other is Source.DATASET and self.samples_per_prompt > 1:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt} only repeats rows that all come from the dataset; "
                "remove it or raise student_fraction"
            )
        return self


_OF_POLICY_GRADIENT = OnlyWhen(
    'estimator is "policy_gradient"', lambda term: term.estimator is Estimator.POLICY_GRADIENT
)


class TermConfig(Noun):
    """`[[terms]]`: one summand of the loss: which teacher, how much of it, measured how, trained how, on which rows."""

    teacher: Literal["teacher", "label"] = Field(
        default="teacher",
        description='The model of [teacher], or the "label": all probability on the row\'s own next token.',
    )
    support: Word[Support] = Field(
        default=Support.FULL,
        description="How much of the vocabulary is compared: all of it, or only the token that was drawn.",
    )
    divergence: Word[Divergence] = Field(
        default=Divergence.REVERSE_KL,
        description="What is measured at each token. reverse_kl, KL(student || teacher): do what the teacher would.",
    )
    beta: Annotated[
        float | None,
        OnlyWhen('divergence is "jsd"', lambda term: term.divergence is Divergence.JSD, default=0.5),
    ] = Field(
        default=None,
        ge=0,
        le=1,
        description="The teacher's weight in jsd's mixture: near 0 as forward KL, near 1 as reverse KL.",
    )
    alpha: Annotated[
        float | None,
        OnlyWhen("divergence is a skew one", lambda term: term.divergence in _SKEWED, default=0.1),
    ] = Field(
        default=None,
        gt=0,
        lt=1,
        description="How much of the first distribution a skew divergence mixes into the second. 0.1: DistiLLM (2024).",
    )
    estimator: Word[Estimator] = Field(
        default=Estimator.ANALYTIC,
        description="analytic differentiates the divergence; policy_gradient takes it as each drawn token's advantage.",
    )
    form: Annotated[
        Word[Form] | None,
        OnlyWhen(
            'support is "sampled"',
            lambda term: term.support is Support.SAMPLED,
            default_of=lambda term: Point(support=term.support, estimator=term.estimator).default_form,
        ),
    ] = Field(
        default=None,
        description="Which function of the log-ratio stands for reverse KL: k2 analytic, k1 policy gradient.",
    )
    discount: Annotated[float, replace(_OF_POLICY_GRADIENT, default=0.0)] = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Weight of each later token in a token's return. 0: a token answers for itself.",
    )
    importance: Annotated[Word[Importance], replace(_OF_POLICY_GRADIENT, default=Importance.RATIO)] = Field(
        default=Importance.NONE,
        description="Correction for tokens that today's student did not draw: none, ratio, ppo_clip.",
    )
    clip: Annotated[
        float | None,
        OnlyWhen('importance is "ppo_clip"', lambda term: term.importance is Importance.PPO_CLIP, default=0.2),
    ] = Field(default=None, gt=0, lt=1, description="The ratio counts within 1 - clip and 1 + clip. 0.2: PPO (2017).")
    coefficient: float = Field(default=1.0, gt=0, description="The term is multiplied by it in the loss.")
    sources: Many[Word[Source]] = Field(
        default=tuple(Source), min_length=1, description="Which rows the term trains, by who wrote them."
    )
    train_truncated: bool = Field(
        default=True, description="Train rows that were cut at max_new_tokens. Off: they leave the loss and its count."
    )
    reduction: Word[Reduction] = Field(
        default=Reduction.TOKEN_MEAN,
        description="Mean over all trained tokens of the step, or over each row's tokens first and then over rows.",
    )
    # Last, because its default is read off a field above.
    name: str = Field(
        default_factory=lambda term: str(term["divergence"]),
        pattern=r"^[A-Za-z0-9_-]+$",
        description="Names the term's metrics. Left out: the divergence.",
    )


class LossConfig(Noun):
    """`[loss]`: what all terms share."""

    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Divides both models' logits in the loss, with no further factor; not the sampler's.",
    )
    chunk_bytes: int = Field(
        default=256 * 2**20,
        ge=2**20,
        description="Bytes that head and divergence may hold at once; tokens x vocabulary never exists. 256 MiB.",
    )


class TrainConfig(Noun):
    """`[train]`: how much is trained. A round is prompts, completions, marks; then optimiser steps on them."""

    steps: int = Field(
        default=200, ge=1, description="Optimiser steps in all. 200: where published runs on one task end."
    )
    prompts_per_round: int = Field(default=8, ge=1, description="Prompts of a round, over all processes.")
    updates_per_round: int = Field(
        default=1, ge=1, description="Parts a round's rows are split into, one optimiser step each."
    )
    epochs: int = Field(default=1, ge=1, description="Passes over a round's rows. 1 x 1 step is on-policy.")
    tokens_per_micro_batch: int = Field(
        default=8192,
        ge=1,
        description="Padded tokens of one forward and backward pass; sets memory, and with dropout off no result.",
    )


class OptimConfig(Noun):
    """`[optim]`: AdamW and its learning rate."""

    learning_rate: float = Field(
        default=1e-5,
        gt=0,
        description="At its peak. 1e-5: safe for full fine-tuning of billions; ten times that for LoRA.",
    )
    schedule: Word[Schedule] = Field(default=Schedule.LINEAR, description="How it moves after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which it rises from 0 to the peak.")
    final_fraction: Annotated[
        float,
        OnlyWhen("schedule is not constant", lambda optim: optim.schedule is not Schedule.CONSTANT, default=0.1),
    ] = Field(default=1.0, ge=0, le=1, description="Learning rate of the last step, as a share of the peak.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decoupled decay of the weights, each step, times the learning rate."
    )
    beta1: float = Field(
        default=0.9, ge=0, lt=1, description="Decay of the gradient's running mean. AdamW's own default."
    )
    beta2: float = Field(
        default=0.999, ge=0, lt=1, description="Decay of its square's running mean. AdamW's own default."
    )
    epsilon: float = Field(default=1e-8, gt=0, description="Added to the divisor. AdamW's own default.")
    clip_norm: float = Field(default=1.0, ge=0, description="Largest norm of the whole gradient; 0 clips nothing.")


class EvaluationConfig(Noun):
    """`[evaluation]`: what is measured on held-out prompts, before, during and after."""

    every: int = Field(default=50, ge=0, description="Steps between evaluations; 0: before and after only.")
    prompts: int = Field(default=64, ge=1, description="Held-out prompts used, at most.")
    samples_per_prompt: int = Field(
        default=1, ge=1, description="Completions of each, sampled at temperature 1 whatever the sampler does."
    )
    greedy: bool = Field(
        default=True, description="Accuracy of the likeliest answer as well, where answers can be verified."
    )
    show: int = Field(default=6, ge=0, description="Answers kept to be read, before and after.")


class CheckpointConfig(Noun):
    """`[checkpoint]`: what a killed run goes on from."""

    every: int = Field(default=50, ge=0, description="Steps between checkpoints; 0: at the end only.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints kept. 2: one to fall back on.")


class DeviceConfig(Noun):
    """`[device]`: where it runs."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="auto: cuda, else mps, else cpu.")
    threads: int = Field(
        default=0, ge=0, description="CPU threads of torch. 0: by the size of the models; tiny ones want one."
    )


class Recipe(Noun):
    """A whole run: one sampler, a list of terms, and everything around them."""

    method: str | None = Field(
        default=None, description="A named point of the axes whose settings this recipe starts from."
    )
    seed: int = Field(default=0, ge=0, description="Every random number of the run follows from it.")
    name: str = Field(
        default="run",
        min_length=1,
        pattern=r"^[A-Za-z0-9_=-][A-Za-z0-9._=-]*$",  # it names a folder, which stays where runs are
        description="Of the run: letters, digits, -, _, = and dots. Left out: the recipe file's name.",
    )
    output: str = Field(
        default_factory=lambda recipe: f"runs/{recipe['name']}",
        min_length=1,
        description="Folder of the run, from where the command is called. Left out: runs/NAME.",
    )
    student: StudentConfig = Field(description="Who learns.")
    teacher: TeacherConfig | None = Field(
        default=None, description="Who marks. May be left out where only labels are trained."
    )
    data: DataConfig = Field(description="Where prompts come from.")
    sampler: SamplerConfig = Field(default=SamplerConfig(), description="Who writes.")
    terms: Many[TermConfig] = Field(
        default=(TermConfig(),), min_length=1, description="What is learned: summands of the loss."
    )
    loss: LossConfig = Field(default=LossConfig(), description="What all terms share.")
    train: TrainConfig = Field(default=TrainConfig(), description="How much.")
    optim: OptimConfig = Field(default=OptimConfig(), description="How fast.")
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="What is measured.")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="What is kept.")
    device: DeviceConfig = Field(default=DeviceConfig(), description="Where it runs.")

    @property
    def sampling(self) -> Sampling:
        """How rows are written, as far as a term's gradient depends on it; `Point.of` takes it."""
        return Sampling(
            rows=self.sampler.writers,
            temperature=self.sampler.temperature,
            top_p=self.sampler.top_p,
            top_k=self.sampler.top_k,
            steps_per_round=self.train.updates_per_round * self.train.epochs,
        )

    @model_validator(mode="after")
    def _check_terms(self) -> Self:
        names = [term.name for term in self.terms]
        for place, term in enumerate(self.terms):
            if term.name in names[:place]:
                raise ValueError(f'terms.{place}: a second term is called "{term.name}"; give it a name of its own')
            if not self.sampler.writers & set(term.sources):
                raise ValueError(
                    f"terms.{place}: sources = {spelled(term.sources)} trains nothing, rows come from "
                    f"{' and '.join(sorted(self.sampler.writers))}; name one of those"
                )
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if self.teacher is not None:
            return self
        for place, term in enumerate(self.terms):
            if term.teacher == "teacher":
                raise ValueError(
                    f'terms.{place} ("{term.name}") compares the student with a teacher and there is no [teacher]; '
                    'name its model, or write teacher = "label" for this term'
                )
        if self.sampler.other is Source.TEACHER:
            raise ValueError(
                'sampler.other = "teacher" lets the teacher write and there is no [teacher]; name its model'
            )
        return self

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        rows = self.train.prompts_per_round * self.sampler.samples_per_prompt
        if self.train.updates_per_round > rows:
            raise ValueError(
                f"train.updates_per_round = {self.train.updates_per_round} is more than the {rows} rows of a round; "
                "lower it or raise prompts_per_round"
            )
        return self
