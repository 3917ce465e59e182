"""The original: ChainerMN 7.8.1 on numpy and MPI, with the only communicator it has for CPUs.

`flat` and `non_cuda_aware` pack gradients with CuPy, `pure_nccl` needs NCCL, and double buffering needs `pure_nccl`.
"""

from __future__ import annotations

import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import task
import turns
from mpi4py import MPI

warnings.simplefilter("ignore")
chainer.disable_experimental_feature_warning = True
chainer.set_debug(False)
chainer.global_config.type_check = False
chainer.global_config.use_ideep = "never"  # iDeep has no build for this Python

rank = MPI.COMM_WORLD.rank
arrays = task.weights()
net = chainer.Sequential()
for weight, bias in zip(arrays[::2], arrays[1::2], strict=True):
    net.append(L.Linear(weight.shape[1], weight.shape[0], initialW=weight, initial_bias=bias))
    net.append(F.relu)
net.pop()
model = L.Classifier(net)
model.compute_accuracy = False
adam = chainer.optimizers.Adam(alpha=task.LEARNING_RATE)
optimizer = chainermn.create_multi_node_optimizer(adam, chainermn.create_communicator("naive"), zero_fill=False)
optimizer.setup(model)
inputs, target = task.samples(rank)
target = target.astype("int32")  # as Chainer's losses have it


def step() -> None:
    optimizer.update(model, inputs, target)


turns.take_turns(
    rank, step, loss=lambda _: float(model.loss.array), parameters=lambda: [each.array for each in model.params()]
)
