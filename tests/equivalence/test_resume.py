"""A resumed run is the uninterrupted one, bit for bit: what was written, what was logged, weights and optimiser."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from etude.config.load import dump_toml, load_recipe
from etude.config.schema import Recipe
from etude.recipes.record import record
from etude.recipes.run import train
from etude.testing import Kind, tiny_recipe

STEPS = 12  # three rounds of two updates x two epochs
INNER_STEPS = range(1, STEPS)

COMMON = [
    "sampler.student_fraction=0.5",
    f"train.steps={STEPS}",
    "train.updates_per_round=2",
    "train.epochs=2",
    "train.tokens_per_micro_batch=12",  # one to three rows, so that every step accumulates
    "evaluation.every=5",
    "evaluation.prompts=2",
    "optim.schedule=cosine",
]


def short(fields: Mapping[str, Any], text: str) -> float:
    """A verifier: the fewer words, the better."""
    return 1.0 / (1 + len(text.split()))


GOLD = {"name": "gold", "teacher": "label", "divergence": "forward_kl", "sources": ["dataset"]}

VARIANTS: dict[str, tuple[Kind, list[dict[str, Any]], list[str]]] = {
    "dropout, rows from the dataset": (
        "gpt2",  # whose dropout rates are 0.1 by default
        [
            {"divergence": "reverse_kl"},
            GOLD,
        ],
        ["student.dropout=true"],
    ),
    "adapters, a policy gradient, rows from the teacher, a copy that writes": (
        "llama",
        [
            {
                "name": "clipped",
                "support": "sampled",
                "estimator": "policy_gradient",
                "importance": "ppo_clip",
                "sources": ["student"],
            },
            {"divergence": "forward_kl", "sources": ["teacher"]},
        ],
        [
            "student.lora.rank=2",
            "student.lora.alpha=4",
            "student.lora.dropout=0.1",
            "student.dropout=true",
            "sampler.other=teacher",
            "sampler.dtype=bfloat16",
        ],
    ),
    "a reference, an extrapolated target, chosen tokens": (
        "llama",
        [
            {
                "name": "beyond",
                "support": "sampled",
                "estimator": "policy_gradient",
                "importance": "truncated",
                "extrapolation": 1.25,
                "sources": ["student"],
            },
            {"name": "near", "teacher": "reference", "coefficient": 0.1},
            {"name": "informative", "entropy_share": 0.5, "confident_wrong_share": 0.1, "sources": ["student"]},
        ],
        [],
    ),
    "replay of student's and teacher's rows, and a share by the evaluations": (
        "llama",
        [
            {
                "name": "ratio",
                "support": "sampled",
                "estimator": "policy_gradient",
                "importance": "ratio",
                "sources": ["student"],
            },
            {"divergence": "forward_kl"},
        ],
        [
            "sampler.teacher_share=0.2",
            "sampler.replay_fraction=0.8",
            "train.prompts_per_round=8",
            "sampler.replay_capacity=16",
            "sampler.max_age=4",  # that of the round before, and no other
            "sampler.adaptive.rise=0.4",
            "sampler.adaptive.tolerance=0.0",
            "optim.learning_rate=3.0",  # so that the student gets worse
            "evaluation.every=2",
        ],
    ),
    "within the ids that the sampler kept, in rows of earlier rounds, too": (
        "llama",
        [
            {
                "name": "within",
                "support": "sampled",
                "renormalise": True,
                "estimator": "policy_gradient",
                "importance": "ratio",
                "baseline": "batch",
                "sources": ["student"],
            },
            {"divergence": "forward_kl"},
        ],
        [
            "sampler.top_p=0.9",
            "sampler.temperature=0.8",
            "sampler.replay_fraction=0.8",
            "sampler.replay_capacity=16",
        ],
    ),
    "a reward off its group's mean beside a divergence": (
        "llama",
        [
            {"divergence": "jsd", "coefficient": 0.3},
            {
                "teacher": "reward",
                "support": "sampled",
                "estimator": "policy_gradient",
                "baseline": "group",
                "whiten": True,
                "importance": "ppo_clip",
                "coefficient": 0.7,
                "sources": ["student"],
            },
        ],
        ["sampler.samples_per_prompt=3", f"data.verifier={__name__}:short", "train.prompts_per_round=2"],
    ),
    "an average of an adapted student marks": (
        "llama",
        [{"divergence": "reverse_kl"}, GOLD],
        [
            "student.lora.rank=2",
            "student.lora.alpha=4",
            "teacher.model=",
            "teacher.weights=ema",
            "teacher.ema_rate=0.3",
            "teacher.ema_every=3",  # within a round of four steps, so that average and marks differ in it
            "teacher.dtype=bfloat16",
        ],
    ),
    "the student as the round began marks": (
        "gpt2",
        [{"divergence": "jsd"}, GOLD],
        ["teacher.model=", "teacher.weights=live"],
    ),
}
RECORDED = "recorded rows, some of them marked beforehand"
VARIANTS[RECORDED] = (
    "llama",
    [
        {
            "name": "clipped",
            "support": "sampled",
            "estimator": "policy_gradient",
            "importance": "ppo_clip",
            "sources": ["student"],
        },
        {"divergence": "forward_kl"},
    ],
    [],
)
REMEMBERING = [name for name in VARIANTS if "replay" in name]


@pytest.fixture(scope="module", params=list(VARIANTS))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A run that was never interrupted, with a checkpoint of every step."""
    kind, terms, changes = VARIANTS[request.param]
    settings = tiny_recipe(tmp_path_factory.mktemp("whole"), kind) | {"terms": terms}
    if request.param == RECORDED:
        recording = tmp_path_factory.mktemp("recording")
        changes = [*changes, f'sampler.recorded="{recording}"', f'teacher.scores="{recording}"']
    recipe = load_recipe(settings, [*COMMON, *changes])
    if request.param == RECORDED:
        record(recipe, rounds=2, quiet=True)  # of three; the dataset's rows of the third are marked as it goes
    train(recipe, quiet=True)
    return recipe


def interrupted(whole: Recipe, folder: Path, step: int) -> Recipe:
    """The same run in another folder, as it is found when it was killed some time after that step's checkpoint."""
    recipe = whole.model_copy(update={"output": str(folder)})
    shutil.copytree(Path(whole.output), folder, ignore=lambda _, names: [n for n in names if is_other(n, step)])
    (folder / "summary.json").unlink()
    (folder / "recipe.toml").write_text(dump_toml(recipe), encoding="utf-8")
    return recipe


def is_other(name: str, step: int) -> bool:
    return name.startswith("step-") and name != f"step-{step:06d}"


def traces(folder: Path) -> dict[str, Any]:
    """All that a run leaves behind, times aside."""
    last = folder / "checkpoints" / f"step-{STEPS:06d}"
    hashed = [*last.rglob("*.safetensors"), *(folder / "samples").iterdir()]
    # student, optimiser, answers before and after, and what sampler and teacher remember
    assert len(hashed) == 4 + (last / "sampler-of-rank-0").exists() + (last / "teachers").exists()
    hashed += last.glob("sampler-of-rank-0/**/*.json")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in hashed} | {
        "metrics": [
            {key: value for key, value in line.items() if key != "tokens/per_second" and not key.startswith("time/")}
            for line in lines
        ]
    }


def steps_kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def test_it_does_what_the_variant_promises(whole: Recipe) -> None:
    metrics = [line for line in traces(Path(whole.output))["metrics"] if "tokens/scored" in line]
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    for term in whole.terms:
        trained = [line[f"tokens/{term.name}"] for line in metrics]
        assert any(trained)
        assert term.sources == ("student", "dataset", "teacher") or min(trained) < metrics[0]["tokens/scored"]
    assert sum(line["gradient/skipped"] for line in metrics) < STEPS / 2


@pytest.mark.parametrize("whole", REMEMBERING, indirect=True)
def test_replay_replays_and_the_share_rises(whole: Recipe) -> None:
    metrics = [line for line in traces(Path(whole.output))["metrics"] if "tokens/scored" in line]
    assert any(line["rollout/replayed"] for line in metrics)
    assert not all(line["rollout/replayed"] == line["rollout/student"] for line in metrics[4:])  # fresh ones as well
    phi = json.loads(
        (Path(whole.output) / "checkpoints" / "step-000012" / "sampler-of-rank-0/fraction.json").read_text()
    )
    assert phi["fraction"] > 0.5


def test_from_every_inner_step(whole: Recipe, tmp_path: Path) -> None:
    expected = traces(Path(whole.output))
    for step in INNER_STEPS:
        folder = tmp_path / str(step)
        train(interrupted(whole, folder, step), quiet=True)
        assert steps_kept(folder) == list(range(step, STEPS + 1))
        assert traces(folder) == expected, f"resumed after step {step}"


def test_from_the_one_before_a_damaged_checkpoint(
    whole: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = interrupted(whole, tmp_path / "run", STEPS - 3)
    damaged = tmp_path / "run" / "checkpoints" / f"step-{STEPS:06d}"
    shutil.copytree(Path(whole.output) / "checkpoints" / damaged.name, damaged)
    (damaged / "optimizer.safetensors").write_bytes(b"")
    train(recipe)
    assert traces(tmp_path / "run") == traces(Path(whole.output))
    said = capsys.readouterr().err
    assert f"passed over the checkpoint {damaged.name}: optimizer.safetensors has 0 bytes" in said
    assert f"going on after step {STEPS - 3}" in said
