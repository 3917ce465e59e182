"""How well and how fast the recipes train, on two ranks, over several seeds.

python benchmarks/recipes.py [digits] [fashion-mnist]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time

from record import Record, table

SEEDS = {"digits": 5, "fashion-mnist": 3}


def main() -> None:
    for recipe in sys.argv[1:] or SEEDS:
        measure(recipe)


def measure(recipe: str) -> None:
    record = Record(f"recipe-{recipe}")
    accuracies, seconds = [], []
    for seed in range(SEEDS[recipe]):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "renkei", "train", recipe, "-n", "2", "--json"]
            begin = time.perf_counter()
            options = ["--set", f"seed={seed}", "--run-dir", f"{folder}/run"]
            done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
            elapsed = round(time.perf_counter() - begin, 2)
        result = json.loads(done.stdout.splitlines()[-1])
        record.add(recipe=recipe, seed=seed, command_seconds=elapsed, **{k: result[k] for k in ("top1", "loss")})
        accuracies.append(result["top1"])
        seconds.append(elapsed)
    accuracy = f"{statistics.mean(accuracies):.4f} ± {statistics.stdev(accuracies):.4f}"
    row = (recipe, len(accuracies), accuracy, f"{min(accuracies):.4f}", f"{statistics.median(seconds):.1f}")
    text = (
        "`renkei train RECIPE -n 2` on two cores, from the command to its end. Settings were chosen on samples held "
        "out of the training sets (`benchmarks/settings.py`); top-1 is that of the last epoch, on the digits' held-out "
        "fifth and on Fashion-MNIST's test set.\n\n"
        + table(("recipe", "seeds", "top-1, mean ± standard deviation", "lowest", "seconds, median"), [row])
    )
    print(record.write("A recipe", text))


if __name__ == "__main__":
    main()
