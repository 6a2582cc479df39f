"""Checkpoints that are whole or not there.

A save writes into a folder aside, flushes it to the disk, hashes every file into `manifest.json`, and only then takes
its name by one rename; older ones go after that. So a run may be killed at any instant, and a full disk never costs the
last good checkpoint. On the way back the newest whole one is found, and each damaged one is named and passed over.

Knows no model: `training/loop.py` hands over a function that writes the files. Tensors are stored as safetensors and
everything else as JSON; nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from etude.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest and of the folder's layout; a reader refuses another one

_SAVING, _DISCARDED = ".saving-", ".discarded-"  # folders that are no checkpoint yet, or no longer


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One whole checkpoint: every file in it has the size and the hash it was written with."""

    path: Path
    step: int  # optimiser steps taken when it was written
    info: Mapping[str, Any]  # what the saver wrote down: versions, thread count, place in the run, ...


class CheckpointStore:
    """The checkpoints of one run, `step-000040` and so on in one folder. Only the main process may save."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """Keep the newest `keep` (at least 1) whole checkpoints; a save needs room for one more."""
        if keep < 1:
            raise ValueError(f"keep = {keep}; at least one checkpoint has to be kept")
        self.folder = folder
        self.keep = keep
        self.passed_over: list[tuple[Path, str]] = []  # by the last `newest`: each damaged checkpoint, and the reason

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / _name(step)

    def save(self, step: int, write: Callable[[Path], None], info: Mapping[str, Any], needed_bytes: int = 0) -> Path:
        """Write one checkpoint and return its folder; whatever fails, the earlier ones are untouched.

        `write` fills the empty folder it is given. `info` (JSON values) comes back as `Checkpoint.info`. `needed_bytes`
        is the expected size; the size of the checkpoint before this one is assumed where that is larger.
        Raises `CheckpointError` where the disk is too full or a file cannot be written.
        """
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "info": _json_values(info)}
        aside, final = self.folder / f"{_SAVING}{_name(step)}", self.path_of(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self.require_space(max(needed_bytes, self._size_of_last()))
            aside.mkdir()
            write(aside)
            _seal(aside, manifest)
            if final.exists():  # a damaged one of the same step, passed over when this run resumed
                self._discard(final)
                self.passed_over = [(path, reason) for path, reason in self.passed_over if path != final]
            aside.rename(final)
            _flush_folder(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"cannot save step {step} in {self.folder}: {error} ({self._free_bytes():,} bytes are free there); "
                "earlier checkpoints are untouched: make room or mend the folder, then start the same command again"
            ) from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._prune()
        return final

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None; `passed_over` then holds the damaged ones that are newer than it."""
        self.passed_over = []
        for path in reversed(self._paths()):
            try:
                return _whole(path)
            except CheckpointError as error:
                self.passed_over.append((path, str(error)))
        return None

    def at(self, step: int) -> Checkpoint:
        """The whole checkpoint of a step. Raises `CheckpointError` with the reason where there is none."""
        return _whole(self.path_of(step))

    @property
    def steps(self) -> list[int]:
        """Of every folder that claims to be a checkpoint, damaged ones included; ascending."""
        return [int(path.name.removeprefix("step-")) for path in self._paths()]

    def require_space(self, needed_bytes: int) -> None:
        """Raise `CheckpointError` unless so many bytes are free where the checkpoints go."""
        free_bytes = self._free_bytes()
        if free_bytes < needed_bytes:
            raise CheckpointError(
                f"a checkpoint in {self.folder} needs {needed_bytes:,} bytes and {free_bytes:,} are free; "
                "make room there, or give the run another output folder"
            )

    def _paths(self) -> list[Path]:
        """Every folder that claims to be a checkpoint, oldest first."""
        steps = {path: path.name.removeprefix("step-") for path in self.folder.glob("step-*")}
        return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))

    def _seemingly_whole(self) -> list[Path]:
        """Those with a manifest whose files have the right sizes, oldest first; nothing is hashed."""
        whole: list[Path] = []
        for path in self._paths():
            try:
                _check_files(path, _read_manifest(path), hashes=False)
            except CheckpointError:
                continue
            whole.append(path)
        return whole

    def _prune(self) -> None:
        """Remove what is older than the newest `keep` whole ones; damaged ones do not count among them."""
        damaged = {path for path, _ in self.passed_over}
        kept = [path for path in self._seemingly_whole() if path not in damaged][-self.keep :]
        paths = self._paths()
        for path in paths[: paths.index(kept[0])]:
            self._discard(path)

    def _discard(self, path: Path) -> None:
        """Take the name away first, so that a half-removed folder is never taken for a checkpoint."""
        nameless = path.rename(self.folder / f"{_DISCARDED}{path.name}")
        shutil.rmtree(nameless, ignore_errors=True)  # what a network disk still holds on to goes at the next save

    def _remove_leftovers(self) -> None:
        """What a killed save or a killed removal left behind."""
        for prefix in (_SAVING, _DISCARDED):
            for path in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _size_of_last(self) -> int:
        whole = self._seemingly_whole()
        return sum(entry["size"] for entry in _read_manifest(whole[-1])["files"].values()) if whole else 0

    def _free_bytes(self) -> int:
        """Free bytes on the disk that holds the folder, or will hold it."""
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file, bit for bit, from whatever device they are on."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of one safetensors file into memory: they stay what they are when the file goes."""
    try:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


# Files and folders that are whole or not there, for stores that are no checkpoints ------------------------------------


def put_file(path: Path, write: Callable[[Path], None]) -> dict[str, Any]:
    """Write one file aside, flush and hash it, and only then give it its name; returns its entry for a manifest."""
    aside = path.with_name(f"{_SAVING}{path.name}")
    try:
        write(aside)
        entry = _flushed_entry(aside)
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)
    return entry


def put_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder aside, seal it with a manifest of its own, and only then give it its name."""
    aside = path.with_name(f"{_SAVING}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)  # what a killed process left behind
    try:
        aside.mkdir(parents=True)
        write(aside)
        _seal(aside, {})
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _flush_folder(path.parent)


def put_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Put JSON values and a hash of them into a file, in the place of an earlier one, by one rename."""
    values = _json_values(manifest)
    text = json.dumps(values | {"manifest_sha256": _digest(values)}, indent=1)
    put_file(path, lambda aside: _write_text(aside, text))


def read_manifest(path: Path) -> dict[str, Any]:
    """What `put_manifest` wrote, checked against its own hash. Raises `CheckpointError` with the reason."""
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.pop("manifest_sha256", None) != _digest(manifest):
        raise CheckpointError(f"{path.name} is not the one that was written: its hash differs")
    return manifest


def require_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` with the reason unless each of a manifest's files is there as it was written."""
    _check_files(folder, manifest, hashes=True)


def files_of(folder: Path) -> dict[str, Any]:
    """The entries of a folder that `put_folder` wrote."""
    return read_manifest(folder / MANIFEST)["files"]


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def pack_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The whole state of Adam or its kin: tensors named `exp_avg/PARAMETER`, and settings that are JSON values.

    `parameters` are the optimizer's own, by name: names survive a change of order, positions do not.
    """
    state = optimizer.state_dict()
    names = _names_in_order(optimizer, parameters)
    tensors = {
        f"{key}/{names[index]}": value for index, values in state["state"].items() for key, value in values.items()
    }
    groups = [group | {"params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return tensors, {"class": type(optimizer).__name__, "param_groups": groups}


def unpack_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> None:
    """Put a state from `pack_optimizer` back. Raises `CheckpointError` where it belongs to other parameters."""
    names = _names_in_order(optimizer, parameters)
    _require_same(optimizer, names, settings)
    indices = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        key, name = path.split("/", maxsplit=1)
        expected = parameters[name].shape
        if tensor.ndim and tensor.shape != expected:
            raise CheckpointError(
                f"the optimizer's {path} has shape {tuple(tensor.shape)} in the checkpoint and the parameter "
                f"{tuple(expected)} in this run; resume with the model the run was started with"
            )
        state.setdefault(indices[name], {})[key] = tensor
    groups: list[dict[str, Any]] = []
    for group in settings["param_groups"]:  # JSON has no tuples, and a group's betas are one
        restored = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        groups.append(restored | {"params": [indices[name] for name in group["params"]]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping as it will be read again, so that what cannot be written fails before anything is."""
    return json.loads(json.dumps(dict(values), allow_nan=False))


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Flush every file to the disk and write the manifest last: sizes, hashes, and a hash of the manifest itself."""
    manifest["files"] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        manifest["files"][path.relative_to(folder).as_posix()] = _flushed_entry(path)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest | {"manifest_sha256": _digest(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _flush_folder(path)


def _flushed_entry(path: Path) -> dict[str, Any]:
    """Flush a file to the disk; its size and its hash."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _flush_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files behind them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of one checkpoint, checked against its own hash. Raises `CheckpointError` with the reason."""
    manifest = read_manifest(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"it has format {manifest.get('format')} and this version of etude reads format {FORMAT}")
    if folder.name != _name(manifest["step"]):
        raise CheckpointError(f"the folder is named {folder.name} and holds step {manifest['step']}")
    return manifest


def _whole(folder: Path) -> Checkpoint:
    """One checkpoint, every file of it hashed. Raises `CheckpointError` with the reason if it is damaged."""
    manifest = _read_manifest(folder)
    _check_files(folder, manifest, hashes=True)
    return Checkpoint(folder, manifest["step"], manifest["info"])


def _check_files(folder: Path, manifest: Mapping[str, Any], *, hashes: bool) -> None:
    """Raise `CheckpointError` with the reason unless every file is there, of its size, and (`hashes`) of its hash."""
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{name} leads out of the checkpoint's folder")
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                raise CheckpointError(f"{name} has {size:,} bytes and was written with {expected['size']:,}")
            if hashes:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != expected["sha256"]:
                    raise CheckpointError(f"{name} is not the file that was written: its hash differs")
        except FileNotFoundError:
            raise CheckpointError(f"{name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error


def _names_in_order(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The names of the optimizer's parameters in its own order, by which its state dict numbers them."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if {id(parameter) for parameter in held} != set(names):
        raise CheckpointError(
            f"the optimizer holds {len(held)} parameters and {len(names)} were named; "
            "exactly those it holds have to be named"
        )
    return [names[id(parameter)] for parameter in held]


def _require_same(optimizer: Optimizer, names: list[str], settings: Mapping[str, Any]) -> None:
    """The checkpoint's optimizer must be of this class and hold parameters of these names."""
    if settings["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint's optimizer is {settings['class']} and this run's is {type(optimizer).__name__}; "
            "resume with the recipe the run was started with"
        )
    saved = {name for group in settings["param_groups"] for name in group["params"]}
    if saved != set(names):
        first = sorted(saved ^ set(names))[0]
        raise CheckpointError(
            f"the optimizer's parameters differ between checkpoint ({len(saved)}) and run ({len(names)}), first in "
            f"{first}; resume with the model the run was started with"
        )
