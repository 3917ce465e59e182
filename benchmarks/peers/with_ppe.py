"""pytorch-pfn-extras: its own DDP over Gloo, which exchanges all gradients in one message after the backward pass.

What its buffers and the use of parameters differ in between ranks is not looked for: there are no buffers, and every
parameter is used.
"""

from __future__ import annotations

import on_torch
import torch.distributed as dist
from pytorch_pfn_extras.nn.parallel import DistributedDataParallel

net, optimizer = on_torch.build()
dist.init_process_group("gloo")
wrapped = DistributedDataParallel(net, broadcast_buffers=False, negotiate_grads=False)
on_torch.train(wrapped, optimizer)
dist.destroy_process_group()
