"""What a user waits for before anything happens.

python benchmarks/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from record import Record, table

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import renkei": ["-c", "import renkei, sys; assert 'torch' not in sys.modules"],
    "renkei --help": ["-m", "renkei", "--help"],
    "renkei train --print-config": ["-m", "renkei", "train", "--print-config"],
    "import torch": ["-c", "import torch"],
}
REPEATS = 11


def main() -> None:
    record = Record("startup")
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS):
        for name, arguments in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(round(time.perf_counter() - begin, 4))
            record.add(command=name, seconds=seconds[name][-1])
    rows = [(name, f"{statistics.median(each):.3f}", f"{max(each):.3f}") for name, each in seconds.items()]
    text = f"{REPEATS} times in turns; seconds for the whole process.\n\n" + table(("what", "median", "longest"), rows)
    print(record.write("Starting", text))


if __name__ == "__main__":
    main()
