"""`[data]`: prompts, how they are rendered, and what is held out."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from etude.config.noun import Noun, OnlyWhen, spelled

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
        description='How a text is compared with the answer column, in evaluation and for a reward: "exact", "number" '
        '(the last in both) or "package.module:function". Left out: no accuracy. A task brings its own.',
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
