"""What a run will leave on the disk: the checkpoints it keeps and the one it is writing, against what is free there."""

from __future__ import annotations

import shutil
from pathlib import Path

from etude.axes.names import Check
from etude.models.backbone import TransformersBackbone
from etude.models.lora import is_adapted
from etude.preflight.findings import Finding, passed, refused, warned
from etude.training.loop import Parts

ROOMY = 0.9  # of the free space; what is left over is soon filled by somebody else


def checkpoint_bytes(parts: Parts) -> int:
    """Of one checkpoint, before there is one: the student's weights as it is saved, and Adam's two numbers for each
    that learns.

    With adapters only these are saved; without, all weights are, each once.
    """
    trained = parts.student.trainable_parameters().values()
    held = {id(weight): weight for weight in parts.student.backbone.parameters()}.values()
    backbone = parts.student.backbone
    saved = trained if isinstance(backbone, TransformersBackbone) and is_adapted(backbone.model) else held
    return sum(weight.nbytes for weight in saved) + 2 * sum(weight.nbytes for weight in trained)


def disk(folder: Path, one_bytes: int, *, keep: int, saves: int, free_bytes: int | None = None) -> Finding:
    """Whether the checkpoints a run keeps, and the one it is writing, fit.

    Args:
        folder: of the run; it need not be there yet.
        one_bytes: size of one checkpoint.
        keep: how many are kept.
        saves: how many are written.
        free_bytes: on the disk of the folder; None: asked.
    """
    free = shutil.disk_usage(existing(folder)).free if free_bytes is None else free_bytes
    count = min(saves, keep + 1)  # the new one is whole before the oldest goes
    needed = count * one_bytes
    plural = "s" if count > 1 else ""
    kept = f"; the newest {keep} are kept while one more is written" if count > 1 else ""
    evidence = (
        f"{count} checkpoint{plural} of {gigabytes(one_bytes)} (weights and Adam's two numbers for each that learns"
        f"{kept}) need {gigabytes(needed)}, and {gigabytes(free)} are free"
    )
    figures = {"needed_bytes": needed, "free_bytes": free, "checkpoint_bytes": one_bytes, "checkpoints": count}
    cure = "make room there, lower checkpoint.keep, or choose another output"
    if needed > free:
        return refused(Check.DISK, evidence, cure, **figures)
    if needed > ROOMY * free:
        return warned(Check.DISK, evidence, cure, **figures)
    return passed(Check.DISK, evidence, **figures)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one around it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def gigabytes(count: float) -> str:
    """Bytes as people say them.

    >>> gigabytes(1_240_000), gigabytes(5_360_000_000)
    ('1.24 MB', '5.36 GB')
    """
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
