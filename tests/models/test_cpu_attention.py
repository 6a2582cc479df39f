"""Attention by products against attention row by row and head by head, and when it is left to torch's kernel."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from etude.core.collate import pad_rows
from etude.models import cpu_attention
from etude.models.backbone import TransformersBackbone
from etude.models.cpu_attention import NAME, attention, use_for_short_rows
from etude.testing import tiny_model, word_tokenizer

LENGTH, HEADS, KEY_HEADS, SIZE = 5, 6, 3, 8


def tensors(num_queries: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, HEADS, num_queries, SIZE), (2, KEY_HEADS, LENGTH, SIZE), (2, KEY_HEADS, LENGTH, SIZE))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


def layer() -> nn.Module:
    """What the kernel wants to know of the layer it is called from."""
    module: Any = nn.Module()
    module.num_key_value_groups = HEADS // KEY_HEADS
    return module


def seen(num_queries: int) -> Tensor:
    """[2, Q, S]: causal, the second row padded by two tokens on the left."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[-num_queries:].repeat(2, 1, 1)
    seen[1, :, :2] = False
    return seen


def by_hand(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float) -> Tensor:
    """[B, Q, H, E] in float32, query by query."""
    query, key, value = query.float(), key.float(), value.float()
    result = torch.zeros(query.transpose(1, 2).shape)
    for row in range(query.shape[0]):
        for head in range(HEADS):
            for place in range(query.shape[2]):
                shared = head // (HEADS // KEY_HEADS)
                scores = key[row, shared] @ query[row, head, place] * scaling
                weights = scores.masked_fill(~seen[row, place], -torch.inf).softmax(-1)
                result[row, place, head] = weights @ value[row, shared]
    return result


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of calls that went to torch's kernel."""
    calls: list[dict[str, Any]] = []

    def recorded(*tensors: Any, **arguments: Any) -> Any:
        calls.append(arguments)
        return sdpa_attention_forward(*tensors, **arguments)

    monkeypatch.setattr(cpu_attention, "sdpa_attention_forward", recorded)
    return calls


class TestByProducts:
    @pytest.mark.parametrize("heads", [1, HEADS])
    @pytest.mark.parametrize("added", [False, True])
    @pytest.mark.parametrize("num_queries", [1, 3])
    def test_is_attention(self, num_queries: int, added: bool, heads: int, kernel_calls: list[Any]) -> None:
        mask = seen(num_queries)[:, None].expand(2, heads, num_queries, LENGTH)
        given = torch.where(mask, 0.0, torch.finfo(torch.bfloat16).min).bfloat16() if added else mask
        attended, _ = attention(layer(), *tensors(num_queries), given, scaling=0.3)
        expected = by_hand(*tensors(num_queries), seen(num_queries), 0.3)
        torch.testing.assert_close(attended.float(), expected, atol=0.02, rtol=0.02)
        assert not kernel_calls

    @pytest.mark.parametrize("num_queries", [1, LENGTH])
    def test_without_mask_and_scale_is_causal(self, num_queries: int, kernel_calls: list[Any]) -> None:
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[-num_queries:].repeat(2, 1, 1)
        attended, _ = attention(layer(), *tensors(num_queries), None)
        expected = by_hand(*tensors(num_queries), causal, SIZE**-0.5)
        torch.testing.assert_close(attended.float(), expected, atol=0.02, rtol=0.02)
        assert not kernel_calls

    def test_gradients_are_the_kernels(self) -> None:
        """Both in bfloat16, so each is off by rounding; the kernel in float64 is the reference."""
        gradients = dict[str, list[Tensor]]()
        for name, function, dtype in (
            ("products", attention, torch.bfloat16),
            ("reference", sdpa_attention_forward, torch.float64),
        ):
            leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors(LENGTH)]
            attended, _ = function(layer(), *leaves, seen(LENGTH)[:, None] | torch.eye(LENGTH, dtype=torch.bool))
            attended.pow(2).sum().backward()
            gradients[name] = [leaf.grad.double() for leaf in leaves if leaf.grad is not None]
        for ours, expected in zip(*gradients.values(), strict=True):
            torch.testing.assert_close(ours, expected, atol=0.1, rtol=0.05)

    def test_a_pad_that_sees_nothing_is_finite(self) -> None:
        """Its output is never read, and must not poison the rows that are."""
        attended, _ = attention(layer(), *tensors(1), torch.zeros(2, 1, 1, LENGTH, dtype=torch.bool))
        assert attended.isfinite().all()


class TestByTheKernel:
    """Whatever is not understood, too long or in another precision goes to it, with all its arguments."""

    @pytest.mark.parametrize(
        "arguments",
        [
            {"dropout": 0.5},
            {"position_bias": torch.zeros(1, HEADS, LENGTH, LENGTH)},
            {"is_causal": False},  # a mask of nobody's, over many queries
        ],
        ids=lambda arguments: next(iter(arguments)),
    )
    def test_settings(self, arguments: dict[str, Any], kernel_calls: list[dict[str, Any]]) -> None:
        attention(layer(), *tensors(LENGTH), None, scaling=0.3, **arguments)
        [call] = kernel_calls
        assert call["scaling"] == 0.3
        assert {name: call[name] for name in arguments} == arguments

    def test_float32(self, kernel_calls: list[Any]) -> None:
        attention(layer(), *tensors(1, torch.float32), seen(1)[:, None])
        assert len(kernel_calls) == 1

    def test_long_rows(self, kernel_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_attention, "MOST_SCORES", 2 * HEADS * 3 * LENGTH - 1)
        attention(layer(), *tensors(3), seen(3)[:, None])
        assert len(kernel_calls) == 1


class TestModels:
    def test_those_with_an_attention_of_their_own_keep_it(self) -> None:
        model = tiny_model()
        model.set_attn_implementation("eager")
        use_for_short_rows(model)
        assert model.config._attn_implementation == "eager"

    def test_those_elsewhere_keep_theirs(self) -> None:
        model = tiny_model().to("meta")
        use_for_short_rows(model)
        assert model.config._attn_implementation == "sdpa"

    def test_it_is_not_written_to_folders(self) -> None:
        model = tiny_model()
        use_for_short_rows(model)
        assert model.config._attn_implementation == NAME
        assert NAME not in model.config.to_json_string()

    @pytest.mark.parametrize("computing", ["weights", "autocast"])
    def test_a_model_reads_rows_as_with_the_kernel(self, computing: str, kernel_calls: list[Any]) -> None:
        model = tiny_model().to(torch.bfloat16 if computing == "weights" else torch.float32)
        backbone = TransformersBackbone(model, word_tokenizer(), compute_dtype=torch.bfloat16)
        rows = pad_rows([torch.tensor([7, 11, 2, 30, 9, 2]), torch.tensor([5, 6, 7])])
        with torch.no_grad():
            ours = backbone.hidden_states(*rows)
            assert not kernel_calls
            model.set_attn_implementation("sdpa")
            theirs = backbone.hidden_states(*rows)
        read = rows[1].bool()
        torch.testing.assert_close(ours[read].float(), theirs[read].float(), atol=0.05, rtol=0.05)
