"""Two processes give what one gives: gradients on the same rows, a whole run, and a run taken up again.

Run as a program, this file is one of the two processes: it does `work` and leaves its results in a folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.axes.names import Reduction, Source
from etude.config.load import dump_toml, load_recipe
from etude.config.schema import Recipe
from etude.core.objective import Objective, Term
from etude.core.records import Rollout
from etude.errors import CheckpointError
from etude.models.cache import ScoreStore
from etude.models.student import Student
from etude.models.teachers import FrozenTeacher
from etude.recipes.record import record
from etude.recipes.run import train
from etude.runtime.tracking import read_metrics
from etude.runtime.world import World
from etude.testing import rollout_of, tiny_backbone, tiny_recipe
from etude.training.evaluation import score_rows
from etude.training.learner import Learner
from etude.training.stages import Plan

# Rows of 3 to 10 tokens; the odd ones, which are the second process's, come out of a dataset and are the longer ones.
ROWS = [
    rollout_of(
        list(range(4, 6 + row % 3)),
        [(5 * row + 3 * place) % 32 for place in range(1 + row % 4 + 2 * (row % 2))],
        row=row,
        source=Source.DATASET if row % 2 else Source.STUDENT,
    )
    for row in range(8)
]
EVERYBODY, STUDENT_ONLY = Term(), Term(sources={Source.STUDENT})
STEPS = {  # what a step may be made of: term, padded tokens of a micro-batch, rows
    "one micro-batch": (EVERYBODY, 1000, ROWS),
    "many micro-batches": (EVERYBODY, 1, ROWS),
    "rows by rows": (Term(reduction=Reduction.SEQUENCE_MEAN), 12, ROWS),
    "more here than there": (EVERYBODY, 1, ROWS[:6:2] + ROWS[1:2]),
    "chosen among the tokens of both": (Term(entropy_share=0.4, confident_wrong_share=0.3), 12, ROWS),
    "nothing to train there": (STUDENT_ONLY, 12, ROWS),
    "no rows but one there, which trains nothing": (STUDENT_ONLY, 1, [*ROWS[:7:2], ROWS[1]]),
}
RUN = [
    "sampler.student_fraction=0.75",
    "sampler.replay_fraction=0.9",
    'terms.0.sources=["student"]',
    "train.updates_per_round=2",
    "train.tokens_per_micro_batch=12",
    "evaluation.prompts=3",
    "optim.epsilon=1e-3",  # Adam's sign of a gradient near 0 would blow rounding up to a whole step
]
STAGES = ["stages.0.method=supervised-kd", "stages.0.train.steps=2", "stages.1.name=mixed", "stages.1.train.steps=2"]
RECORDED_ROUNDS = 1  # of the run's two, so that the second meets the first one's rows
LAST, INNER = 4, 3  # steps of the run, and the one in the middle of a round from which it is taken up again


def gradients(world: World, term: Term, budget: int, rollouts: Sequence[Rollout]) -> tuple[dict[str, Tensor], float]:
    """The gradient of one step and the divergence it logs; this process's rows are those of its rank."""
    student, objective = Student(tiny_backbone(layers=1)), Objective([term])
    teacher = FrozenTeacher("teacher", tiny_backbone(layers=1, seed=1))
    before = {name: weight.detach().clone() for name, weight in student.trainable_parameters().items()}
    learner = Learner(
        student,
        objective,
        torch.optim.SGD(student.trainable_parameters().values(), lr=1.0),
        heads={"teacher": teacher.head()},
        plan=Plan(steps=1),
        rate=lambda step: 1.0,
        world=world,
        tokens_per_micro_batch=budget,
        clip_norm=0.0,
        seed=0,
    )
    mine = [row for row in rollouts if row.prompt.row % world.size == world.rank]
    prepared = learner.prepare(score_rows(mine, {"teacher": teacher}, objective), step=0)
    [report] = learner.learn(prepared, step=0, num_rows=len(ROWS))
    after = student.trainable_parameters()
    return {name: before[name] - after[name].detach() for name in before}, report.metrics["divergence/reverse_kl"]


def work(world: World, folder: Path, recipe: Recipe) -> None:
    """Everything there is to compare."""
    for name, step in STEPS.items():
        found, divergence = gradients(world, *step)
        if world.is_main:
            save_file(found | {"divergence": torch.tensor(divergence)}, folder / f"{name}.safetensors")
    train(recipe, quiet=True)
    again = recipe.model_copy(update={"output": f"{recipe.output} again"})
    if world.is_main:
        copy_inner(recipe, again)
    world.barrier()
    train(again, quiet=True)
    train(load_recipe(folder / "recipe.toml", [*STAGES, f"output={recipe.output} in stages"]), quiet=True)
    train(recorded(folder, recipe), quiet=True)
    others = recipe.model_copy(update={"output": f"{recipe.output} of others"})
    if Path(others.output).exists():
        train(others, quiet=True)
    if world.size > 1:
        refusal = said_of(others.model_copy(update={"seed": others.seed + 1}))
        assert world.gather_objects([refusal]) == [refusal] * world.size


def recorded(folder: Path, recipe: Recipe) -> Recipe:
    """A run on recorded rows; those of the dataset are marked by whichever process has them, into one store."""
    places = [f'{key}="{folder}/recording"' for key in ("sampler.recorded", "teacher.scores")]
    fresh = ["sampler.replay_fraction=0", "sampler.replay_capacity="]
    return load_recipe(folder / "recipe.toml", [*places, *fresh, f"output={recipe.output} recorded"])


def said_of(recipe: Recipe) -> str:
    """What a run is refused with."""
    with pytest.raises(CheckpointError, match="holds a run with other settings") as refused:
        train(recipe, quiet=True)
    return str(refused.value)


def copy_inner(recipe: Recipe, other: Recipe) -> None:
    """The run as it was in the middle of a round, in another folder."""
    kept = f"step-{INNER:06d}"
    shutil.copytree(
        recipe.output,
        other.output,
        ignore=lambda _, names: [name for name in names if name.startswith("step-") and name != kept],
    )
    (Path(other.output) / "recipe.toml").write_text(dump_toml(other), encoding="utf-8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What one process found, and what two did."""
    shared, one, two = (tmp_path_factory.mktemp(name) for name in ("shared", "one", "two"))
    settings = tiny_recipe(shared)
    for folder in (one, two):
        recipe = load_recipe(settings | {"output": str(folder / "run")}, RUN)
        (folder / "recipe.toml").write_text(dump_toml(recipe), encoding="utf-8")
        record(recorded(folder, recipe), rounds=RECORDED_ROUNDS, quiet=True)
    work(World(), one, load_recipe(one / "recipe.toml"))
    recipes = [load_recipe(folder / "recipe.toml") for folder in (one, two)]
    others = [recipe.model_copy(update={"output": f"{recipe.output} of others"}) for recipe in recipes]
    copy_inner(recipes[0], others[1])
    run_ranks(two, size=2)
    copy_inner(recipes[1], others[0])
    train(others[0], quiet=True)
    return one, two


def run_ranks(folder: Path, size: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", __file__, str(folder)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": loopback},
        )
        for rank in range(size)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("name", STEPS)
def test_the_gradient_of_a_step(folders: tuple[Path, Path], name: str) -> None:
    one, two = (load_file(folder / f"{name}.safetensors") for folder in folders)
    assert one.keys() == two.keys()
    assert max(gradient.abs().max() for gradient in one.values()) > 0.01
    for weight, gradient in one.items():
        torch.testing.assert_close(two[weight], gradient, atol=1e-6, rtol=1e-6)


def test_a_whole_run(folders: tuple[Path, Path]) -> None:
    one, two = (folder / "run" for folder in folders)
    student = f"checkpoints/step-{LAST:06d}/student/model.safetensors"
    theirs = load_file(two / student)
    for weight, value in load_file(one / student).items():
        torch.testing.assert_close(theirs[weight], value, atol=1e-6, rtol=1e-6)
    for alone, together in zip(*(read_metrics(run / "metrics.jsonl") for run in (one, two)), strict=True):
        counted = {name: value for name, value in alone.items() if "time/" not in name and "per_second" not in name}
        for metric, value in counted.items():
            assert together[metric] == pytest.approx(value, abs=1e-5), metric
    for answers in ("before", "after"):
        assert (one / f"samples/{answers}.jsonl").read_text() == (two / f"samples/{answers}.jsonl").read_text()


def test_a_run_in_stages(folders: tuple[Path, Path]) -> None:
    for stage in ("1-supervised-kd", "2-mixed"):
        student = f"run in stages/{stage}/checkpoints/step-000002/student/model.safetensors"
        one, two = (load_file(folder / student) for folder in folders)
        for weight, value in one.items():
            torch.testing.assert_close(two[weight], value, atol=1e-6, rtol=1e-6)


def test_a_run_on_recorded_rows(folders: tuple[Path, Path]) -> None:
    run = Path("run recorded")
    one, two = (
        load_file(folder / run / f"checkpoints/step-{LAST:06d}/student/model.safetensors") for folder in folders
    )
    for weight, value in one.items():
        torch.testing.assert_close(two[weight], value, atol=1e-6, rtol=1e-6)
    stores = [ScoreStore(folder / "recording/scores/teacher") for folder in folders]
    assert len(stores[0]) == len(stores[1])
    assert len(list((folders[1] / "recording/scores/teacher").glob("scores-*"))) > 1


def test_rows_are_replayed(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        assert any(line.get("rollout/replayed") for line in read_metrics(folder / "run" / "metrics.jsonl"))


def test_a_run_taken_up_inside_a_round(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        files = [
            folder / run / f"checkpoints/step-{LAST:06d}" / name
            for run in ("run", "run again")
            for name in ("student/model.safetensors", "optimizer.safetensors")
        ]
        student, optimizer, student_again, optimizer_again = (file.read_bytes() for file in files)
        assert student == student_again
        assert optimizer == optimizer_again


def test_a_run_taken_up_inside_a_round_by_another_number_of_processes(folders: tuple[Path, Path]) -> None:
    student = f"checkpoints/step-{LAST:06d}/student/model.safetensors"
    expected = load_file(folders[0] / "run" / student)
    for folder in folders:
        for weight, value in load_file(folder / "run of others" / student).items():
            torch.testing.assert_close(value, expected[weight], atol=1e-6, rtol=1e-6)


def test_the_rows_of_every_process_are_in_the_checkpoint(folders: tuple[Path, Path]) -> None:
    for folder, size in zip(folders, (1, 2), strict=True):
        saved = (folder / "run" / "checkpoints" / f"step-{INNER:06d}").glob("round-of-rank-*")
        assert {path.name for path in saved} == {f"round-of-rank-{rank}" for rank in range(size)}


if __name__ == "__main__":
    where = Path(sys.argv[1])
    torch.set_num_threads(1)
    work(World.current(), where, load_recipe(where / "recipe.toml"))
    World.current().close()
