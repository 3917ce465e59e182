"""A training step of Renkei and of DistributedDataParallel at its best, on two ranks over Gloo.

    python benchmarks/step_against_ddp.py [RUNS]

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


def measure(ranks: int, rounds: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "renkei", "bench", "step", "-n", str(ranks), "--peers", "ddp"]
    done = subprocess.run([*command, "--rounds", str(rounds), "--json"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["results"]


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    record = Record("step-against-ddp")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in range(runs):
        for result in measure(ranks=2, rounds=ROUNDS):
            record.add(run=run, **result)
            found.setdefault((result["model"], result["name"]), []).append(result)
    rows = []
    for (model, name), results in found.items():
        ratios = sorted(result["ratio"] for result in results if result["ratio"] is not None)
        middle = {key: statistics.median(result[key] for result in results) for key in ("median_ms", "exposed_ms")}
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})" if ratios else ""
        rows.append((model, name, f"{middle['median_ms']:.2f}", f"{middle['exposed_ms']:.2f}", spread))
    text = (
        f"Two ranks, one thread each, Gloo; {runs} runs, in each {ROUNDS} turns of 8 steps per contestant in random "
        "order. A step takes as long as on the slowest rank. DDP has gradients as bucket views, a static graph, "
        "and the best of three bucket sizes counts. Exposed is what a step takes longer than one without "
        "communication; *all-reduce alone* is the time to add as many bytes with nothing else to do: less can't be "
        "exposed of what goes over Gloo and isn't hidden. Ratios are to the best DDP, round by round; of each run the "
        "median counts, and here is the median of runs (smallest to largest).\n\n"
        + table(("model", "who", "step, ms", "exposed, ms", "of best DDP"), rows)
    )
    print(record.write("A training step against DDP", text))


if __name__ == "__main__":
    main()
