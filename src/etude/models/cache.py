"""A teacher's scores on disk, and a teacher that reads them: what is there is not computed again.

A store is a folder of safetensors shards and one manifest, which holds the hash of every shard and what the scores
depend on besides ids: weights, tokenizer, precision, and the loss temperature where it enters. A row is found by the
hash of its ids, prompt and completion as the teacher saw them. A store of another teacher, or a damaged one, is refused
when it is opened. With hidden states the teacher's head is stored once, so that training needs none of its weights.
Knows no recipe; `recipes/stored.py` says what the scores have to be of.

Legend: C completion tokens of a row, N those of all rows of a shard, R rows of a shard, D hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from etude.axes.names import Gives
from etude.core.linear import OutputHead
from etude.core.records import Rollout, Scores
from etude.errors import CheckpointError, PairError
from etude.models.roles import AbstractTeacher
from etude.runtime.checkpoints import (
    load_tensors,
    put_file,
    put_manifest,
    read_manifest,
    require_files,
    save_tensors,
)
from etude.runtime.lock import locked_in_turn

FORMAT = 1  # of the manifest and the shards; a reader refuses another one
MANIFEST, HEAD = "scores.json", "head.safetensors"
LOCK_TIMEOUT_S = 120.0  # adding takes a moment, on a slow disk a few seconds
_FIELDS = {
    Gives.SAMPLED_LOGPROBS: "sampled_logprobs",
    Gives.KEPT_MASS: "kept_mass",
    Gives.HIDDEN_STATES: "hidden",
}
_AT_A_TEMPERATURE = frozenset({Gives.SAMPLED_LOGPROBS, Gives.KEPT_MASS})


@dataclass(frozen=True, slots=True)
class Origin:
    """What scores depend on besides ids."""

    teacher: str  # the model as it was named: said to people, never compared
    weights: str  # hash
    vocabulary: str  # hash of which id means which token
    special_ids: Mapping[str, int | None]  # by part: bos, eos, pad
    dtype: str  # what the teacher computed in
    temperature: float  # the loss temperature; enters log-probabilities and not hidden states


_WORDS = {
    "weights": "another teacher's weights",
    "vocabulary": "another tokenizer",
    "special_ids": "other special ids",
    "dtype": "another precision",
    "temperature": "another loss temperature",
}


class ScoreStore:
    """The scores of one teacher in one folder, each shard checked against its hash.

    Args:
        folder: of a store, or of one to be made.
        origin: what scores to be added depend on, which must be what those that are there do. None: only read.

    Raises:
        CheckpointError: the store is damaged.
        PairError: it is of another origin.
    """

    def __init__(self, folder: Path, origin: Origin | None = None) -> None:
        self.folder = folder
        self.origin = origin
        self._may_add = origin is not None
        self.kinds: frozenset[Gives] = frozenset()
        self.made = ""  # when the first score was stored
        self._places: dict[bytes, tuple[str, int, int]] = {}  # key -> shard, first and last token
        self._head: Mapping[str, Any] | None = None
        manifest = manifest_of(folder)
        if manifest is None:
            return
        try:
            require_files(folder, manifest)
        except CheckpointError as error:
            raise _damaged(folder, error) from None
        self._adopt(manifest)
        for name in manifest["shards"]:
            self._list(name)

    def __len__(self) -> int:
        return len(self._places)

    def require(self, **expected: Any) -> None:
        """Refuse a store of another origin: fields of `Origin` by name, those that are known.

        Raises:
            PairError: names the first that differs.
        """
        if self.origin is None or not self.kinds:
            return
        for name, value in expected.items():
            stored = getattr(self.origin, name)
            if stored != value and not (name == "temperature" and not self.kinds & _AT_A_TEMPERATURE):
                raise PairError(
                    f"the stored scores in {self.folder} come from {_WORDS[name]} ({_short(stored)} there, "
                    f"{_short(value)} now; they are of {self.origin.teacher}, made {self.made}); name another folder "
                    "in teacher.scores, or go back to what they were made with"
                )

    def require_kinds(self, needs: frozenset[Gives]) -> None:
        """Refuse a store that has something and not what is asked for."""
        if self.kinds and not needs <= self.kinds:
            raise PairError(
                f"the stored scores in {self.folder} are {', '.join(sorted(self.kinds))}, and a term needs "
                f"{', '.join(sorted(needs - self.kinds))}; name another folder in teacher.scores, or give the term "
                "another support"
            )

    def get(self, name: str, keys: Sequence[bytes], kinds: frozenset[Gives]) -> dict[bytes, Scores]:
        """Those of the rows that are there, with the fields of `kinds`; `name` is the teacher's."""
        wanted: dict[str, list[bytes]] = {}
        for key in dict.fromkeys(keys):
            if key in self._places:
                wanted.setdefault(self._places[key][0], []).append(key)
        found: dict[bytes, Scores] = {}
        for shard, held in wanted.items():
            with safe_open(self.folder / shard, framework="pt") as tensors:
                slices = {_FIELDS[kind]: tensors.get_slice(_FIELDS[kind]) for kind in kinds}
                for key in held:
                    _, start, end = self._places[key]
                    found[key] = Scores(name, **{field: part[start:end].clone() for field, part in slices.items()})
        return found

    def add(self, scores: Mapping[bytes, Scores], kinds: frozenset[Gives], head: OutputHead | None) -> None:
        """Put rows on the disk; when it returns they are whole there, whoever else adds to the store.

        Args:
            scores: by key; every row has exactly the fields of `kinds`.
            kinds: of all rows of the store.
            head: what belongs to hidden states; stored with the first rows.

        Raises:
            PairError: another process has begun a store of another origin or of other kinds there.
            RecipeError: another process holds the store for minutes.
        """
        origin = self.origin
        if origin is None or not self._may_add:
            raise PairError(f"the store {self.folder} was opened to be read; nothing can be added to it")
        with locked_in_turn(self.folder, LOCK_TIMEOUT_S):
            manifest = manifest_of(self.folder)
            if manifest is None:
                manifest = _begun(self.folder, origin, kinds, head)
            else:
                self._adopt(manifest)
                if self.kinds != kinds:
                    raise PairError(
                        f"another process has begun to store {', '.join(sorted(self.kinds))} in {self.folder}, and "
                        f"this one has {', '.join(sorted(kinds))}; name another folder in teacher.scores"
                    )
            shard = f"scores-{len(manifest['shards']):06d}.safetensors"
            tensors = _shard(scores, kinds)
            entry = put_file(self.folder / shard, lambda aside: save_tensors(aside, tensors))
            manifest["files"][shard] = entry
            manifest["shards"].append(shard)
            put_manifest(self.folder / MANIFEST, manifest)
        self._adopt(manifest)
        self._list(shard)

    def head(self, device: str) -> OutputHead | None:
        """The head that belongs to the stored hidden states; None where there are none."""
        if self._head is None:
            return None
        tensors = {name: tensor.to(device) for name, tensor in load_tensors(self.folder / HEAD).items()}
        return OutputHead(tensors["weight_VD"], tensors.get("bias_V"), self._head["scale"], self._head["softcap"])

    def describe(self) -> str:
        """Whose scores these are, for a person."""
        assert self.origin is not None
        return (
            f"{len(self):,} rows by {self.origin.teacher} (weights {_short(self.origin.weights)}, "
            f"{self.origin.dtype}), made {self.made}, in {self.folder}"
        )

    def _adopt(self, manifest: Mapping[str, Any]) -> None:
        """Take over what a manifest says, if it is the same origin's."""
        stored, mine = Origin(**manifest["origin"]), self.origin if self._may_add else None
        self.origin, self.made, self._head = stored, manifest["made"], manifest["head"]
        self.kinds = frozenset(Gives(kind) for kind in manifest["kinds"])
        if mine is not None:
            self.require(**{name: getattr(mine, name) for name in _WORDS})

    def _list(self, shard: str) -> None:
        tensors = load_tensors_of(self.folder / shard, ("keys", "starts"))
        starts = tensors["starts"].tolist()
        for place, key in enumerate(tensors["keys"]):
            # The first of two equal rows stays: it is the one that was handed out.
            self._places.setdefault(key.numpy().tobytes(), (shard, starts[place], starts[place + 1]))


class CachedTeacher(AbstractTeacher):
    """A teacher whose scores are read where the store has them; the others are asked of `inner` and added.

    Args:
        inner: the teacher itself; None: only what is stored can be had.
        store: where its scores lie.
        name: the teacher's name in the recipe.
        device: where the stored head goes; an inner teacher brings its own.

    Raises:
        PairError: there is neither a teacher nor a score.
    """

    def __init__(
        self, inner: AbstractTeacher | None, store: ScoreStore, *, name: str = "teacher", device: str = "cpu"
    ) -> None:
        if inner is None and not store.kinds:
            raise nothing_stored(store.folder)
        self.inner = inner
        self.store = store
        self.name = name
        self.gives = store.kinds if inner is None else store.kinds or inner.gives
        self._head = store.head(device) if inner is None else None

    def score(self, rollouts: Sequence[Rollout], needs: frozenset[Gives], temperature: float) -> list[Scores]:
        """Marks in the rollouts' order, with exactly the needed fields; equal rows have equal marks, bit for bit.

        Raises:
            PairError: the store lacks a kind or is of another temperature, or a row is missing and there is no teacher.
        """
        if not needs:
            return [Scores(self.name) for _ in rollouts]
        self.store.require_kinds(needs)
        self.store.require(temperature=temperature)
        keys = [key_of(rollout, self.store.kinds or needs) for rollout in rollouts]
        found = self.store.get(self.name, keys, needs)
        missing: dict[bytes, Rollout] = {}
        for key, rollout in zip(keys, rollouts, strict=True):
            if key not in found:
                missing.setdefault(key, rollout)
        if missing:
            found |= self._scored(missing, self.store.kinds or needs, temperature)
        unasked = {field: None for kind, field in _FIELDS.items() if kind not in needs}
        return [replace(found[key], **unasked) for key in keys]

    def head(self) -> OutputHead | None:
        """The stored head where there is no teacher, else the teacher's own."""
        return self._head if self.inner is None else self.inner.head()

    def _scored(
        self, missing: Mapping[bytes, Rollout], kinds: frozenset[Gives], temperature: float
    ) -> dict[bytes, Scores]:
        """Ask the teacher, and keep what it says."""
        if self.inner is None:
            first = next(iter(missing.values()))
            raise PairError(
                f"{len(missing)} rows have no stored score in {self.store.folder}, row {first.prompt.row} first, and "
                "there is no teacher to ask; record them with `etude record`, or name the teacher's model in "
                "teacher.model"
            )
        marks = self.inner.score(list(missing.values()), kinds, temperature)
        scores = dict(zip(missing, marks, strict=True))
        head = self.inner.head() if Gives.HIDDEN_STATES in kinds else None
        self.store.add(scores, kinds, head)
        return scores


def key_of(rollout: Rollout, kinds: frozenset[Gives]) -> bytes:
    """32 bytes that name a row: its ids, where the completion begins, and the kept ids where `kinds` depend on them."""
    parts = [rollout.token_ids]
    if Gives.KEPT_MASS in kinds:
        parts += [part for part in (rollout.kept_lengths, rollout.kept_ids) if part is not None]
    named = hashlib.sha256(rollout.num_prompt_tokens.to_bytes(8, "little"))
    for part in parts:
        named.update(part.numpy().astype("<i8").tobytes())
    return named.digest()


def kinds_of(folder: Path) -> frozenset[Gives]:
    """What a store holds, read off its manifest; no shard is opened.

    Raises:
        PairError: there is no store.
        CheckpointError: its manifest is damaged.
    """
    manifest = manifest_of(folder)
    if manifest is None:
        raise nothing_stored(folder)
    return frozenset(Gives(kind) for kind in manifest["kinds"])


def nothing_stored(folder: Path) -> PairError:
    """What to raise where scores have to be there and are not."""
    return PairError(
        f"there are no stored scores in {folder} and no teacher to ask; make them with `etude record`, or name the "
        "teacher's model in teacher.model"
    )


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """The manifest of a store, or None where none was begun.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    if not (folder / MANIFEST).exists():
        return None  # shards without it were never told of: a kill came between
    try:
        manifest = read_manifest(folder / MANIFEST)
    except CheckpointError as error:
        raise _damaged(folder, error) from None
    if manifest["format"] != FORMAT:
        raise _damaged(folder, f"it has format {manifest['format']} and this version of etude reads format {FORMAT}")
    return manifest


def load_tensors_of(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Some tensors of a file; the others are not read."""
    with safe_open(path, framework="pt") as tensors:
        return {name: tensors.get_tensor(name).clone() for name in names}


def _begun(folder: Path, origin: Origin, kinds: frozenset[Gives], head: OutputHead | None) -> dict[str, Any]:
    """The manifest of a store without rows; writes the head."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "origin": asdict(origin),
        "kinds": sorted(kinds),
        "head": None,
        "files": {},
        "shards": [],
    }
    if head is not None:
        tensors = {"weight_VD": head.weight_VD} | ({} if head.bias_V is None else {"bias_V": head.bias_V})
        manifest["files"][HEAD] = put_file(folder / HEAD, lambda aside: save_tensors(aside, tensors))
        manifest["head"] = {"scale": head.scale, "softcap": head.softcap}
    return manifest


def _shard(scores: Mapping[bytes, Scores], kinds: frozenset[Gives]) -> dict[str, Tensor]:
    """R rows, one after the other: keys [R, 32], where each begins [R + 1], and [N] or [N, D] of each kind."""
    keys = torch.frombuffer(bytearray(b"".join(scores)), dtype=torch.uint8).reshape(len(scores), -1)
    fields = {_FIELDS[kind]: [getattr(score, _FIELDS[kind]) for score in scores.values()] for kind in kinds}
    lengths = [part.shape[0] for part in next(iter(fields.values()))]
    starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return {"keys": keys, "starts": starts} | {field: torch.cat(parts) for field, parts in fields.items()}


def _damaged(folder: Path, reason: object) -> CheckpointError:
    return CheckpointError(
        f"the stored scores in {folder} are damaged: {reason}; bring back a copy, or remove the folder and make them "
        "again"
    )


def _short(value: object) -> str:
    """Enough of a hash to tell two apart; anything else as it is."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
