"""`[student]`, `[teacher]` and `[reference]`: whose weights, in which precision, and what of them is trained."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from etude.config.noun import Many, Noun, OnlyWhen, spelled

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

    model: str = Field(
        description="A name on the hub, a folder, or a shipped model (etude:maze-student); a run's folder means its "
        "student."
    )
    step: int | None = Field(
        default=None, ge=0, description="Which checkpoint, where model is a run's folder. Left out: the newest."
    )
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
        if self.model.endswith(".gguf"):
            raise ValueError(
                f"model = {spelled(self.model)} names its way of splitting text and does not hold it, so prompts might "
                "get ids the model never saw; name the folder it was made from, or take the file as a teacher"
            )
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


_OF_FROZEN = OnlyWhen('weights = "model"', lambda teacher: teacher.weights == "model")
_OF_MODEL = OnlyWhen(
    'weights = "model" and model is given', lambda teacher: teacher.weights == "model" and teacher.model is not None
)
_OF_AVERAGE = OnlyWhen('weights = "ema"', lambda teacher: teacher.weights == "ema")
_OF_OWN_CLASS = OnlyWhen("weights names a class", lambda teacher: ":" in teacher.weights)
_OF_PRECISION = OnlyWhen(
    'model is given, or weights = "ema"', lambda teacher: teacher.weights == "ema" or _OF_MODEL.holds(teacher)
)


class TeacherConfig(Noun):
    """`[teacher]`: who marks; always in evaluation mode and without gradients."""

    weights: str = Field(
        default="model",
        description='Whose they are: "model" (frozen), "base" (the student with its adapters switched off), "ema" (a '
        'moving average of the student), "live" (the student as each round begins), or package.module:Class, a '
        "teacher of your own.",
    )
    model: Annotated[str | None, _OF_FROZEN] = Field(
        default=None,
        description="A name on the hub, a folder, a GGUF file, or a shipped model (etude:maze-teacher); a run's folder "
        "means its student. May be left out where scores are stored: the teacher's weights are then never loaded.",
    )
    scores: Annotated[str | None, _OF_FROZEN] = Field(
        default=None,
        description="Folder of stored scores, from where the command is called, as etude record makes it. A row that "
        "is there is not marked again; another one is, and added. Left out: every row is marked.",
    )
    step: Annotated[int | None, _OF_MODEL] = Field(
        default=None, ge=0, description="Which checkpoint, where model is a run's folder. Left out: the newest."
    )
    dtype: Annotated[Precision, _OF_PRECISION] = Field(
        default="auto", description="Of weights and products. auto: the student's compute_dtype."
    )
    device: Annotated[str, _OF_MODEL] = Field(
        default="auto",
        description='Where it marks: "cpu", "cuda:1" and so on. auto: where the student is.',
    )
    offload: Annotated[bool, _OF_MODEL] = Field(
        default=False,
        description="Keep its weights in CPU memory and bring them to the device while it marks; the output head stays "
        "there.",
    )
    quantization: Annotated[Literal["none", "bitsandbytes-8bit", "bitsandbytes-4bit", "torchao-int8"], _OF_MODEL] = (
        Field(
            default="none",
            description="Quantise its linear layers while loading. A folder saved quantised (GPTQ, AWQ) and a GGUF "
            "file need none.",
        )
    )
    trust_remote_code: Annotated[bool, _OF_MODEL] = Field(
        default=False, description="Run Python code that comes with the model folder."
    )
    ema_rate: Annotated[float | None, replace(_OF_AVERAGE, default=0.05)] = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the student that comes into the average at a time. 0.05 in SDPO.",
    )
    ema_every: Annotated[int | None, replace(_OF_AVERAGE, default=1)] = Field(
        default=None, ge=1, description="Optimiser steps between two of these."
    )
    options: Annotated[dict[str, Any], _OF_OWN_CLASS] = Field(
        default={}, description="Keyword arguments of your own teacher's class, beside its name."
    )

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, weights: str) -> str:
        if weights not in ("model", "base", "ema", "live") and ":" not in weights:
            raise ValueError(
                f'{spelled(weights)} is nobody\'s; write "model", "base", "ema", "live" or package.module:Class'
            )
        return weights

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", device):
            raise ValueError(f'{spelled(device)} is no device; write "auto", "cpu", "mps", "cuda" or "cuda:1"')
        return device

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weights == "model" and self.model is None and self.scores is None:
            raise ValueError('weights = "model" needs the model; write model, or whose else the weights are, or scores')
        if self.offload and self.device != "auto":
            raise ValueError(
                f"offload brings the weights to where the student is and device = {spelled(self.device)} says where "
                "they stay; remove one of them"
            )
        if self.quantization != "none" and self.offload:
            raise ValueError(
                f"quantization = {spelled(self.quantization)} ties the weights to a device and offload moves them; "
                "remove one of them"
            )
        if self.quantization != "none" and self.model is not None and self.model.endswith(".gguf"):
            raise ValueError(
                f"quantization = {spelled(self.quantization)} and {self.model} is quantised already; "
                "remove quantization"
            )
        return self


class ReferenceConfig(Noun):
    """`[reference]`: what a term stays near, or extrapolates away from; frozen.

    Left out: the student as the run begins, in a stage the student as that stage does.
    """

    model: str = Field(
        description="A name on the hub, a folder, a GGUF file, or a shipped model (etude:maze-student); a run's folder "
        "means its student."
    )
    step: int | None = Field(
        default=None, ge=0, description="Which checkpoint, where model is a run's folder. Left out: the newest."
    )
    dtype: Precision = Field(default="auto", description="Of weights and products. auto: the student's compute_dtype.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model folder.")
