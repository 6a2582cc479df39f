"""Term and Objective: prepare a round's rows once, count once, then sum.

A `Term` is one (teacher, support, divergence, estimator, weighting, coefficient). An `Objective` is a list of terms
over the same rows. Three calls make a step of it:

1. `prepare(scored)`: masks, weights and detached advantages for every row of a round, before its first step;
2. `counts(rows)`: one count a term over the rows of one optimiser step, to be summed over micro-batches and ranks;
3. `sum(...)`: the scaled loss of one micro-batch, inside the wrapped model's forward, chunked over the vocabulary.

It knows no model, no file and no network; on plain tensors it works in a notebook (docs/core.md).

Legend: C completion tokens of a row, N scored tokens of a batch, n tokens of a tile, V vocabulary, J terms, M metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from etude.axes.legality import Point, Rule, Sampling, require_legal
from etude.axes.names import REWARD, Divergence, Gives, Reduction
from etude.core.advantages import Gather, Total, prepare
from etude.core.linear import DEFAULT_CHUNK_BYTES, OutputHead, head_sum
from etude.core.logprobs import next_token_logprobs, pick
from etude.core.records import Batch, Scored
from etude.core.reduction import row_count, term_scales
from etude.core.term import Term
from etude.core.tile import Tile, mark, shared_sums, shares_of
from etude.errors import PairError, RecordError

NEAR_AN_END = 0.05  # betas of jsd nearer to 0 or 1 than this are warned about: the signal shrinks in proportion


def _alone(of_this_rank: Tensor) -> Tensor:
    return of_this_rank


def _shown_of(term: Term) -> tuple[str, ...]:
    """Names of the values a term reports: a reward compares with no distribution and has no divergence to show."""
    return () if term.teacher == REWARD else ("divergence",)


class Objective:
    """Terms over the same rows, legal under the given sampling.

    Args:
        terms: at least one, with different names.
        sampling: how the rows are written; decides what is legal.
        temperature: of student and teacher softmax in the loss.
        chunk_bytes: budget for tensors as wide as the vocabulary.

    Raises:
        LegalityError: a term has no gradient, or another objective's.
        ValueError: no terms, or a name twice.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        *,
        sampling: Sampling | None = None,
        temperature: float = 1.0,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        names = [term.name for term in terms]
        if not terms or len(set(names)) != len(names):
            raise ValueError(f"an objective needs terms with different names, got {names}")
        if temperature <= 0.0:
            raise ValueError(f"the loss temperature is {temperature}; expected a number above 0")
        self.terms = tuple(terms)
        self.temperature = temperature
        self.chunk_bytes = chunk_bytes
        self.verdicts = self._judge(sampling or Sampling())
        self._divergences = [term.divergence_fn() for term in self.terms]

    def _judge(self, sampling: Sampling) -> tuple[Rule, ...]:
        return tuple(
            require_legal(Point.of(term, sampling, self.temperature), f"term '{term.name}'") for term in self.terms
        )

    # What it needs from others ------------------------------------------------------------------------------------

    def needs(self, teacher: str) -> frozenset[Gives]:
        """Everything its terms need from the teacher of that name."""
        wanted = (term.needs for term in self.terms if teacher in term.teachers)
        return frozenset[Gives]().union(*wanted)

    @cached_property
    def teachers(self) -> tuple[str, ...]:
        """Names of the teachers it asks for scores, each once; neither label nor reward is one of them."""
        return tuple(dict.fromkeys(name for term in self.terms for name in term.teachers))

    @property
    def needs_rewards(self) -> bool:
        """Whether a verifier must judge the rows."""
        return any(Gives.REWARDS in term.needs or term.verdicts_needed for term in self.terms)

    @property
    def needs_student_logprobs(self) -> bool:
        """Whether `prepare` needs a pass of the student before the round's first step."""
        return any(term.student_logprobs_needed for term in self.terms)

    @property
    def needs_kept_sets(self) -> bool:
        """Whether the sampler must record which ids it drew each token from."""
        return any(term.renormalise for term in self.terms)

    @property
    def needs_student_kept_mass(self) -> bool:
        """Whether the student's pass before the round's first step must say what is on those ids."""
        return any(
            term.renormalise and (term.log_ratios_needed or term.confident_wrong_share is not None)
            for term in self.terms
        )

    @property
    def needs_student_entropy(self) -> bool:
        """Whether that pass must also say how certain the student is."""
        return any(term.entropy_share is not None for term in self.terms)

    @property
    def chooses(self) -> bool:
        """Whether a term trains the informative tokens of a round only."""
        return any(term.chooses for term in self.terms)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is legal and perhaps not meant, a sentence each."""
        return tuple(
            f"term '{term.name}': jsd with beta = {term.beta} has about {min(term.beta, 1 - term.beta):.2g} times the "
            f"gradient of the KL at that end; rescale = true makes up for it, and beta = {round(term.beta)} is that KL"
            for term in self.terms
            if term.divergence is Divergence.JSD and term.beta is not None and not term.rescale
            if 0.0 < min(term.beta, 1.0 - term.beta) < NEAR_AN_END
        )

    # 1. prepare -----------------------------------------------------------------------------------------------------

    def prepare(
        self, scored: Sequence[Scored], *, step: int = 0, total: Total = _alone, gather: Gather = _alone
    ) -> list[Scored]:
        """Fill in weights and advantages of every row of a round, before its first step.

        Args:
            scored: this rank's rows.
            step: the round's first optimiser step, from 0.
            total: sums a tensor over all ranks; left out: there is one.
            gather: joins the one-dimensional tensors of all ranks; left out: there is one.

        Raises:
            RecordError: a row lacks a score, or what a term needs of the student.
        """
        return prepare(self.terms, scored, step=step, total=total, gather=gather)

    # 2. count -------------------------------------------------------------------------------------------------------

    def counts(self, rows: Sequence[Scored]) -> Tensor:
        """[J] float64: each term's count over these prepared rows (tokens, or rows under `sequence_mean`)."""
        counts_J = torch.zeros(len(self.terms), dtype=torch.float64)
        for row in rows:
            if row.weights is None:
                raise RecordError(
                    f"row {row.rollout.prompt.row} was not prepared: call Objective.prepare before counts"
                )
            for j, term in enumerate(self.terms):
                counts_J[j] += row_count(row.weights[j] != 0, term.reduction)
        return counts_J

    def choices(self, rows: Sequence[Scored]) -> Tensor:
        """[2, J] float64: tokens of these prepared rows that each term trains, and those it chose them from."""
        sums_2J = torch.zeros(2, len(self.terms), dtype=torch.float64)
        for row in rows:
            if row.weights is None or row.candidates is None:
                raise RecordError(
                    f"row {row.rollout.prompt.row} was not prepared: call Objective.prepare before choices"
                )
            sums_2J += torch.stack([(row.weights != 0).sum(1), row.candidates])
        return sums_2J

    def selected(self, choices_2J: Tensor) -> dict[str, float]:
        """Share of its tokens that each choosing term trains, from `choices` summed over micro-batches and ranks."""
        kept_J, candidates_J = choices_2J
        return {
            f"selected/{term.name}": (kept_J[j] / candidates_J[j]).item()
            for j, term in enumerate(self.terms)
            if term.chooses and candidates_J[j] > 0
        }

    def scales(self, counts_J: Tensor, *, step: int = 0, world_size: int = 1) -> Tensor:
        """[J] what each term's sum is multiplied by in a step: its coefficient there over its count.

        Args:
            counts_J: from `counts`, summed over all micro-batches and ranks of the step.
            step: optimiser step, from 0.
            world_size: ranks whose gradients will be averaged.
        """
        coefficients_J = torch.tensor([term.coefficient_at(step) for term in self.terms], dtype=torch.float64)
        sums_J = torch.tensor([term.reduction is Reduction.SUM for term in self.terms])
        return term_scales(torch.where(sums_J, counts_J.clamp(max=1), counts_J), coefficients_J, world_size)

    # 3. sum ---------------------------------------------------------------------------------------------------------

    def sum(
        self,
        hidden_ND: Tensor,
        head: OutputHead,
        batch: Batch,
        scales_J: Tensor,
        teacher_heads: Mapping[str, OutputHead],
    ) -> tuple[Tensor, Tensor]:
        """The scaled loss of one micro-batch and its metric sums.

        Args:
            hidden_ND: [N, D] student hidden states at `batch.predicted_from_N`.
            head: the student's head.
            batch: prepared and collated rows, on the same device.
            scales_J: [J] from `scales`: coefficient / count.
            teacher_heads: by name, the heads of the teachers whose hidden states the batch holds.

        Returns:
            loss (differentiable scalar) and [M] float64 sums, named by `metric_names`.
        """

        def token_loss(student_nV: Tensor, teachers_nV: Mapping[str, Tensor], tokens: slice) -> tuple[Tensor, Tensor]:
            return self._tile(student_nV, teachers_nV, tokens, batch, scales_J)

        teachers = self._heads_with_hidden(head.vocab_size, batch, teacher_heads)
        return head_sum(
            hidden_ND, head, token_loss, len(self.metric_names), teachers=teachers, chunk_bytes=self.chunk_bytes
        )

    def _heads_with_hidden(
        self, vocab_size: int, batch: Batch, heads: Mapping[str, OutputHead]
    ) -> dict[str, tuple[OutputHead, Tensor]]:
        """By name, what makes the logits of each teacher whose full distribution some term needs."""
        pairs = dict[str, tuple[OutputHead, Tensor]]()
        for name in self.teachers:
            if Gives.HIDDEN_STATES not in self.needs(name):
                continue
            hidden_ND = batch.teachers[name].hidden_ND if name in batch.teachers else None
            if hidden_ND is None or name not in heads:
                raise PairError(f"teacher '{name}' gave no hidden states with a head; a full-support term needs both")
            if heads[name].vocab_size != vocab_size:
                raise PairError(
                    f"teacher '{name}' has {heads[name].vocab_size} ids and the student {vocab_size}; "
                    "full support compares the same ids"
                )
            pairs[name] = (heads[name], hidden_ND)
        return pairs

    def _tile(
        self,
        student_logits_nV: Tensor,
        teacher_logits_nV: Mapping[str, Tensor],
        tokens: slice,
        batch: Batch,
        scales_J: Tensor,
    ) -> tuple[Tensor, Tensor]:
        student_nV = next_token_logprobs(student_logits_nV, self.temperature)
        tile = Tile(
            student_nV,
            {name: next_token_logprobs(x, self.temperature) for name, x in teacher_logits_nV.items()},
            pick(student_nV, batch.target_ids_N[tokens]),
            tokens,
            batch,
            batch.kept.log_mass(student_nV, tokens) if batch.kept is not None and self.needs_kept_sets else None,
        )
        loss = student_nV.new_zeros(())
        sums: list[Tensor] = []
        for j, term in enumerate(self.terms):
            weights_n = batch.weights_JN[j, tokens].to(loss.dtype)
            marks = mark(term, self._divergences[j], tile, batch.advantages_JN[j, tokens])
            loss = loss + scales_J[j].to(loss.dtype) * (weights_n * marks.values_n).sum()
            trained_n = weights_n != 0
            sums += [] if marks.shown_n is None else [(marks.shown_n.detach() * trained_n).sum()]
            sums.append(trained_n.sum())
            sums += [(marks.shares[name] * trained_n).sum() for name in shares_of(term)]
        sums += shared_sums(tile, self.temperature)
        return loss, torch.stack([s.to(loss.dtype) for s in sums])

    # Metrics --------------------------------------------------------------------------------------------------------

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the M sums `sum` returns, in order."""
        names: list[str] = []
        for term in self.terms:
            names += [f"{name}/{term.name}" for name in (*_shown_of(term), "tokens", *shares_of(term))]
        return (*names, "student/entropy", "student/logprob", "tokens/scored", "sampler/logprob_gap", "tokens/written")

    def summarise(self, sums_M: Tensor) -> dict[str, float]:
        """Means from metric sums that were added up over micro-batches and ranks; counts stay counts."""
        sums: list[float] = sums_M.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        total = dict(zip(self.metric_names, sums, strict=True))
        result = {name: value for name, value in total.items() if name.startswith("tokens/")}

        def mean(name: str, count: str) -> None:
            if total[count] > 0:
                result[name] = total[name] / total[count]

        for term in self.terms:
            for name in (*_shown_of(term), *shares_of(term)):
                mean(f"{name}/{term.name}", f"tokens/{term.name}")
        mean("student/entropy", "tokens/scored")
        mean("student/logprob", "tokens/scored")
        mean("sampler/logprob_gap", "tokens/written")
        return result
