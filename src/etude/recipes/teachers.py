"""From `[teacher]` and `[reference]` to who marks; what cannot be had here is refused before any weight is read.

`build.py` calls it. A kind of teacher that needs no model of its own is made of the student.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from etude.axes.names import Gives
from etude.config.schema import Recipe
from etude.config.tables.models import TeacherConfig
from etude.errors import PairError, RecipeError
from etude.models.backbone import TransformersBackbone
from etude.models.own_teachers import BaseTeacher, EmaTeacher, LiveTeacher
from etude.models.quantised import require_quantiser
from etude.models.roles import AbstractTeacher
from etude.models.shipped import resolve
from etude.models.student import Student
from etude.models.teachers import FrozenTeacher, InProcessTeacher, OffloadedTeacher
from etude.recipes.devices import Device, require_device

Load = Callable[..., TransformersBackbone]


def loading_once(load: Load) -> Load:
    """`load_backbone` that reads the same model, asked for in the same way, once: for models that stay as they are."""
    loaded: dict[tuple[object, ...], TransformersBackbone] = {}

    def load_or_share(model: str, **how: Any) -> TransformersBackbone:
        name = resolve(model)
        place = str(Path(name).resolve()) if Path(name).exists() else name
        key = (place, *sorted((option, str(value)) for option, value in how.items() if value is not None))
        if key not in loaded:
            loaded[key] = load(model, **how)
        return loaded[key]

    return load_or_share


def require_teacher(recipe: Recipe, device: Device) -> None:
    """Refuse a teacher for which this machine lacks a device or a package.

    Raises:
        UsageError: says what is missing.
    """
    config = recipe.teacher
    if config is None:
        return
    if ":" in config.weights:
        own_class(config.weights)
    if config.device != "auto":
        require_device(config.device, "teacher.device")
    if config.quantization != "none":
        require_quantiser(config.quantization)
    if config.offload and not device.name.startswith("cuda"):
        raise RecipeError(
            f"teacher.offload = true does nothing on {device.name}, whose memory is the CPU's already; remove it"
        )


def gives_of(config: TeacherConfig) -> frozenset[Gives]:
    """What a teacher gives, known before it is made; a function in a class's place may say so later."""
    if ":" not in config.weights:
        return FrozenTeacher.gives
    return getattr(own_class(config.weights), "gives", frozenset(Gives))


def teacher_of(
    config: TeacherConfig, name: str, *, recipe: Recipe, device: Device, student: Student | None, load: Load
) -> AbstractTeacher:
    """The teacher that a table describes.

    Args:
        config: `[teacher]`, or a table like it.
        name: what terms call it.
        student: whose weights are marked with, where the table says so; None: it must not.
        load: `load_backbone`, or one that shares what it loads.
    """
    tokens = recipe.train.tokens_per_micro_batch
    if config.weights in ("base", "live", "ema"):
        assert student is not None
        return _of_student(config, name, student, device, tokens)
    if config.weights != "model":
        return _own(config, name)
    assert config.model is not None  # the schema asks for it
    elsewhere = None if config.device == "auto" else config.device
    how: dict[str, Any] = {} if config.quantization == "none" else {"quantization": config.quantization}
    backbone = load(
        config.model,
        dtype=device.teacher_dtype,
        device="cpu" if config.offload else elsewhere or device.name,
        trust_remote_code=config.trust_remote_code,
        **how,
    )
    if config.offload:
        return OffloadedTeacher(name, backbone, device=device.name, tokens_per_batch=tokens)
    return FrozenTeacher(name, backbone, tokens_per_batch=tokens, learns_on=elsewhere and device.name)


def _of_student(
    config: TeacherConfig, name: str, student: Student, device: Device, tokens_per_batch: int
) -> AbstractTeacher:
    if config.weights == "base":
        return BaseTeacher(name, student, tokens_per_batch=tokens_per_batch)
    if config.weights == "live":
        return LiveTeacher(name, student, tokens_per_batch=tokens_per_batch)
    assert config.ema_rate is not None  # the schema fills both
    assert config.ema_every is not None
    return EmaTeacher(
        name,
        student,
        rate=config.ema_rate,
        every=config.ema_every,
        dtype=device.teacher_dtype,
        tokens_per_batch=tokens_per_batch,
    )


def _own(config: TeacherConfig, name: str) -> AbstractTeacher:
    made = own_class(config.weights)(name=name, **config.options)
    if not isinstance(made, AbstractTeacher):
        raise PairError(
            f"teacher.weights = '{config.weights}' made a {type(made).__name__}; expected an AbstractTeacher "
            "(etude.models.roles), which etude.testing.check_teacher tries out"
        )
    return made


def own_class(name: str) -> Callable[..., Any]:
    """The class, or the function, that `package.module:Class` names.

    Raises:
        RecipeError: it cannot be imported, or is nothing that can be called.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(
            f"teacher.weights names '{name}', which cannot be imported ({error}); its folder must be on the Python "
            "path, for example PYTHONPATH=."
        ) from error
    if not callable(found):
        raise RecipeError(f"teacher.weights names '{name}', which is a {type(found).__name__}; expected a class")
    return found


def backbones(models: Sequence[object]) -> list[torch.nn.Module]:
    """The language models in these roles; a teacher of one's own may have none."""
    return [model.backbone for model in models if isinstance(model, (Student, InProcessTeacher))]
