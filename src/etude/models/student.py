"""Who learns: the trainable weights of a backbone, its marks for its own rows, and how it is kept.

The same for every backbone, full fine-tuning and adapters alike: what is trained is what requires a gradient. It knows
no optimiser and no loss; the learner trains it, the sampler writes with its backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from etude.core.records import Rollout
from etude.errors import ModelError
from etude.models.forward import (
    completion_logprobs,
    completion_logprobs_and_entropies,
    completion_logprobs_and_kept_masses,
    completion_states,
    evaluating,
    first_too_long,
)
from etude.models.roles import AbstractBackbone, AbstractStudent


class Student(AbstractStudent):
    """A backbone that learns.

    Args:
        backbone: its model; which of its weights require a gradient is decided by whoever loaded it.
        tokens_per_batch: padded tokens of one forward pass in which it marks rows.

    Raises:
        ModelError: no weight requires a gradient.
    """

    def __init__(self, backbone: AbstractBackbone, *, tokens_per_batch: int = 8192) -> None:
        self.backbone = backbone
        self.tokens_per_batch = tokens_per_batch
        if not self.trainable_parameters():
            raise ModelError(
                "no weight of the student requires a gradient, so there is nothing to train; load it afresh rather "
                "than taking a teacher's or a sampler's model"
            )

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """By name, in the order of the modules; a tied weight appears once, under its first name."""
        return {name: weight for name, weight in self.backbone.named_parameters() if weight.requires_grad}

    def logprobs(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """[C] float32 on the CPU for each row, in evaluation mode and without gradient.

        Raises:
            ModelError: a row exceeds the context window.
            NonFiniteError: the hidden states are not finite.
        """
        return self._read(rollouts, temperature, completion_logprobs)

    def logprobs_and_entropies(self, rollouts: Sequence[Rollout], temperature: float) -> list[tuple[Tensor, Tensor]]:
        """The same and, from the same pass, [C] entropies in nats. Raises as `logprobs`."""
        both = self._read(rollouts, temperature, completion_logprobs_and_entropies)
        return [(logprobs_C, entropies_C) for logprobs_C, entropies_C in both]

    def logprobs_and_kept_masses(self, rollouts: Sequence[Rollout], temperature: float) -> list[tuple[Tensor, Tensor]]:
        """The same and, from the same pass, [C] log-probabilities of the kept sets. Raises as `logprobs`."""
        both = self._read(rollouts, temperature, completion_logprobs_and_kept_masses)
        return [(logprobs_C, masses_C) for logprobs_C, masses_C in both]

    def _read(
        self, rollouts: Sequence[Rollout], temperature: float, marks: Callable[..., list[Tensor]]
    ) -> list[Tensor]:
        row = first_too_long(rollouts, self.backbone.context_window)
        if row is not None:
            raise ModelError(
                f"row {row.prompt.row} has {row.token_ids.shape[0]} tokens, and the student reads at most "
                f"{self.backbone.context_window}; lower data.max_prompt_tokens or sampler.max_new_tokens"
            )
        found: dict[int, Tensor] = {}
        with torch.no_grad(), evaluating(self.backbone):
            for indices, states in completion_states(self.backbone, rollouts, self.tokens_per_batch):
                rows = [rollouts[index] for index in indices]
                of_rows = marks(states, self.backbone.head(), rows, temperature)
                found.update(zip(indices, of_rows, strict=True))
        return [found[index] for index in range(len(rollouts))]

    def save(self, folder: Path) -> None:
        """Write a folder that transformers (or peft, for an adapter) loads."""
        self.backbone.save(folder)

    def load(self, folder: Path) -> None:
        """Take back the weights that `save` wrote, bit for bit, in place: an optimiser keeps its hold on them."""
        self.backbone.restore(folder)
