"""The three roles, and the language model underneath them: what each promises, gives and needs.

`AbstractBackbone` is the seam to an engine: ids in, hidden states and an output head out. Student, in-process sampler
and frozen teacher are built on it, so that a table, a transformers folder or a user's own module pass through the same
code. Role implementations never import each other; `recipes/build.py` puts them together.

Legend: B rows, T positions, V real vocabulary, D hidden size, P prompt tokens, C completion tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from etude.axes.names import Gives
from etude.core.linear import OutputHead
from etude.core.records import Prompt, Rollout, Scores
from etude.errors import ModelError
from etude.runtime.seeds import Key


class AbstractDecoding(ABC):
    """An unfinished set of rows being written by a backbone, one token a row at a time."""

    @abstractmethod
    def next_logits(self) -> Tensor:
        """[B, V] logits of the next token of each row still being written, real vocabulary only."""

    @abstractmethod
    def append(self, ids_B: Tensor) -> None:
        """Append one token to each row still being written; `ids_B` is [B] int64."""

    @abstractmethod
    def keep(self, rows_b: Tensor) -> None:
        """Go on with these rows only (indices into the rows still being written, ascending)."""


class AbstractBackbone(nn.Module, ABC):
    """A decoder-only language model as etude sees it."""

    vocab_size: int  # V: the tokenizer's real vocabulary; rows of the head beyond it are filler and are cut
    context_window: int | None  # longest row it can read; None: no limit

    @abstractmethod
    def hidden_states(self, token_ids_BT: Tensor, attention_mask_BT: Tensor, position_ids_BT: Tensor) -> Tensor:
        """[B, T, D] last hidden states: what the head turns into the logits of the *next* token."""

    @abstractmethod
    def head(self) -> OutputHead:
        """The output head over the real vocabulary; its tensors take part in autograd."""

    @abstractmethod
    def decoding(self, prompt_ids: Sequence[Tensor]) -> AbstractDecoding:
        """Begin writing after each of these prompts ([P] int64 each, of any lengths)."""

    def writing(self) -> AbstractContextManager[None]:
        """Around decoding with weights that stay as they are: an engine may prepare them, and undoes it afterwards."""
        return nullcontext()

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write a folder that loads again with the engine's own loader."""

    @abstractmethod
    def restore(self, folder: Path) -> None:
        """Take back the weights that `save` wrote, bit for bit and in place."""

    def copy_as(self, dtype: str) -> AbstractBackbone:
        """A second model with the present weights in another precision, to write with: no gradients, evaluation mode.

        Parameters only are cast: a rotary table in bfloat16 would put late tokens in wrong places.
        """
        copy = deepcopy(self).eval().requires_grad_(False)
        for parameter in copy.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
        return copy

    def load_weights_from(self, other: AbstractBackbone) -> None:
        """Take over the present weights of `other`, of which this is a copy, each cast to the precision it has here."""
        self.load_state_dict(other.state_dict())

    def effective_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as it acts now, by the name that it has in the state of a copy (`copy_as`)."""
        yield from self.state_dict().items()

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside, the weights underneath the adapters act alone.

        Raises:
            ModelError: it has none.
        """
        raise ModelError(f"{type(self).__name__} has no adapters that could be switched off")

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class AbstractSampler(ABC):
    """Who writes."""

    version: int  # weights version it writes with

    @abstractmethod
    def sample(self, prompts: Sequence[Prompt], key: Key) -> list[Rollout]:
        """One rollout a prompt, in their order; a row draws from `key.generator(prompt.row)` and nothing else."""

    @abstractmethod
    def refresh(self, student: AbstractStudent, version: int) -> None:
        """Write with the student's present weights from now on."""

    # What it remembers from round to round; most remember nothing. One that does extends these, for the run goes on
    # from a checkpoint with what they restore.

    @property
    def parts(self) -> Mapping[str, AbstractSampler]:
        """The samplers it is made of, by a name that is a folder's."""
        return {}

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Hear what an evaluation of the student has measured, the one before the first step included."""
        for part in self.parts.values():
            part.observe(metrics)

    def save(self, folder: Path) -> None:
        """Write what it remembers into an empty folder; nothing where there is nothing."""
        for name, part in self.parts.items():
            (folder / name).mkdir()
            part.save(folder / name)

    def load(self, folders: Sequence[Path], mine: Callable[[int], bool]) -> None:
        """Take back what `save` wrote.

        Args:
            folders: one of every process that saved, in the order of ranks.
            mine: whether a row of a round falls to this process; there may be more or fewer of them than then.
        """
        for name, part in self.parts.items():
            part.load([folder / name for folder in folders], mine)


class AbstractTeacher(ABC):
    """Who judges. `gives` is fixed before weights are loaded, and matched with what terms need."""

    name: str
    gives: frozenset[Gives]

    @abstractmethod
    def score(self, rollouts: Sequence[Rollout], needs: frozenset[Gives], temperature: float) -> list[Scores]:
        """Scores in the rollouts' order, with exactly the needed fields; `temperature` is the loss temperature."""

    @abstractmethod
    def head(self) -> OutputHead | None:
        """The head that belongs to its hidden states, over the real vocabulary; None if it gives no hidden states.

        On the device the student learns on. Its tensors stay the same ones: a teacher that moves writes into them.
        """

    # What moves with the student; most teachers do not. Marks and head change at the end of a round only, so that a
    # round's hidden states and head belong together. One that moves extends these, and a wrapper names its parts.

    @property
    def parts(self) -> Mapping[str, AbstractTeacher]:
        """The teachers it is made of, by a name that is a folder's."""
        return {}

    def begin(self, student: AbstractStudent) -> None:
        """Hear which student a run begins with."""
        for part in self.parts.values():
            part.begin(student)

    def follow(self, student: AbstractStudent, step: int, *, round_over: bool) -> None:
        """Hear that the student has taken its optimiser step number `step` (from 1), perhaps the last of a round."""
        for part in self.parts.values():
            part.follow(student, step, round_over=round_over)

    def save(self, folder: Path) -> None:
        """Write what it remembers into an empty folder; nothing where there is nothing. All ranks remember the same."""
        for name, part in self.parts.items():
            (folder / name).mkdir()
            part.save(folder / name)

    def load(self, folder: Path, student: AbstractStudent) -> None:
        """Take back what `save` wrote, if anything, beside a student that has been restored."""
        for name, part in self.parts.items():
            part.load(folder / name, student)


class AbstractStudent(ABC):
    """Who learns: a backbone with trainable weights, and how they are saved."""

    backbone: AbstractBackbone

    @abstractmethod
    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """By name, in a fixed order; the optimiser holds exactly these."""

    @abstractmethod
    def logprobs(self, rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
        """[C] float32 log-probability of each completion id under the present weights, without gradient."""

    @abstractmethod
    def logprobs_and_entropies(self, rollouts: Sequence[Rollout], temperature: float) -> list[tuple[Tensor, Tensor]]:
        """The same, and beside it [C] the entropy, in nats, of the distribution in front of each completion id."""

    @abstractmethod
    def logprobs_and_kept_masses(self, rollouts: Sequence[Rollout], temperature: float) -> list[tuple[Tensor, Tensor]]:
        """The same, and beside it [C] the log of the probability on the ids each completion id was drawn from."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the student as a folder that transformers (or peft, for an adapter) loads."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take back the weights that `save` wrote, bit for bit and in place."""
