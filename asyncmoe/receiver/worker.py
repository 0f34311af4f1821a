"""The receiver: a thread of an SGLang worker that stages new weights, and the commit that makes them the parameters."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from asyncmoe.errors import AsyncmoeError, InvariantBroken, WaitTimeout
from asyncmoe.receiver import command, handshake, route
from asyncmoe.receiver.command import Commit, Join
from asyncmoe.receiver.meeting import Header, Moved, Outcome, Ready, Store, Terms
from asyncmoe.receiver.transport import GroupTransport
from asyncmoe.reshard import Plan, exchange

log = logging.getLogger(__name__)
_MEET_S = 60.0
_IDLE_S = 3600.0
_FIRST = 1

_receivers: weakref.WeakKeyDictionary[torch.nn.Module, Receiver] = weakref.WeakKeyDictionary()


def obey(model: torch.nn.Module, text: str) -> None:
    """Carry out a command, in the worker's main thread.

    Raises:
        InvariantBroken: a commit of something that is not staged; the worker must not go on.
        ProtocolError: not a command.
    """
    receiver = _receivers.get(model)
    match command.parse(text):
        case Join() as join:
            if receiver is not None:
                receiver.leave()
            _receivers[model] = Receiver(model, join)
            _receivers[model].start()
        case Commit() as commit:
            if receiver is None:
                raise InvariantBroken(f"version {commit.version} was committed in a worker that joined no sender")
            receiver.commit(commit.version, commit.digest)


@dataclass(frozen=True)
class _Staged:
    version: int
    digest: str
    tensors: dict[str, torch.Tensor]


class Receiver(threading.Thread):
    """Stages one update after the other until the sender is gone.

    Args:
        model: the worker's; its parameters are read at the start and written by `commit` only.
    """

    def __init__(self, model: torch.nn.Module, join: Join) -> None:
        super().__init__(name="weights", daemon=True)
        self._model, self._join = model, join
        self._ready = Ready(parameters=handshake.parameters_of(model), places=handshake.places())
        self._lock = threading.Lock()
        self._staged: _Staged | None = None
        self._spare: dict[str, torch.Tensor] = {}
        self._left = threading.Event()

    def run(self) -> None:
        """Meet the sender, then stage what it sends."""
        try:
            store = Store(self._join.group, self._join.rank, self._join.host, self._join.port, _MEET_S)
            terms = store.get("terms", Terms, _MEET_S)
            plans = self._plan(store, terms)
            outcome = store.get("verdict", Outcome, terms.timeout_s)
            if not outcome.failure:
                self._serve(store, terms, plans)
        except AsyncmoeError as error:
            log.warning("the weight receiver of rank %d ends: %s", self._join.rank, error)

    def leave(self) -> None:
        """Stage nothing more."""
        self._left.set()

    def commit(self, version: int, digest: str) -> None:
        """Make what is staged the parameters. In the worker's main thread, between forward passes.

        Raises:
            InvariantBroken: something else, or nothing, is staged.
        """
        with self._lock:
            staged, self._staged = self._staged, None
            if staged is None or (staged.version, staged.digest) != (version, digest):
                what = "nothing" if staged is None else f"version {staged.version} with digest {staged.digest}"
                raise InvariantBroken(f"rank {self._join.rank}: staged is {what}, to be committed version {version} with digest {digest}")
            self._spare = replace(self._model, staged.tensors)
        refresh(self._model)

    def _plan(self, store: Store, terms: Terms) -> list[Plan]:
        key = f"ready/{self._join.rank}"
        try:
            plans = route.route(terms)
        except AsyncmoeError as error:
            store.put(key, Ready(failure=f"rank {self._join.rank}: {error}"))
            raise
        store.put(key, Ready("", route.digest(plans), self._ready.parameters, self._ready.places))
        return plans

    def _serve(self, store: Store, terms: Terms, plans: Sequence[Plan]) -> None:
        number, epoch = _FIRST, 0
        group: dist.ProcessGroup | None = None
        while not self._left.is_set():
            try:
                header = store.get(f"{number}/header", Header, _IDLE_S)
            except WaitTimeout:
                continue
            if store.has(f"{number + 1}/header"):
                number += 1  # this process slept; nobody waits for the one before any more
                continue
            if not header.failure:
                self._drop()
                if header.epoch != epoch:
                    group = None  # the old one ends first, and with it what its ranks still wait for
                group = self._update(store, terms, plans, number, header, group)
                epoch = header.epoch
            number += 1

    def _update(
        self, store: Store, terms: Terms, plans: Sequence[Plan], number: int, header: Header, group: dist.ProcessGroup | None
    ) -> dist.ProcessGroup | None:
        """Stage one update; the group, or None when it cannot be used any more."""
        key = f"{number}/staged/{self._join.rank}"
        until = time.monotonic() + terms.timeout_s
        try:
            if group is None:
                group = store.connect(terms.world, header.epoch, terms.timeout_s)
            transport = GroupTransport(group, until)
            tensors = self._staging(terms)
            for plan in plans:
                exchange(plan, transport, None, tensors, timeout_s=terms.timeout_s, threads=1)
        except AsyncmoeError as error:
            store.fail(number, key, Moved(failure=str(error)))
            return None  # its end tells those that wait for us
        with self._lock:
            self._staged, self._spare = _Staged(header.version, whole_digest(transport.digests), tensors), {}
        store.put(key, Moved(digests=transport.digests))
        return group

    def _drop(self) -> None:
        """What is staged will not be committed; its memory can be written again."""
        with self._lock:
            staged, self._staged = self._staged, None
            if staged is not None:
                self._spare = staged.tensors

    def _staging(self, terms: Terms) -> dict[str, torch.Tensor]:
        """Memory for all parameters: once they have been swapped, what they were in before."""
        with self._lock:
            if not self._spare:
                dtype = getattr(torch, terms.dtype)
                self._spare = {name: torch.empty(p.shape, dtype=dtype) for name, p in self._ready.parameters.items()}
            return self._spare


def whole_digest(digests: Mapping[int, str]) -> str:
    """One digest of the messages from all ranks."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


def replace(model: torch.nn.Module, staged: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make `staged` the model's parameters; returns memory for as many.

    A parameter whose storage something else in the model views, or that is on a device where a captured graph may hold its address,
    is copied into; the storage of any other is swapped.
    """
    free: dict[str, torch.Tensor] = {}
    viewed = _viewed(model)
    for name, parameter in model.named_parameters():
        new, old = staged[name], parameter.data
        if old.device.type == "cpu" and old.untyped_storage().data_ptr() not in viewed:
            parameter.data, free[name] = new, old
        else:
            old.copy_(new)
            free[name] = new
    return free


def refresh(model: torch.nn.Module) -> None:
    """Bring what SGLang derives from parameters up to date, as its own loaders do after writing them.

    `end_weight_update` leaves out `post_load_weights` after a call like ours (sglang 0.5.23, scheduler_components/weight_updater.py),
    and only a norm's own loader refreshes its `gemma_weight` (layers/layernorm.py).
    """
    if (post_load := getattr(model, "post_load_weights", None)) is not None:
        post_load()
    for module in model.modules():
        if (refresh_norm := getattr(module, "refresh_gemma_weight", None)) is not None:
            refresh_norm()


def _viewed(model: torch.nn.Module) -> set[int]:
    """Storages of tensors that modules hold besides their parameters."""
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in (*held, *model.buffers()) if tensor.device.type != "meta"}
