"""Which rollout worker uses which engine, and how many requests it may have in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Located:
    """An engine or a worker, and the machine that it is on."""

    name: str
    host: str


def assign(engines: Sequence[Located], workers: Sequence[Located], before: Mapping[str, str]) -> dict[str, str]:
    """Return the worker of each engine, by name; empty without workers.

    An engine stays with its worker, because requests in flight do not move. A new one goes to the worker of its machine with the fewest
    engines; if its machine has none, to the one with the fewest of all. A worker without an engine gets one from a worker that has two or
    more, so that no worker is idle while another has engines to spare.
    """
    if not workers:
        return {}
    alive = {worker.name for worker in workers}
    found = {engine.name: before[engine.name] for engine in engines if before.get(engine.name) in alive}
    load = Counter(found.values())
    for engine in engines:
        if engine.name not in found:
            near = [worker for worker in workers if worker.host == engine.host] or list(workers)
            found[engine.name] = min(near, key=lambda worker: (load[worker.name], worker.name)).name
            load[found[engine.name]] += 1
    for worker in sorted(workers, key=lambda worker: worker.name):
        richest = max(sorted(alive), key=lambda name: load[name])
        if load[worker.name] or load[richest] < 2:
            continue
        owned = [engine for engine in engines if found[engine.name] == richest]
        moved = next((engine for engine in owned if engine.host == worker.host), owned[-1])
        found[moved.name] = worker.name
        load[richest] -= 1
        load[worker.name] += 1
    return found


def limits(most: int, engines: Mapping[str, int]) -> dict[str, int]:
    """Return the requests that each worker may have in flight: `most` in all, in proportion to its engines, and at least one.

    Args:
        engines: number of engines by worker.
    """
    used = {name: count for name, count in sorted(engines.items()) if count}
    total = sum(used.values())
    shares = {name: most * count // total for name, count in used.items()}
    rest = most - sum(shares.values())
    by_remainder = sorted(used, key=lambda name: (-(most * used[name] % total), name))
    for name in by_remainder[:rest]:
        shares[name] += 1
    return {name: max(1, shares.get(name, 0)) for name in engines}
