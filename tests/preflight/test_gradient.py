"""The gradient of training against float64, by hand and with planted faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.axes.legality import Sampling
from etude.axes.names import Gives, Source
from etude.core.collate import collate
from etude.core.objective import Objective, Term
from etude.core.records import Scored
from etude.models.backbone import load_backbone
from etude.models.roles import AbstractBackbone
from etude.models.table import TableBackbone
from etude.models.teachers import FrozenTeacher
from etude.preflight.findings import Finding, Verdict
from etude.preflight.gradient import gradient, reference
from etude.preflight.tolerance import TOLERANCE
from etude.testing import counting_logits, rollout_of, tiny_backbone, tiny_folder

EXACT = TOLERANCE[torch.float32]
ROWS = [rollout_of([3], [4, 5, 9, 0]), rollout_of([1, 2, 3], [4], row=1)]
KINDS = frozenset({Gives.SAMPLED_LOGPROBS, Gives.HIDDEN_STATES})


def prepared(objective: Objective, student: AbstractBackbone, teacher: FrozenTeacher) -> list[Scored]:
    marks = teacher.score(ROWS, KINDS, objective.temperature)
    own = FrozenTeacher("student", student).score(ROWS, frozenset({Gives.SAMPLED_LOGPROBS}), objective.temperature)
    rows = [
        Scored(row, {teacher.name: mark}).with_prepared(student_logprobs=said.sampled_logprobs)
        for row, mark, said in zip(ROWS, marks, own, strict=True)
    ]
    return objective.prepare(rows)


def judged(terms: Sequence[Term], student: AbstractBackbone, teacher: AbstractBackbone, **options: Any) -> Finding:
    objective, frozen = Objective(terms, **options), FrozenTeacher("teacher", teacher)
    return gradient(objective, student, prepared(objective, student, frozen), {"teacher": frozen.head()}, EXACT)


def test_the_reference_by_hand() -> None:
    """Cross-entropy of a table: at each token the student's probabilities less one at the token, over five tokens."""
    student = TableBackbone(counting_logits(certainty=0.5))
    objective = Objective(
        [Term(name="gold", teacher="label", divergence="forward_kl")],
        sampling=Sampling(rows=frozenset({Source.DATASET})),
    )
    batch = collate(prepared(objective, student, FrozenTeacher("teacher", TableBackbone(counting_logits()))))
    hidden_NS = student.hidden_states(batch.token_ids_BT, batch.attention_mask_BT, batch.position_ids_BT)
    hidden_NS = hidden_NS.flatten(0, 1)[batch.predicted_from_N]
    found_NS = reference(objective, 0, hidden_NS, student.head(), batch, 1 / 5, {})
    before = torch.tensor([3, 4, 5, 9, 3])
    wrong_NV = counting_logits(certainty=0.5)[before].double().softmax(-1)
    wrong_NV[torch.arange(5), torch.tensor([4, 5, 9, 0, 4])] -= 1.0
    expected_NS = wrong_NV / 5 @ student.weight_VS.detach().double()
    torch.testing.assert_close(found_NS, expected_NS, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "term",
    [
        Term(),
        Term(divergence="jsd", beta=0.5),
        Term(support="top_k", top_k=5),
        Term(support="sampled", estimator="policy_gradient", discount=1.0, importance="ratio"),
        Term(teacher_entropy=2.0),
    ],
    ids=["reverse_kl", "jsd", "top_k", "policy_gradient", "gated"],
)
def test_training_gives_it(kind: Any, term: Term) -> None:
    found = judged([term], tiny_backbone(kind), tiny_backbone(kind, seed=1), temperature=2.0, chunk_bytes=1)
    assert found.verdict is Verdict.PASS, found
    assert found.figures["tokens"] == 5
    assert found.figures["relative_error"]["reverse_kl"] < 1e-5


def test_a_half_precision_student(tmp_path: Any) -> None:
    student = load_backbone(tiny_folder(tmp_path / "s"), dtype="bfloat16")
    objective, teacher = Objective([Term()]), FrozenTeacher("teacher", tiny_backbone(seed=1))
    rows, heads = prepared(objective, student, teacher), {"teacher": teacher.head()}
    assert gradient(objective, student, rows, heads, TOLERANCE[torch.bfloat16]).verdict is Verdict.PASS
    assert gradient(objective, student, rows, heads, EXACT).verdict is Verdict.REFUSE  # it is coarser than float32


def test_a_term_off_its_formula_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two terms, the small one alone is wrong: in the sum of both it would hardly show."""
    honest = Objective.sum

    def wrong(self: Objective, hidden_ND: Tensor, head: Any, batch: Any, scales_J: Tensor, heads: Any) -> Any:
        return honest(self, hidden_ND, head, batch, scales_J * torch.tensor([1.0, 1.1]), heads)

    monkeypatch.setattr(Objective, "sum", wrong)
    terms = [Term(), Term(name="small", divergence="forward_kl", coefficient=1e-3)]
    found = judged(terms, tiny_backbone(), tiny_backbone(seed=1))
    assert found.verdict is Verdict.REFUSE
    assert found.evidence.startswith("the gradient of term 'small' is off its formula in float64 by 10.0% of its size")


def test_a_gradient_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Objective.sum
    monkeypatch.setattr(Objective, "sum", lambda self, hidden_ND, *rest: honest(self, hidden_ND * float("nan"), *rest))
    assert judged([Term()], tiny_backbone(), tiny_backbone(seed=1)).verdict is Verdict.REFUSE


@pytest.mark.parametrize("term", [Term(skip_first=9), Term()], ids=["no token", "the teacher is the student"])
def test_a_term_without_a_gradient_is_told(term: Term) -> None:
    found = judged([term], tiny_backbone(), tiny_backbone(seed=0 if term.skip_first == 0 else 1))
    assert found.verdict is Verdict.WARN
    assert "none at all from reverse_kl" in found.evidence
