"""Packed products against the plain ones, and what they leave behind."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etude.core.collate import pad_rows
from etude.models import cpu_packing
from etude.models.backbone import TransformersBackbone
from etude.models.cpu_packing import packed_layers, packed_product
from etude.models.forward import evaluating
from etude.models.lora import LoraSettings, add_adapters
from etude.testing import tiny_model, word_tokenizer

ROWS = [torch.tensor([7, 11, 2, 30, 9, 2]), torch.tensor([5, 6, 7])]


@pytest.fixture(autouse=True)
def small_layers_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_packing, "PAYS_FROM", 1)


def linear_layer(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 80, bias=bias).to(dtype).requires_grad_(False)


def next_logits(backbone: TransformersBackbone) -> Tensor:
    """[2, B, V] after the prompts, and after one token more."""
    decoding = backbone.decoding(ROWS)
    first = decoding.next_logits()
    decoding.append(torch.tensor([3, 4]))
    return torch.stack([first, decoding.next_logits()])


class TestPackedProduct:
    @pytest.mark.parametrize("rows", [1, 8, 33])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_the_linear_layer(self, dtype: torch.dtype, bias: bool, rows: int) -> None:
        layer = linear_layer(dtype, bias=bias)
        inputs = torch.randn(2, rows, 48).to(dtype)
        product = packed_product(layer.weight, layer.bias, dtype)
        assert product is not None
        torch.testing.assert_close(product(inputs), layer(inputs))

    def test_of_a_cut_head(self) -> None:
        layer = linear_layer(bias=False)
        inputs = torch.randn(3, 48)
        product = packed_product(layer.weight[:70], None, torch.float32)
        assert product is not None
        torch.testing.assert_close(product(inputs), layer(inputs)[:, :70])

    def test_none_where_it_does_not_pay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = linear_layer()
        assert packed_product(layer.weight, None, torch.float16) is None
        assert packed_product(layer.weight.to("meta"), None, torch.float32) is None
        monkeypatch.setattr(cpu_packing, "PAYS_FROM", layer.weight.numel() + 1)
        assert packed_product(layer.weight, None, torch.float32) is None

    def test_none_on_a_build_without_the_operators(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.ops, "mkldnn", object())
        assert packed_product(linear_layer().weight, None, torch.float32) is None


class TestPackedLayers:
    def test_all_is_as_it_was_afterwards(self) -> None:
        model = tiny_model("llama")
        layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
        with suppress(KeyError), packed_layers(model, torch.float32):
            assert all("forward" in vars(layer) for layer in layers)
            raise KeyError
        assert not any("forward" in vars(layer) for layer in layers)

    def test_another_device_changes_nothing(self) -> None:
        layer = linear_layer().to("meta")
        with packed_layers(layer, torch.float32):
            assert "forward" not in vars(layer)

    def test_autocast_decides_the_precision(self) -> None:
        """A router that a model keeps out of autocast keeps its own precision."""
        layer = linear_layer()
        inputs = torch.randn(3, 48)
        with packed_layers(layer, torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16):
                assert layer(inputs).dtype == torch.bfloat16
                with torch.autocast("cpu", enabled=False):
                    assert layer(inputs).dtype == torch.float32
            assert layer(inputs).equal(linear_layer()(inputs))


class TestBackboneWhileWriting:
    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    def test_gives_the_same_logits(self, kind: Any) -> None:
        backbone = TransformersBackbone(tiny_model(kind).eval(), word_tokenizer())
        plain = next_logits(backbone)
        with backbone.writing():
            torch.testing.assert_close(next_logits(backbone), plain, atol=1e-5, rtol=1e-5)
        assert next_logits(backbone).equal(plain)

    def test_with_products_in_half_precision(self) -> None:
        backbone = TransformersBackbone(tiny_model("llama").eval(), word_tokenizer(), compute_dtype=torch.bfloat16)
        plain = next_logits(backbone)
        with backbone.writing():
            torch.testing.assert_close(next_logits(backbone), plain, atol=0.05, rtol=0.05)

    def test_with_adapters(self) -> None:
        adapted = add_adapters(tiny_model("llama"), LoraSettings(rank=2, alpha=4.0))
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_B" in name:
                    weight.normal_()
        backbone = TransformersBackbone(adapted.eval(), word_tokenizer())
        plain = next_logits(backbone)
        with backbone.writing():
            torch.testing.assert_close(next_logits(backbone), plain, atol=1e-5, rtol=1e-5)

    def test_new_weights_are_packed_anew(self) -> None:
        backbone = TransformersBackbone(tiny_model("llama").eval(), word_tokenizer())
        with backbone.writing():
            before = next_logits(backbone)
        with torch.no_grad():
            for weight in backbone.parameters():
                weight.mul_(1.5)
        plain = next_logits(backbone)
        with backbone.writing():
            after = next_logits(backbone)
        torch.testing.assert_close(after, plain, atol=1e-4, rtol=1e-4)
        assert (after - before).abs().max() > 0.01

    def test_may_be_entered_twice(self) -> None:
        backbone = TransformersBackbone(tiny_model("llama").eval(), word_tokenizer())
        with backbone.writing():
            with backbone.writing():
                pass
            assert "forward" in vars(backbone.base.get_decoder().layers[0].mlp.up_proj)

    def test_reading_whole_rows_inside_is_unchanged(self) -> None:
        backbone = TransformersBackbone(tiny_model("llama").eval(), word_tokenizer())
        rows = pad_rows(ROWS)
        with evaluating(backbone), torch.no_grad():
            plain = backbone.hidden_states(*rows)
            with backbone.writing():
                torch.testing.assert_close(backbone.hidden_states(*rows), plain, atol=1e-5, rtol=1e-5)
