"""Hugging Face Accelerate: DDP over Gloo, given the same settings as DDP alone.

with_accelerate.py BUCKETS_MIB
"""

from __future__ import annotations

import sys

import on_torch
from accelerate import Accelerator, DistributedDataParallelKwargs

settings = DistributedDataParallelKwargs(
    bucket_cap_mb=int(sys.argv[1]), gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
)
accelerator = Accelerator(cpu=True, kwargs_handlers=[settings])
net, optimizer = accelerator.prepare(*on_torch.build())
on_torch.train(net, optimizer, accelerator.backward)
accelerator.end_training()
