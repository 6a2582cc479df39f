"""On-policy distillation by hand: the whole method in plain torch, on models so small that every claim can be checked.

The student plays a tune. The teacher listens and says, after each note, what it would have played next. The student is
moved a little towards that, note by note, and plays again. This is all of it. The rest is bookkeeping, and bookkeeping
is where such runs go wrong in silence, so here it is done in the open.

    python tutorial/on_policy_distillation.py          # a few seconds on one core
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

# --- 1. Two language models -------------------------------------------------------------------------------------------
# Five tokens; id 0 ends the tune. A table of logits is a language model that remembers one note: row = the note before,
# column = the note to come, and `table[ids]` is its forward pass. All its tunes can be listed, so that "in expectation"
# will be a sum below and not a hope.

NOTES = ["stop", "do", "re", "mi", "fa"]
STOP, DO, RE, MI, FA = range(5)
PROMPT = torch.tensor([RE, DO])  # the notes that are given
MAX_NEW_NOTES = 4


def table(favourites: dict[int, int], chance: float) -> Tensor:
    """[V, V] logits: after each note its favourite with this chance, the others sharing the rest evenly."""
    probabilities = torch.full((len(NOTES), len(NOTES)), (1 - chance) / (len(NOTES) - 1), dtype=torch.float64)
    for note, favourite in favourites.items():
        probabilities[note, favourite] = chance
    return probabilities.log()


TEACHER = table({STOP: STOP, DO: RE, RE: MI, MI: FA, FA: STOP}, chance=0.92)  # climbs the scale, and stops at the top
NOVICE = table({STOP: STOP, DO: DO, RE: RE, MI: MI, FA: FA}, chance=0.60)  # plays the same note again


# --- 2. The student plays ---------------------------------------------------------------------------------------------


def play(student: Tensor, tunes: int) -> Tensor:
    """[B, P + C] ids: the prompt, then one note at a time from the student's own distribution."""
    ids = PROMPT.expand(tunes, -1)
    ended = torch.zeros(tunes, 1, dtype=torch.bool)
    with torch.no_grad():  # which notes were drawn is data: no gradient flows through the choice
        for _ in range(MAX_NEW_NOTES):
            note = torch.multinomial(student[ids[:, -1]].softmax(-1), num_samples=1)
            note[ended] = STOP  # a tune that has ended is filled up; as in many tokenizers, padding and end share an id
            ids = torch.cat([ids, note], dim=1)
            ended |= note == STOP
    return ids


def trained(completion: Tensor) -> Tensor:
    """[B, C] True where the student played, its stop included; the filling after it is not the student's doing.

    `completion != STOP` looks like the same thing and is not: the stop would never be trained, and never learnt.
    """
    stops = (completion == STOP).long()
    return stops.cumsum(1) - stops == 0  # no stop *before* this place


# --- 3. Both read what was played -------------------------------------------------------------------------------------


def next_note_logprobs(model: Tensor, ids: Tensor) -> Tensor:
    """[B, C, V]: what the model expected at each place of the completion, knowing everything before it.

    Logits at place i are about place i + 1. So we begin one place early, at the last note of the prompt, and leave out
    the last place, which is about a note nobody played. This is the only shift; do it once.
    """
    return model[ids][:, len(PROMPT) - 1 : -1].log_softmax(-1)


def of_played(logprobs: Tensor, completion: Tensor) -> Tensor:
    """[B, C] log-probability of the note that was really played."""
    return logprobs.gather(-1, completion.unsqueeze(-1)).squeeze(-1)


# --- 4. What one note is worth: three losses, [B, C] each, not yet averaged -------------------------------------------
# All three are about KL(student || teacher), "reverse" KL: how surprised the teacher is by what the student does.


def full_vocabulary(student: Tensor, teacher: Tensor, completion: Tensor) -> Tensor:
    """The divergence itself, over all notes that could have come next. Exact; needs all of the teacher's numbers."""
    return (student.exp() * (student - teacher)).sum(-1)


def sampled_note(student: Tensor, teacher: Tensor, completion: Tensor) -> Tensor:
    """Policy gradient: make a note likelier if the teacher liked it better than the student did. One number a note.

    The advantage is a verdict, not something to be differentiated, hence `detach`.
    """
    log_q = of_played(student, completion)
    advantage = (of_played(teacher, completion) - log_q).detach()
    return -advantage * log_q


def popular(student: Tensor, teacher: Tensor, completion: Tensor) -> Tensor:
    """The loss printed in many tutorials: student minus teacher log-probability of the sampled notes, differentiated.

    Its *value* estimates the KL without bias, so the curve looks right. Its *gradient* is another matter: the teacher's
    term is a constant, which leaves grad log q; and sum_y q(y) grad log q(y) = grad sum_y q(y) = grad 1 = 0.
    """
    return of_played(student, completion) - of_played(teacher, completion)


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {"full vocabulary": full_vocabulary, "sampled note": sampled_note, "popular": popular}


def per_note(loss: Loss, student: Tensor, teacher: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """[B, C] the loss of every note, zero where nothing is trained, and [B, C] the mask."""
    completion = ids[:, len(PROMPT) :]
    mask = trained(completion)
    return loss(next_note_logprobs(student, ids), next_note_logprobs(teacher, ids), completion) * mask, mask


# --- 5. The loop ------------------------------------------------------------------------------------------------------


def train(loss: Loss, updates: int = 200, tunes: int = 32, learning_rate: float = 1.0) -> Tensor:
    """The student after so many updates, each on tunes it has just played itself: that is what makes it on-policy."""
    torch.manual_seed(0)
    student = NOVICE.clone().requires_grad_()
    for _ in range(updates):
        losses, mask = per_note(loss, student, TEACHER, play(student, tunes))
        mean = losses.sum() / mask.sum()  # divide once, by the notes that are trained: each counts alike
        (gradient,) = torch.autograd.grad(mean, student)
        with torch.no_grad():
            student -= learning_rate * gradient
    return student.detach()


# --- 6. The proof: add up every tune the student could play -----------------------------------------------------------


def every_tune() -> Tensor:
    """[M, P + C] ids of all tunes: anything up to the first stop, then filling."""
    completions = torch.tensor(list(product(range(len(NOTES)), repeat=MAX_NEW_NOTES)))
    completions = completions[(trained(completions) | (completions == STOP)).all(1)]
    return torch.cat([PROMPT.expand(len(completions), -1), completions], dim=1)


def expected(loss: Loss, student: Tensor, teacher: Tensor = TEACHER) -> tuple[float, Tensor]:
    """The loss of a whole tune and its [V, V] gradient, averaged over all tunes by their chance: no noise is left."""
    student = student.clone().requires_grad_()
    ids = every_tune()
    log_q, _ = per_note(lambda q, p, completion: of_played(q, completion), student, teacher, ids)
    chance = log_q.sum(1).exp().detach()  # how often the student plays this tune: again data, not to be differentiated
    value = (chance * per_note(loss, student, teacher, ids)[0].sum(1)).sum()
    return value.item(), torch.autograd.grad(value, student)[0]


def likeliest(student: Tensor) -> str:
    """The tune in which every note is the student's favourite."""
    ids = PROMPT.tolist()
    while ids[-1] != STOP and len(ids) < len(PROMPT) + MAX_NEW_NOTES:
        ids.append(int(student[ids[-1]].argmax()))
    return " ".join(NOTES[note] for note in ids[len(PROMPT) :])


def main() -> None:
    """Print the proof, and train with each loss."""
    right = expected(full_vocabulary, NOVICE)[1]
    print(f"In expectation, over all {len(every_tune())} tunes:")
    print(f"{'loss':<18}{'value':>8}{'|gradient|':>13}{'|gradient - full vocabulary|':>32}")
    for name, loss in LOSSES.items():
        value, gradient = expected(loss, NOVICE)
        print(f"{name:<18}{value:>8.4f}{gradient.norm():>13.4f}{(gradient - right).norm():>32.4f}")

    # The popular loss once more, on one batch: with a teacher who knows the scale, and with one who plays it backwards.
    torch.manual_seed(0)
    student, ids = NOVICE.clone().requires_grad_(), play(NOVICE, tunes=32)
    backwards = table({STOP: STOP, DO: STOP, RE: DO, MI: RE, FA: MI}, chance=0.92)
    one, other = (
        torch.autograd.grad(per_note(popular, student, teacher, ids)[0].sum(), student)[0]
        for teacher in (TEACHER, backwards)
    )
    print("\nThe popular loss with two opposite teachers, on the same 32 tunes:")
    print(f"|gradient| {one.norm():.4f}, |difference of the two gradients| {(one - other).norm():.4f}")

    print("\nThree students, 200 updates of 32 tunes each:")
    print(f"{'loss':<18}{'KL a tune':>10}   likeliest tune")
    students = {"before": NOVICE} | {name: train(loss) for name, loss in LOSSES.items()}
    for name, student in students.items():
        print(f"{name:<18}{expected(full_vocabulary, student)[0]:>10.4f}   {likeliest(student)}")


# What to take along:
#   1. Judge a loss by its gradient: the value can be perfect while nothing is learnt, and idle while all is well.
#   2. The sampled note and the full vocabulary agree in expectation; the one asks little of the teacher and is noisy.
#   3. Detach what is a verdict, count what you divide by, shift once, and train the stop.

if __name__ == "__main__":
    main()
