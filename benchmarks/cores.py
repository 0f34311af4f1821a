"""Which cores of this machine are the engines' and which the trainer's: two pools of hardware that take nothing from each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import psutil


@dataclass(frozen=True)
class Cores:
    """Halves of the cores we may use; on a machine of one core both are that one.

    Attributes:
        engines: of the engines and of the controller, which is where their requests come from.
        trainer: of all trainer ranks.
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
        """This thread, and the processes it starts meanwhile, are on the engines' cores."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.engines)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def place_trainer(self, run: int) -> int:
        """Put all trainer processes of the `asyncmoe run` of this process number on the trainer's cores; returns how many there are."""
        found = 0
        for child in psutil.Process(run).children(recursive=True):
            try:
                if "asyncmoe.trainer" in child.cmdline():
                    for thread in child.threads():
                        os.sched_setaffinity(thread.id, self.trainer)
                    found += 1
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue  # it ended while we looked
        return found
