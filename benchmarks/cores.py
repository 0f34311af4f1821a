"""Divides this machine's cores between engines and trainer: two pools of hardware that do not compete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import psutil


@dataclass(frozen=True)
class Cores:
    """Halves of the available cores; with a single core, both are that core.

    Attributes:
        engines: cores of the engines and of the controller, which sends their requests.
        trainer: cores of all trainer ranks.
    """

    engines: frozenset[int]
    trainer: frozenset[int]

    @classmethod
    def halves(cls) -> Self:
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        return cls(frozenset(cores[:half] or cores), frozenset(cores[half:]))

    @contextmanager
    def as_engine(self) -> Iterator[None]:
        """Pin this thread, and processes it starts meanwhile, to the engines' cores."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.engines)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def place_trainer(self, run: int) -> int:
        """Pin all trainer processes of the `asyncmoe run` with this process id to the trainer's cores; return their number."""
        found = 0
        for child in psutil.Process(run).children(recursive=True):
            try:
                if "asyncmoe.trainer" in child.cmdline():
                    for thread in child.threads():
                        os.sched_setaffinity(thread.id, self.trainer)
                    found += 1
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue  # it has just ended
        return found
