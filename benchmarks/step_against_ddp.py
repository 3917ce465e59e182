"""A training step of Renkei and of DistributedDataParallel at its best, on two ranks of one host.

    python benchmarks/step_against_ddp.py [RUNS [MODELS [ROUNDS]]]

Each run lets all take turns in random order; the claim is the median over runs of the ratio within a run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from record import Record, table

ROUNDS = 12


def measure(ranks: int, rounds: int, models: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "renkei", "bench", "step", "-n", str(ranks), "--peers", "ddp"]
    command += ["--models", models, "--rounds", str(rounds), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["results"]


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    models = sys.argv[2] if len(sys.argv) > 2 else "perceptron,convnet"
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else ROUNDS
    record = Record("step-against-ddp")
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for run in range(runs):
        for result in measure(2, rounds, models):
            record.add(run=run, **result)
            found.setdefault(result["model"], {}).setdefault(result["name"], []).append(result)
    rows = [row for model, by_name in found.items() for row in summarize(model, by_name)]
    text = (
        "Two ranks, one thread each; DDP over Gloo, Renkei over shared memory, and DDP over that. "
        f"{runs} runs, in each {rounds} turns of 8 steps per contestant in random order. A step takes as long as on "
        "the slowest rank. DDP has gradients as bucket views and a static graph. Exposed is what a step takes longer "
        "than one without communication; *all-reduce alone* is Renkei's time to add as many bytes with nothing else to "
        "do.\n\n"
        "Ratios are to the best DDP: that of the three bucket sizes which is quickest over all runs. (The quickest of "
        "each run would be chosen by the noise, which is larger than what sets the three apart.) They are taken round "
        "by round; of each run the median counts, and here is the median of runs (smallest to largest).\n\n"
        + table(("model", "who", "step, ms", "exposed, ms", "of best DDP"), rows)
    )
    print(record.write("A training step against DDP", text))


def summarize(model: str, by_name: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """A row for each contestant; within a run, ratios are to the best peer of that run, so their ratios are kept."""
    ratios = {name: [result["ratio"] for result in results] for name, results in by_name.items()}
    ddp = min((name for name in by_name if name.startswith("ddp,")), key=lambda name: statistics.median(ratios[name]))
    rows = []
    for name, results in by_name.items():
        step, exposed = (statistics.median(result[key] for result in results) for key in ("median_ms", "exposed_ms"))
        spread = ""
        if None not in ratios[name]:
            to_ddp = sorted(own / its for own, its in zip(ratios[name], ratios[ddp], strict=True))
            spread = f"{statistics.median(to_ddp):.3f} ({to_ddp[0]:.3f} to {to_ddp[-1]:.3f})"
        rows.append((model, name, f"{step:.2f}", f"{exposed:.2f}", spread))
    return rows


if __name__ == "__main__":
    main()
