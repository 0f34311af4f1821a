"""Connects to the store that a run has."""

from __future__ import annotations

from asyncmoe import installed
from asyncmoe.config.queue import QueueSection
from asyncmoe.payloads.store import GroupStore


def open_store(section: QueueSection, *, patient: bool = True, writes: bool = False) -> GroupStore | None:
    """Connect to the store of a run; None: it has none. Blocks.

    Args:
        patient: wait for one that does not answer.
        writes: this process puts groups, and so may give the store memory.

    Raises:
        UserError: a package is missing, or the store cannot be reached or used.
        StorageError: it did not answer in time.
    """
    if section.payloads == "workers":
        return None
    installed.need(section.payloads, f"queue.payloads={section.payloads}")
    if section.payloads == "ray":
        from asyncmoe.payloads.in_ray import RayGroups

        return RayGroups.open(section)
    if section.payloads == "mooncake":
        from asyncmoe.payloads.in_mooncake import MooncakeGroups

        return MooncakeGroups.open(section, patient=patient, writes=writes)
    from asyncmoe.payloads.in_redis import RedisGroups

    return RedisGroups.open(section, patient=patient)


def check(section: QueueSection) -> None:
    """Refuse a store that cannot be used; stay connected to none. Blocks. Raises as `open_store`, which it has not wait."""
    if section.payloads == "ray":
        installed.need(section.payloads, f"queue.payloads={section.payloads}")
        from asyncmoe.payloads import in_ray

        in_ray.check()
    elif (store := open_store(section, patient=False)) is not None:
        store.close()
