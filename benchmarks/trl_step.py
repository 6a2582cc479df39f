"""TRL's side: `DistillationTrainer` on the work of `work.py`. Runs in the environment that `against_trl.py` makes."""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import transformers
import trl
import work
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer


class TimedTrainer(DistillationTrainer):
    """The trainer as it is, with a stopwatch around its own phases."""

    stopwatch: work.Stopwatch
    written = 0  # completion tokens of the latest step

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.stopwatch.span("write"):
            output = super()._generate_and_score_completions(inputs)
        self.written = int(output["completion_mask"].sum())
        return output

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch.span("forward of both and loss"):
            return super().compute_loss(*args, **kwargs)


class Steps(TrainerCallback):
    def __init__(self, stopwatch: work.Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.step = self.stopwatch.step()
        self.step.__enter__()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.optimiser = self.stopwatch.span("optimiser")
        self.optimiser.__enter__()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.optimiser.__exit__(None, None, None)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.step.__exit__(None, None, None)


def settings(options: argparse.Namespace, output: str) -> DistillationConfig:
    return DistillationConfig(
        output_dir=output,
        use_cpu=True,
        bf16=options.bf16,
        gradient_checkpointing=options.gradient_checkpointing,
        teacher_model_init_kwargs={"dtype": "bfloat16" if options.bf16 else "float32"},
        beta=1.0,  # reverse KL over the full vocabulary
        temperature=1.0,
        max_completion_length=work.NEW_TOKENS,
        generation_kwargs={"min_new_tokens": work.NEW_TOKENS},  # its public way to switch stopping off
        per_device_train_batch_size=work.NUM_PROMPTS,
        gradient_accumulation_steps=1,
        max_steps=work.WARM_UP_STEPS + options.steps,
        learning_rate=work.LEARNING_RATE,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )


def main() -> None:
    parser = work.arguments(__doc__ or "")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=False)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    stopwatch = work.Stopwatch()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    with tempfile.TemporaryDirectory() as output:
        trainer = TimedTrainer(
            model=options.model,
            teacher_model=options.model,
            args=settings(options, output),
            train_dataset=Dataset.from_dict({"prompt": work.prompt_texts(tokenizer)}),
            processing_class=tokenizer,
            callbacks=[Steps(stopwatch)],
        )
        trainer.stopwatch = stopwatch
        trainer.train()
    for step in stopwatch.steps:
        named = sum(seconds for name, seconds in step.items() if name != "step")
        step["backward"] = step["step"] - named
    work.report(
        stopwatch.steps,
        written_tokens=trainer.written,
        versions=f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
    )


if __name__ == "__main__":
    main()
