"""The table as a language model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from etude.errors import ModelError
from etude.models.table import TableBackbone

LOGITS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)  # ids 0 and 1, start state 2


def test_state_is_the_previous_token_whatever_mask_and_positions_say() -> None:
    table = TableBackbone(LOGITS)
    ids = torch.tensor([[2, 0, 1], [2, 1, 0]])
    hidden = table.hidden_states(ids, torch.ones_like(ids), torch.zeros_like(ids))
    assert hidden.shape == (2, 3, 3)
    assert hidden.dtype == torch.float64
    assert torch.equal(table.head().logits(hidden), LOGITS[ids])


def test_decoding_equals_the_table_step_by_step() -> None:
    decoding = TableBackbone(LOGITS).decoding([torch.tensor([2]), torch.tensor([0, 1]), torch.tensor([2, 0])])
    assert torch.equal(decoding.next_logits(), LOGITS[[2, 1, 0]])
    decoding.keep(torch.tensor([0, 2]))
    assert torch.equal(decoding.next_logits(), LOGITS[[2, 0]])
    decoding.append(torch.tensor([1, 0]))
    assert torch.equal(decoding.next_logits(), LOGITS[[1, 0]])


def test_gradient_of_one_state_stays_in_its_row() -> None:
    table = TableBackbone(LOGITS)
    table.next_logits(torch.tensor([1])).log_softmax(-1)[0, 0].backward()
    probs = LOGITS[1].softmax(-1)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    expected[:, 1] = torch.tensor([1.0, 0.0]) - probs
    assert table.weight_VS.grad is not None
    torch.testing.assert_close(table.weight_VS.grad, expected)


def test_the_table_is_a_copy() -> None:
    logits = LOGITS.clone()
    table = TableBackbone(logits)
    logits.zero_()
    assert torch.equal(table.weight_VS.detach().T, LOGITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_save_and_load_give_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    table = TableBackbone(torch.randn(5, 4, dtype=dtype))
    table.save(tmp_path / "new")
    assert set(load_file(tmp_path / "new" / "table.safetensors")) == {"logits_SV"}
    again = TableBackbone.load(tmp_path / "new")
    assert again.weight_VS.dtype == dtype
    assert torch.equal(again.weight_VS, table.weight_VS)


def test_restore_is_in_place(tmp_path: Path) -> None:
    table = TableBackbone(LOGITS)
    held = table.weight_VS
    table.save(tmp_path)
    with torch.no_grad():
        table.weight_VS.zero_()
    table.restore(tmp_path)
    assert table.weight_VS is held
    assert torch.equal(held.detach().T, LOGITS)


def test_wrong_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"shape \(2, 3\).*a state for each id"):
        TableBackbone(torch.zeros(2, 3))
    with pytest.raises(ModelError, match="not finite.*write -1000"):
        TableBackbone(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))
    with pytest.raises(ModelError, match=r"holds no table\.safetensors"):
        TableBackbone.load(tmp_path)
