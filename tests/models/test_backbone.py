from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
)

from etude.core.collate import pad_rows
from etude.core.logprobs import next_token_logprobs
from etude.errors import ModelError
from etude.models.backbone import TransformersBackbone, load_backbone
from etude.models.forward import evaluating
from etude.testing import EOS_ID, Kind, tiny_backbone, tiny_folder, tiny_model, word_tokenizer

KINDS: list[Kind] = ["llama", "gpt2"]
ROW = [7, 11, 2, 30, 9, 2]  # holds the end-of-text id twice, as a prompt of several turns does
LONG = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def logits(backbone: TransformersBackbone, *rows: Sequence[int]) -> list[Tensor]:
    """[T, V] for each row, all of them read in one padded batch."""
    with torch.no_grad():
        hidden_BTD = backbone.hidden_states(*pad_rows([torch.tensor(row) for row in rows]))
        return [backbone.head().logits(hidden_TD[: len(row)]) for hidden_TD, row in zip(hidden_BTD, rows, strict=True)]


def logprobs(backbone: TransformersBackbone, *rows: Sequence[int]) -> list[Tensor]:
    return [next_token_logprobs(logits_TV) for logits_TV in logits(backbone, *rows)]


class TestReading:
    def test_gives_the_models_own_logits(self, kind: Kind) -> None:
        backbone = tiny_backbone(kind)
        with torch.no_grad():
            expected = backbone.base(input_ids=torch.tensor([ROW])).logits[0]
        torch.testing.assert_close(logits(backbone, ROW)[0], expected)

    @pytest.mark.parametrize("pads", [1, 4, 8])
    def test_a_row_is_the_same_however_far_it_is_padded(self, kind: Kind, pads: int) -> None:
        backbone = tiny_backbone(kind)
        padded, neighbour = logprobs(backbone, ROW, LONG[: len(ROW) + pads])
        torch.testing.assert_close(padded, logprobs(backbone, ROW)[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(neighbour, logprobs(backbone, LONG[: len(ROW) + pads])[0], atol=1e-5, rtol=0)

    def test_an_end_of_text_inside_the_prompt_is_attended(self, kind: Kind) -> None:
        """With pad = eos, a mask made by comparing ids would hide it, and then its id would not matter."""
        backbone = tiny_backbone(kind, tokenizer=word_tokenizer(pad_is_eos=True))
        assert backbone.tokenizer.pad_token_id == EOS_ID
        other = [8 if id_ == EOS_ID else id_ for id_ in ROW[:-1]] + ROW[-1:]
        difference = logprobs(backbone, ROW, LONG)[0][-1] - logprobs(backbone, other, LONG)[0][-1]
        assert difference.abs().max() > 0.01


class TestHead:
    @pytest.mark.parametrize("rows", [261, 264, 320])
    def test_filler_rows_are_cut(self, rows: int) -> None:
        """261 real ids: the tokenizer says so, whatever the model's settings say."""
        backbone = tiny_backbone(tokenizer=word_tokenizer(254), rows=rows)
        assert backbone.base.config.vocab_size == rows
        assert backbone.vocab_size == backbone.head().vocab_size == 261
        [logits_TV] = logits(backbone, ROW)
        decoded_V = backbone.decoding([torch.tensor(ROW)]).next_logits()[0]
        assert logits_TV.shape[1] == decoded_V.shape[0] == 261

    def test_a_short_window_is_proved_within(self, kind: Kind) -> None:
        tiny_backbone(kind, window=3).decoding([torch.tensor([5])])

    def test_takes_part_in_autograd(self) -> None:
        backbone = tiny_backbone(rows=40)
        backbone.head().logits(torch.ones(1, 16)).sum().backward()
        gradient = backbone.base.get_output_embeddings().weight.grad
        assert gradient[:32].eq(1).all()
        assert gradient[32:].eq(0).all()

    @pytest.mark.parametrize(
        ("family", "settings"),
        [
            ("gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
            ("granite", {"logits_scaling": 5.0}),
            ("cohere", {"logit_scale": 0.25}),
            ("phi", {}),  # a head with a bias
        ],
    )
    def test_families_with_a_head_of_their_own(self, family: str, settings: dict[str, Any]) -> None:
        backbone = TransformersBackbone(family_model(family, settings), word_tokenizer())
        with torch.no_grad():
            expected = backbone.base(input_ids=torch.tensor([ROW]), use_cache=False).logits[0]
        torch.testing.assert_close(logits(backbone, ROW)[0], expected)

    def test_a_head_etude_does_not_know_is_refused(self) -> None:
        class LlamaWithATwist(LlamaForCausalLM):
            def forward(self, *args: object, **kwargs: object):
                output = super().forward(*args, **kwargs)
                output.logits = 3 * output.logits
                return output

        with pytest.raises(ModelError, match="LlamaWithATwist turns hidden states into logits in a way etude does not"):
            TransformersBackbone(LlamaWithATwist(tiny_model().config), word_tokenizer())

    def test_a_tokenizer_larger_than_the_head_is_refused(self) -> None:
        with pytest.raises(ModelError, match="tokenizer has 37 ids and the output head of LlamaForCausalLM only 32"):
            tiny_backbone(tokenizer=word_tokenizer(30), rows=32)

    def test_damaged_weights_are_refused(self) -> None:
        model = tiny_model()
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(torch.nan)
        with pytest.raises(ModelError, match="logits of LlamaForCausalLM are not finite"):
            TransformersBackbone(model, word_tokenizer())


def family_model(family: str, settings: dict[str, Any], **sizes: int) -> PreTrainedModel:
    common = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(
        family, vocab_size=32, num_key_value_heads=2, max_position_embeddings=64, **common | ids | settings | sizes
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


class TestDecoding:
    @pytest.mark.parametrize("pads", [0, 1, 3, 8])
    def test_padded_and_cached_is_the_row_alone(self, kind: Kind, pads: int) -> None:
        """A prompt of 3 tokens beside a longer one, then 3 tokens written to both."""
        backbone = tiny_backbone(kind)
        neighbour = LONG[: 3 + pads]
        decoding = backbone.decoding([torch.tensor(ROW[:3]), torch.tensor(neighbour)])
        for step, ids in enumerate(ROW[3:]):
            expected = [logits(backbone, row)[0][-1] for row in (ROW[: 3 + step], neighbour + LONG[:step])]
            torch.testing.assert_close(decoding.next_logits(), torch.stack(expected), atol=1e-5, rtol=1e-5)
            decoding.append(torch.tensor([ids, LONG[step]]))

    def test_rows_that_leave_do_not_disturb_the_others(self, kind: Kind) -> None:
        backbone = tiny_backbone(kind)
        decoding = backbone.decoding([torch.tensor(row) for row in (LONG, ROW, ROW[:2])])
        decoding.next_logits()
        decoding.keep(torch.tensor([1, 2]))
        kept = decoding.next_logits()
        torch.testing.assert_close(kept[1], logits(backbone, ROW[:2])[0][-1], atol=1e-5, rtol=1e-5)
        decoding.append(torch.tensor([4, 5]))
        decoding.keep(torch.tensor([1]))
        [last] = decoding.next_logits()
        torch.testing.assert_close(last, logits(backbone, [*ROW[:2], 5])[0][-1], atol=1e-5, rtol=1e-5)

    def test_ids_may_be_appended_without_a_look_between(self, kind: Kind) -> None:
        backbone = tiny_backbone(kind)
        decoding = backbone.decoding([torch.tensor(ROW), torch.tensor(LONG)])
        for ids in ([3, 4], [5, 6]):
            decoding.append(torch.tensor(ids))
        expected = [logits(backbone, row)[0][-1] for row in ([*ROW, 3, 5], [*LONG, 4, 6])]
        torch.testing.assert_close(decoding.next_logits(), torch.stack(expected), atol=1e-5, rtol=1e-5)

    def test_a_sliding_window_is_kept(self) -> None:
        backbone = TransformersBackbone(family_model("mistral", {"sliding_window": 4, "head_dim": 8}), word_tokenizer())
        decoding = backbone.decoding([torch.tensor(ROW), torch.tensor(LONG)])
        decoding.append(torch.tensor([3, 4]))
        torch.testing.assert_close(decoding.next_logits()[0], logits(backbone, [*ROW, 3])[0][-1], atol=1e-5, rtol=1e-5)

    def test_rows_leave_recurrent_layers_too(self) -> None:
        kinds = ["linear_attention", "full_attention"]
        backbone = TransformersBackbone(family_model("qwen3_5_text", {"layer_types": kinds}), word_tokenizer())
        decoding = backbone.decoding([torch.tensor(ROW), torch.tensor(LONG)])
        decoding.next_logits()
        decoding.keep(torch.tensor([0]))
        decoding.append(torch.tensor([3]))
        torch.testing.assert_close(decoding.next_logits()[0], logits(backbone, [*ROW, 3])[0][-1], atol=1e-4, rtol=1e-4)

    def test_an_architecture_that_reads_its_padding_is_refused(self) -> None:
        config = AutoConfig.for_model("mamba", vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)
        backbone = TransformersBackbone(AutoModelForCausalLM.from_config(config).eval(), word_tokenizer())
        with pytest.raises(ModelError, match="MambaForCausalLM gives a row another distribution when it is padded"):
            backbone.decoding([torch.tensor(ROW)])

    def test_logits_can_take_part_in_a_loss(self) -> None:
        logits_BV = tiny_backbone().decoding([torch.tensor(ROW)]).next_logits()
        assert not logits_BV.is_inference()
        assert not logits_BV.requires_grad


class TestLoading:
    def test_from_a_folder(self, tmp_path: Path, kind: Kind) -> None:
        backbone = load_backbone(tiny_folder(tmp_path, kind, window=48))
        assert (backbone.context_window, backbone.vocab_size, backbone.device.type) == (48, 32, "cpu")
        assert not backbone.training
        assert {weight.dtype for weight in backbone.parameters()} == {torch.float32}
        assert backbone.generation_config is not None
        assert backbone.generation_config.eos_token_id == EOS_ID

    @pytest.mark.parametrize("tied", [False, True])
    def test_a_round_trip_changes_no_bit(self, tmp_path: Path, kind: Kind, tied: bool) -> None:
        folder = tmp_path / "again"
        before = load_backbone(tiny_folder(tmp_path / "first", kind, tied=tied))
        before.save(folder)
        after = load_backbone(str(folder))
        assert logits(after, ROW)[0].equal(logits(before, ROW)[0])
        embedding, head = after.base.get_input_embeddings().weight, after.base.get_output_embeddings().weight
        assert (embedding.data_ptr() == head.data_ptr()) == tied
        assert [path.suffix for path in folder.glob("model*")] == [".safetensors"]

    def test_plain_transformers_reads_what_was_saved(self, tmp_path: Path, kind: Kind) -> None:
        backbone = tiny_backbone(kind)
        backbone.save(tmp_path)
        with torch.no_grad():
            plain = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=torch.tensor([ROW])).logits[0]
        assert plain.equal(logits(backbone, ROW)[0])
        assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == backbone.tokenizer.get_vocab()

    def test_settings_that_say_tied_of_weights_that_differ(self, tmp_path: Path) -> None:
        """Both weights are kept: the head that was trained is the head that is loaded."""
        backbone = tiny_backbone(tied=True)
        head = backbone.base.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach() + 1)
        backbone.save(tmp_path)
        assert logits(load_backbone(str(tmp_path)), ROW)[0].equal(logits(backbone, ROW)[0])

    def test_restoring_keeps_the_optimisers_hold(self, tmp_path: Path, kind: Kind) -> None:
        backbone = tiny_backbone(kind, tied=True)
        before, weights = logits(backbone, ROW)[0], list(backbone.parameters())
        backbone.save(tmp_path)
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1.1)
        backbone.restore(tmp_path)
        assert logits(backbone, ROW)[0].equal(before)
        assert all(was is now for was, now in zip(weights, backbone.parameters(), strict=True))

    def test_hostile_generation_defaults_are_kept_and_not_obeyed(self, tmp_path: Path) -> None:
        folder = tiny_folder(tmp_path / "hostile")
        settings = (
            '{"do_sample": false, "temperature": 0.1, "top_k": 1, "suppress_tokens": [7], "eos_token_id": [2, 5]}'
        )
        (tmp_path / "hostile" / "generation_config.json").write_text(settings)
        backbone = load_backbone(folder)
        assert backbone.generation_config is not None
        assert backbone.generation_config.eos_token_id == [2, 5]
        torch.testing.assert_close(
            backbone.decoding([torch.tensor(ROW)]).next_logits()[0], logits(tiny_backbone(), ROW)[0][-1]
        )
        backbone.save(tmp_path / "saved")


class TestDropout:
    def test_is_off_unless_asked_for(self, tmp_path: Path) -> None:
        """GPT-2's own settings say 0.1."""
        backbone = load_backbone(tiny_folder(tmp_path, "gpt2")).train()
        assert {part.p for part in backbone.modules() if isinstance(part, nn.Dropout)} == {0.0}
        assert logits(backbone, ROW)[0].equal(logits(backbone.eval(), ROW)[0])

    def test_acts_in_training_mode_if_asked_for(self, tmp_path: Path) -> None:
        backbone = load_backbone(tiny_folder(tmp_path, "gpt2"), dropout=True).train()
        assert {part.p for part in backbone.modules() if isinstance(part, nn.Dropout)} == {0.1}
        assert not logits(backbone, ROW)[0].equal(logits(backbone, ROW)[0])
        with evaluating(backbone):
            assert logits(backbone, ROW)[0].equal(logits(backbone, ROW)[0])
        assert backbone.training

    def test_the_models_own_attention_dropout_is_off(self, tmp_path: Path) -> None:
        model = tiny_model()
        model.config.attention_dropout = 0.5
        TransformersBackbone(model, word_tokenizer()).save(tmp_path)
        backbone = load_backbone(str(tmp_path)).train()
        assert logits(backbone, ROW)[0].equal(logits(backbone.eval(), ROW)[0])


class TestPrecision:
    @pytest.mark.parametrize("compute", ["bfloat16", "float16"])
    def test_products_in_half_precision_weights_in_full(self, tmp_path: Path, kind: Kind, compute: str) -> None:
        folder = tiny_folder(tmp_path, kind)
        full, half = load_backbone(folder), load_backbone(folder, compute_dtype=compute)
        assert {weight.dtype for weight in half.parameters()} == {torch.float32}
        difference = (logits(half, ROW)[0] - logits(full, ROW)[0]).abs().max()
        assert 0 < difference < 0.3
        half.decoding([torch.tensor(ROW), torch.tensor(LONG)]).next_logits()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
    def test_weights_in_another_precision(self, tmp_path: Path, dtype: str) -> None:
        backbone = load_backbone(tiny_folder(tmp_path), dtype=dtype)
        assert {weight.dtype for weight in backbone.parameters()} == {getattr(torch, dtype)}
        expected = torch.float64 if dtype == "float64" else torch.float32
        assert logits(backbone, ROW)[0].dtype == expected

    def test_no_such_precision(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="there is no precision 'bf16'; write one of float32, bfloat16"):
            load_backbone(tiny_folder(tmp_path), dtype="bf16")

    def test_a_copy_follows_the_original(self, kind: Kind) -> None:
        student = tiny_backbone(kind, tied=True)
        copy = student.copy_as("bfloat16")
        assert {weight.dtype for weight in copy.parameters()} == {torch.bfloat16}
        assert {buffer.dtype for buffer in copy.buffers() if buffer.is_floating_point()} <= {torch.float32}
        assert not any(weight.requires_grad for weight in copy.parameters())
        assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in student.parameters())
        with torch.no_grad():
            for weight in student.parameters():
                weight.mul_(1.25)
        copy.load_weights_from(student)
        assert logits(copy, ROW)[0].equal(logits(student.copy_as("bfloat16"), ROW)[0])

    def test_a_copy_in_the_same_precision_is_exact(self, kind: Kind) -> None:
        student = tiny_backbone(kind)
        assert logits(student.copy_as("float32"), ROW)[0].equal(logits(student, ROW)[0])


class TestActivationCheckpointing:
    def test_gives_the_same_gradients(self, tmp_path: Path, kind: Kind) -> None:
        folder = tiny_folder(tmp_path, kind)
        plain, checkpointed = (load_backbone(folder, activation_checkpointing=on).train() for on in (False, True))
        for backbone in (plain, checkpointed):
            hidden_BTD = backbone.hidden_states(*pad_rows([torch.tensor(ROW), torch.tensor(LONG)]))
            backbone.head().logits(hidden_BTD.flatten(0, 1)).pow(2).sum().backward()
        for before, after in zip(plain.parameters(), checkpointed.parameters(), strict=True):
            assert before.grad is not None
            torch.testing.assert_close(after.grad, before.grad)

    def test_recomputes_in_training_mode_only(self, tmp_path: Path) -> None:
        backbone = load_backbone(tiny_folder(tmp_path), activation_checkpointing=True)
        calls: list[int] = []
        backbone.base.get_decoder().layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
        backbone.train().hidden_states(*pad_rows([torch.tensor(ROW)])).sum().backward()
        assert len(calls) == 2
        backbone.eval().hidden_states(*pad_rows([torch.tensor(ROW)])).sum().backward()
        assert len(calls) == 3

    def test_does_not_touch_decoding(self, tmp_path: Path, kind: Kind) -> None:
        backbone = load_backbone(tiny_folder(tmp_path, kind), activation_checkpointing=True).train()
        with evaluating(backbone):
            decoding = backbone.decoding([torch.tensor(ROW), torch.tensor(LONG)])
            decoding.append(torch.tensor([3, 4]))
            last = decoding.next_logits()[0]
        torch.testing.assert_close(last, logits(backbone.eval(), [*ROW, 3])[0][-1], atol=1e-5, rtol=1e-5)

    def test_a_model_that_cannot_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(GPT2LMHeadModel, "supports_gradient_checkpointing", False)
        with pytest.raises(ModelError, match="GPT2LMHeadModel cannot recompute activations"):
            load_backbone(tiny_folder(tmp_path, "gpt2"), activation_checkpointing=True)
