from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from etude.errors import CheckpointError
from etude.runtime.checkpoints import (
    MANIFEST,
    Checkpoint,
    CheckpointStore,
    files_of,
    load_tensors,
    pack_optimizer,
    put_file,
    put_folder,
    put_manifest,
    read_manifest,
    require_files,
    save_tensors,
    unpack_optimizer,
)


def _writer(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "student").mkdir()
        (folder / "student" / "weights.bin").write_bytes(bytes([step]) * 1000)
        (folder / "state.json").write_text(json.dumps({"step": step}))

    return write


def _two_saved(folder: Path) -> CheckpointStore:
    store = CheckpointStore(folder)
    for step in (20, 40):
        store.save(step, _writer(step), {"threads": 2})
    return store


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestSaving:
    def test_what_was_saved_is_found(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path / "runs" / "one")
        assert store.newest() is None
        path = store.save(40, _writer(40), {"threads": 2, "versions": {"torch": "2"}})
        assert path.name == "step-000040"
        assert store.newest() == Checkpoint(path, 40, {"threads": 2, "versions": {"torch": "2"}})
        assert store.passed_over == []
        assert json.loads((path / "state.json").read_text()) == {"step": 40}
        assert list(json.loads((path / MANIFEST).read_text())["files"]) == ["state.json", "student/weights.bin"]

    def test_only_the_newest_are_kept(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=2)
        for step in (1, 2, 30, 1_000_000):
            store.save(step, _writer(step % 256), {})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000030", "step-1000000"]

    def test_nothing_is_pruned_before_the_new_one_is_whole(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=1)
        store.save(1, _writer(1), {})

        def write(folder: Path) -> None:
            assert store.newest() is not None
            _writer(2)(folder)
            raise RuntimeError("out of coffee")

        with pytest.raises(RuntimeError, match="coffee"):
            store.save(2, write, {})
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]

    def test_a_damaged_one_does_not_count_among_the_kept(self, tmp_path: Path) -> None:
        store = _two_saved(tmp_path)
        (tmp_path / "step-000040" / "state.json").unlink()
        store.save(60, _writer(60), {})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000020", "step-000040", "step-000060"]
        store.save(80, _writer(80), {})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000060", "step-000080"]

    def test_a_damaged_one_is_replaced_when_its_step_comes_again(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=1)
        store.save(40, _writer(40), {})
        _flip_a_byte(tmp_path / "step-000040")
        assert store.newest() is None
        store.save(40, _writer(40), {})
        newest = store.newest()
        assert newest is not None
        assert newest.step == 40

    def test_what_cannot_be_written_down_is_refused_before_anything_is(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="not JSON serializable"):
            CheckpointStore(tmp_path).save(1, _writer(1), {"threads": object()})
        assert list(tmp_path.iterdir()) == []

    def test_keep_zero_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="keep = 0"):
            CheckpointStore(tmp_path, keep=0)


class TestNoRoom:
    def test_needed_and_free_bytes_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9000, 8000, 1000))
        store = CheckpointStore(tmp_path / "not" / "made" / "yet")
        with pytest.raises(CheckpointError, match="needs 1,001 bytes and 1,000 are free"):
            store.save(1, _writer(1), {}, needed_bytes=1001)
        store.save(1, _writer(1), {}, needed_bytes=1000)
        with pytest.raises(CheckpointError, match=r"needs 1,011 bytes"):  # as many as the one before: 1000 + 11
            store.save(2, _writer(2), {})
        newest = store.newest()
        assert newest is not None
        assert newest.step == 1

    def test_a_write_that_fails_leaves_the_earlier_ones(self, tmp_path: Path) -> None:
        script = f"""
import resource, torch
from pathlib import Path
from etude.errors import CheckpointError
from etude.runtime.checkpoints import CheckpointStore, save_tensors

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # a file beyond 10 kB fails as on a full disk
store = CheckpointStore(Path({str(tmp_path)!r}), keep=1)
store.save(1, lambda folder: save_tensors(folder / "a.safetensors", {{"x": torch.zeros(1_000)}}), {{}})
try:
    store.save(2, lambda folder: save_tensors(folder / "a.safetensors", {{"x": torch.zeros(10_000)}}), {{}})
except CheckpointError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        assert "cannot save step 2" in done.stdout
        assert "bytes are free" in done.stdout
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
        newest = CheckpointStore(tmp_path).newest()
        assert newest is not None
        assert newest.step == 1


def _flip_a_byte(folder: Path) -> None:
    path = folder / "student" / "weights.bin"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])


def _truncate(folder: Path) -> None:
    path = folder / "student" / "weights.bin"
    path.write_bytes(path.read_bytes()[:-1])


def _empty(folder: Path) -> None:
    (folder / "student" / "weights.bin").write_bytes(b"")


def _remove_a_file(folder: Path) -> None:
    (folder / "state.json").unlink()


def _take_a_file_of_another_step(folder: Path) -> None:
    shutil.copy(folder.parent / "step-000020" / "state.json", folder / "state.json")


def _remove_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def _cut_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-40])


def _edit_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"threads": 2', '"threads": 3'))


def _take_the_name_of_another_step(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "step-000020", folder)


def _link_a_file_elsewhere(folder: Path) -> None:
    elsewhere = folder.parent / "state.json"
    shutil.move(folder / "state.json", elsewhere)
    (folder / "state.json").symlink_to(elsewhere)


def _a_file_by_the_name(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


class TestDamage:
    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (_flip_a_byte, "student/weights.bin is not the file that was written"),
            (_truncate, "student/weights.bin has 999 bytes and was written with 1,000"),
            (_empty, "student/weights.bin has 0 bytes"),
            (_remove_a_file, "state.json is missing"),
            (_take_a_file_of_another_step, "state.json is not the file that was written"),
            (_remove_the_manifest, "manifest.json is missing"),
            (_cut_the_manifest, "manifest.json cannot be read"),
            (_edit_the_manifest, "manifest.json is not the one that was written"),
            (_take_the_name_of_another_step, "named step-000040 and holds step 20"),
            (_link_a_file_elsewhere, "state.json leads out of the checkpoint's folder"),
            (_a_file_by_the_name, "manifest.json cannot be read"),
        ],
    )
    def test_is_named_and_passed_over(self, tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
        store = _two_saved(tmp_path)
        damage(tmp_path / "step-000040")
        newest = store.newest()
        assert newest is not None
        assert newest.step == 20
        ((path, said),) = store.passed_over
        assert path == tmp_path / "step-000040"
        assert reason in said

    def test_a_format_of_the_future_is_passed_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("etude.runtime.checkpoints.FORMAT", 2)
        store = _two_saved(tmp_path)
        monkeypatch.setattr("etude.runtime.checkpoints.FORMAT", 1)
        assert store.newest() is None
        assert [reason for _, reason in store.passed_over] == [
            "it has format 2 and this version of etude reads format 1"
        ] * 2

    def test_where_all_are_damaged_each_is_named(self, tmp_path: Path) -> None:
        store = _two_saved(tmp_path)
        for path in tmp_path.iterdir():
            _truncate(path)
        assert store.newest() is None
        assert [path.name for path, _ in store.passed_over] == ["step-000040", "step-000020"]

    def test_no_flipped_bit_goes_unnoticed(self, tmp_path: Path) -> None:
        store = _two_saved(tmp_path)
        folder = tmp_path / "step-000040"
        original = _contents(folder)
        manifest = json.loads(original[MANIFEST])
        draw = random.Random(0)
        for _ in range(200):
            name = draw.choice(sorted(original))
            content = bytearray(original[name])
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            (folder / name).write_bytes(content)
            newest = store.newest()
            assert newest is not None
            # white space between the manifest's values is the only place where a flip may be harmless
            assert newest.step == 20 or json.loads((folder / MANIFEST).read_bytes()) == manifest
            (folder / name).write_bytes(original[name])


FORKED = """
import os, random, shutil, signal, sys, time, torch
from pathlib import Path
from etude.runtime.checkpoints import CheckpointStore, load_tensors, save_tensors

torch.set_num_threads(1)
root, rename = Path(sys.argv[1]), Path.rename

def save(store, step):
    tensors = {"x": torch.full((50_000,), float(step))}
    store.save(step, lambda folder: save_tensors(folder / "a.safetensors", tensors), {})

def newest_step(folder):
    store = CheckpointStore(folder)
    newest = store.newest()
    assert store.passed_over == [], store.passed_over
    assert newest is None or (load_tensors(newest.path / "a.safetensors")["x"] == newest.step).all()
    return newest.step if newest else 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED_AT_NAMED_MOMENTS = """
def in_the_writer(store):
    store.save(2, lambda folder: (save_tensors(folder / "a.safetensors", {"x": torch.ones(9)}), die()), {})

def before_the_rename(store):
    Path.rename = lambda *_: die()
    save(store, 2)

def after_the_rename(store):
    Path.rename = lambda *names: (rename(*names), die())
    save(store, 2)

def while_the_old_one_goes(store):
    shutil.rmtree = lambda path, **_: (next(path.iterdir()).unlink(), die())
    save(store, 2)

for moment, left in (in_the_writer, 1), (before_the_rename, 1), (after_the_rename, 2), (while_the_old_one_goes, 2):
    folder = root / moment.__name__
    store = CheckpointStore(folder, keep=1)
    save(store, 1)
    child = os.fork()
    if child == 0:
        moment(store)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert newest_step(folder) == left, moment
    save(store, 3)
    assert [path.name for path in folder.iterdir()] == ["step-000003"], moment  # nothing is left behind
"""

KILLED_AT_RANDOM_MOMENTS = """
draw = random.Random(0)
for trial in range(25):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        store, step = CheckpointStore(root), newest_step(root)
        while True:
            step += 1
            save(store, step)
            os.write(writing, step.to_bytes(4, "big"))
    os.close(writing)
    reported = os.read(reading, 4)  # the first save is done; the blow falls in a later one
    time.sleep(draw.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reported += b"".join(iter(lambda: os.read(reading, 4096), b""))
    os.close(reading)
    assert newest_step(root) >= int.from_bytes(reported[-4:], "big") > 0
"""


@pytest.mark.parametrize("script", [KILLED_AT_NAMED_MOMENTS, KILLED_AT_RANDOM_MOMENTS], ids=["named", "random"])
def test_killed_at_any_moment_the_newest_is_whole(tmp_path: Path, script: str) -> None:
    subprocess.run([sys.executable, "-c", FORKED + script, str(tmp_path)], check=True)


class TestTensors:
    def test_come_back_bit_for_bit(self, tmp_path: Path) -> None:
        base = torch.randn(6, 4)
        tensors = {
            "float32": base,
            "bfloat16": base.bfloat16(),
            "transposed": base.T,
            "not finite": torch.tensor([torch.nan, torch.inf, -0.0]),
            "whole number": torch.tensor([3]),
            "rows": base[2:4].clone(),
            "empty": torch.empty(0, 5),
        }
        save_tensors(tmp_path / "a.safetensors", tensors)
        loaded = load_tensors(tmp_path / "a.safetensors")
        (tmp_path / "a.safetensors").write_bytes(b"")  # nothing that was loaded hangs on the file
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert loaded[name].shape == tensor.shape
            assert torch.equal(loaded[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))

    def test_what_is_no_safetensors_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.safetensors").write_bytes(b"\x80\x04pickle me")
        with pytest.raises(CheckpointError, match=r"a\.safetensors is not a readable safetensors file"):
            load_tensors(tmp_path / "a.safetensors")


def _two_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def _adam(model: nn.Module) -> torch.optim.AdamW:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    plain = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.99))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([[1.0, -2.0, 0.5]])).square().sum().backward()
    optimizer.step()


class TestOptimizer:
    def test_a_resumed_one_goes_on_bit_for_bit(self, tmp_path: Path) -> None:
        model = _two_layers()
        optimizer = _adam(model)
        _step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.05  # as a schedule would
        _step(model, optimizer)
        tensors, settings = pack_optimizer(optimizer, dict(model.named_parameters()))
        assert set(tensors) == {
            f"{key}/{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name, _ in model.named_parameters()
        }
        save_tensors(tmp_path / "optimizer.safetensors", tensors)
        settings = json.loads(json.dumps(settings))

        resumed = _two_layers()
        resumed.load_state_dict(model.state_dict())
        again = _adam(resumed)
        backwards = dict(reversed(list(resumed.named_parameters())))  # names decide, not places
        unpack_optimizer(again, backwards, load_tensors(tmp_path / "optimizer.safetensors"), settings)
        assert [{**group, "params": 0} for group in again.param_groups] == [
            {**group, "params": 0} for group in optimizer.param_groups
        ]
        for _ in range(3):
            _step(model, optimizer)
            _step(resumed, again)
        for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one, other)

    def test_one_that_has_not_stepped_is_empty(self) -> None:
        model = _two_layers()
        tensors, settings = pack_optimizer(_adam(model), dict(model.named_parameters()))
        assert tensors == {}
        unpack_optimizer(_adam(model), dict(model.named_parameters()), tensors, settings)

    def test_another_models_is_refused(self) -> None:
        model = _two_layers()
        optimizer = _adam(model)
        _step(model, optimizer)
        parameters = dict(model.named_parameters())
        tensors, settings = pack_optimizer(optimizer, parameters)
        renamed = {name.replace("1.", "2."): parameter for name, parameter in parameters.items()}
        with pytest.raises(CheckpointError, match=r"parameters differ.*first in 1\.bias"):
            unpack_optimizer(optimizer, renamed, tensors, settings)
        with pytest.raises(CheckpointError, match="optimizer is AdamW and this run's is SGD"):
            unpack_optimizer(torch.optim.SGD(model.parameters()), parameters, tensors, settings)
        with pytest.raises(CheckpointError, match="holds 4 parameters and 1 were named"):
            pack_optimizer(optimizer, {"0.weight": parameters["0.weight"]})
        wider = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        with pytest.raises(CheckpointError, match=r"0\.weight has shape \(2, 3\) in the checkpoint.*\(4, 3\)"):
            unpack_optimizer(_adam(wider), dict(wider.named_parameters()), tensors, settings)


class TestFilesAndFoldersByThemselves:
    def test_a_file_is_whole_or_not_there(self, tmp_path: Path) -> None:
        entry = put_file(tmp_path / "a.bin", lambda aside: aside.write_bytes(b"abc") and None)
        digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # SHA-256 of "abc", FIPS 180-2
        assert entry == {"size": 3, "sha256": digest}

        def fail(aside: Path) -> None:
            aside.write_bytes(b"half")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            put_file(tmp_path / "b.bin", fail)
        assert _contents(tmp_path) == {"a.bin": b"abc"}

    def test_a_folder_is_whole_or_not_there(self, tmp_path: Path) -> None:
        (tmp_path / ".saving-round").mkdir()  # what a killed process left behind
        put_folder(tmp_path / "round", lambda aside: (aside / "x").write_bytes(b"abc") and None)
        assert files_of(tmp_path / "round").keys() == {"x"}

        def fail(aside: Path) -> None:
            (aside / "x").write_bytes(b"half")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            put_folder(tmp_path / "other", fail)
        assert {path.name for path in tmp_path.iterdir()} == {"round"}

    def test_a_manifest_says_what_it_said_or_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "m.json"
        with pytest.raises(CheckpointError, match="m.json is missing"):
            read_manifest(path)
        for values in ({"files": {}}, {"files": {"x": {"size": 1, "sha256": "0"}}}):
            put_manifest(path, values)
            assert read_manifest(path) == values
        with pytest.raises(CheckpointError, match="x is missing"):
            require_files(tmp_path, read_manifest(path))
        path.write_text(path.read_text().replace('"size": 1', '"size": 2'))
        with pytest.raises(CheckpointError, match="m.json is not the one that was written: its hash differs"):
            read_manifest(path)
