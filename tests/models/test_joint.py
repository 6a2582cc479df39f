"""Tokens drawn from student and teacher together."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from etude.axes.names import FinishReason, Source
from etude.core.estimators import importance_ratio
from etude.core.logprobs import pick
from etude.core.records import Prompt, Rollout
from etude.errors import DataError, NonFiniteError, PairError, RecipeError
from etude.models.backbone import TransformersBackbone
from etude.models.decoding import decode
from etude.models.joint import Interleaving, JointDecoding, JointDistribution, JointSampler, TokenMixture
from etude.models.roles import AbstractBackbone, AbstractDecoding
from etude.models.sampling import InProcessSampler, SamplingSettings
from etude.models.student import Student
from etude.models.table import TableBackbone
from etude.runtime.seeds import Key
from etude.testing import Kind, log_table, tiny_model, word_tokenizer
from etude.testing import sampling_settings as settings

KEY = Key(seed=0, purpose="sample", stage=0, round=0)
TEACHER = (0.5, 0.25, 0.125, 0.125)
STUDENT = (0.125, 0.5, 0.25, 0.125)
DISTRIBUTIONS = (TokenMixture(alpha=0.2), Interleaving(teacher_top_k=2))


def joint(
    student: AbstractBackbone,
    teacher: AbstractBackbone,
    distribution: JointDistribution,
    chosen: SamplingSettings,
    *,
    dtype: str | None = None,
    rows_per_batch: int = 64,
) -> JointSampler:
    own = InProcessSampler(student, chosen, dtype=dtype, rows_per_batch=rows_per_batch)
    return JointSampler(own, teacher, distribution)


def prompt(*ids: int, row: int = 0) -> Prompt:
    return Prompt(torch.tensor(ids), row)


def ids(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [rollout.completion_ids.tolist() for rollout in rollouts]


def probs(distribution: JointDistribution, student: Sequence[float], teacher: Sequence[float]) -> Tensor:
    q, p = (torch.tensor([values], dtype=torch.float64).log() for values in (student, teacher))
    return distribution(student_logprobs=q, teacher_logprobs=p)[0]


def drawn_one_after_the_other(distribution: JointDistribution, q: Sequence[float], p: Sequence[float]) -> list[float]:
    """As published, a draw and what becomes of it, added up over everything that can come out."""
    found = [0.0] * len(q)
    for own, theirs in itertools.product(range(len(q)), range(len(p))):  # both models' draws
        if isinstance(distribution, TokenMixture):
            found[theirs] += distribution.alpha * q[own] * p[theirs]
            found[own] += (1 - distribution.alpha) * q[own] * p[theirs]
        elif isinstance(distribution, Interleaving):
            likelier = sum(other > p[own] for other in p)  # ids the teacher prefers to the student's
            found[own if likelier < distribution.teacher_top_k else theirs] += q[own] * p[theirs]
    return found


class TestDistributions:
    @pytest.mark.parametrize(
        ("distribution", "expected"),
        [
            (TokenMixture(alpha=0.2), (0.2, 0.45, 0.225, 0.125)),
            (TokenMixture(alpha=0.0), STUDENT),
            (TokenMixture(alpha=1.0), TEACHER),
            (Interleaving(teacher_top_k=2), (0.3125, 0.59375, 0.046875, 0.046875)),
            # ids 2 and 3 tie at the third place: both are in
            (Interleaving(teacher_top_k=3), STUDENT),
            (Interleaving(teacher_top_k=4), STUDENT),
            (Interleaving(teacher_top_k=99), STUDENT),
            # 1/8 + 7/8 * 1/2; 7/8 of the rest
            (Interleaving(teacher_top_k=1), (0.5625, 0.21875, 0.109375, 0.109375)),
        ],
    )
    def test_by_hand(self, distribution: JointDistribution, expected: Sequence[float]) -> None:
        torch.testing.assert_close(
            probs(distribution, STUDENT, TEACHER), torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0
        )

    def test_the_weight_of_the_mixture(self) -> None:
        pi = probs(TokenMixture(alpha=0.2), STUDENT, TEACHER)
        ratio = importance_ratio(
            student_logprobs=torch.tensor(STUDENT, dtype=torch.float64).log(), behaviour_logprobs=pi.log()
        )
        expected = torch.tensor([0.625, 1.111111, 1.111111, 1.0], dtype=torch.float64)
        torch.testing.assert_close(ratio, expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize(
        "distribution",
        [*(TokenMixture(alpha) for alpha in (0.0, 0.3, 1.0)), *(Interleaving(number) for number in (1, 2, 3, 5, 7))],
    )
    def test_equals_the_draws_of_the_published_sampler(self, distribution: JointDistribution) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            q, p = torch.rand(2, 7, generator=generator, dtype=torch.float64).pow(3)
            q, p = (q / q.sum()).tolist(), (p / p.sum()).tolist()
            pi = probs(distribution, q, p)
            torch.testing.assert_close(pi.tolist(), drawn_one_after_the_other(distribution, q, p))
            torch.testing.assert_close(pi.sum().item(), 1.0)

    @pytest.mark.parametrize("distribution", DISTRIBUTIONS)
    def test_probability_zero_on_either_side(self, distribution: JointDistribution) -> None:
        q, p = (0.5, 0.5, 0.0, 0.0), (0.0, 0.5, 0.5, 0.0)
        pi = probs(distribution, q, p)
        torch.testing.assert_close(pi.tolist(), drawn_one_after_the_other(distribution, q, p))
        assert pi[3] == 0.0

    def test_the_cut_is_by_order_also_where_probabilities_have_become_zero(self) -> None:
        """In float32 the second and third likeliest of the teacher have both probability zero, but not one place."""
        teacher = torch.tensor([[0.0, -200.0, -300.0]])
        student = torch.tensor([[0.25, 0.25, 0.5]]).log()
        pi = Interleaving(teacher_top_k=2)(student_logprobs=student, teacher_logprobs=teacher)
        torch.testing.assert_close(pi, torch.tensor([[0.75, 0.25, 0.0]]))

    @pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
    def test_alpha_is_a_share(self, alpha: float) -> None:
        with pytest.raises(RecipeError, match="alpha is .*share of the tokens, from 0 to 1"):
            TokenMixture(alpha=alpha)

    def test_one_id_at_least_is_the_students_to_write(self) -> None:
        with pytest.raises(RecipeError, match="teacher_top_k is 0; .*at least 1"):
            Interleaving(teacher_top_k=0)


class TestDraws:
    @pytest.mark.parametrize("distribution", DISTRIBUTIONS)
    def test_shares_of_whole_rows(self, distribution: JointDistribution) -> None:
        """Two tokens, 16 rows possible, 8,000 drawn: Pearson's statistic exceeds 37.7 once in a thousand (15 df)."""
        generator = torch.Generator().manual_seed(5)
        student, teacher = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        q, p = student.softmax(-1).tolist(), teacher.softmax(-1).tolist()
        pi = [drawn_one_after_the_other(distribution, *rows) for rows in zip(q, p, strict=True)]
        sampler = joint(
            TableBackbone(student),
            TableBackbone(teacher),
            distribution,
            settings(max_new_tokens=2),
            rows_per_batch=8000,
        )
        rollouts = sampler.sample([prompt(3, row=row) for row in range(8000)], KEY)
        found = torch.stack([rollout.completion_ids for rollout in rollouts])
        counts = (4 * found[:, 0] + found[:, 1]).bincount(minlength=16).double()
        expected = 8000 * torch.tensor([pi[3][first] * pi[first][second] for first in range(4) for second in range(4)])
        assert ((counts - expected) ** 2 / expected).sum() < 37.7

    @pytest.mark.parametrize("distribution", DISTRIBUTIONS)
    @pytest.mark.parametrize(
        ("temperature", "q", "p"),
        [(1.0, STUDENT, TEACHER), (0.5, (1 / 22, 16 / 22, 4 / 22, 1 / 22), (16 / 22, 4 / 22, 1 / 22, 1 / 22))],
    )
    def test_logprobs_of_the_drawn_ids_by_hand(
        self, distribution: JointDistribution, temperature: float, q: Sequence[float], p: Sequence[float]
    ) -> None:
        """Temperature 1/2 squares what is mixed; the raw log-probabilities are the student's as it is."""
        tables = log_table(*[STUDENT] * 4), log_table(*[TEACHER] * 4)
        sampler = joint(*tables, distribution, settings(temperature=temperature))
        pi = torch.tensor(drawn_one_after_the_other(distribution, q, p))
        for rollout in sampler.sample([prompt(0, row=row) for row in range(20)], KEY):
            assert (rollout.source, rollout.version, rollout.finish_reason) == (Source.STUDENT, 0, FinishReason.LENGTH)
            assert rollout.behaviour_logprobs is not None
            assert rollout.raw_logprobs is not None
            torch.testing.assert_close(rollout.behaviour_logprobs, pi.log()[rollout.completion_ids])
            torch.testing.assert_close(rollout.raw_logprobs, torch.tensor(STUDENT).log()[rollout.completion_ids])

    def test_one_uniform_number_a_token(self) -> None:
        """Cumulated golden pi: .2, .65, .875, 1; the j-th number of the row draws the j-th token."""
        decoding = JointDecoding(
            log_table(*[STUDENT] * 4).decoding([torch.tensor([0])]),
            log_table(*[TEACHER] * 4).decoding([torch.tensor([0])]),
            TokenMixture(alpha=0.2),
            settings(max_new_tokens=6),
        )
        uniforms = torch.tensor([[0.19, 0.21, 0.64, 0.66, 0.87, 0.88]], dtype=torch.float64)
        (completion,) = decode(decoding, uniforms, settings(max_new_tokens=6), decoding.next_probs)
        assert completion.ids.tolist() == [0, 1, 1, 2, 2, 3]


class RecordingDecoding(AbstractDecoding):
    """Fair coins, and what was done to the rows."""

    def __init__(self, num_rows: int, calls: list[tuple[str, list[int]]]) -> None:
        self.num_rows, self.calls = num_rows, calls

    def next_logits(self) -> Tensor:
        return torch.zeros(self.num_rows, 2)

    def append(self, ids_B: Tensor) -> None:
        self.calls.append(("append", ids_B.tolist()))

    def keep(self, rows_b: Tensor) -> None:
        self.calls.append(("keep", rows_b.tolist()))
        self.num_rows = len(rows_b)


def test_both_decodings_are_told_the_same() -> None:
    student, teacher = list[tuple[str, list[int]]](), list[tuple[str, list[int]]]()
    decoding = JointDecoding(
        RecordingDecoding(3, student), RecordingDecoding(3, teacher), TokenMixture(0.5), settings(max_new_tokens=3)
    )
    uniforms = torch.tensor([[0.1, 0.1, 0.1], [0.9, 0.1, 0.1], [0.1, 0.9, 0.1]])
    decode(decoding, uniforms, settings(max_new_tokens=3, stop_ids=(1,)), decoding.next_probs)
    assert student == [("keep", [0, 2]), ("append", [0, 0]), ("keep", [0]), ("append", [0])]
    assert teacher == student


# On transformers models: two caches, padded and thinned out side by side ----------------------------------------------


def tiny(kind: Kind, seed: int, *, num_words: int = 25, window: int = 64) -> TransformersBackbone:
    model = tiny_model(kind, seed=seed, window=window).double()
    return TransformersBackbone(model, word_tokenizer(num_words)).eval()


def prompts_of_all_lengths() -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    lengths = (3, 9, 1, 6, 4, 12, 2, 7, 5, 1)
    return [Prompt(torch.randint(0, 32, (length,), generator=generator), row) for row, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def pair() -> tuple[TransformersBackbone, TransformersBackbone]:
    """Student and teacher of different architectures over the same 32 ids."""
    return tiny("llama", 0), tiny("gpt2", 1)


Pair = tuple[TransformersBackbone, TransformersBackbone]
SETTINGS = settings(temperature=0.8, max_new_tokens=16, stop_ids=(2, 9, 10, 11))


class TestOnTransformers:
    @pytest.mark.parametrize("distribution", DISTRIBUTIONS)
    def test_a_row_is_the_same_alone_and_among_others(self, pair: Pair, distribution: JointDistribution) -> None:
        prompts = prompts_of_all_lengths()
        alone = joint(*pair, distribution, SETTINGS, rows_per_batch=1).sample(prompts, KEY)
        reasons = {rollout.finish_reason for rollout in alone}
        assert reasons == {FinishReason.STOP, FinishReason.LENGTH}  # so that rows leave batches at different times
        for rows_per_batch in (3, 64):
            sampler = joint(*pair, distribution, SETTINGS, rows_per_batch=rows_per_batch)
            together = sampler.sample(prompts[::-1], KEY)[::-1]
            assert ids(together) == ids(alone)
            assert ids(sampler.sample(prompts[::2], KEY)) == ids(alone)[::2]
            for one, other in zip(together, alone, strict=True):
                torch.testing.assert_close(one.behaviour_logprobs, other.behaviour_logprobs)
                torch.testing.assert_close(one.raw_logprobs, other.raw_logprobs)

    @pytest.mark.parametrize("distribution", [TokenMixture(alpha=0.3), Interleaving(teacher_top_k=4)])
    def test_recorded_logprobs_against_an_unpadded_pass_of_both(
        self, pair: Pair, distribution: JointDistribution
    ) -> None:
        for rollout in joint(*pair, distribution, SETTINGS).sample(prompts_of_all_lengths(), KEY):
            with torch.no_grad():
                student_CV, teacher_CV = (
                    backbone.base(rollout.token_ids[None]).logits[0, rollout.num_prompt_tokens - 1 : -1]
                    for backbone in pair
                )
            raw_C = pick(student_CV.log_softmax(-1), rollout.completion_ids)
            torch.testing.assert_close(rollout.raw_logprobs, raw_C.float())
            q, p = ((logits_CV / 0.8).softmax(-1).tolist() for logits_CV in (student_CV, teacher_CV))
            pi = [drawn_one_after_the_other(distribution, *rows) for rows in zip(q, p, strict=True)]
            behaviour_C = pick(torch.tensor(pi).log(), rollout.completion_ids)
            torch.testing.assert_close(rollout.behaviour_logprobs, behaviour_C)

    @pytest.mark.parametrize("distribution", [TokenMixture(0.0), Interleaving(32), Interleaving(1000)])
    def test_without_the_teacher_it_is_the_students_sampler(self, pair: Pair, distribution: JointDistribution) -> None:
        plain = InProcessSampler(pair[0], SETTINGS).sample(prompts_of_all_lengths(), KEY)
        for one, other in zip(
            joint(*pair, distribution, SETTINGS).sample(prompts_of_all_lengths(), KEY), plain, strict=True
        ):
            assert one.completion_ids.equal(other.completion_ids)
            assert (one.source, one.finish_reason) == (other.source, other.finish_reason)
            torch.testing.assert_close(one.behaviour_logprobs, other.behaviour_logprobs)
            torch.testing.assert_close(one.raw_logprobs, other.raw_logprobs)

    def test_without_the_student_it_writes_what_the_teachers_does(self, pair: Pair) -> None:
        plain = InProcessSampler(pair[1], SETTINGS, source=Source.TEACHER).sample(prompts_of_all_lengths(), KEY)
        rollouts = joint(*pair, TokenMixture(1.0), SETTINGS).sample(prompts_of_all_lengths(), KEY)
        assert ids(rollouts) == ids(plain)
        for one, other in zip(rollouts, plain, strict=True):
            torch.testing.assert_close(one.behaviour_logprobs, other.behaviour_logprobs)
            assert one.raw_logprobs is not None
            assert not one.raw_logprobs.allclose(other.raw_logprobs)  # pyright: ignore[reportArgumentType]

    def test_training_sees_the_raw_logprobs_it_computes_itself(self, pair: Pair) -> None:
        rollouts = joint(*pair, DISTRIBUTIONS[0], SETTINGS).sample(prompts_of_all_lengths(), KEY)
        for rollout, logprobs in zip(rollouts, Student(pair[0]).logprobs(rollouts, 1.0), strict=True):
            torch.testing.assert_close(rollout.raw_logprobs, logprobs)

    def test_the_smaller_window_of_the_two_is_the_limit(self) -> None:
        student, teacher = tiny("llama", 0), tiny("gpt2", 1, window=20)
        sampler = joint(student, teacher, TokenMixture(0.2), settings(max_new_tokens=4))
        sampler.sample([prompt(*[5] * 16)], KEY)
        with pytest.raises(DataError, match="row 7 has 17 tokens.* makes 21.*the teacher's context window holds 20"):
            sampler.sample([prompt(5), prompt(*[5] * 17, row=7)], KEY)
        mirrored = joint(teacher, student, TokenMixture(0.2), settings(max_new_tokens=4))
        with pytest.raises(DataError, match="the student's context window holds 20"):
            mirrored.sample([prompt(*[5] * 17)], KEY)

    def test_vocabularies_of_different_sizes_are_refused(self) -> None:
        with pytest.raises(PairError, match="the student has 32 ids and the teacher 31"):
            joint(tiny("llama", 0), tiny("llama", 1, num_words=24), TokenMixture(0.2), SETTINGS)


class WithDropout(TableBackbone):
    """Half of each state's logits are gone in training mode."""

    def __init__(self, logits_SV: Tensor) -> None:
        super().__init__(logits_SV)
        self.dropout = nn.Dropout(0.5)

    def _states(self, token_ids: Tensor) -> Tensor:
        return self.dropout(super()._states(token_ids))


class TestJointSampler:
    @pytest.mark.parametrize(
        ("chosen", "sentence"),
        [
            (settings(temperature=0.0), r"temperature is 0 \(greedy\).*write a temperature above 0"),
            (settings(top_p=0.9), r"top_p is 0\.9 .*write top_p = 1 and top_k = 0"),
            (settings(top_k=5), "top_k is 5, .*write top_p = 1 and top_k = 0"),
        ],
    )
    def test_settings_without_a_whole_distribution_are_refused(self, chosen: SamplingSettings, sentence: str) -> None:
        table = log_table([0.5, 0.5], [0.5, 0.5])
        with pytest.raises(RecipeError, match=sentence):
            joint(table, table, TokenMixture(0.2), chosen)

    def test_no_prompts_give_no_rollouts(self) -> None:
        assert joint(log_table([1.0]), log_table([1.0]), TokenMixture(0.2), settings()).sample([], KEY) == []

    @pytest.mark.parametrize("distribution", [*DISTRIBUTIONS, TokenMixture(0.0), Interleaving(4)])
    @pytest.mark.parametrize("damaged", ["student", "teacher"])
    def test_damaged_weights_are_named(self, distribution: JointDistribution, damaged: str) -> None:
        tables = {"student": log_table(*[STUDENT] * 4), "teacher": log_table(*[TEACHER] * 4)}
        with torch.no_grad():
            tables[damaged].weight_VS[:, 0] = math.nan
        sampler = joint(tables["student"], tables["teacher"], distribution, settings())
        with pytest.raises(NonFiniteError, match=f"row 3 .*version 0, the {damaged}'s logits"):
            sampler.sample([prompt(0, row=3)], KEY)

    def test_dropout_of_both_is_off_and_every_mode_comes_back(self) -> None:
        generator = torch.Generator().manual_seed(0)
        student, teacher = (WithDropout(torch.randn(8, 8, generator=generator)) for _ in range(2))
        sampler = joint(student, teacher, TokenMixture(0.5), settings(max_new_tokens=30))
        student.eval()
        teacher.eval()
        (quiet,) = sampler.sample([prompt(7)], KEY)
        student.train()
        teacher.train()
        teacher.dropout.eval()
        (rollout,) = sampler.sample([prompt(7)], KEY)
        assert rollout.completion_ids.equal(quiet.completion_ids)
        torch.testing.assert_close(rollout.behaviour_logprobs, quiet.behaviour_logprobs, atol=0, rtol=0)
        modes = [part.training for part in (student, student.dropout, teacher, teacher.dropout)]
        assert modes == [True, True, True, False]

    @pytest.mark.parametrize("dtype", [None, "bfloat16"])
    def test_refresh_reaches_the_student_and_not_the_teacher(self, dtype: str | None) -> None:
        student, teacher = log_table([1.0, 0.0], [1.0, 0.0]), log_table([0.5, 0.5], [0.5, 0.5])
        sampler = joint(student, teacher, TokenMixture(0.5), settings(max_new_tokens=1), dtype=dtype)
        with torch.no_grad():
            student.weight_VS.copy_(torch.tensor([[-1000.0], [0.0]]))
        sampler.refresh(Student(student), version=5)
        rollouts = sampler.sample([prompt(0, row=row) for row in range(10)], KEY)
        assert sampler.version == 5
        assert {rollout.version for rollout in rollouts} == {5}
        for rollout in rollouts:
            expected = torch.tensor([0.25, 0.75]).log()[rollout.completion_ids]
            torch.testing.assert_close(rollout.behaviour_logprobs, expected)

    def test_writes_in_the_students_precision(self) -> None:
        """0.3 in bfloat16 is 0.30078125: student and behaviour log-probabilities are those of the copy."""
        student, teacher = TableBackbone(torch.tensor([[0.3, 0.0]] * 2)), TableBackbone(torch.zeros(2, 2))
        (rollout,) = joint(student, teacher, TokenMixture(0.5), settings(), dtype="bfloat16").sample([prompt(0)], KEY)
        q = torch.tensor([0.30078125, 0.0]).softmax(-1)[rollout.completion_ids]
        torch.testing.assert_close(rollout.raw_logprobs, q.log())
        torch.testing.assert_close(rollout.behaviour_logprobs, (0.25 + 0.5 * q).log())

    def test_writing_is_announced_to_both_engines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        student, teacher = (tiny(kind, 0) for kind in ("llama", "gpt2"))
        prepared: dict[str, bool] = {}

        def noting(name: str, backbone: TransformersBackbone) -> Callable[[Sequence[Tensor]], AbstractDecoding]:
            begin = backbone.decoding

            def decoding(prompt_ids: Sequence[Tensor]) -> AbstractDecoding:
                prepared[name] = backbone._writing  # pyright: ignore[reportPrivateUsage]
                return begin(prompt_ids)

            return decoding

        for name, backbone in (("student", student), ("teacher", teacher)):
            monkeypatch.setattr(backbone, "decoding", noting(name, backbone))
        joint(student, teacher, TokenMixture(0.5), settings()).sample([prompt(5)], KEY)
        assert prepared == {"student": True, "teacher": True}
        assert not student._writing  # pyright: ignore[reportPrivateUsage]
        assert not teacher._writing  # pyright: ignore[reportPrivateUsage]

    def test_the_process_draws_on_as_if_nothing_had_been(self) -> None:
        before = torch.get_rng_state()
        joint(log_table(*[STUDENT] * 4), log_table(*[TEACHER] * 4), TokenMixture(0.2), settings()).sample(
            [prompt(0)], KEY
        )
        assert torch.get_rng_state().equal(before)
