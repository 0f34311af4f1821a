"""Bytes of tensors that exist at once, counted as torch's operations return them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations make inside the context; other tensors count only if they are `held`.

    A storage counts once, however many tensors view it, from its creation until it is freed; views of uncounted storages do not count. A
    kernel's internal allocations are not seen. On the CPU a backward pass is counted too, whatever starts it.

    Attributes:
        now: current bytes.
        peak: the most bytes that existed at once since the start, or since `restart`.
        largest: bytes of the largest storage that was created or grew inside the context.
    """

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.largest = 0
        self._sizes: dict[int, int] = {}  # of each storage seen, by the id of its Python object, which lives as long; uncounted ones: 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._see(held, counted=True)
        self.largest = 0

    def restart(self) -> None:
        """Reset the peak to the current bytes."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = tree_leaves((args, kwargs))
        self._see(given, counted=False)
        result = func(*args, **(kwargs or {}))
        self._see(tree_leaves(result), counted=True)
        self._grow(given)
        return result

    def _see(self, values: Iterable[Any], *, counted: bool) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if id(storage) not in self._sizes:
                    self._watch(storage, storage.nbytes() if counted else 0)

    def _watch(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = id(storage)

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            self.now -= self._sizes.pop(key)
            del self._watched[key]

        self._sizes[key] = nbytes
        self._watched[key] = weakref.ref(storage, freed)
        self._add(nbytes)
        self.largest = max(self.largest, nbytes)

    def _grow(self, given: Iterable[Any]) -> None:
        """Count what an operation added to counted storages that it was given: an `out` of no elements is resized."""
        for value in given:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                before = self._sizes[id(storage)]
                if before and storage.nbytes() != before:
                    self._sizes[id(storage)] = storage.nbytes()
                    self._add(storage.nbytes() - before)
                    self.largest = max(self.largest, storage.nbytes())

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)
