"""Who judges, in this process: a frozen model that marks each completion token of finished rows.

It runs each row once and hands over what a term needs, sampled-token log-probabilities or hidden states (with its head,
the exact full vocabulary at D numbers a token). It knows no student, no loss and no tokenizer; `recipes/build.py` makes
it and the loop calls `score`.

Legend: C completion tokens of a row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from etude.axes.names import Gives
from etude.core.linear import OutputHead
from etude.core.records import Rollout, Scores
from etude.errors import PairError
from etude.models.forward import (
    completion_logprobs,
    completion_logprobs_and_kept_masses,
    completion_states,
    evaluating,
    first_too_long,
)
from etude.models.roles import AbstractBackbone, AbstractTeacher


class FrozenTeacher(AbstractTeacher):
    """A model that never changes: in evaluation mode, without gradients, whatever is done to the student.

    Args:
        name: the teacher's name in the recipe.
        backbone: its model; from now on it belongs to this teacher, so it must share no module with the student.
        tokens_per_batch: padded tokens of one forward pass.
    """

    gives = frozenset({Gives.SAMPLED_LOGPROBS, Gives.HIDDEN_STATES, Gives.KEPT_MASS})

    def __init__(self, name: str, backbone: AbstractBackbone, *, tokens_per_batch: int = 8192) -> None:
        self.name = name
        self.backbone = backbone.eval().requires_grad_(False)
        self.tokens_per_batch = tokens_per_batch

    def score(self, rollouts: Sequence[Rollout], needs: frozenset[Gives], temperature: float) -> list[Scores]:
        """Marks in the rollouts' order, on the CPU, with exactly the needed fields.

        Args:
            rollouts: rows of any lengths; they are read in batches of like length.
            needs: what to hand over, from `gives`.
            temperature: the loss temperature, for log-probabilities and masses; hidden states do not depend on it.

        Raises:
            PairError: `needs` holds what this teacher does not give, or a row exceeds its context window.
            NonFiniteError: its hidden states are not finite.
        """
        self._require(rollouts, needs)
        if not needs:
            return [Scores(self.name) for _ in rollouts]
        marks: dict[int, Scores] = {}
        with torch.no_grad(), evaluating(self.backbone):
            for indices, states in completion_states(self.backbone, rollouts, self.tokens_per_batch):
                rows = [rollouts[index] for index in indices]
                drawn = self._of_drawn(states, rows, needs, temperature)
                kept = [states_CD.cpu() if Gives.HIDDEN_STATES in needs else None for states_CD in states]
                for index, (sampled, mass), hidden in zip(indices, drawn, kept, strict=True):
                    marks[index] = Scores(self.name, sampled_logprobs=sampled, hidden=hidden, kept_mass=mass)
        return [marks[index] for index in range(len(rollouts))]

    def _of_drawn(
        self, states: Sequence[Tensor], rows: Sequence[Rollout], needs: frozenset[Gives], temperature: float
    ) -> list[tuple[Tensor | None, Tensor | None]]:
        """Of each row the log-probabilities of its ids and of their kept sets, each where it is needed."""
        head = self.backbone.head()
        if Gives.KEPT_MASS in needs:
            both = completion_logprobs_and_kept_masses(states, head, rows, temperature)
            return [(drawn_C if Gives.SAMPLED_LOGPROBS in needs else None, mass_C) for drawn_C, mass_C in both]
        if Gives.SAMPLED_LOGPROBS in needs:
            return [(drawn_C, None) for drawn_C in completion_logprobs(states, head, rows, temperature)]
        return [(None, None)] * len(rows)

    def head(self) -> OutputHead:
        """Over the real vocabulary, without gradients."""
        return self.backbone.head()

    def _require(self, rollouts: Sequence[Rollout], needs: frozenset[Gives]) -> None:
        missing = sorted(needs - self.gives)
        if missing:
            raise PairError(
                f"the teacher '{self.name}' gives {', '.join(sorted(self.gives))}, and a term needs "
                f"{', '.join(missing)}; give the term another support or another teacher"
            )
        window = self.backbone.context_window
        row = first_too_long(rollouts, window)
        if row is not None:
            raise PairError(
                f"row {row.prompt.row} has {row.token_ids.shape[0]} tokens, and the teacher '{self.name}' reads "
                f"at most {window}; lower data.max_prompt_tokens or sampler.max_new_tokens, or take another teacher"
            )
