"""DistributedDataParallel over Gloo as its documentation advises for speed.

with_ddp.py BUCKETS_MIB [fp16]
"""

from __future__ import annotations

import sys

import on_torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

net, optimizer = on_torch.build()
dist.init_process_group("gloo")
wrapped = DistributedDataParallel(
    net, bucket_cap_mb=float(sys.argv[1]), gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
)
if "fp16" in sys.argv:
    wrapped.register_comm_hook(None, fp16_compress_hook)
on_torch.train(wrapped, optimizer)
dist.destroy_process_group()
