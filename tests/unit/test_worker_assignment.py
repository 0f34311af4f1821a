"""Which rollout worker uses which engine."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.rollout.workers.assignment import Located, assign, limits

HOSTS = st.sampled_from(["a", "b", "c"])


def located(prefix: str, hosts: list[str]) -> list[Located]:
    return [Located(f"{prefix}{n}", host) for n, host in enumerate(hosts)]


@given(st.lists(HOSTS, max_size=12), st.lists(HOSTS, max_size=5))
def test_every_engine_has_one_worker_and_no_worker_is_idle_beside_a_rich_one(engines: list[str], workers: list[str]) -> None:
    there, those = located("e", engines), located("w", workers)
    found = assign(there, those, {})
    assert set(found) == ({one.name for one in there} if those else set())
    assert set(found.values()) <= {one.name for one in those}
    load = Counter({one.name: 0 for one in those})
    load.update(found.values())
    assert not (0 in load.values() and max(load.values(), default=0) > 1)


@given(st.lists(HOSTS, min_size=1, max_size=12), st.lists(HOSTS, min_size=1, max_size=5), st.data())
def test_an_engine_stays_with_its_worker_when_others_come_and_go(engines: list[str], workers: list[str], data: st.DataObject) -> None:
    there, those = located("e", engines), located("w", workers)
    before = assign(there, those, {})
    left = data.draw(st.lists(st.sampled_from(those), min_size=1, unique=True))
    kept = data.draw(st.lists(st.sampled_from(there), unique=True))
    after = assign([*kept, Located("new", "a")], left, before)
    alive = {one.name for one in left}
    moved = [one.name for one in kept if before[one.name] in alive and after[one.name] != before[one.name]]
    # Only to workers that would have none.
    taken = [after[name] for name in moved]
    assert len(set(taken)) == len(taken)
    assert all(Counter(after.values())[worker] == 1 for worker in taken)


def test_an_engine_goes_to_the_worker_of_its_machine() -> None:
    found = assign(located("e", ["a", "b", "a", "b"]), located("w", ["b", "a"]), {})
    assert found == {"e0": "w1", "e1": "w0", "e2": "w1", "e3": "w0"}


@given(st.integers(1, 10_000), st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40), min_size=1))
def test_limits_add_up_to_the_runs_in_proportion(most: int, engines: dict[str, int]) -> None:
    found, total = limits(most, engines), sum(engines.values())
    assert set(found) == set(engines)
    assert min(found.values()) >= 1
    used = {name: found[name] for name, count in engines.items() if count}
    if total and most >= len(used) * total:
        assert sum(used.values()) == most
        assert all(abs(found[name] - most * engines[name] / total) < 1 for name in used)
