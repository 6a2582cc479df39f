"""Where a run computes and in which precision: the `auto` values of a recipe, resolved once.

float32 on CPU and mps, where it is the reference; on CUDA bfloat16 where the card has it, otherwise float16 with a loss
scaler. The device must be there when it is asked for by name: nothing falls back silently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from etude.config.schema import Recipe
from etude.errors import RecipeError
from etude.runtime.world import World

SMALL_MODEL = 5_000_000  # parameters below which a second CPU thread costs more than it brings


@dataclass(frozen=True, slots=True)
class Device:
    """The resolved device and precisions of a run."""

    name: str  # "cpu", "cuda:0", "mps"
    compute_dtype: str  # of the student's matrix products
    teacher_dtype: str
    sampler_dtype: str  # of the copy that writes

    @property
    def needs_scaler(self) -> bool:
        """float16 gradients underflow without a loss scale."""
        return self.compute_dtype == "float16"


def choose_device(recipe: Recipe, world: World) -> Device:
    """Resolve every `auto`, and make this process's card the current one.

    Raises:
        RecipeError: the device asked for is not there, or float16 is asked for where it cannot be trained.
    """
    name = _device_name(recipe.device.device, world)
    if name.startswith("cuda"):
        torch.cuda.set_device(world.local_rank)  # or NCCL would guess a card, at the first word exchanged
    compute_dtype = _compute_dtype(recipe.student.compute_dtype, name)
    if compute_dtype == "float16" and not name.startswith("cuda"):
        raise RecipeError(
            f'student.compute_dtype = "float16" needs a CUDA card and this run is on {name}; '
            'write "bfloat16" or "float32"'
        )
    teacher = recipe.teacher.dtype if recipe.teacher else "auto"
    sampler = recipe.sampler.dtype
    return Device(
        name=name,
        compute_dtype=compute_dtype,
        teacher_dtype=compute_dtype if teacher == "auto" else teacher,
        sampler_dtype=compute_dtype if sampler == "auto" else sampler,
    )


def choose_threads(asked: int, num_parameters: int) -> None:
    """Set torch's CPU threads: as asked, or one for models so small that threads only wait for each other."""
    if asked > 0:
        torch.set_num_threads(asked)
    elif num_parameters < SMALL_MODEL:
        torch.set_num_threads(1)


def require_device(name: str, key: str) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        RecipeError: names the key that asks for it.
    """
    kind, _, number = name.partition(":")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(number or 0) >= count:
        raise RecipeError(
            f'{key} = "{name}" is not there ({count} of the kind {kind} are); write "auto" or another one'
        )


def _device_name(asked: str, world: World) -> str:
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if asked == "auto":
        asked = next(name for name in ("cuda", "mps", "cpu") if available[name])
    if not available[asked]:
        there = ", ".join(name for name, there in available.items() if there)
        raise RecipeError(f'device.device = "{asked}" is not available here ({there}); write "auto" or one of these')
    return f"cuda:{world.local_rank}" if asked == "cuda" else asked


def _compute_dtype(asked: str, device: str) -> str:
    if asked != "auto":
        return asked
    if not device.startswith("cuda"):
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
