"""A training step of Renkei and of its peers, the original ChainerMN among them, on two ranks of one host.

    python benchmarks/peers.py [ROUNDS [NAME ...]]

Each contestant is a job of two processes in an environment of its own (`benchmarks/peers/`), which waits for its turn.
In each round all take turns, in random order; what is compared is what was measured in the same round.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from peers_jobs import Contestant, Job, start
from record import Record, table
from renkei.bench.comparison import median_ratio, quickest, random_orders

ROUNDS = 21
UNTIMED, TIMED = 2, 8  # steps of a turn; in the first ones caches still hold what another left there
FIRST_TURN = 20  # steps, untimed; then losses are compared
IDLE = 0.02  # of a core at most may a rank use that waits for its turn
LOSSES = 0.2  # by how much of Renkei's the loss of another may differ after the first turn: fp16 costs Adam small ones

RENKEI, ALONE, ORIGINAL = "renkei", "no communication", "chainermn 7.8.1"
DDP = {f"ddp, {size} MiB buckets": Contestant("with_ddp.py", (str(size),)) for size in (1, 4, 25)}
CONTESTANTS = {
    RENKEI: Contestant("with_renkei.py"),
    "renkei, Adam not fused": Contestant("with_renkei.py", adam="default"),
    ORIGINAL: Contestant("with_chainermn.py", environment="chainermn", by_mpi=True),
    **DDP,
    "ddp, fp16 hook": Contestant("with_ddp.py", ("25", "fp16")),
    "accelerate": Contestant("with_accelerate.py", ("25",), environment="accelerate"),
    "fabric": Contestant("with_fabric.py", ("25",), environment="fabric"),
    "pytorch-pfn-extras": Contestant("with_ppe.py", environment="ppe"),
    ALONE: Contestant("alone.py"),
}


def check(name: str, replies: list[dict[str, Any]]) -> None:
    """Raise unless ranks have the same parameters, or different ones where nothing is exchanged, and waited idly."""
    same = len({reply["digest"] for reply in replies}) == 1
    if same != (name != ALONE):
        found = "have the same" if same else "have different"
        raise RuntimeError(f"the ranks of {name!r} {found} parameters after training on different samples")
    busiest = max(reply["idle_share"] for reply in replies)
    if busiest > IDLE:
        raise RuntimeError(f"a rank of {name!r} used {busiest:.1%} of a core while it waited; the run is void")


def first_turn(name: str, job: Job) -> float:
    """Let it plan its buckets, and check that it trains; the mean loss over ranks after it."""
    replies = job.train(FIRST_TURN)
    check(name, replies)
    return statistics.mean(reply["loss"] for reply in replies)


def turn(name: str, job: Job) -> list[float]:
    """Milliseconds of each step, which takes as long as it does on the slowest rank."""
    replies = job.train(UNTIMED + TIMED)
    check(name, replies)
    steps = zip(*(reply["seconds"][UNTIMED:] for reply in replies), strict=True)
    return [round(1000 * max(ranks), 3) for ranks in steps]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    names = [RENKEI, *(name for name in sys.argv[2:] or CONTESTANTS if name != RENKEI)]
    turns: dict[str, list[float]] = {name: [] for name in names}
    with start({name: CONTESTANTS[name] for name in names}) as jobs:
        record = Record("peers")
        losses = {name: first_turn(name, job) for name, job in jobs.items()}
        record.add(losses_after_first_turn=losses)
        for name, loss in losses.items():
            if name != ALONE and abs(loss / losses[RENKEI] - 1) > LOSSES:
                raise RuntimeError(f"{name!r} trains something else: its loss is {loss}, Renkei's {losses[RENKEI]}")
        for round_, order in enumerate(random_orders(jobs, rounds)):
            for name in order:
                steps = turn(name, jobs[name])
                record.add(round=round_, contestant=name, milliseconds=steps)
                turns[name].append(statistics.median(steps))
    print(record.write("A training step against peers", text(turns, losses)))


def text(turns: dict[str, list[float]], losses: dict[str, float]) -> str:
    """What was measured, and how."""
    rounds = len(turns[RENKEI])
    rows = []
    for name, own in turns.items():
        ratio = median_ratio(own, turns[RENKEI], decimals=2)
        low, _, high = statistics.quantiles((mine / its for mine, its in zip(own, turns[RENKEI], strict=True)), n=4)
        rows.append(
            (name, f"{statistics.median(own):.2f}", f"{ratio:.2f} ({low:.2f} to {high:.2f})", f"{losses[name]:.3f}")
        )
    best = quickest((name for name in turns if name in DDP), turns)
    how = (
        f"The perceptron 784-1000-1000-10, Adam, 100 samples a rank, two ranks, one thread each. {rounds} rounds; in "
        f"each all take a turn of {UNTIMED} steps that don't count and {TIMED} that do, in random order, while the "
        f"others sleep (a rank that waits and uses more than {IDLE:.0%} of a core makes the run void). A step takes as "
        "long as on the slowest rank; of a turn the median counts. Ratios are to Renkei's turn in the same round: the "
        "median of rounds (quartiles).\n\n"
        "All begin with the same weights, and each rank has its own samples. After every turn ranks have the same "
        "parameters, so gradients were exchanged; without communication they differ. The loss is the mean over ranks "
        f"after the first {FIRST_TURN} steps (the original's first one only sends weights). What each is set to, and "
        "why, is in `benchmarks/peers/README.md`."
    )
    found = f"The quickest DDP was {best!r}." if best else ""
    return f"{how}\n\n{table(('who', 'step, ms', 'times as long as Renkei', 'loss'), rows)}\n\n{found}".rstrip()


if __name__ == "__main__":
    main()
