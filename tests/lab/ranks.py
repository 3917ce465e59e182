"""What a rank does in the lab: say where it stands, and take part in a sum and a training step."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

import renkei


def main() -> None:
    with renkei.create_communicator(timeout=20) as comm:
        model = torch.nn.Linear(3, 2)
        optimizer = renkei.MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
        optimizer.backward(model(torch.full((comm.rank + 1, 3), 1.0)).mean(), weight=comm.rank + 1)
        optimizer.step()
        summed = comm.all_reduce(torch.tensor(float(comm.rank))).item()
        weights = comm.all_gather(torch.cat([each.detach().flatten() for each in model.parameters()]))
        alike = all(torch.equal(each, weights[0]) for each in weights)
        comm.barrier()
        said = {**asdict(comm.topology), "address": comm.options.address, "sum": summed, "alike": alike}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
