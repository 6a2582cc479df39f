import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from etude.core.collate import pad_rows
from etude.errors import ExtraMissing, ModelError
from etude.models.backbone import TransformersBackbone, load_backbone
from etude.models.lora import LoraSettings, add_adapters
from etude.models.student import Student
from etude.testing import Kind, tiny_folder, word_tokenizer

ROW = [7, 11, 2, 30, 9, 2]
SETTINGS = LoraSettings(rank=2, alpha=4.0)


@pytest.fixture(params=["llama", "gpt2"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind: Kind = request.param
    return tiny_folder(tmp_path / "base", kind, tied=True)


def logits(backbone: TransformersBackbone) -> Tensor:
    with torch.no_grad():
        return backbone.head().logits(backbone.hidden_states(*pad_rows([torch.tensor(ROW)]))[0])


def trained(base: str) -> TransformersBackbone:
    """A backbone whose adapters have moved."""
    backbone = load_backbone(base, lora=SETTINGS)
    with torch.no_grad():
        for weight in Student(backbone).trainable_parameters().values():
            weight.add_(torch.randn_like(weight))
    return backbone


def test_only_adapters_learn_and_nothing_has_changed_yet(base: str) -> None:
    backbone = load_backbone(base, lora=SETTINGS)
    names = Student(backbone).trainable_parameters()
    assert names
    assert all(".lora_" in name for name in names)
    assert logits(backbone).equal(logits(load_backbone(base)))


def test_the_first_values_follow_from_the_seed_alone(base: str) -> None:
    def first_values(seed: int) -> Tensor:
        settings = LoraSettings(rank=2, alpha=4.0, seed=seed)
        weights = Student(load_backbone(base, lora=settings)).trainable_parameters().values()
        return torch.cat([weight.flatten() for weight in weights])

    before = torch.get_rng_state()
    first = first_values(0)
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(99)
    assert first_values(0).equal(first)
    assert not first_values(1).equal(first)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:fan_in_fan_out")
def test_saves_an_adapter_folder_that_peft_loads(base: str, tmp_path: Path) -> None:
    backbone = trained(base)
    backbone.save(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        assert plain(input_ids=torch.tensor([ROW])).logits[0].equal(logits(backbone))


def test_a_copy_is_saved_as_a_plain_folder(base: str, tmp_path: Path) -> None:
    backbone = trained(base)
    before = logits(backbone)
    backbone.copy_as("float32").save(tmp_path / "merged")
    assert logits(backbone).equal(before)
    merged = load_backbone(str(tmp_path / "merged"))
    assert not hasattr(merged.model, "peft_config")
    torch.testing.assert_close(logits(merged), before, atol=1e-5, rtol=1e-5)
    assert not logits(merged).allclose(logits(load_backbone(base)), atol=1e-3)


def test_an_adapter_folder_is_a_model_too(base: str, tmp_path: Path) -> None:
    backbone = trained(base)
    backbone.save(tmp_path / "adapter")
    loaded = load_backbone(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(loaded), logits(backbone), atol=1e-5, rtol=1e-5)
    assert Student(loaded).trainable_parameters().keys() == Student(load_backbone(base)).trainable_parameters().keys()
    with pytest.raises(ModelError, match="is an adapter folder, which takes neither"):
        load_backbone(str(tmp_path / "adapter"), lora=SETTINGS)


def test_an_adapter_folder_without_a_base_is_refused(base: str, tmp_path: Path) -> None:
    trained(base).save(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="names no base model"):
        load_backbone(str(tmp_path / "adapter"))


def test_restores_bit_for_bit_and_in_place(base: str, tmp_path: Path) -> None:
    backbone = trained(base)
    weights = list(Student(backbone).trainable_parameters().values())
    backbone.save(tmp_path / "adapter")
    other = load_backbone(base, lora=SETTINGS)
    held = list(Student(other).trainable_parameters().values())
    other.restore(tmp_path / "adapter")
    assert all(mine.equal(theirs) for mine, theirs in zip(held, weights, strict=True))
    assert all(was is now for was, now in zip(held, Student(other).trainable_parameters().values(), strict=True))
    assert logits(other).equal(logits(backbone))


def test_a_low_precision_copy_holds_the_effective_weights(base: str) -> None:
    backbone = trained(base)
    copy = load_backbone(base, lora=SETTINGS).copy_as("bfloat16")
    assert {weight.dtype for weight in copy.parameters()} == {torch.bfloat16}
    copy.load_weights_from(backbone)
    assert logits(copy).equal(logits(backbone.copy_as("bfloat16")))
    exact = load_backbone(base, lora=SETTINGS).copy_as("float32")
    exact.load_weights_from(backbone)
    torch.testing.assert_close(logits(exact), logits(backbone), atol=1e-5, rtol=1e-5)


def test_adapters_on_experts_are_merged_too() -> None:
    """A stack of experts is one parameter of three dimensions, and its adapters nest."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    backbone = TransformersBackbone(add_adapters(model, SETTINGS), word_tokenizer()).eval()
    copy = backbone.copy_as("float32")
    names = Student(backbone).trainable_parameters()
    assert any("experts" in name for name in names)
    with torch.no_grad():
        for weight in names.values():
            weight.add_(torch.randn_like(weight))
    copy.load_weights_from(backbone)
    torch.testing.assert_close(logits(copy), logits(backbone), atol=1e-4, rtol=1e-4)


def test_dropout_of_the_adapters_acts_in_training_mode_only(base: str) -> None:
    backbone = load_backbone(base, lora=LoraSettings(rank=2, alpha=4.0, dropout=0.5))
    with torch.no_grad():
        for weight in Student(backbone).trainable_parameters().values():
            weight.add_(torch.randn_like(weight))
    assert logits(backbone).equal(logits(backbone))
    backbone.train()
    assert not logits(backbone).equal(logits(backbone))


def test_an_adapter_on_the_head_is_refused(tmp_path: Path) -> None:
    settings = LoraSettings(rank=2, alpha=4.0, target_modules=("q_proj", "lm_head"))
    with pytest.raises(ModelError, match="puts an adapter on the output head"):
        load_backbone(tiny_folder(tmp_path), lora=settings)


def test_unknown_modules_are_refused(base: str) -> None:
    with pytest.raises(ModelError, match=r"target_modules = \['nothing'\] does not fit"):
        load_backbone(base, lora=LoraSettings(rank=2, alpha=4.0, target_modules=["nothing"]))


def test_activations_are_recomputed_under_adapters_too(base: str) -> None:
    gradients: list[list[Tensor]] = []
    for on in (False, True):
        student = Student(load_backbone(base, lora=SETTINGS, activation_checkpointing=on).train())
        student.backbone.hidden_states(*pad_rows([torch.tensor(ROW)])).pow(2).sum().backward()
        gradients.append([weight.grad for weight in student.trainable_parameters().values() if weight.grad is not None])
    plain, recomputed = gradients
    assert plain
    torch.testing.assert_close(recomputed, plain)


def test_layers_and_adapters_do_not_go_together(base: str) -> None:
    with pytest.raises(ModelError, match="keep_layers and student.lora do not go together"):
        load_backbone(base, lora=SETTINGS, keep_layers=[0])


def test_without_peft(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    load_backbone(base)
    with pytest.raises(ExtraMissing, match=r"student\.lora needs the package 'peft'.*etude\[lora\]"):
        load_backbone(base, lora=SETTINGS)
