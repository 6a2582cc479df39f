"""Who judges, in this process: a frozen model that marks each completion token of finished rows.

It runs each row once and hands over what a term needs, sampled-token log-probabilities or hidden states (with its head,
the exact full vocabulary at D numbers a token). It knows no student, no loss and no tokenizer; `recipes/teachers.py`
makes it and the loop calls `score`. Teachers made of the student itself are in `own_teachers.py`.

Legend: C completion tokens of a row, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

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


class InProcessTeacher(AbstractTeacher):
    """A backbone of this process that marks: always in evaluation mode, always without gradients.

    Args:
        name: the teacher's name in the recipe.
        backbone: its model.
        tokens_per_batch: padded tokens of one forward pass.
    """

    gives = frozenset({Gives.SAMPLED_LOGPROBS, Gives.HIDDEN_STATES, Gives.KEPT_MASS})

    def __init__(self, name: str, backbone: AbstractBackbone, *, tokens_per_batch: int = 8192) -> None:
        self.name = name
        self.backbone = backbone
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
        if not needs or not rollouts:
            return [Scores(self.name) for _ in rollouts]
        marks: dict[int, Scores] = {}
        with torch.no_grad(), self.marking(), evaluating(self.backbone):
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

    def marking(self) -> AbstractContextManager[None]:
        """Inside, the backbone is what marks; afterwards it is what it was."""
        return nullcontext()

    def head(self) -> OutputHead:
        """Over the real vocabulary, without gradients."""
        with self.marking():
            return detached(self.backbone.head())

    def _require(self, rollouts: Sequence[Rollout], needs: frozenset[Gives]) -> None:
        require_given(self, needs)
        window = self.backbone.context_window
        row = first_too_long(rollouts, window)
        if row is not None:
            raise PairError(
                f"row {row.prompt.row} has {row.token_ids.shape[0]} tokens, and the teacher '{self.name}' reads "
                f"at most {window}; lower data.max_prompt_tokens or sampler.max_new_tokens, or take another teacher"
            )


class FrozenTeacher(InProcessTeacher):
    """A model that never changes, whatever is done to the student.

    Args:
        name: the teacher's name in the recipe.
        backbone: its model; from now on it is frozen, so it must share no module with the student.
        tokens_per_batch: padded tokens of one forward pass.
        learns_on: where the student is, if that is another device than the backbone's; the loss reads the head there.
    """

    def __init__(
        self,
        name: str,
        backbone: AbstractBackbone,
        *,
        tokens_per_batch: int = 8192,
        learns_on: torch.device | str | None = None,
    ) -> None:
        super().__init__(name, backbone.eval().requires_grad_(False), tokens_per_batch=tokens_per_batch)
        there = backbone.device if learns_on is None else torch.device(learns_on)
        self._head = None if there == backbone.device else copied(backbone.head(), there)

    def head(self) -> OutputHead:
        """Over the real vocabulary, where the student is."""
        return super().head() if self._head is None else self._head


class OffloadedTeacher(FrozenTeacher):
    """A frozen model that lies in CPU memory and stands on the device only while it marks.

    The device keeps the output head, which the loss reads in every step. Weights are copied there and dropped, never
    copied back.

    Args:
        name: the teacher's name in the recipe.
        backbone: its model, in CPU memory.
        device: where it marks, and where the student learns.
        tokens_per_batch: padded tokens of one forward pass.
    """

    def __init__(
        self, name: str, backbone: AbstractBackbone, *, device: torch.device | str, tokens_per_batch: int = 8192
    ) -> None:
        super().__init__(name, backbone, tokens_per_batch=tokens_per_batch)
        self.device = torch.device(device)
        self._head = copied(backbone.head(), self.device)
        self._kept = [(held, self._home(held.data)) for held in (*backbone.parameters(), *backbone.buffers())]
        self._put_back()

    @contextmanager
    def marking(self) -> Iterator[None]:
        try:
            for held, kept in self._kept:
                held.data = kept.to(self.device, non_blocking=True, copy=True)
            yield
        finally:
            self._put_back()

    def _put_back(self) -> None:
        for held, kept in self._kept:
            held.data = kept

    def _home(self, weight: Tensor) -> Tensor:
        """In memory that a card reads without asking the processor, where there is a card."""
        return weight.cpu().pin_memory() if self.device.type == "cuda" else weight.cpu()


class EnsembleTeacher(AbstractTeacher):
    """Several teachers by weight: the mixture of their probabilities, log sum_k w_k p_k(y).

    Of the drawn tokens only: no one head turns the members' hidden states into such a mixture.

    Args:
        name: the ensemble's name in the recipe.
        members: teacher and weight by name; weights are above 0 and sum to 1.

    Raises:
        PairError: the weights are not such, or a member does not give log-probabilities of drawn tokens.
    """

    gives = frozenset({Gives.SAMPLED_LOGPROBS})

    def __init__(self, name: str, members: Mapping[str, tuple[AbstractTeacher, float]]) -> None:
        weights = [weight for _, weight in members.values()]
        if not weights or min(weights) <= 0 or not math.isclose(sum(weights), 1.0, abs_tol=1e-6):
            raise PairError(f"the ensemble '{name}' has weights {weights}; expected numbers above 0 that sum to 1")
        for member, _ in members.values():
            require_given(member, self.gives)
        self.name = name
        self.members = dict(members)

    @property
    def parts(self) -> Mapping[str, AbstractTeacher]:
        return {name: member for name, (member, _) in self.members.items()}

    def score(self, rollouts: Sequence[Rollout], needs: frozenset[Gives], temperature: float) -> list[Scores]:
        """Each member is asked; see `InProcessTeacher.score`."""
        require_given(self, needs)
        if not needs:
            return [Scores(self.name) for _ in rollouts]
        weighted: list[list[Tensor]] = [[] for _ in rollouts]
        for member, weight in self.members.values():
            for terms, marks in zip(weighted, member.score(rollouts, needs, temperature), strict=True):
                assert marks.sampled_logprobs is not None
                terms.append(marks.sampled_logprobs + math.log(weight))
        # Rounding may carry a certain token above log 1.
        return [Scores(self.name, torch.stack(terms).logsumexp(0).clamp(max=0.0)) for terms in weighted]

    def head(self) -> None:
        """There is none."""


def require_given(teacher: AbstractTeacher, needs: frozenset[Gives]) -> None:
    """Refuse what a teacher does not give.

    Raises:
        PairError: names it, and both ways out.
    """
    missing = sorted(needs - teacher.gives)
    if missing:
        raise PairError(
            f"the teacher '{teacher.name}' gives {', '.join(sorted(teacher.gives))}, and a term needs "
            f"{', '.join(missing)}; give the term another support or another teacher"
        )


def detached(head: OutputHead) -> OutputHead:
    """The same tensors, out of autograd's sight."""
    bias_V = None if head.bias_V is None else head.bias_V.detach()
    return replace(head, weight_VD=head.weight_VD.detach(), bias_V=bias_V)


def copied(head: OutputHead, device: torch.device) -> OutputHead:
    """A head of its own on a device."""
    bias_V = None if head.bias_V is None else head.bias_V.detach().to(device, copy=True)
    return replace(head, weight_VD=head.weight_VD.detach().to(device, copy=True), bias_V=bias_V)
