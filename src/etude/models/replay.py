"""Rows of earlier rounds, handed out again: a sampler around the one that writes as the student.

Every row that is written is kept, with the version of the student that wrote it, under its place in the round: row 3
of a round may be replaced by row 3 of an earlier round and by no other. A row is always the business of the process
row % processes, so what is replayed is the same on any number of them, and a store is dealt out anew by its rows. The
rows of the present version are kept but not handed out yet, so that what `sample` gives hangs on the key alone until
the next `refresh`. This file knows no loss; `axes/legality.py` says which terms may meet such rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from etude.axes.schedules import Ramp, as_ramp
from etude.core.records import Prompt, Rollout
from etude.errors import RecipeError
from etude.models.mixture import Mix, require_mix
from etude.models.roles import AbstractSampler, AbstractStudent
from etude.models.rollout_files import load_rollouts, save_rollouts, without_what_json_cannot
from etude.runtime.seeds import Key


class ReplaySampler(AbstractSampler):
    """The student's rows, a share of them written in an earlier round. These keep prompt, version and log-probs.

    A row whose place has nothing to replay is written afresh, whatever its coin.

    Args:
        student: writes what is not replayed.
        replay_fraction: the share of the rows to replay, 0 to 1, or a ramp of the optimiser steps taken.
        rows_kept: earlier rows kept of each place in the round, the newest.
        max_age: optimiser steps after which a row is dropped; None: never.
        mix: "row": a coin for each row. "batch": one coin for all rows of a round.

    Raises:
        RecipeError: nothing would be kept, or there is no such mix.

    Reference: Ko et al. 2024, "DistiLLM: Towards Streamlined Distillation for Large Language Models", section 3.2 (a
    store of 1,000 rows).
    """

    def __init__(
        self,
        student: AbstractSampler,
        replay_fraction: float | Ramp,
        *,
        rows_kept: int,
        max_age: int | None = None,
        mix: Mix = "row",
    ) -> None:
        require_mix(mix)
        if rows_kept < 1 or (max_age is not None and max_age < 1):
            raise RecipeError(
                f"a store of {rows_kept} rows a place, {max_age} steps old at most, has nothing to replay; write at "
                "least 1 for both"
            )
        self.student = student
        self.replay_fraction = as_ramp(replay_fraction)
        self.rows_kept = rows_kept
        self.max_age = max_age
        self.mix = mix
        self.version = student.version
        self._kept: dict[int, list[Rollout]] = {}  # by place in the round, oldest first

    @property
    def parts(self) -> Mapping[str, AbstractSampler]:
        return {"student": self.student}

    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        """One rollout a prompt, in their order; a replayed one carries the prompt it was written for."""
        self._forget()
        draws = replace(key, purpose=f"{key.purpose}/replay")
        earlier = [self._replayed(prompt.row, draws) for prompt in prompts]
        anew = [prompt for prompt, rollout in zip(prompts, earlier, strict=True) if rollout is None]
        written = self.student.sample(anew, key)
        for rollout in written:
            self._keep(rollout)
        rest = iter(written)
        return [next(rest) if rollout is None else rollout for rollout in earlier]

    def refresh(self, student: AbstractStudent, version: int) -> None:
        """Write with the student's present weights from now on; what was written before may be replayed."""
        self.student.refresh(student, version)
        self.version = version

    def save(self, folder: Path) -> None:
        """Write this process's store."""
        super().save(folder)
        save_rollouts(folder, [rollout for row in sorted(self._kept) for rollout in self._kept[row]])

    def load(self, folders: Sequence[Path], mine: Callable[[int], bool]) -> None:
        """Take back the store, or what of all processes' stores is this one's."""
        super().load(folders, mine)
        self._kept = {}
        for rollout in (rollout for folder in folders for rollout in load_rollouts(folder)):
            if mine(rollout.prompt.row):
                self._kept.setdefault(rollout.prompt.row, []).append(rollout)

    def _replayed(self, row: int, draws: Key) -> Rollout | None:
        """An earlier rollout in this row's place, if its coin says so and there is one."""
        usable = [rollout for rollout in self._kept.get(row, ()) if rollout.version < self.version]
        coin, place = draws.uniforms(row, 2).tolist()
        if self.mix == "batch":  # the coin of global row 0, which every rank can toss, also the ranks without that row
            coin = draws.uniforms(0, 1).item()
        if not usable or coin >= self.replay_fraction.value(self.version):
            return None
        return usable[int(place * len(usable))]

    def _forget(self) -> None:
        """Drop what is too old, and what is too much, of the rows that earlier students wrote."""
        for row, rollouts in self._kept.items():
            oldest = 0 if self.max_age is None else self.version - self.max_age
            earlier = [rollout for rollout in rollouts if oldest <= rollout.version < self.version]
            present = [rollout for rollout in rollouts if rollout.version >= self.version]
            self._kept[row] = earlier[-self.rows_kept :] + present

    def _keep(self, rollout: Rollout) -> None:
        """Once a version: the same rows may be asked for twice."""
        others = [other for other in self._kept.get(rollout.prompt.row, ()) if other.version != rollout.version]
        self._kept[rollout.prompt.row] = [*others, without_what_json_cannot(rollout)]
