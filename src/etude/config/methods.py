"""The named points of the axes: what the field's method names mean, as recipe fragments.

A recipe that says `method = "gkd"` starts from that row's settings, and whatever else it says overrides them. A row
states every axis it stands for, and nothing about models, data, size or learning rate. A method is listed only if
today's axes express it; where the published one differs, its note says how. `etude methods` prints this table.

    >>> METHODS["sft"].axes["teacher"]
    'label'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Method:
    """One named point."""

    name: str
    line: str  # what it does
    settings: Mapping[str, Any]  # a fragment of a recipe
    source: str  # authors, year, where to read it
    note: str = ""  # where the published method differs, and its other values

    @property
    def axes(self) -> dict[str, str]:
        """The six axes in the order of the equation, read off the settings; values of several terms joined by +."""
        axes = {"sampler": _writers(self.settings["sampler"])}
        for axis in TERM_AXES:
            values = dict.fromkeys(term[axis] for term in self.settings["terms"] if axis in term)
            axes[axis] = " + ".join(values) or "none"
        return axes


TERM_AXES = ("teacher", "support", "divergence", "estimator", "reduction")


def _writers(sampler: Mapping[str, Any]) -> str:
    """Who writes, in words."""
    share, other = sampler["student_fraction"], sampler.get("other", "dataset")  # as in the schema
    student = "student"
    if "teacher_share" in sampler:
        student = f"student, {sampler['teacher_share']:.0%} of tokens teacher"
    elif "teacher_top_k" in sampler:
        student = f"student within teacher's top {sampler['teacher_top_k']}"
    if "replay_fraction" in sampler:
        student += " with replay"
    if "adaptive" in sampler:
        return f"{student} from {share:.0%} up, {other}"
    if isinstance(share, Mapping):
        return f"{student} {share['start']:.0%} to {share['end']:.0%}, {other}"
    return {0.0: other, 1.0: student}.get(share, f"{student} {share:.0%}, {other} {1 - share:.0%}")


def _term(divergence: str, **others: Any) -> Any:
    """A term that states every axis; what is not given is the house's default."""
    axes = {"teacher": "teacher", "support": "full", "divergence": divergence, "estimator": "analytic"}
    return axes | {"reduction": "token_mean"} | others


_DRAWN = {"support": "sampled", "estimator": "policy_gradient"}


def _reward(**others: Any) -> Any:
    """A term on the verifier's number for the whole row; it measures no divergence."""
    return {"teacher": "reward", "reduction": "token_mean", "discount": 1.0, "name": "reward"} | _DRAWN | others


_ROWS = (
    Method(
        "opd",
        "on-policy distillation: the student writes, the teacher marks the whole vocabulary, reverse KL",
        {"sampler": {"student_fraction": 1.0}, "terms": [_term("reverse_kl")]},
        "Agarwal et al. (2023), arXiv 2306.13649: GKD with lambda 1 and reverse KL",
        "What a recipe without a method does.",
    ),
    Method(
        "gkd",
        "generalised knowledge distillation: half the rows from the student, half from the data, JSD",
        {"sampler": {"student_fraction": 0.5}, "terms": [_term("jsd")]},
        "Agarwal et al. (2023), arXiv 2306.13649",
        'The paper tosses one coin a batch (mix = "batch"); here one is tossed a row. It averages within each '
        'sequence first (reduction = "sequence_mean"); code that followed and the default here take the mean over all '
        "tokens. Its other values: student_fraction 0 and 1 (the best), beta 0.1 and 0.9, forward_kl, reverse_kl.",
    ),
    Method(
        "gkd-rl",
        "on-policy distillation and reinforcement learning at once: JSD to the teacher, and the verifier's reward",
        {
            "sampler": {"student_fraction": 1.0, "temperature": 1.0},
            "terms": [_term("jsd", beta=0.9, coefficient=0.5), _reward(baseline="batch", coefficient=0.5)],
        },
        "Agarwal et al. (2023), arXiv 2306.13649, section on RL fine-tuning",
        "The paper's alpha is the first coefficient, 1 - alpha the second: near 1 it is gkd, near 0 the reward alone; "
        "it goes through several, and 0.5 is ours. It advises reverse_kl or jsd with beta 0.9 beside a reward. Its "
        "reward is a learned model of factual consistency; here it is data's verifier. The paper's objective names no "
        "baseline; the round's mean is ours and leaves the expected gradient as it is but for the row's own share.",
    ),
    Method(
        "grpo",
        "reinforcement learning from the verifier alone, each answer against the others to its question; no teacher",
        {
            "sampler": {"student_fraction": 1.0, "temperature": 1.0, "samples_per_prompt": 8},
            "terms": [
                _reward(baseline="group", whiten=True, importance="ppo_clip", clip=0.2, reduction="sequence_mean")
            ],
        },
        "Shao et al. (2024), arXiv 2402.03300",
        "The paper draws 64 answers to each question and takes one step on them (with one step nothing is clipped); "
        "8 answers and the clip are what trainers ship. Its third part, a KL to the model the run began with (0.04), "
        'is a term with teacher = "reference", not in this row. whiten = false and reduction = "token_mean" are nearer '
        "to Dr. GRPO (2025), which divides neither by the group's deviation nor by the answer's length.",
    ),
    Method(
        "thinking-machines",
        "the student writes, the log-ratio of each drawn token is its advantage: only one number a token is needed",
        {
            "sampler": {"student_fraction": 1.0, "temperature": 1.0, "samples_per_prompt": 4},
            "terms": [_term("reverse_kl", **_DRAWN)],
        },
        "Lu and Thinking Machines Lab (2025), thinkingmachines.ai/blog/on-policy-distillation",
        "Discount 0 and the importance ratio are the defaults of policy_gradient.",
    ),
    Method(
        "imitkd",
        "imitation: rows from the data at first, more and more of them from the student, forward KL",
        {
            "sampler": {"student_fraction": {"start": 0.0, "end": 1.0, "kind": "linear", "first": 0}},
            "terms": [_term("forward_kl")],
        },
        "Lin et al. (2020), arXiv 2009.07253",
        "The pace is ours: the student writes everything when the run ends, or from student_fraction.last on. The "
        "paper lets the data's share decay and also trains on the teacher's likeliest token alone.",
    ),
    Method(
        "f-distill",
        "half the rows from the teacher, half from the student, total variation on both",
        {
            "sampler": {"student_fraction": 0.5, "other": "teacher"},
            "terms": [
                _term("total_variation", sources=["teacher"], name="on_teacher_rows"),
                _term("total_variation", sources=["student"], name="on_student_rows"),
            ],
        },
        "Wen et al. (2023), arXiv 2307.15190",
        "Its other divergences: forward_kl on teacher rows alone, reverse_kl on student rows alone, jsd on both.",
    ),
    Method(
        "minillm",
        "sequence-level reverse KL by policy gradient, written with the teacher's hand in each token, plus the exact "
        "reverse KL of the current token",
        {
            "sampler": {"student_fraction": 1.0, "teacher_share": 0.2},
            "terms": [
                _term(
                    "reverse_kl",
                    **_DRAWN,
                    discount=1.0,
                    length_normalise=True,
                    whiten=True,
                    importance="ppo_clip",
                    name="long_term",
                ),
                _term("reverse_kl", name="single_step"),
            ],
            "train": {"epochs": 4},
        },
        "Gu et al. (2023), arXiv 2306.08543",
        "The ratio here is today's student over the mixture really drawn from: the paper's importance weight and "
        "PPO's ratio in one, so that tokens the teacher likes much better are clipped at once. The paper doubles its "
        "rewards and cuts them at 100, which whitening makes needless. Its third term trains on pretraining text: a "
        'term with teacher = "label" and sources = ["dataset"].',
    ),
    Method(
        "distillm",
        "skewed reverse KL; rows from the data, and more of the student's own whenever the held-out divergence rises, "
        "replayed more and more",
        {
            "sampler": {
                "student_fraction": 0.0,
                "adaptive": {"rise": 0.1, "tolerance": 0.1},
                "mix": "batch",
                "replay_fraction": {"start": 0.0, "end": 1.0, "kind": "linear", "first": 0},
                "replay_capacity": 1000,
            },
            "terms": [_term("skew_reverse_kl", alpha=0.1)],
        },
        "Ko et al. (2024), arXiv 2402.03898",
        "Published: start 0, rise 0.1, tolerance 0.1, capacity 1000, alpha 0.1, one coin a batch, and replay that is "
        "all when the run ends (replay_fraction.last sets another step). The paper watches the cross-entropy on "
        "held-out completions of the data; here heldout/reverse_kl is watched, on the student's own samples. Its code "
        "replays once the store is full, here as soon as there is anything. Its other divergence: skew_forward_kl with "
        "alpha 0.1.",
    ),
    Method(
        "distillm2",
        "contrastive: skewed forward KL where the teacher wrote, skewed reverse KL where the student wrote",
        {
            "sampler": {"student_fraction": 0.5, "other": "teacher", "temperature": 0.8},
            "terms": [
                _term("skew_forward_kl", alpha=0.1, sources=["teacher"], name="on_teacher_rows"),
                _term("skew_reverse_kl", alpha=0.1, detach_mixture=True, sources=["student"], name="on_student_rows"),
            ],
        },
        "Ko et al. (2025), arXiv 2503.07067",
        "The paper has a row of each kind for every prompt, written once an epoch; here a coin decides, each round "
        "anew. Its skew may adapt to each row, its second coefficient may rise from 1 to 1.5 (coefficient takes a "
        "ramp).",
    ),
    Method(
        "abkd",
        "alpha-beta divergence: how much large errors weigh and how much the student's own confidence does",
        {"sampler": {"student_fraction": 1.0}, "terms": [_term("alpha_beta", alpha=0.2, beta=0.7)]},
        "Wang et al. (2025), arXiv 2505.04560",
        "0.2 and 0.7 are advised for text; the paper's code starts from 0.5 and 0.5. Any rows will do.",
    ),
    Method(
        "akl",
        "adaptive KL: forward and reverse KL, weighed by where the student errs, in the teacher's head or in its tail",
        {"sampler": {"student_fraction": 0.0}, "terms": [_term("adaptive_kl", head_mass=0.5)]},
        "Wu et al. (2024), arXiv 2404.02657",
        "Published on the data's own rows; student_fraction = 1 makes it on-policy.",
    ),
    Method(
        "skd",
        "speculative: the student writes, and the teacher replaces what is not among its own likeliest tokens",
        {"sampler": {"student_fraction": 1.0, "teacher_top_k": 25}, "terms": [_term("forward_kl")]},
        "Xu et al. (2024), arXiv 2410.11325",
        "Drawn from the closed form, one uniform number a token; the paper proposes five tokens at a time.",
    ),
    Method(
        "mopd",
        "the log-ratio of each drawn token is its advantage; tokens whose ratio to the sampler drifted are left out",
        {
            "sampler": {"student_fraction": 1.0},
            "terms": [_term("reverse_kl", **_DRAWN, importance="masked", bounds=[0.2, 5.0], advantage_clip=20.0)],
        },
        "MiMo-V2-Flash (2026), arXiv 2601.02780",
        "Published with one specialist for each kind of prompt. The bounds and the clip are those of another large "
        "run.",
    ),
    Method(
        "exopd",
        "extrapolated: the drawn token's advantage goes on beyond the teacher, away from where the student began",
        {
            "sampler": {"student_fraction": 1.0},
            "terms": [
                _term("reverse_kl", **_DRAWN, importance="truncated", bounds=[0.0, 5.0], extrapolation=1.25),
            ],
        },
        "arXiv 2602.12125 (G-OPD, ExOPD)",
        "The target is teacher^1.25 reference^-0.25. The reference is the student as it begins; the paper's reward "
        "correction names the model its teacher was trained from in [reference] instead. extrapolation below 1 "
        "interpolates. The logged divergence lacks each state's constant, so that it may be below zero.",
    ),
    Method(
        "tip",
        "reverse KL on the tokens that teach: where the student is uncertain, or confident and wrong",
        {
            "sampler": {"student_fraction": 1.0},
            "terms": [_term("reverse_kl", entropy_share=0.5, confident_wrong_share=0.1)],
        },
        "Xu et al. (2026), arXiv 2604.14084",
        "Half of the tokens by entropy is the paper's; that a tenth of the others joins them is ours, and so is "
        "measuring who is wrong by the drawn token's log-ratio.",
    ),
    Method(
        "iw-opd",
        "the drawn token's log-ratio as advantage, early tokens weighing more, the less the more has been disagreed on",
        {
            "sampler": {"student_fraction": 1.0},
            "terms": [_term("reverse_kl", **_DRAWN, disagreement_weight=1.5)],
        },
        "arXiv 2606.22600",
    ),
    Method(
        "local-support",
        "reverse KL on the teacher's likeliest tokens only, coefficients detached",
        {
            "sampler": {"student_fraction": 1.0, "top_p": 0.95},
            "terms": [_term("reverse_kl", support="top_k", top_k=64, owner="teacher", tail="truncate")],
        },
        "arXiv 2603.25562; the detached coefficient arXiv 2605.11182",
        'k and top_p are ours. The paper also leaves special tokens out. owner = "student" with top_k = 16 is another '
        "published point.",
    ),
    Method(
        "entropy-aware",
        "reverse KL everywhere, and forward KL where the teacher itself is of several minds",
        {
            "sampler": {"student_fraction": 1.0},
            "terms": [
                _term("reverse_kl"),
                _term("forward_kl", teacher_entropy=0.8),
            ],
        },
        "arXiv 2603.07079",
        "The threshold is ours, in nats; watch uncertain/forward_kl, the share of tokens above it.",
    ),
    Method(
        "prefix",
        "only the beginning of each answer is trained, more of it as training goes on",
        {
            "sampler": {"student_fraction": 1.0},
            "terms": [_term("reverse_kl", first_tokens={"start": 32, "end": 256, "kind": "linear", "first": 0})],
        },
        "arXiv 2602.15260",
        "Start, end and pace are ours: end at your max_new_tokens, when the run ends or from first_tokens.last on. The "
        "paper also stops writing at the horizon, where its time is saved; here rows are written to their end.",
    ),
    Method(
        "supervised-kd",
        "word-level distillation: the teacher marks the data's own completions, forward KL",
        {"sampler": {"student_fraction": 0.0}, "terms": [_term("forward_kl")]},
        "Hinton et al. (2015), arXiv 1503.02531; on language models Sanh et al. (2019), arXiv 1910.01108",
    ),
    Method(
        "seqkd",
        "sequence-level distillation: cross-entropy on what the teacher writes",
        {
            "sampler": {"student_fraction": 0.0, "other": "teacher"},
            "terms": [_term("forward_kl", teacher="label")],
        },
        "Kim and Rush (2016), arXiv 1606.07947",
        "The paper decodes each prompt once, by beam search; here the teacher samples afresh in every round.",
    ),
    Method(
        "sft",
        "supervised fine-tuning: cross-entropy on the data's own completions; needs no teacher",
        {
            "sampler": {"student_fraction": 0.0},
            "terms": [_term("forward_kl", teacher="label")],
        },
        "maximum likelihood; as forward KL to a one-hot label it is a point of the same axes",
    ),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _ROWS}
