"""What rollout workers need of the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncmoe.config.engines import EngineSection
from asyncmoe.config.log import LogSection
from asyncmoe.config.rollout import RolloutSection


def refused(rollout: RolloutSection, log: LogSection, engines: EngineSection, slots: bool) -> Iterator[tuple[str, Any, str]]:
    """Yield keys with values that rollout workers cannot work with, and what is expected of each.

    Args:
        slots: whether every version is an adapter of its own, which the controller's pool loads.
    """
    if not rollout.workers:
        return
    because = f"because rollout.workers is {rollout.workers}"
    if not log.enabled:
        yield "log.enabled", False, f"true {because}: what a lost worker held is read from the log"
    if slots:
        yield "sync.method", "broadcast", f"reshard {because} and train is lora"
    if rollout.max_concurrent < rollout.workers:
        yield "rollout.max_concurrent", rollout.max_concurrent, f"at least {rollout.workers} {because}: each worker has a request in flight"
    if not engines.join and rollout.workers > engines.count:
        yield "rollout.workers", rollout.workers, f"at most engines.count = {engines.count}: each worker has engines of its own"
