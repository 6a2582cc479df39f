import pytest
import torch
from torch import nn

from etude.core.linear import OutputHead
from etude.errors import NonFiniteError
from etude.models import forward
from etude.models.forward import (
    batches_by_length,
    completion_states,
    evaluating,
    first_too_long,
    token_logprobs,
    token_logprobs_and_entropies,
)
from etude.models.table import TableBackbone
from etude.testing import counting_logits, rollout_of


class TestEvaluating:
    def test_puts_every_module_back_after_an_exception(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
        model[1].eval()
        with pytest.raises(KeyError), evaluating(model):
            raise KeyError
        assert [part.training for part in model.modules()] == [True, True, False, False]

    def test_evaluates_inside(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5))
        with evaluating(model):
            assert not any(part.training for part in model.modules())


class TestBatches:
    def test_every_row_once_within_the_budget(self) -> None:
        lengths = [5, 1, 9, 3, 3, 2, 30, 4]
        batches = batches_by_length(lengths, tokens_per_batch=12)
        assert sorted(index for batch in batches for index in batch) == list(range(8))
        assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 12 for batch in batches)

    def test_no_rows_no_batches(self) -> None:
        assert batches_by_length([], tokens_per_batch=12) == []


class TestCompletionStates:
    def test_are_those_that_predict_each_token(self) -> None:
        """The state of a table is the previous id, one-hot."""
        rows = [rollout_of([3], [4, 5, 6]), rollout_of([1, 2, 3], [9], row=1)]
        [(indices, states)] = completion_states(TableBackbone(counting_logits()), rows, tokens_per_batch=100)
        found = {index: state.argmax(-1).tolist() for index, state in zip(indices, states, strict=True)}
        assert found == {0: [3, 4, 5], 1: [3]}

    def test_a_state_that_is_no_number_names_its_row(self) -> None:
        class Damaged(TableBackbone):
            def hidden_states(self, *args: torch.Tensor) -> torch.Tensor:
                return super().hidden_states(*args).masked_fill(args[0][..., None] == 7, torch.nan)

        backbone = Damaged(counting_logits())
        rows = [rollout_of([3], [7]), rollout_of([7], [4], row=5)]
        with pytest.raises(NonFiniteError, match="hidden states of row 5"):
            list(completion_states(backbone, rows, tokens_per_batch=100))


@pytest.mark.parametrize("tokens", [1, 3, 7, 100])
def test_token_logprobs_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    head, hidden_ND = OutputHead(torch.randn(11, 4), torch.randn(11)), torch.randn(23, 4)
    ids_N = torch.arange(23) % 11
    logprobs_NV = ((hidden_ND @ head.weight_VD.T + head.bias_V) / 2).log_softmax(-1)
    expected, entropies = logprobs_NV[torch.arange(23), ids_N], -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    monkeypatch.setattr(forward, "LOGITS_BYTES", tokens * 11 * 4)
    torch.testing.assert_close(token_logprobs(hidden_ND, head, ids_N, temperature=2.0), expected)
    both = token_logprobs_and_entropies(hidden_ND, head, ids_N, temperature=2.0)
    torch.testing.assert_close(both, torch.stack([expected, entropies]))


def test_token_logprobs_stay_within_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = OutputHead.logits

    def logits(head: OutputHead, hidden_ND: torch.Tensor) -> torch.Tensor:
        seen.append(hidden_ND.shape[0])
        return original(head, hidden_ND)

    monkeypatch.setattr(OutputHead, "logits", logits)
    token_logprobs(torch.randn(300, 2), OutputHead(torch.randn(151_936, 2)), torch.zeros(300, dtype=torch.int64), 1.0)
    assert max(seen) * 151_936 * 4 <= forward.LOGITS_BYTES
    assert sum(seen) == 300


def test_the_first_row_that_is_too_long() -> None:
    rows = [rollout_of([1, 2], [3]), rollout_of([1, 2], [3, 4], row=1), rollout_of([1] * 9, [3], row=2)]
    assert first_too_long(rows, 3) is rows[1]
    assert first_too_long(rows, 10) is None
    assert first_too_long(rows, None) is None
