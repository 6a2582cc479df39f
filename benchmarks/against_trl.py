"""Step time and peak memory beside TRL's `DistillationTrainer`, on the same work (`work.py`), in one run.

Each side runs in its own process and its own environment, and the two take turns (A B A B ...), so that a machine whose
speed drifts drifts for both. Printed are medians over all timed steps, the ratio of the sides round by round, and where
each second of a step goes. It measures and does not judge: the exit status says whether it could measure.

    make bench
    python benchmarks/against_trl.py --trl-python .venv-trl/bin/python --model FOLDER --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import work

HERE = Path(__file__).parent
SIDES = ("etude", "trl")


def run_side(side: str, python: str, options: argparse.Namespace) -> dict[str, Any]:
    """One process of one side; what its line of JSON says."""
    command = [python, str(HERE / f"{side}_step.py"), "--model", options.model]
    command += ["--threads", str(options.threads), "--steps", str(options.steps)]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{side} ended with status {result.returncode}:\n{result.stderr[-2000:]}")
    line: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    expected = work.NUM_PROMPTS * work.NEW_TOKENS
    if line["written_tokens"] != expected:
        raise SystemExit(f"{side} wrote {line['written_tokens']} tokens a step; the work is {expected}")
    return line


def take_turns(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Every side's lines, one a round."""
    pythons = {"etude": sys.executable, "trl": options.trl_python}
    lines: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES:
            line = run_side(side, pythons[side], options)
            lines[side].append(line)
            seconds, peak = step_seconds([line]), line["peak_mib"]
            print(f"round {number + 1}  {side:<6}{seconds:>8.2f} s a step{peak:>8} MiB", flush=True)
    return lines


def step_seconds(lines: list[dict[str, Any]]) -> float:
    return statistics.median(step["step"] for line in lines for step in line["steps"])


def spans(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The median seconds of every part of a step, the longest first."""
    steps = [step for line in lines for step in line["steps"]]
    medians = {name: statistics.median(step[name] for step in steps) for name in steps[0] if name != "step"}
    return dict(sorted(medians.items(), key=lambda item: -item[1]))


def show(lines: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    print(f"\n{work.NUM_PROMPTS} prompts of {work.PROMPT_TOKENS} tokens, {work.NEW_TOKENS} new tokens each, ", end="")
    print(f"reverse KL over the full vocabulary; {options.threads} threads, {options.rounds} rounds of {options.steps}")
    for side in SIDES:
        print(f"  {side}: {lines[side][0]['versions']}")
    seconds = {side: step_seconds(lines[side]) for side in SIDES}
    peaks = {side: statistics.median(line["peak_mib"] for line in lines[side]) for side in SIDES}
    pairs = [step_seconds([a]) / step_seconds([b]) for a, b in zip(*(lines[side] for side in SIDES), strict=True)]
    print(f"\n{'median':<22}{'etude':>10}{'TRL':>10}{'ratio':>10}")
    print(f"{'seconds a step':<22}{seconds['etude']:>10.2f}{seconds['trl']:>10.2f}", end="")
    print(f"{seconds['etude'] / seconds['trl']:>10.2f}   rounds: {', '.join(f'{pair:.2f}' for pair in pairs)}")
    print(f"{'peak memory, MiB':<22}{peaks['etude']:>10.0f}{peaks['trl']:>10.0f}{peaks['etude'] / peaks['trl']:>10.2f}")
    for side in SIDES:
        print(f"\nwhere {side}'s seconds go")
        for name, value in spans(lines[side]).items():
            print(f"  {name:<30}{value:>8.2f}{value / seconds[side]:>8.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model; left out: SmolLM2-135M-Instruct from its package")
    parser.add_argument("--trl-python", required=True, help="the Python that has TRL")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a process")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads of both sides")
    options = parser.parse_args()
    if options.model is None:
        from etude.data import smollm2

        options.model = str(smollm2.folder())
    show(take_turns(options), options)


if __name__ == "__main__":
    main()
