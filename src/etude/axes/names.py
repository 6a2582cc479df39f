"""The words everybody shares: the six axes as enumerations.

An axis changes one symbol of

    grad L = E_{x, y ~ sampler} [ 1/N * sum_t w_t * g_t ]

and nothing else. Pure Python: `core`, `config` and the recipes import it, so that a recipe is checked without torch.
Values are the spellings of the recipe file.
"""

from __future__ import annotations

from enum import StrEnum

LABEL = "label"  # reserved teacher name: the one-hot label, that is, the row's own ids
REWARD = "reward"  # reserved teacher name: a verifier's one number for the whole row
TEACHER = "teacher"  # the name terms know the model of [teacher] by
REFERENCE = "reference"  # reserved teacher name: a frozen model to stay near, or to extrapolate away from


class Source(StrEnum):
    """Who wrote a row (axis 1, the sampler)."""

    STUDENT = "student"
    DATASET = "dataset"
    TEACHER = "teacher"


class Correctness(StrEnum):
    """What a verifier says of a whole answer, for a term that trains one kind only (axis 6)."""

    RIGHT = "right"  # its score is 0.5 or more
    WRONG = "wrong"


class FinishReason(StrEnum):
    """Why a completion ended; decided where it was written, never guessed from ids later."""

    STOP = "stop"  # its last token is a stop id
    LENGTH = "length"  # cut at the limit: no stop id, none is invented


class Gives(StrEnum):
    """What a teacher can hand over about a rollout (axis 2); a term's *needs* are drawn from the same list."""

    SAMPLED_LOGPROBS = "sampled_logprobs"  # log-probability of each completion id
    HIDDEN_STATES = "hidden_states"  # last hidden states, with the head kept beside: exact full vocabulary
    LABELS = "labels"  # the one-hot teacher: the row's own ids are the mark
    REWARDS = "rewards"  # the verifier: one number for the whole row
    KEPT_MASS = "kept_mass"  # log of the probability on the ids each completion id was drawn from


class Support(StrEnum):
    """How much of the vocabulary a term looks at (axis 3)."""

    FULL = "full"
    TOP_K = "top_k"  # the likeliest ids of one side or both (`Owner`), and what stands for the others (`Tail`)
    SAMPLED = "sampled"


class Owner(StrEnum):
    """Under top-k support: whose likeliest ids are kept."""

    TEACHER = "teacher"  # the teacher's k
    STUDENT = "student"  # the student's k, as it is now
    UNION = "union"  # the k of each side, an id that both keep once


class Tail(StrEnum):
    """Under top-k support: what stands for the ids that are not kept."""

    BUCKET = "bucket"  # one more id with the rest of the probability
    TRUNCATE = "truncate"  # nothing: the sum stops at the kept ids
    RENORMALISE = "renormalise"  # nothing: both sides are rescaled to sum to one over the kept ids
    SAMPLED = "sampled"  # the drawn token, where it is not kept; reverse KL only


class Divergence(StrEnum):
    """What is measured between teacher and student at one state (axis 4)."""

    FORWARD_KL = "forward_kl"  # KL(teacher || student)
    REVERSE_KL = "reverse_kl"  # KL(student || teacher)
    JSD = "jsd"  # beta weighs the teacher in the mixture
    SKEW_FORWARD_KL = "skew_forward_kl"  # KL(teacher || alpha teacher + (1 - alpha) student)
    SKEW_REVERSE_KL = "skew_reverse_kl"  # KL(student || (1 - alpha) teacher + alpha student)
    ALPHA_BETA = "alpha_beta"  # powers of teacher and student: (1, 0) forward KL, (0, 1) reverse KL
    ADAPTIVE_KL = "adaptive_kl"  # both KLs, weighed by where the error lies: in the teacher's head or in its tail
    TOTAL_VARIATION = "total_variation"  # half the L1 distance


class Estimator(StrEnum):
    """How the divergence becomes a gradient (axis 5)."""

    ANALYTIC = "analytic"  # states fixed, divergence differentiated
    POLICY_GRADIENT = "policy_gradient"  # detached advantage times grad log student


class Form(StrEnum):
    """Under sampled support: which function of the log-ratio c = log student - log teacher stands for reverse KL."""

    K1 = "k1"  # c
    K2 = "k2"  # c^2 / 2
    K3 = "k3"  # exp(-c) - 1 + c


class Importance(StrEnum):
    """How a policy-gradient term treats tokens written by another distribution than today's student (axis 5)."""

    NONE = "none"  # tokens are taken as the student's own
    RATIO = "ratio"  # student / behaviour, unclipped
    PPO_CLIP = "ppo_clip"  # the pessimistic minimum of ratio and clipped ratio
    TRUNCATED = "truncated"  # TIS: the ratio held between two bounds, detached
    MASKED = "masked"  # ICE-POP: the ratio, and nothing for a token whose ratio leaves the bounds, detached


class Baseline(StrEnum):
    """What a policy-gradient term takes off its return, for the sake of the variance (axis 5)."""

    NONE = "none"
    BATCH = "batch"  # mean over the round's trained tokens as the reduction weighs them, each own return among them
    GROUP = "group"  # mean reward of the question's rows, as GRPO; rewards only
    STATE_KL = "state_kl"  # the state's own reverse KL, which is the mean of c: -c + KL has mean zero


class Reduction(StrEnum):
    """What the summed term is divided by (axis 6)."""

    TOKEN_MEAN = "token_mean"  # trainable tokens of the whole optimiser step, over micro-batches and ranks
    SEQUENCE_MEAN = "sequence_mean"  # mean within each row first, then over rows
    SUM = "sum"  # nothing: the loss grows with the number of tokens


class Schedule(StrEnum):
    """How the learning rate moves after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Check(StrEnum):
    """What a preflight asks of a pair, an objective and a machine; a recipe may allow what one of them refuses."""

    SPECIAL_IDS = "special-ids"  # which tokens begin, end and pad a text, on either side
    BOS = "bos"  # at most one begins a prompt
    TEMPLATE = "template"  # both sides render a prompt alike, or say that they do not
    THINKING = "thinking"  # both sides open the same thinking block, or none
    IDENTITY = "identity"  # the student, loaded through the teacher's door, is the student
    DIFFERENCE = "difference"  # the teacher is not
    ALIGNMENT = "alignment"  # a token's score is this token's
    REPETITION = "repetition"  # and does not depend on its neighbours, or on when it is asked for
    SAMPLER = "sampler"  # what the sampler says of its own tokens, the trainer says too
    WARM_START = "warm-start"  # the teacher knows what to make of the student's answers
    STOP = "stop-token"  # both end an answer with the same token
    GRADIENT = "gradient"  # each term's is that of its formula
    DISK = "disk"  # the checkpoints fit
    TIME = "time"  # how long the run takes
    COST = "cost"  # what it computes
    DETERMINISM = "determinism"  # the same step twice gives the same bits
    MEMORY = "memory"  # the worst batch fits
