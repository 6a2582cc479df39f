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
from etude.axes.names import LABEL, Estimator, Form, Gives, Importance, Support
from etude.core import estimators
from etude.core.linear import DEFAULT_CHUNK_BYTES, OutputHead, head_sum
from etude.core.logprobs import next_token_logprobs, pick
from etude.core.records import Batch, Scored
from etude.core.reduction import row_count, row_weights
from etude.core.term import Term
from etude.core.weighting import row_mask
from etude.errors import PairError, RecordError

NEAR_AN_END = 0.05  # betas of jsd nearer to 0 or 1 than this are warned about: the signal shrinks in proportion


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
        wanted = (term.needs for term in self.terms if term.teacher == teacher)
        return frozenset[Gives]().union(*wanted)

    @cached_property
    def teachers(self) -> tuple[str, ...]:
        """Names of the teachers it asks for scores, each once; the label is not one of them."""
        return tuple(dict.fromkeys(term.teacher for term in self.terms if term.teacher != LABEL))

    @property
    def needs_student_logprobs(self) -> bool:
        """Whether `prepare` needs a pass of the student before the round's first step."""
        return any(term.rewards_needed for term in self.terms)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is legal and perhaps not meant, a sentence each."""
        return tuple(
            f"term '{term.name}': jsd with beta = {term.beta} has about {min(term.beta, 1 - term.beta):.2g} times the "
            f"gradient of the KL at that end, which beta = {round(term.beta)} gives in full"
            for term in self.terms
            if term.beta is not None and 0.0 < min(term.beta, 1.0 - term.beta) < NEAR_AN_END
        )

    @property
    def coefficients(self) -> Tensor:
        """[J] float64."""
        return torch.tensor([term.coefficient for term in self.terms], dtype=torch.float64)

    # 1. prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, scored: Sequence[Scored]) -> list[Scored]:
        """Fill in weights and advantages of every row; nothing depends on the rows around it.

        Raises:
            RecordError: a row lacks a score, or the student's log-probabilities a term needs.
        """
        return [self._prepare_row(row) for row in scored]

    def _prepare_row(self, row: Scored) -> Scored:
        weights, advantages = list[Tensor](), list[Tensor]()
        for term in self.terms:
            mask_C = row_mask(row.rollout, sources=term.sources, train_truncated=term.train_truncated)
            weights.append(row_weights(mask_C, term.reduction))
            trains = term.rewards_needed and bool(mask_C.any())
            advantages.append(self._advantages(term, row) if trains else torch.zeros_like(weights[-1]))
        return row.with_prepared(weights=torch.stack(weights), advantages=torch.stack(advantages))

    @staticmethod
    def _advantages(term: Term, row: Scored) -> Tensor:
        """[C] returns of r = log teacher - log student, the student as it was before the round's first step."""
        scores = row.scores.get(term.teacher)
        if scores is None or scores.sampled_logprobs is None or row.student_logprobs is None:
            raise RecordError(
                f"term '{term.name}' needs the log-probabilities of student and teacher '{term.teacher}' for row "
                f"{row.rollout.prompt.row}; the row has scores of {sorted(row.scores)}"
            )
        if term.importance is not Importance.NONE and row.rollout.behaviour_logprobs is None:
            raise RecordError(
                f"term '{term.name}' weighs row {row.rollout.prompt.row} by student / behaviour, and the row carries "
                "no behaviour_logprobs; take them from the sampler that wrote it"
            )
        c = estimators.log_ratio(student_logprobs=row.student_logprobs, teacher_logprobs=scores.sampled_logprobs)
        return estimators.returns(-c, term.discount)

    # 2. count -------------------------------------------------------------------------------------------------------

    def counts(self, rows: Sequence[Scored]) -> Tensor:
        """[J] float64: each term's count over these rows (tokens, or rows under `sequence_mean`)."""
        counts_J = torch.zeros(len(self.terms), dtype=torch.float64)
        for row in rows:
            for j, term in enumerate(self.terms):
                mask_C = row_mask(row.rollout, sources=term.sources, train_truncated=term.train_truncated)
                counts_J[j] += row_count(mask_C, term.reduction)
        return counts_J

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
            scales_J: [J] from `reduction.term_scales`: coefficient / count.
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
        teachers_nV = {name: next_token_logprobs(x, self.temperature) for name, x in teacher_logits_nV.items()}
        chosen_n = pick(student_nV, batch.target_ids_N[tokens])
        loss = student_nV.new_zeros(())
        sums: list[Tensor] = []
        for j, term in enumerate(self.terms):
            weights_n = batch.weights_JN[j, tokens].to(chosen_n.dtype)
            values_n, shown_n = self._term_values(j, term, student_nV, teachers_nV, chosen_n, tokens, batch)
            loss = loss + scales_J[j].to(loss.dtype) * (weights_n * values_n).sum()
            trained_n = weights_n != 0
            sums += [(shown_n.detach() * trained_n).sum(), trained_n.sum()]
            if term.clip is not None:
                ratio_n = estimators.importance_ratio(
                    student_logprobs=chosen_n.detach(), behaviour_logprobs=batch.behaviour_logprobs_N[tokens]
                )
                cut_n = estimators.clipped(ratio=ratio_n, advantages=batch.advantages_JN[j, tokens], clip=term.clip)
                sums.append((cut_n & trained_n).sum())
        sums += self._shared_sums(student_nV.detach(), chosen_n.detach(), tokens, batch)
        return loss, torch.stack([s.to(loss.dtype) for s in sums])

    def _term_values(
        self,
        j: int,
        term: Term,
        student_nV: Tensor,
        teachers_nV: Mapping[str, Tensor],
        chosen_n: Tensor,
        tokens: slice,
        batch: Batch,
    ) -> tuple[Tensor, Tensor]:
        """[n] the differentiable per-token term, and [n] the divergence it stands for (for the log)."""
        if term.teacher == LABEL:
            return -chosen_n, -chosen_n
        if term.support is Support.FULL:
            values_n = self._divergences[j](student_logprobs=student_nV, teacher_logprobs=teachers_nV[term.teacher])
            return values_n, values_n
        columns = batch.teachers.get(term.teacher)
        if columns is None or columns.sampled_logprobs_N is None:
            raise PairError(
                f"teacher '{term.teacher}' gave no log-probabilities of the drawn ids; term '{term.name}' needs them"
            )
        c_n = estimators.log_ratio(student_logprobs=chosen_n, teacher_logprobs=columns.sampled_logprobs_N[tokens])
        if term.estimator is Estimator.ANALYTIC:
            return estimators.form_value(c_n, term.form or Form.K2), c_n
        values_n = estimators.policy_gradient(
            student_logprobs=chosen_n,
            behaviour_logprobs=batch.behaviour_logprobs_N[tokens],
            advantages=batch.advantages_JN[j, tokens],
            importance=term.importance,
            clip=term.clip,
        )
        return values_n, c_n

    # Metrics --------------------------------------------------------------------------------------------------------

    def _shared_sums(self, student_nV: Tensor, chosen_n: Tensor, tokens: slice, batch: Batch) -> list[Tensor]:
        scored_n = (batch.weights_JN[:, tokens] != 0).any(dim=0)  # a batch without work holds one token of no weight
        entropy_n = -student_nV.exp().mul_(student_nV.clamp(min=torch.finfo(student_nV.dtype).min)).sum(-1)
        raw_n = batch.raw_logprobs_N[tokens]
        # The student's rows with the sampler's log-probabilities, which are comparable at temperature 1 only.
        written_n = scored_n & ~torch.isnan(raw_n) & (self.temperature == 1.0)
        gap_n = torch.where(written_n, (chosen_n - raw_n).abs(), 0.0)
        return [
            (entropy_n * scored_n).sum(),
            (chosen_n * scored_n).sum(),
            scored_n.sum(),
            gap_n.sum(),
            written_n.sum(),
        ]

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the M sums `sum` returns, in order."""
        names: list[str] = []
        for term in self.terms:
            names += [f"divergence/{term.name}", f"tokens/{term.name}"]
            if term.importance is Importance.PPO_CLIP:
                names.append(f"clipped/{term.name}")
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
            mean(f"divergence/{term.name}", f"tokens/{term.name}")
            if f"clipped/{term.name}" in total:
                mean(f"clipped/{term.name}", f"tokens/{term.name}")
        mean("student/entropy", "tokens/scored")
        mean("student/logprob", "tokens/scored")
        mean("sampler/logprob_gap", "tokens/written")
        return result
