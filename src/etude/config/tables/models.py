"""`[student]`, `[teacher]` and `[reference]`: whose weights, in which precision, and what of them is trained."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from etude.config.noun import Many, Noun, spelled

Precision = Literal["auto", "float32", "bfloat16", "float16"]


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


class ReferenceConfig(Noun):
    """`[reference]`: what a term stays near, or extrapolates away from; frozen.

    Left out: the student as the run begins, in a stage the student as that stage does.
    """

    model: str = Field(description="A name on the hub, a folder, or a shipped model (etude:maze-student).")
    dtype: Precision = Field(default="auto", description="Of weights and products. auto: the student's compute_dtype.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model folder.")
