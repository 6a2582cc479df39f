"""What a preflight estimates of a run beside what the run then measures: peak memory of the process, and seconds.

Three recipes of different size: the maze, models of random weights made for the occasion, and the pruned SmolLM2. Each
is estimated in a process of its own and then trained in another, both timed from start to end, and the ratio is
printed. It judges nothing. On a machine whose load changes between the two, so do the seconds; with `--processor` both
sides count seconds of the processor instead, which with one thread are those of a machine that does nothing else.

    make bench-estimates
    python benchmarks/estimates.py --only maze random --threads 1 --processor
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CASES = {  # recipe and changes; short runs, in which every part of the loop comes
    "maze": ("maze", ["train.steps=100", "evaluation.prompts=128", "evaluation.every=50"]),
    "random": ("random.toml", []),
    "smollm2": ("smollm2-prune", ["train.steps=3", "evaluation.prompts=8", "evaluation.every=0"]),
}

RANDOM = """
[student]
model = "student"

[teacher]
model = "teacher"

[data]
prompts = "prompts.jsonl"

[sampler]
max_new_tokens = 64

[[terms]]
divergence = "reverse_kl"

[train]
steps = 8
prompts_per_round = 16

[evaluation]
prompts = 16
every = 4
"""
NUM_WORDS = 8_000
SIZES = {"student": (384, 6), "teacher": (512, 8)}  # hidden size and layers: 17 and 34 million weights


@dataclass(frozen=True)
class Found:
    """Of one process."""

    seconds: float
    peak_bytes: float
    processor: float = 0.0  # seconds of it


def make_random(folder: Path) -> None:
    """Two models of random weights, 200 prompts and a recipe in a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from etude.testing import word_tokenizer

    tokenizer = word_tokenizer(NUM_WORDS)
    for seed, (name, (hidden, layers)) in enumerate(SIZES.items()):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=256,
            bos_token_id=1,
            eos_token_id=2,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [" ".join(f"w{(31 * row + place) % NUM_WORDS}" for place in range(4 + row % 29)) for row in range(200)]
    lines = "".join(json.dumps({"prompt": row}) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")
    (folder / "random.toml").write_text(RANDOM, encoding="utf-8")


def estimate(recipe: str, changes: list[str], started: float | None) -> None:
    """Print the findings of a recipe, one JSON object a line; `started` is when this process was.

    None: count the processor's seconds, which say it themselves.
    """
    from etude.config.load import load_recipe
    from etude.preflight.estimates import estimates
    from etude.preflight.rehearsal import Stopwatch
    from etude.recipes.build import build
    from etude.recipes.data import read_data
    from etude.runtime.memory import keep_freed_memory
    from etude.runtime.tracking import Tracker
    from etude.runtime.world import World

    keep_freed_memory()  # as `etude train` does
    if started is None:
        Stopwatch.clock = staticmethod(time.process_time)
    asked = load_recipe(recipe, changes)
    tracker = Tracker(None, console=False, total_steps=asked.train.steps)
    parts = build(asked, folder=Path(asked.output), world=World(), tracker=tracker)
    start_s = time.process_time() if started is None else time.time() - started
    data = read_data(asked)
    findings = estimates(
        parts,
        {name: teacher.backbone for name, teacher in parts.teachers.items()},
        longest_prompt=data.train.longest_prompt,
        longest_completion=asked.sampler.max_new_tokens,
        max_new_tokens=asked.sampler.max_new_tokens,
        start_s=start_s,
    )
    for finding in findings:
        print(json.dumps(finding.as_json()), flush=True)


def started(command: list[str], folder: Path, threads: int) -> tuple[Found, str]:
    """Run a command to its end: seconds, peak of its memory as the system counted it, and what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    with (folder / "printed").open("w+", encoding="utf-8") as printed:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=printed, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        text = printed.read()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}:\n{text[-2000:]}")
    return Found(seconds, 1024 * usage.ru_maxrss, usage.ru_utime + usage.ru_stime), text


def compare(name: str, folder: Path, options: argparse.Namespace) -> None:
    """One recipe: estimate, run, ratio."""
    recipe, changes = CASES[name]
    changes = [*changes, f"output={folder / 'run' / name}", f"device.threads={options.threads}"]
    here = [sys.executable, str(Path(__file__).resolve())]
    took, text = started(
        [*here, "--estimate", "" if options.processor else str(time.time()), recipe, *changes], folder, options.threads
    )
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    findings: dict[str, dict[str, Any]] = {line["check"]: line for line in lines}
    said = Found(findings["time"]["figures"]["seconds"], findings["memory"]["figures"]["peak_bytes"])
    found, _ = started([sys.executable, "-m", "etude", "train", recipe, *changes, "--quiet"], folder, options.threads)
    measured = found.processor if options.processor else found.seconds
    print(f"\n{name:<10}{'estimated':>12}{'measured':>12}{'ratio':>8}   (the estimate took {took.seconds:.0f} s)")
    print(f"{'seconds':<10}{said.seconds:>12.1f}{measured:>12.1f}{said.seconds / measured:>8.2f}", end="")
    print(f"   worst case {findings['time']['figures']['worst_seconds']:.1f}")
    peaks = said.peak_bytes / 2**20, found.peak_bytes / 2**20
    print(f"{'MiB':<10}{peaks[0]:>12.0f}{peaks[1]:>12.0f}{peaks[0] / peaks[1]:>8.2f}", flush=True)
    for finding in findings.values() if options.evidence else ():
        print(f"  {finding['check']}: {finding['verdict']}: {finding['evidence']}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--estimate"]:  # a process of the parent's, told when it was started
        return estimate(sys.argv[3], sys.argv[4:], float(sys.argv[2]) if sys.argv[2] else None)
    if sys.argv[1:2] == ["--make"]:
        return make_random(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="recipes to compare")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads of every process")
    parser.add_argument("--processor", action="store_true", help="count the processor's seconds; with --threads 1")
    parser.add_argument("--evidence", action="store_true", help="print what the estimates say in full")
    options = parser.parse_args()
    print(f"{options.threads} threads; load of the machine before: {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "random" in options.only:
            started([sys.executable, str(Path(__file__).resolve()), "--make", name], folder, options.threads)
        for case in options.only:
            compare(case, folder, options)


if __name__ == "__main__":
    main()
