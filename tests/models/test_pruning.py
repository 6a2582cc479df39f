from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from etude.core.collate import pad_rows
from etude.errors import ModelError
from etude.models.backbone import TransformersBackbone, load_backbone
from etude.models.pruning import keep_layers
from etude.testing import Kind, tiny_folder, tiny_model, word_tokenizer

ROW = [7, 11, 2, 30, 9, 2]
KEPT = [0, 2, 3]


def logits(backbone: TransformersBackbone, row: list[int]) -> Tensor:
    with torch.no_grad():
        return backbone.head().logits(backbone.hidden_states(*pad_rows([torch.tensor(row)]))[0])


def without_other_layers(model: PreTrainedModel, name: str) -> Tensor:
    """The logits of a model from whose list of layers the others have been taken, without any cache."""
    decoder = model.get_decoder()
    setattr(decoder, name, nn.ModuleList([getattr(decoder, name)[layer] for layer in KEPT]))
    with torch.no_grad():
        return model(input_ids=torch.tensor([ROW]), use_cache=False).logits[0]


@pytest.mark.parametrize(("kind", "name"), [("llama", "layers"), ("gpt2", "h")])
@pytest.mark.parametrize("tied", [False, True])
def test_the_layers_left_out_are_skipped(tmp_path: Path, kind: Kind, name: str, tied: bool) -> None:
    folder = tiny_folder(tmp_path / "long", kind, layers=4, tied=tied)
    short = load_backbone(folder, keep_layers=KEPT)
    assert short.base.config.num_hidden_layers == 3
    expected = without_other_layers(tiny_model(kind, layers=4, tied=tied), name)
    torch.testing.assert_close(logits(short, ROW), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_is_written_with_and_saved_like_any_model(tmp_path: Path, kind: Kind) -> None:
    short = load_backbone(tiny_folder(tmp_path / "long", kind, layers=4), keep_layers=KEPT)
    decoding = short.decoding([torch.tensor(ROW), torch.tensor(ROW * 2)])
    decoding.append(torch.tensor([3, 4]))
    torch.testing.assert_close(decoding.next_logits()[0], logits(short, [*ROW, 3])[-1], atol=1e-5, rtol=1e-5)
    short.save(tmp_path / "short")
    again = load_backbone(str(tmp_path / "short"))
    assert logits(again, ROW).equal(logits(short, ROW))
    assert len(list(again.parameters())) == len(list(short.parameters()))
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "short")(input_ids=torch.tensor([ROW])).logits[0]
    assert plain.equal(logits(short, ROW))


def layered(**settings: object) -> PreTrainedModel:
    """Layers of two kinds in turn: a window of 3 tokens, and none."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=32,
        num_hidden_layers=4,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=3,
        **sizes | {"layer_types": kinds} | settings,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_each_layer_keeps_its_kind() -> None:
    short = keep_layers(layered(), [1, 2])
    assert short.config.layer_types == ["full_attention", "sliding_attention"]
    assert [layer.self_attn.layer_idx for layer in short.get_decoder().layers] == [0, 1]
    backbone = TransformersBackbone(short, word_tokenizer())
    decoding = backbone.decoding([torch.tensor(ROW), torch.tensor(ROW * 2)])
    decoding.append(torch.tensor([3, 4]))
    torch.testing.assert_close(decoding.next_logits()[0], logits(backbone, [*ROW, 3])[-1], atol=1e-5, rtol=1e-5)


def test_a_kind_that_would_move_is_refused() -> None:
    """A layer whose nature the shortened settings do not tell."""
    model = layered()
    model.get_decoder().layers[2].self_attn.sliding_window = 7
    with pytest.raises(ModelError, match=r"sliding_window of layer 2 would change with its number"):
        keep_layers(model, [1, 2])


@pytest.mark.parametrize("kept", [[], [4], [-1, 0], [1, 1], [2, 0]])
def test_numbers_that_name_no_layers_are_refused(tmp_path: Path, kept: list[int]) -> None:
    folder = tiny_folder(tmp_path, layers=4)
    with pytest.raises(
        ModelError, match=r"does not fit LlamaForCausalLM with its 4 layers; name layers between 0 and 3"
    ):
        load_backbone(folder, keep_layers=kept)
