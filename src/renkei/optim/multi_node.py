"""The optimizer that steps with the mean gradient of all ranks: where gradients and a communicator meet."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from renkei.communicators.communicator import Communicator
from renkei.errors import MismatchError, UsageError
from renkei.gradients.buckets import fingerprint
from renkei.gradients.compression.formats import Fp32, WireFormat, read_format
from renkei.gradients.compression.names import AUTO
from renkei.gradients.readiness import Habits
from renkei.gradients.reducer import Reducer
from renkei.optim import auto_wire, saved_gradients
from renkei.optim.auto_wire import AutoWire
from renkei.optim.equal_batches import check_equal_batches
from renkei.optim.initial_state import check_chosen_alike, start_alike
from renkei.optim.look_ahead import LookAhead, watch_forward
from renkei.optim.structure import names_of, parameters_of, structure_of
from renkei.optim.wire_choice import Choice, Way
from renkei.optim.wrapper import OptimizerWrapper

# why ranks meet, in numbers that no exchange of gradients has
_TO_REORDER = 0
_TO_RESTRUCTURE = -1
_TO_CHOOSE = -2


class MultiNodeOptimizer(OptimizerWrapper):
    """Wraps an optimizer so that it steps with gradients averaged over the ranks of `comm`.

    On creation, rank 0's parameters, buffers and optimizer state reach every rank, after a check that all ranks have
    built the same; a rank that has not makes every rank raise `MismatchError`.

    `zero_grad` begins a step. Gradients are exchanged while ``loss.backward()`` runs and are the mean over ranks when
    it returns, so clipping and `GradScaler` need no change. `step` ends it: gradients that come between `step` and
    `zero_grad` are not this optimizer's business, so several optimizers can share parts of a model (a GAN).

    With ``loss.backward()`` all ranks count equally. Where they hold different numbers of samples, call
    ``optimizer.backward(loss, weight=number_of_samples)``: the result is the gradient that one process would have on
    all samples together.

    Args:
        inner: the optimizer to wrap; create LR schedulers for the wrapper, not for it.
        comm: the ranks; the optimizer makes a group of its own of them, so its messages meet no others.
        model: the module whose parameters are optimized: gives names for messages, and buffers to start from.
        wire: how 32-bit gradients travel: "fp32", "bf16", "fp16", "int8", "power_sgd", or one of the classes of
            `renkei.gradients.compression.formats`; the same on all ranks. With "auto" the first ten steps go in fp32
            and are timed; then ranks choose by that and by what `renkei bench all-reduce --save` has measured, and
            rank 0 says why (see `renkei.optim.wire_choice`). Where nothing is saved, that is fp32.
        grad_scaler: what scales the losses, if anything. Needed where error is fed back ("int8", "power_sgd"), for what
            is owed of a step before has that step's scale, and for double buffering, where the gradients have.
        double_buffering: whether each step is made with the gradients of the step before, whose exchange so has a whole
            step's time; see `flush`. The same on all ranks. None leaves it to ``wire="auto"``, and else is False.
        look_ahead: whether gradients that will be late are computed where this rank's own last ones would lead, which
            makes up for most of it (see `renkei.optim.look_ahead`); that is from the beginning of ``model(...)`` to
            `step`, in between which parameters so differ by rank. Takes the memory of another copy of parameters,
            gradients and state; needs `model`. What is done to gradients before a step, as clipping, isn't foreseen.

    Attributes:
        inner: the wrapped optimizer.
    """

    def __init__(
        self,
        inner: Optimizer,
        comm: Communicator,
        *,
        model: nn.Module | None = None,
        wire: str | WireFormat = "fp32",
        grad_scaler: torch.amp.GradScaler | None = None,
        double_buffering: bool | None = None,
        look_ahead: bool = True,
    ) -> None:
        if not isinstance(inner, Optimizer):
            raise UsageError(f"inner must be a torch.optim.Optimizer, but is a {type(inner).__name__}")
        super().__init__(inner)
        self._users_comm = comm
        self._model = model
        self._wire_format = Fp32() if wire == AUTO else read_format(wire)
        self._grad_scaler = grad_scaler
        self._double_buffering, self._look_ahead = bool(double_buffering), look_ahead and model is not None
        self._comm = comm.duplicate()
        self._waited_before = 0.0
        wanted = wire if wire == AUTO else self._wire_format
        chosen = f"wire={wanted}, double_buffering={double_buffering}, look_ahead={look_ahead}"
        check_chosen_alike(self._comm, chosen)
        self._auto = AutoWire(self._comm, double_buffering) if wire == AUTO else None
        self._ahead = LookAhead(inner)
        self._hooks = [watch_forward(model, self._go_ahead)] if model is not None and look_ahead else []
        self._start_alike()
        self._reducer = self._plan(None)

    # -- one step -------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; those that come from now on are exchanged."""
        self._reducer.arm()
        self.inner.zero_grad(set_to_none)
        if self._structure != structure_of(self.inner):
            self._restructure()
        elif self._auto is not None and self._auto.is_due:
            self._reducer.meet(why=_TO_CHOOSE)
            floats = (each.numel() for each in self._reducer.parameters if each.dtype == torch.float32)
            self._go(self._auto.decide(sum(floats)))
        elif self._reducer.has_learnt:
            self._reducer.meet(why=_TO_REORDER)
            self._replan(self._reducer.learnt())

    def backward(self, loss: Tensor | None, weight: float | None = None, **kwargs: Any) -> None:
        """Compute and exchange the gradients of `loss`; None on a rank that has no samples.

        Args:
            loss: a mean over samples, tokens or the like.
            weight: over how many. Ranks then count in proportion, and so do the backward passes of one step made
                inside `accumulate`. Without it, ranks count equally.
            kwargs: for ``loss.backward``.
        """
        if loss is None:
            weight = 0.0
        if weight is not None:
            weight = float(weight)
            if not (math.isfinite(weight) and weight >= 0):
                raise UsageError(f"rank {self._comm.rank}: weight is {weight}, but must be a finite number, at least 0")
        with self._reducer.backward_of(weight):
            if loss is not None and weight != 0:
                (loss if weight is None else loss * weight).backward(**kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside add up on this rank; the first one outside, or `step`, exchanges the sum."""
        before, self._reducer.accumulating = self._reducer.accumulating, True
        try:
            yield
        finally:
            self._reducer.accumulating = before

    def synchronize(self, weight: float | None = None) -> None:
        """Make sure that ``.grad`` holds the mean over ranks, unless inside `accumulate`.

        Only needed on a rank that has not run a backward pass in this step and looks at gradients before `step`, and
        where gradients come from no backward pass at all.

        Args:
            weight: how much what ``.grad`` holds counts in the mean, as in `backward`, where no backward pass did that.
        """
        if weight is not None:
            for parameter in parameters_of(self.inner):
                if parameter.grad is not None:
                    parameter.grad.mul_(weight)
            with self._reducer.backward_of(weight):
                pass
        elif not self._reducer.accumulating:
            self._reducer.complete()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the mean gradients. What a closure returns is averaged too, so that all ranks search alike."""
        if closure is None:
            self._complete()
            # the first of those that are late has nothing to step with
            result: Any = None if self._reducer.turns.has_nothing_to_step_with else self.inner.step()
        elif self._double_buffering:
            raise UsageError(
                "step(closure) can't be combined with double_buffering: it needs gradients of its own loss"
            )
        else:
            result = self.inner.step(lambda: self._evaluate_alike(closure))
        self._reducer.disarm()
        if self._auto is not None:
            may_be_late = closure is None and self._reducer.num_exchanges == 1
            self._auto.note_step(self.seconds_waited, may_be_late=may_be_late)
        return result

    @property
    def double_buffering(self) -> bool:
        """Whether steps are made with the gradients of the step before.

        Can be set between two steps, on all ranks alike. Setting it makes a step with what is late, as `flush` does,
        and is a collective operation.
        """
        return self._double_buffering

    @double_buffering.setter
    def double_buffering(self, is_late: bool) -> None:
        self.flush()
        if self._auto is not None:
            self._auto.insist(is_late)
        if is_late != self._double_buffering:
            self._double_buffering = is_late
            self._reducer.turns.become_late() if is_late else self._reducer.turns.become_punctual()

    @property
    def chosen(self) -> Choice | None:
        """What ``wire="auto"`` has chosen, and why; None before that, and where it had nothing to choose."""
        return None if self._auto is None else self._auto.choice

    def flush(self) -> None:
        """Make a step with the gradients that none has been made with, on all ranks alike; before evaluation, say.

        Only double buffering leaves such gradients. With a `grad_scaler` they are unscaled here, and if they aren't
        finite, no step is made.

        Raises:
            UsageError: a backward pass has begun, and no step was made with it.
        """
        turns = self._reducer.turns
        self._ahead.come_back()
        if not self._reducer.is_between_steps:
            raise UsageError(
                f"rank {self._comm.rank}: flush() was called, or double_buffering set, between backward() and step(); "
                "do that between step() and the next backward pass"
            )
        if turns.take_late():
            gradients = [parameter.grad for parameter in parameters_of(self.inner) if parameter.grad is not None]
            if self._grad_scaler is None or all(bool(gradient.isfinite().all()) for gradient in gradients):
                self.inner.step()
                turns.settle()
            turns.forget()
            self.inner.zero_grad()

    def _evaluate_alike(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        weight = self._reducer.weight
        self._complete()
        mine = torch.zeros(2, dtype=torch.float64)
        if loss is not None and weight > 0:
            mine += torch.tensor([weight * float(torch.as_tensor(loss).detach()), weight], dtype=torch.float64)
        total, weights = self._comm.all_reduce(mine)
        return total / weights if weights else None

    def _go_ahead(self) -> None:
        """A forward pass begins."""
        own = self._reducer.turns.own
        there = [] if own is None else [gradient for gradient in own if gradient is not None]
        if own is None or not there:
            return
        if self._grad_scaler is None or all(bool(gradient.isfinite().all()) for gradient in there):
            self._ahead.go(self._reducer.parameters, own)

    def _complete(self) -> None:
        self._ahead.come_back()
        for parameter, name in self._untrained:
            if parameter.grad is not None:
                raise UsageError(
                    f"rank {self._comm.rank}: {name} has a gradient but did not require one when zero_grad() was "
                    "called, so it was not exchanged; change requires_grad before zero_grad()"
                )
        self._reducer.complete()

    # -- the rest of an optimizer's interface ---------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike; their values become those of rank 0."""
        self.inner.add_param_group(param_group)
        self._restructure()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, the same on every rank.

        Where error is fed back or gradients are late, also those and how they come, so that a resumed run has the same
        bits if each rank saves and loads its own.
        """
        self._ahead.come_back()
        state = self.inner.state_dict()
        if self._reducer.turns.has_state:
            state[saved_gradients.KEY] = saved_gradients.save(self._reducer, self._place())
        if self._auto is not None:
            state[auto_wire.KEY] = self._auto.state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state, on every rank alike.

        Where error is fed back or gradients are late, and with ``wire="auto"``, this is a collective operation.
        """
        self._ahead.come_back()
        ours = (saved_gradients.KEY, auto_wire.KEY)
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name not in ours})
        if self._auto is not None:
            self._reducer.turns.clear()
            self._go(self._auto.restore(state_dict.get(auto_wire.KEY)))
        if self._reducer.turns.has_state:
            self._restore(state_dict.get(saved_gradients.KEY))

    def _restore(self, saved: dict[str, Any] | None) -> None:
        """Go on from what each rank has saved; from nothing if some rank has another's state, or none."""
        saved = saved_gradients.check_own(self._comm, saved, self._place())
        self._reducer.turns.clear()
        if saved is None:
            return
        habits = saved_gradients.habits_of(saved)
        if habits is not None:
            self._replan(habits)
        self._reducer.turns.restore(saved["turns"], {at: at for at in range(len(self._reducer.names))})

    def _place(self) -> list[Any]:
        """Whose state it is."""
        how = [repr(self._wire_format), self._double_buffering, self._look_ahead]
        return [self._comm.rank, self._comm.size, *how, *self._reducer.names]

    def __repr__(self) -> str:
        return f"MultiNodeOptimizer({self.inner!r}, {self._users_comm!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeOptimizer:
        """A copy that steps the copied parameters, on the same ranks; like creation, a collective operation."""
        inner, model = copy.deepcopy((self.inner, self._model), memo)
        how = (self._wire_format, self._double_buffering) if self._auto is None else self._auto.asked
        return MultiNodeOptimizer(
            inner,
            self._users_comm,
            model=model,
            wire=how[0],
            grad_scaler=self._grad_scaler,
            double_buffering=how[1],
            look_ahead=self._look_ahead,
        )

    def __reduce__(self) -> str:
        raise UsageError("a MultiNodeOptimizer can't be pickled, for it is connected; save its state_dict()")

    @property
    def seconds_waited(self) -> float:
        """Time spent so far waiting for gradients that other ranks had not sent yet."""
        return self._waited_before + self._reducer.waited

    def inherit(self, other: MultiNodeOptimizer) -> None:
        """Owe what another optimizer of the same parameters, maybe on other ranks, owed before its last exchanges.

        Those, of which some rank may have got no result, were for nothing.
        """
        self._reducer.turns.inherit(other._reducer.turns)

    def close(self) -> None:
        """Stop exchanging; the parameters and the inner optimizer are left as they are."""
        self._ahead.come_back()
        for hook in self._hooks:
            hook.remove()
        self._reducer.close()
        self._comm.close()

    # -- structure ------------------------------------------------------------------------------------------------

    def _start_alike(self) -> None:
        start_alike(self._comm, self.inner, self._model)
        self._structure = structure_of(self.inner)

    def _plan(self, habits: Habits | None) -> Reducer:
        """A reducer for the parameters as they are now; once their habits are learnt, in rank 0's order."""
        if habits is not None:
            habits = Habits.agreed(self._comm.all_gather_object(habits))
        named = list(zip(parameters_of(self.inner), names_of(self.inner, self._model), strict=True))
        trained = [(parameter, name) for parameter, name in named if parameter.requires_grad]
        self._untrained = [(parameter, name) for parameter, name in named if not parameter.requires_grad]
        if not self._wire_format.is_exact:
            self._comm.prepare_compressed_sums()
        reducer = Reducer(
            [parameter for parameter, _ in trained],
            [name for _, name in trained],
            self._comm,
            limits=self._comm.bucket_sizes,
            habits=habits,
            before_plain=lambda: check_equal_batches(self._users_comm.shares.values()),
            wire_format=self._wire_format,
            loss_scale=None if self._grad_scaler is None else self._grad_scaler.get_scale,
            is_late=self._double_buffering,
            keeps_own=self._look_ahead,
        )
        if len(set(self._comm.all_gather_object(fingerprint(reducer.plan)))) > 1:
            raise MismatchError("ranks have planned different buckets; use the same dtypes and device types on all")
        return reducer

    def _restructure(self) -> None:
        self._ahead.come_back()
        self._reducer.meet(why=_TO_RESTRUCTURE)
        self._start_alike()
        self._replan(None)

    def _go(self, way: Way) -> None:
        """Exchange gradients in another way from now on."""
        before = self._wire_format, self._double_buffering
        self._wire_format, self._double_buffering = read_format(way.wire), way.is_late
        if before != (self._wire_format, self._double_buffering):
            self._replan(self._reducer.habits)

    def _replan(self, habits: Habits | None) -> None:
        before, self._reducer = self._reducer, self._plan(habits)
        self._reducer.take_over(before)
        self._waited_before += before.waited
        before.close()
