"""From `[data]` to prompts, without a weight being read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from etude.config.load import load_recipe
from etude.errors import DataError, PairError
from etude.models.card import ModelCard
from etude.recipes.data import DEFAULT_EVAL_ROWS, Data, read_data, require_room
from etude.testing import CHAT_TEMPLATE, tiny_folder, tiny_recipe, word_tokenizer


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """24 rows; a prompt of n words is n tokens. The weights are not there at all."""
    folder = tmp_path_factory.mktemp("data")
    made = tiny_recipe(folder, window=20)
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    return made


def read(settings: dict[str, Any], *changes: str) -> Data:
    return read_data(load_recipe(settings, changes))


def prompts_file(path: Path, *lengths: int) -> str:
    """A row for each length, of so many words and with its own last word as the completion."""
    rows = [[f"w{(row + place) % 25}" for place in range(length)] for row, length in enumerate(lengths)]
    lines = [json.dumps({"prompt": " ".join(row), "completion": row[-1], "answer": row[-1]}) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return f"data.prompts={path}"


class TestRows:
    def test_held_out_rows_are_not_trained_on(self, settings: dict[str, Any]) -> None:
        data = read(settings)
        assert (len(data.train), len(data.held_out)) == (20, 4)
        trained = {tuple(prompt.token_ids.tolist()) for prompt in data.train.fixed(100)}
        held_out = {tuple(prompt.token_ids.tolist()) for prompt in data.held_out}
        assert not trained & held_out
        assert data.describe() == "prompts: 20 to train on, 4 held out"

    @pytest.mark.parametrize(("rows", "expected"), [(24, 2), (5, 1), (1000, DEFAULT_EVAL_ROWS)])
    def test_how_many_are_held_out_by_default(
        self, settings: dict[str, Any], tmp_path: Path, rows: int, expected: int
    ) -> None:
        changes = prompts_file(tmp_path / "p.jsonl", *([3] * rows)), "data.eval_size="
        assert len(read(settings, *changes, "evaluation.prompts=1000").held_out) == expected

    def test_held_out_rows_of_another_file(self, settings: dict[str, Any], tmp_path: Path) -> None:
        training = prompts_file(tmp_path / "p.jsonl", 3, 4)
        prompts_file(tmp_path / "e.jsonl", 5, 6)
        changes = training, f"data.eval_prompts={tmp_path / 'e.jsonl'}", "data.eval_size="
        data = read(settings, *changes, "evaluation.samples_per_prompt=2")
        assert len(data.train) == 2
        assert [(prompt.row, len(prompt.token_ids)) for prompt in data.held_out] == [(0, 5), (1, 5), (2, 6), (3, 6)]

    def test_no_more_are_used_than_asked_for(self, settings: dict[str, Any]) -> None:
        assert len(read(settings, "evaluation.prompts=3").held_out) == 3

    def test_a_task_brings_questions_and_a_judge(self, settings: dict[str, Any]) -> None:
        maze = {"task": "maze", "task_size": 6, "eval_task_size": 2, "max_prompt_tokens": 64}
        model = {"student": {"model": "etude:maze-student"}, "teacher": {"model": "etude:maze-teacher"}}
        data = read(settings | model | {"data": maze})
        assert (len(data.train), len(data.held_out)) == (6, 2)
        assert data.verify is not None
        assert data.verify(data.held_out[0].example, "nonsense") == 0.0

    def test_where_a_reward_is_trained_on_every_row_needs_an_answer(
        self, settings: dict[str, Any], tmp_path: Path
    ) -> None:
        lines = Path(settings["data"]["prompts"]).read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / "prompts.jsonl").write_text("".join([*lines, '{"prompt": "w1"}\n']), encoding="utf-8")
        reward = {"terms": [{"teacher": "reward", "support": "sampled", "estimator": "policy_gradient"}]}
        changes = f"data.prompts={tmp_path / 'prompts.jsonl'}", f"data.eval_prompts={settings['data']['prompts']}"
        assert read(settings, *changes, "data.eval_size=").verify is not None
        with pytest.raises(DataError, match=r"prompts.jsonl:25"):
            read(settings | reward, *changes, "data.eval_size=")

    def test_the_fingerprint_tells_other_ids_apart(self, settings: dict[str, Any], tmp_path: Path) -> None:
        written = Path(settings["data"]["prompts"]).read_text(encoding="utf-8")
        labels = ["sampler.student_fraction=0.0", "sampler.other=dataset"]

        def fingerprint(text: str, *changes: str) -> str:
            (tmp_path / "prompts.jsonl").write_text(text, encoding="utf-8")
            return read(settings, f"data.prompts={tmp_path / 'prompts.jsonl'}", *changes).fingerprint

        assert fingerprint(written) == fingerprint(written) == read(settings).fingerprint
        other_prompt = written.replace('"prompt": "w0"', '"prompt": "w1"', 1)
        other_completion = written.replace('"completion": "w0"', '"completion": "w1"', 1)
        assert written not in (other_prompt, other_completion)
        assert fingerprint(written) != fingerprint(other_prompt)
        assert fingerprint(written) == fingerprint(other_completion)  # nothing reads it
        assert len({fingerprint(text, *labels) for text in (written, other_prompt, other_completion)}) == 3
        assert fingerprint(written) != fingerprint(written, "data.eval_size=5")

    def test_the_prompts_of_a_round_are_numbered_over_all_ranks(self, settings: dict[str, Any]) -> None:
        changes = ["train.prompts_per_round=3", "sampler.samples_per_prompt=2"]
        recipe = load_recipe(settings, changes)
        data = read_data(recipe)
        rounds = [data.prompts_of_round(recipe, stage=0, number=number) for number in (0, 1, 0)]
        assert [prompt.row for prompt in rounds[0]] == list(range(6))
        ids = [[prompt.token_ids.tolist() for prompt in prompts] for prompts in rounds]
        assert ids[0][0::2] == ids[0][1::2]
        assert ids[0] == ids[2] != ids[1]

    def test_a_verifier_by_name(self, settings: dict[str, Any]) -> None:
        data = read(settings)
        assert data.verify is not None
        assert data.verify({"answer": "w1"}, "w1") == 1.0
        assert read(settings, "data.verifier=").verify is None

    def test_text_has_no_control_tokens(self, settings: dict[str, Any]) -> None:
        assert read(settings).decode([7, 8, 2]) == "w0 w1"


class TestCompletions:
    def test_they_are_read_where_the_dataset_writes(self, settings: dict[str, Any], tmp_path: Path) -> None:
        """Each with its own prompt's: a row's answer here is its prompt's last word."""
        changes = prompts_file(tmp_path / "p.jsonl", 3, 4, 5, 6), "data.eval_size=1"
        for prompt in read(settings, *changes, "sampler.student_fraction=0.5").train.fixed(10):
            assert prompt.completion_ids is not None
            assert prompt.completion_ids.tolist() == [prompt.token_ids[-1].item(), 2]
        alone = read(settings, *changes).train.fixed(10)
        assert {prompt.completion_ids for prompt in alone} == {None}

    def test_a_row_without_one_is_refused_there_only(self, settings: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text('{"prompt": "w1", "answer": "w2"}\n{"prompt": "w2", "answer": "w2"}\n')
        changes = f"data.prompts={tmp_path / 'p.jsonl'}", "data.eval_size=1"
        assert len(read(settings, *changes).train) == 1
        with pytest.raises(DataError, match=r"p.jsonl:\d: no completion, which sampler.student_fraction below 1"):
            read(settings, *changes, "sampler.student_fraction=0.5")
        assert len(read(settings, *changes, "sampler.student_fraction=0.5", "sampler.other=teacher").train) == 1


class TestLongPrompts:
    """Case 9: limit 16, window 20, prompts of 15, 16, 17 and 200 tokens."""

    LIMITS = ("data.max_prompt_tokens=16", "data.eval_size=", "sampler.max_new_tokens=4")

    def files(self, tmp_path: Path) -> tuple[str, str]:
        prompts_file(tmp_path / "e.jsonl", 2)
        return prompts_file(tmp_path / "p.jsonl", 15, 16, 17, 200), f"data.eval_prompts={tmp_path / 'e.jsonl'}"

    def test_stop_names_the_rows(self, settings: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(DataError) as refused:
            read(settings, *self.LIMITS, *self.files(tmp_path))
        assert str(refused.value).startswith("2 of 4 prompts exceed data.max_prompt_tokens = 16: ")
        assert "p.jsonl:3 (17 tokens)" in str(refused.value)
        assert "p.jsonl:4 (200 tokens)" in str(refused.value)

    def test_drop_keeps_the_others_each_with_its_own_answer(self, settings: dict[str, Any], tmp_path: Path) -> None:
        changes = *self.LIMITS, *self.files(tmp_path), "data.long_prompts=drop", "sampler.student_fraction=0"
        data = read(settings, *changes)
        assert [len(prompt.token_ids) for prompt in data.train.fixed(10)] == [15, 16]
        for prompt in data.train.fixed(10):
            assert prompt.completion_ids is not None
            assert prompt.completion_ids[0] == prompt.token_ids[-1]
        assert data.describe() == "prompts: 2 to train on, 1 held out, 2 dropped as too long"

    def test_cut_shortens_them(self, settings: dict[str, Any], tmp_path: Path) -> None:
        data = read(settings, *self.LIMITS, *self.files(tmp_path), "data.long_prompts=cut")
        assert [len(prompt.token_ids) for prompt in data.train.fixed(10)] == [15, 16, 16, 16]
        assert data.describe() == "prompts: 4 to train on, 1 held out, 2 cut as too long"

    def test_long_held_out_prompts_are_told_as_well(self, settings: dict[str, Any], tmp_path: Path) -> None:
        training, held_out = self.files(tmp_path)
        prompts_file(tmp_path / "e.jsonl", 2, 18)
        data = read(settings, *self.LIMITS, training, held_out, "data.long_prompts=drop")
        assert data.describe() == "prompts: 2 to train on, 1 held out, 3 dropped as too long"

    def test_prompt_and_answer_must_fit_the_window(self, settings: dict[str, Any], tmp_path: Path) -> None:
        changes = *self.LIMITS, *self.files(tmp_path), "data.long_prompts=drop", "sampler.max_new_tokens=5"
        with pytest.raises(DataError, match="16 tokens and a completion up to 5, .*student's context window of 20"):
            read(settings, *changes)

    def test_so_must_the_datasets_own_answer(self, settings: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text(
            "".join(json.dumps({"prompt": "w1", "answer": "", "completion": "w2 " * 19}) + "\n" for _ in range(2))
        )
        changes = f"data.prompts={tmp_path / 'p.jsonl'}", "data.eval_size=1", "sampler.student_fraction=0.5"
        with pytest.raises(DataError, match="1 tokens and a completion up to 20"):
            read(settings, *changes, "data.verifier=")

    def test_a_held_out_prompt_may_be_the_longest(self, settings: dict[str, Any], tmp_path: Path) -> None:
        training = prompts_file(tmp_path / "p.jsonl", 2)
        prompts_file(tmp_path / "e.jsonl", 15)
        changes = training, f"data.eval_prompts={tmp_path / 'e.jsonl'}", "data.eval_size=", "sampler.max_new_tokens=6"
        with pytest.raises(DataError, match="the longest prompt has 15 tokens"):
            read(settings, *changes)

    def test_the_teachers_window_counts_too(self) -> None:
        tokenizer = word_tokenizer()
        cards = {"student": ModelCard(tokenizer, None, None), "teacher": ModelCard(tokenizer, 20, None)}
        require_room(cards, 16, 4, evaluation_only=False, from_data=False)
        with pytest.raises(DataError, match="the teacher's context window of 20"):
            require_room(cards, 16, 5, evaluation_only=False, from_data=False)

    @pytest.mark.parametrize(
        ("prompt", "completion", "causes", "cure"),
        [
            (3, 500, {}, "; lower sampler.max_new_tokens to 17 or less"),
            (3, 500, {"evaluation_only": True}, " to 17 or less; only evaluation writes answers here"),
            (3, 18, {"from_data": True}, "; the completion is one of the data's own; shorten it, or leave its row out"),
            (
                16,
                5,
                {},
                '; write data.max_prompt_tokens = 15 or less with long_prompts = "drop" or "cut", or lower '
                "sampler.max_new_tokens to 4 or less",
            ),
            (20, 5, {}, '; write data.max_prompt_tokens = 15 or less with long_prompts = "drop" or "cut"'),
            (20, 20, {}, "; choose shorter prompts and lower sampler.max_new_tokens"),
        ],
    )
    def test_what_does_not_fit_names_the_key_that_is_the_cause(
        self, prompt: int, completion: int, causes: dict[str, bool], cure: str
    ) -> None:
        cards = {"student": ModelCard(word_tokenizer(), 20, None)}
        with pytest.raises(DataError) as caught:
            require_room(cards, prompt, completion, **{"evaluation_only": False, "from_data": False} | causes)
        assert str(caught.value).endswith(cure)

    def test_an_answer_may_be_too_long_for_evaluation_alone(self, settings: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text('{"prompt": "w1", "answer": "", "completion": "w2"}\n' * 2)
        changes = f"data.prompts={tmp_path / 'p.jsonl'}", "data.eval_size=1", "sampler.student_fraction=0"
        with pytest.raises(DataError, match="lower sampler.max_new_tokens to 19 or less; only evaluation writes"):
            read(settings, *changes, "data.verifier=", "sampler.max_new_tokens=99")


class TestPair:
    def test_other_ids_are_refused(self, settings: dict[str, Any], tmp_path: Path) -> None:
        other = tiny_folder(tmp_path, tokenizer=word_tokenizer(24))
        with pytest.raises(PairError, match="student and teacher speak different token ids"):
            read(settings, f"teacher.model={other}")

    def test_other_roles_are_told(self, settings: dict[str, Any], tmp_path: Path) -> None:
        other = tiny_folder(tmp_path, tokenizer=word_tokenizer(pad_is_eos=True))
        [warning] = read(settings, f"teacher.model={other}").warnings
        assert warning == "the pad_token of the student is '<pad>', of the teacher '</s>'"
        assert read(settings).warnings == ()

    def test_without_a_teacher_there_is_nobody_to_compare(self, settings: dict[str, Any]) -> None:
        alone = {key: value for key, value in settings.items() if key != "teacher"}
        terms = [{"teacher": "label", "divergence": "forward_kl"}]
        data = read(alone | {"terms": terms}, "sampler.student_fraction=0")
        assert len(data.train) == 20


class TestStopIds:
    def test_tokenizer_folder_and_recipe_name_them(self, settings: dict[str, Any], tmp_path: Path) -> None:
        folder = tiny_folder(tmp_path)
        GenerationConfig(eos_token_id=[2, 1], temperature=0.1, do_sample=True).save_pretrained(folder)
        data = read(settings, f"student.model={folder}", 'sampler.stop=["w3"]')
        assert data.stop_ids == (2, 1, 10)

    def test_completions_end_with_the_templates(self, settings: dict[str, Any], tmp_path: Path) -> None:
        models = {"model": tiny_folder(tmp_path, tokenizer=word_tokenizer(chat_template=CHAT_TEMPLATE))}
        changes = ["sampler.student_fraction=0.5", "data.system_prompt=w9", "data.max_prompt_tokens=32"]
        data = read(settings | {"student": models, "teacher": models}, *changes)
        [prompt] = data.train.fixed(1)
        assert data.tokenizer.decode(prompt.token_ids[:3].tolist()) == "system w9 </s>"
        assert data.tokenizer.decode(prompt.token_ids[-1:].tolist()) == "assistant"
        assert prompt.completion_ids is not None
        assert prompt.completion_ids[-1] == 2
