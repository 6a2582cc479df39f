"""Scores on disk are the teacher's, bit for bit, and a store that is another teacher's or damaged is never used."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.axes.names import Estimator, Gives, Importance, Support
from etude.core.collate import collate
from etude.core.objective import Objective, Term
from etude.core.records import Rollout, Scored, Scores
from etude.errors import CheckpointError, PairError
from etude.models.cache import HEAD, MANIFEST, CachedTeacher, Origin, ScoreStore, key_of, kinds_of
from etude.models.roles import AbstractTeacher
from etude.models.teachers import FrozenTeacher
from etude.runtime.checkpoints import put_manifest, read_manifest
from etude.testing import CountingTeacher, rollout_of, tiny_backbone

SAMPLED, HIDDEN = frozenset({Gives.SAMPLED_LOGPROBS}), frozenset({Gives.HIDDEN_STATES})
BOTH = SAMPLED | HIDDEN
KINDS = pytest.mark.parametrize("kinds", [SAMPLED, HIDDEN, BOTH], ids=["log-probs", "states", "both"])
ORIGIN = Origin("master", "a" * 64, "b" * 64, {"bos": 1, "eos": 2, "pad": 0}, "float32", 1.0)
ROWS = [
    rollout_of([3], [4, 5, 6]),
    rollout_of([1, 2, 3], [4], row=1),
    rollout_of([7, 2, 2, 9, 5, 6], [8, 0, 2, 2], row=2),
]
OTHER = rollout_of([9, 9], [1, 1, 1], row=3)
FIELDS = ("sampled_logprobs", "hidden")
TERMS = {
    "full": Term(),
    "sampled": Term(support=Support.SAMPLED, estimator=Estimator.POLICY_GRADIENT, importance=Importance.RATIO),
}


class Asked(AbstractTeacher):
    """A teacher that notes which rows it is asked for."""

    def __init__(self, inner: AbstractTeacher) -> None:
        self.inner, self.name, self.gives = inner, inner.name, inner.gives
        self.rows: list[list[int]] = []

    def score(self, rollouts: Sequence[Rollout], needs: frozenset[Gives], temperature: float) -> list[Scores]:
        self.rows.append([rollout.prompt.row for rollout in rollouts])
        return self.inner.score(rollouts, needs, temperature)

    def head(self) -> Any:
        return self.inner.head()


def frozen() -> Asked:
    return Asked(FrozenTeacher("teacher", tiny_backbone(seed=1)))


def stored(folder: Path, kinds: frozenset[Gives], rows: Sequence[Rollout] = ROWS) -> list[Scores]:
    """What the teacher said of the rows, which the folder now holds."""
    teacher = CachedTeacher(frozen(), ScoreStore(folder, ORIGIN))
    return teacher.score(rows, kinds, 1.0)


def same(found: Scores, expected: Scores) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and a.dtype == b.dtype and a.equal(b))
        for a, b in ((getattr(found, field), getattr(expected, field)) for field in FIELDS)
    )


class TestWhatComesBack:
    @KINDS
    def test_the_bits_the_teacher_gave(self, tmp_path: Path, kinds: frozenset[Gives]) -> None:
        given = stored(tmp_path, kinds)
        alone = frozen().score(ROWS, kinds, 1.0)
        read = CachedTeacher(None, ScoreStore(tmp_path)).score(ROWS[::-1], kinds, 1.0)[::-1]
        for first, again, expected in zip(given, read, alone, strict=True):
            assert same(first, expected)
            assert same(again, expected)
            assert again.teacher == "teacher"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_head_comes_with_the_states(self, tmp_path: Path, dtype: str) -> None:
        backbone = tiny_backbone(seed=1).copy_as(dtype)
        CachedTeacher(FrozenTeacher("teacher", backbone), ScoreStore(tmp_path, ORIGIN)).score(ROWS, HIDDEN, 1.0)
        read = CachedTeacher(None, ScoreStore(tmp_path))
        head, expected = read.head(), backbone.head()
        assert head is not None
        assert head.weight_VD.equal(expected.weight_VD)
        assert (head.bias_V, head.scale, head.softcap) == (None, expected.scale, expected.softcap)
        [marks, *_] = read.score(ROWS, HIDDEN, 1.0)
        assert marks.hidden is not None
        assert marks.hidden.dtype == getattr(torch, dtype)

    def test_without_states_there_is_no_head(self, tmp_path: Path) -> None:
        stored(tmp_path, SAMPLED)
        read = CachedTeacher(None, ScoreStore(tmp_path))
        assert read.head() is None
        assert read.gives == SAMPLED
        assert not (tmp_path / HEAD).exists()

    def test_exactly_the_needed_fields(self, tmp_path: Path) -> None:
        stored(tmp_path, BOTH)
        read = CachedTeacher(None, ScoreStore(tmp_path))
        for needs in (frozenset[Gives](), SAMPLED, HIDDEN, BOTH):
            for marks in read.score(ROWS, needs, 1.0):
                assert (marks.sampled_logprobs is not None) == (Gives.SAMPLED_LOGPROBS in needs)
                assert (marks.hidden is not None) == (Gives.HIDDEN_STATES in needs)

    @pytest.mark.parametrize("name", TERMS)
    def test_the_gradient_is_the_same(self, tmp_path: Path, name: str) -> None:
        objective = Objective([TERMS[name]])
        needs = objective.needs("teacher")
        teacher = frozen()
        stored(tmp_path, needs)
        live = gradient(objective, teacher, teacher.score(ROWS, needs, 1.0))
        read = CachedTeacher(None, ScoreStore(tmp_path))
        found = gradient(objective, read, read.score(ROWS, needs, 1.0))
        assert live.abs().max() > 1e-3
        assert found.equal(live)


def gradient(objective: Objective, teacher: AbstractTeacher, scores: Sequence[Scores]) -> Tensor:
    """Of the loss with respect to the student's hidden states, which are the rows' own made-up ones."""
    student = tiny_backbone(seed=2)
    logprobs = FrozenTeacher("student", student).score(ROWS, SAMPLED, 1.0)
    rows = [
        Scored(row, {"teacher": marks}, student_logprobs=own.sampled_logprobs)
        for row, marks, own in zip(ROWS, scores, logprobs, strict=True)
    ]
    prepared = objective.prepare(rows)
    batch = collate(prepared)
    hidden_BTD = student.hidden_states(batch.token_ids_BT, batch.attention_mask_BT, batch.position_ids_BT)
    hidden_ND = hidden_BTD.flatten(0, 1)[batch.predicted_from_N].detach().requires_grad_(True)
    head = teacher.head()
    loss, _ = objective.sum(
        hidden_ND,
        student.head(),
        batch,
        objective.scales(objective.counts(prepared)),
        {} if head is None else {"teacher": head},
    )
    return torch.autograd.grad(loss, hidden_ND)[0]


class TestMissingRows:
    def test_only_they_are_asked_for_and_then_they_are_there(self, tmp_path: Path) -> None:
        stored(tmp_path, BOTH)
        teacher = frozen()
        found = CachedTeacher(teacher, ScoreStore(tmp_path, ORIGIN)).score([*ROWS, OTHER], BOTH, 1.0)
        assert teacher.rows == [[3]]
        again = CachedTeacher(None, ScoreStore(tmp_path)).score([*ROWS, OTHER], BOTH, 1.0)
        assert all(map(same, again, found))
        assert len(ScoreStore(tmp_path)) == 4

    def test_what_is_added_has_everything_stored_of_the_others(self, tmp_path: Path) -> None:
        stored(tmp_path, BOTH)
        CachedTeacher(frozen(), ScoreStore(tmp_path, ORIGIN)).score([OTHER], SAMPLED, 1.0)
        [marks] = CachedTeacher(None, ScoreStore(tmp_path)).score([OTHER], BOTH, 1.0)
        assert marks.hidden is not None

    def test_equal_rows_are_asked_for_once(self, tmp_path: Path) -> None:
        teacher = frozen()
        rows = [replace(OTHER, prompt=replace(OTHER.prompt, row=row)) for row in range(3)]
        found = CachedTeacher(teacher, ScoreStore(tmp_path, ORIGIN)).score(rows, BOTH, 1.0)
        assert teacher.rows == [[0]]
        assert same(found[0], found[1])
        assert same(found[0], found[2])

    def test_without_a_teacher_they_are_refused(self, tmp_path: Path) -> None:
        stored(tmp_path, SAMPLED)
        read = CachedTeacher(None, ScoreStore(tmp_path))
        with pytest.raises(PairError, match=r"1 rows have no stored score in .*, row 3 first, and there is no teacher"):
            read.score([*ROWS, OTHER], SAMPLED, 1.0)

    def test_neither_a_teacher_nor_a_score(self, tmp_path: Path) -> None:
        for ask in (lambda: CachedTeacher(None, ScoreStore(tmp_path)), lambda: kinds_of(tmp_path)):
            with pytest.raises(PairError, match=r"there are no stored scores in .*; make them with `etude record`"):
                ask()

    def test_a_key_is_the_ids_and_where_the_completion_begins(self) -> None:
        assert key_of(ROWS[0], SAMPLED) == key_of(replace(ROWS[0], prompt=replace(ROWS[0].prompt, row=7)), SAMPLED)
        others = [rollout_of([3, 4], [5, 6]), rollout_of([3], [4, 5]), rollout_of([3], [4, 5, 7])]
        assert len({key_of(row, SAMPLED) for row in [ROWS[0], *others]}) == 4

    def test_and_the_ids_the_sampler_kept_where_their_mass_is_stored(self, tmp_path: Path) -> None:
        kinds = frozenset({Gives.KEPT_MASS})
        row = rollout_of([3], [4, 5])
        lengths = torch.tensor([2, 2], dtype=torch.int32)
        one, two = (
            replace(row, kept_ids=torch.tensor(ids, dtype=torch.int32), kept_lengths=lengths)
            for ids in ([4, 5, 4, 5], [4, 6, 4, 5])
        )
        assert key_of(one, SAMPLED) == key_of(two, SAMPLED)
        assert key_of(one, kinds) != key_of(two, kinds)
        given = stored(tmp_path, kinds, [one, two])
        read = CachedTeacher(None, ScoreStore(tmp_path)).score([two, one], kinds, 1.0)[::-1]
        alone = frozen().score([one, two], kinds, 1.0)
        for first, again, expected in zip(given, read, alone, strict=True):
            assert expected.kept_mass is not None
            for found in (first.kept_mass, again.kept_mass):
                assert found is not None
                assert found.equal(expected.kept_mass)
        with pytest.raises(PairError, match="temperature"):
            CachedTeacher(frozen(), ScoreStore(tmp_path, ORIGIN)).score([one], kinds, 2.0)


class TestStale:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"weights": "c" * 64}, r"another teacher's weights \(a{12} there, c{12} now; they are of master, made "),
            ({"vocabulary": "c" * 64}, "another tokenizer"),
            ({"special_ids": {"bos": 1, "eos": 3, "pad": 0}}, "other special ids"),
            ({"dtype": "bfloat16"}, r"another precision \(float32 there, bfloat16 now"),
            ({"temperature": 2.0}, r"another loss temperature \(1.0 there, 2.0 now"),
        ],
    )
    def test_a_store_of_another_origin(self, tmp_path: Path, change: dict[str, Any], words: str) -> None:
        stored(tmp_path, SAMPLED)
        with pytest.raises(PairError, match=words):
            ScoreStore(tmp_path, replace(ORIGIN, **change))
        with pytest.raises(PairError, match=words):
            ScoreStore(tmp_path).require(**change)

    def test_states_know_no_temperature_and_a_name_is_no_origin(self, tmp_path: Path) -> None:
        stored(tmp_path, HIDDEN)
        store = ScoreStore(tmp_path, replace(ORIGIN, temperature=2.0, teacher="the same under another name"))
        assert CachedTeacher(None, store).score(ROWS, HIDDEN, 3.0)

    def test_log_probs_of_another_temperature_are_refused_when_they_are_asked_for(self, tmp_path: Path) -> None:
        stored(tmp_path, SAMPLED)
        with pytest.raises(PairError, match="another loss temperature"):
            CachedTeacher(frozen(), ScoreStore(tmp_path, ORIGIN)).score(ROWS, SAMPLED, 2.0)

    def test_another_kind(self, tmp_path: Path) -> None:
        stored(tmp_path, HIDDEN)
        for inner in (None, frozen()):
            teacher = CachedTeacher(inner, ScoreStore(tmp_path, ORIGIN))
            assert teacher.gives == HIDDEN
            with pytest.raises(PairError, match="are hidden_states, and a term needs sampled_logprobs"):
                teacher.score(ROWS, SAMPLED, 1.0)


def cut(folder: Path) -> None:
    path = folder / "scores-000000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = folder / "scores-000000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def lose(folder: Path) -> None:
    (folder / "scores-000000.safetensors").unlink()


def lose_head(folder: Path) -> None:
    (folder / HEAD).unlink()


def retell(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace("a" * 64, "c" * 64))


def from_the_future(folder: Path) -> None:
    put_manifest(folder / MANIFEST, read_manifest(folder / MANIFEST) | {"format": 99})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, r"scores-000000\.safetensors has [\d,]+ bytes and was written with"),
        (flip, r"scores-000000\.safetensors is not the file that was written: its hash differs"),
        (lose, r"scores-000000\.safetensors is missing"),
        (lose_head, r"head\.safetensors is missing"),
        (retell, r"scores\.json is not the one that was written"),
        (from_the_future, "it has format 99 and this version of etude reads format 1"),
        (lambda folder: (folder / MANIFEST).write_text("{"), r"scores\.json cannot be read"),
    ],
)
def test_a_damaged_store_is_refused(tmp_path: Path, damage: Any, words: str) -> None:
    stored(tmp_path, BOTH)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=rf"the stored scores in .* are damaged: {words}"):
        ScoreStore(tmp_path, ORIGIN)


class TestSeveralWriters:
    def test_stores_opened_side_by_side_lose_nothing(self, tmp_path: Path) -> None:
        one, two = (CachedTeacher(CountingTeacher(), ScoreStore(tmp_path, ORIGIN)) for _ in range(2))
        for number in range(4):
            rows = [rollout_of([number], [1, 2]), rollout_of([number], [3])]
            one.score(rows[:1], SAMPLED, 1.0)
            two.score(rows[1:], SAMPLED, 1.0)
        assert len(ScoreStore(tmp_path)) == 8

    def test_processes_at_once_lose_nothing(self, tmp_path: Path) -> None:
        program = (
            "import sys; from pathlib import Path\n"
            "from etude.axes.names import Gives\n"
            "from etude.models.cache import CachedTeacher, Origin, ScoreStore\n"
            "from etude.testing import CountingTeacher, rollout_of\n"
            "origin = Origin('master', 'a', 'b', {}, 'float32', 1.0)\n"
            "teacher = CachedTeacher(CountingTeacher(), ScoreStore(Path(sys.argv[1]), origin))\n"
            "for number in range(10):\n"
            "    rows = [rollout_of([int(sys.argv[2])], [number])]\n"
            "    teacher.score(rows, frozenset({Gives.SAMPLED_LOGPROBS}), 1.0)\n"
        )
        words = [sys.executable, "-c", program, str(tmp_path)]
        processes = [subprocess.Popen([*words, str(rank)]) for rank in range(2)]
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
        assert len(ScoreStore(tmp_path)) == 20

    def test_a_store_begun_meanwhile_with_another_origin_or_other_kinds(self, tmp_path: Path) -> None:
        waiting = [CachedTeacher(frozen(), ScoreStore(tmp_path, ORIGIN)) for _ in range(2)]
        hers = CachedTeacher(frozen(), ScoreStore(tmp_path, replace(ORIGIN, weights="c" * 64)))
        waiting[0].score(ROWS, SAMPLED, 1.0)
        with pytest.raises(PairError, match="another teacher's weights"):
            hers.score([OTHER], SAMPLED, 1.0)
        with pytest.raises(PairError, match="has begun to store sampled_logprobs in"):
            waiting[1].score([OTHER], BOTH, 1.0)
        assert len(ScoreStore(tmp_path)) == 3

    def test_one_that_was_opened_to_be_read_adds_nothing(self, tmp_path: Path) -> None:
        stored(tmp_path, SAMPLED)
        with pytest.raises(PairError, match="was opened to be read"):
            CachedTeacher(frozen(), ScoreStore(tmp_path)).score([OTHER], SAMPLED, 1.0)

    def test_a_shard_the_manifest_was_never_told_of_is_written_over(self, tmp_path: Path) -> None:
        """As after a kill between the two."""
        stored(tmp_path, SAMPLED)
        (tmp_path / "scores-000001.safetensors").write_bytes(b"half")
        CachedTeacher(frozen(), ScoreStore(tmp_path, ORIGIN)).score([OTHER], SAMPLED, 1.0)
        assert len(ScoreStore(tmp_path)) == 4
        assert sorted(json.loads((tmp_path / MANIFEST).read_text())["shards"]) == [
            "scores-000000.safetensors",
            "scores-000001.safetensors",
        ]


def test_whose_scores_they_are(tmp_path: Path) -> None:
    stored(tmp_path, SAMPLED)
    told = ScoreStore(tmp_path).describe()
    assert told.startswith("3 rows by master (weights aaaaaaaaaaaa, float32), made 20")
    assert told.endswith(f"UTC, in {tmp_path}")
