"""Lightning Fabric: DDP over Gloo, given the same settings as DDP alone.

with_fabric.py BUCKETS_MIB
"""

from __future__ import annotations

import sys

import on_torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy

strategy = DDPStrategy(
    process_group_backend="gloo",
    bucket_cap_mb=int(sys.argv[1]),
    gradient_as_bucket_view=True,
    static_graph=True,
    broadcast_buffers=False,
)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
fabric.launch()
net, optimizer = fabric.setup(*on_torch.build())
on_torch.train(net, optimizer, fabric.backward)
