"""Rollouts recorded beforehand, handed out instead of being written: the student as it was, round by round.

A recording is a folder with one folder of rollouts a round and a manifest, written last, that holds the hash of every
file and how the rows were written; without it there is no recording, only the beginning of one. Prompts come from the
recording with the rows, so the order of a run's own data does not matter. Knows no recipe and no teacher; the scores
that may lie in the same folder are `models/cache.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etude.core.records import Prompt, Rollout
from etude.errors import CheckpointError, RecipeError
from etude.models.roles import AbstractSampler, AbstractStudent
from etude.models.rollout_files import load_rollouts, save_rollouts, without_what_json_cannot
from etude.runtime.checkpoints import files_of, put_folder, put_manifest, read_manifest, require_files
from etude.runtime.seeds import Key

FORMAT = 1  # of the manifest and the folders; a reader refuses another one
MANIFEST, BEGUN, ROUNDS = "recording.json", "begun.json", "rounds"
NAME = "student"  # the fact that is said to people and never compared: weights have a hash
Facts = Mapping[str, Any]  # JSON values: how rows were written and by whom


class Recording:
    """A whole recording, every file of it checked against its hash.

    Raises:
        RecipeError: there is none in the folder.
        CheckpointError: it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / MANIFEST).exists():
            found = "only the beginning of a recording" if (folder / BEGUN).exists() else "no recording"
            raise RecipeError(f"there is {found} in {folder}; `etude record` with this recipe makes it whole")
        try:
            manifest = read_manifest(folder / MANIFEST)
            if manifest["format"] != FORMAT:
                raise CheckpointError(f"it has format {manifest['format']} and this version reads format {FORMAT}")
            require_files(folder, manifest)
        except CheckpointError as error:
            raise CheckpointError(
                f"the recording in {folder} is damaged: {error}; bring back a copy, or remove the folder and record "
                "again"
            ) from None
        self.facts: Facts = manifest["facts"]
        self.rounds: int = manifest["rounds"]
        self.longest: int = manifest["longest"]  # tokens of the longest row, prompt included
        self.made: str = manifest["made"]
        self.files: Facts = manifest["files"]

    def round(self, number: int) -> list[Rollout]:
        """The rows of a round, in their order; after the last round comes the first again."""
        return load_rollouts(_folder_of(self.folder, number % self.rounds))

    def require(self, expected: Facts) -> None:
        """Refuse a recording that was made in another way than this, key by key."""
        _require_same(self.folder, self.facts, expected, "take these values over, or name another recording")

    def describe(self) -> str:
        """What is in it, for a person."""
        return (
            f"{self.rounds} rounds of {self.facts['rows']} rows by {self.facts[NAME]}, made {self.made}, in "
            f"{self.folder}"
        )


class RecordedSampler(AbstractSampler):
    """Hands out a recording's rows: row i of round r is the recording's row i of round r modulo its rounds.

    Every row keeps the prompt it was written for, the version of the student that wrote it and its log-probabilities.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.version = 0

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        """One recorded rollout a prompt, by the prompt's place in the round; of the prompt nothing else is read.

        Raises:
            RecipeError: the recorded round has no row in such a place.
        """
        rows = {rollout.prompt.row: rollout for rollout in self.recording.round(key.round)}
        beyond = [prompt.row for prompt in prompts if prompt.row not in rows]
        if beyond:
            raise RecipeError(
                f"the recording in {self.recording.folder} has {len(rows)} rows a round, and row {beyond[0]} is asked "
                "for; write the train.prompts_per_round and sampler.samples_per_prompt it was made with"
            )
        return [rows[prompt.row] for prompt in prompts]

    def refresh(self, student: AbstractStudent, version: int) -> None:
        """What is recorded does not change; only the stamp of the round does."""
        self.version = version


class Recorder:
    """Makes a recording, a round at a time; the same call again goes on where an earlier one was stopped.

    Args:
        folder: of the recording.
        facts: how rows are written and by whom; an earlier recording there must have been begun with the same.

    Raises:
        RecipeError: another recording was begun there.
        CheckpointError: what is there is damaged.
    """

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.folder = folder
        self.facts: Facts = json.loads(json.dumps(facts))
        if not (folder / BEGUN).exists():
            (folder / ROUNDS).mkdir(parents=True, exist_ok=True)
            put_manifest(folder / BEGUN, self.facts)
            return
        try:
            begun = read_manifest(folder / BEGUN)
        except CheckpointError as error:
            raise CheckpointError(f"the recording begun in {folder} is damaged: {error}; remove the folder") from None
        _require_same(folder, begun, self.facts, "name another folder with --output, or remove this one")

    def has(self, number: int) -> bool:
        """Whether a round is there already."""
        return _folder_of(self.folder, number).exists()

    def load(self, number: int) -> list[Rollout]:
        """A round that is there."""
        return load_rollouts(_folder_of(self.folder, number))

    def add(self, number: int, rollouts: Sequence[Rollout]) -> None:
        """Put a round on the disk: all of it, or nothing."""
        rows = [without_what_json_cannot(rollout) for rollout in rollouts]
        put_folder(_folder_of(self.folder, number), lambda aside: save_rollouts(aside, rows))

    def finish(self, rounds: int) -> Recording:
        """Call the first so many rounds a recording; one with more of them stays as it is."""
        if (self.folder / MANIFEST).exists() and (whole := Recording(self.folder)).rounds >= rounds:
            return whole
        files: dict[str, Any] = {}
        longest = 0
        for number in range(rounds):
            folder = _folder_of(self.folder, number)
            files |= {f"{folder.relative_to(self.folder).as_posix()}/{k}": v for k, v in files_of(folder).items()}
            longest = max(longest, *(rollout.token_ids.shape[0] for rollout in load_rollouts(folder)))
        made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        manifest = {"format": FORMAT, "made": made, "rounds": rounds, "longest": longest, "facts": self.facts}
        put_manifest(self.folder / MANIFEST, manifest | {"files": files})
        return Recording(self.folder)


def _folder_of(folder: Path, number: int) -> Path:
    return folder / ROUNDS / f"round-{number:06d}"


def _require_same(folder: Path, there: Facts, now: Facts, cure: str) -> None:
    differing = [
        f"{key}: {_short(there.get(key))} there, {_short(now[key])} now"
        for key in now
        if key != NAME and there.get(key) != now[key]
    ]
    if differing:
        raise RecipeError(f"the recording in {folder} was made in another way ({'; '.join(differing)}); {cure}")


def _short(value: object) -> str:
    """Enough of a hash to tell two apart; anything else as it is."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
