"""Renkei as a user has it who sets nothing: on one host, shared memory."""

from __future__ import annotations

import on_torch

import renkei

net, optimizer = on_torch.build()
with renkei.create_communicator() as comm:
    on_torch.train(net, renkei.MultiNodeOptimizer(optimizer, comm, model=net))
