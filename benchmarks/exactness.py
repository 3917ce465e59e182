"""The same global batches on 1, 2, 3 and 4 ranks: how far parameters are apart after 20 steps, and evaluations.

python benchmarks/exactness.py
"""

from __future__ import annotations

from typing import Any

import renkei
from record import Record, table

STEPS, GLOBAL_BATCH_SIZE = 20, 53  # a prime, so that ranks never get equal parts


def train_and_evaluate() -> tuple[list[Any], list[str]]:
    """On one of several ranks: evaluate the initial model, train, and return parameters and evaluation, in hex."""
    import torch
    from torch import nn

    from renkei.data.datasets import digits, split
    from renkei.models.convnet import perceptron
    from renkei.training.metrics import METRICS

    torch.set_num_threads(1)
    with renkei.create_communicator() as comm:
        train, held_out = split(digits(), 359)
        torch.manual_seed(comm.rank)  # whatever the others have, rank 0's weights count
        model = perceptron(64, 101, 53, 10)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = renkei.MultiNodeOptimizer(inner, comm, model=model)
        evaluation = renkei.evaluate(model, held_out, comm, batch_size=50, metrics=METRICS)
        data = renkei.scatter_dataset(train, comm, shuffle=True, seed=0)
        loader = renkei.DataLoader(data, comm, global_batch_size=GLOBAL_BATCH_SIZE)
        for _, (images, target) in zip(range(STEPS), loader, strict=False):
            optimizer.zero_grad()
            optimizer.backward(nn.functional.cross_entropy(model(images), target), weight=len(target))
            optimizer.step()
        return [each.detach().numpy() for each in model.parameters()], [each.hex() for each in evaluation.values()]


def main() -> None:
    record = Record("exactness")
    runs = {ranks: renkei.run(train_and_evaluate, ranks) for ranks in (1, 2, 3, 4)}
    one, evaluation_on_one = runs[1][0]
    rows = []
    for ranks, ((own, _), *others) in runs.items():
        difference = max(float(abs(mine - its).max() / abs(its).max()) for mine, its in zip(own, one, strict=True))
        alike = all(bool((a == b).all()) for other, _ in others for a, b in zip(other, own, strict=True))
        evaluations_alike = all(evaluation == evaluation_on_one for _, evaluation in runs[ranks])
        record.add(ranks=ranks, difference=difference, ranks_alike=alike, evaluations=[e for _, e in runs[ranks]])
        rows.append((ranks, f"{difference:.1e}", alike, evaluations_alike))
    text = (
        f"A perceptron on the digits, {STEPS} steps of {GLOBAL_BATCH_SIZE} samples with weights, one thread a rank, in "
        "real processes. The difference is the largest of any parameter, relative to the largest value in its tensor, "
        "from the run on one rank: sums in another order. The model is evaluated before training, when parameters are "
        "the same on any number of ranks; loss and accuracy must then be too, to the bit.\n\n"
        + table(("ranks", "difference", "parameters alike on all ranks", "evaluation equal to one rank's"), rows)
    )
    print(record.write("N ranks equal one", text))


if __name__ == "__main__":
    main()
