"""The paths of a tree of turns: which of them are leaves, and which turns each shares with an earlier one.

A path is the list of an agent's turns from its first to its last; two paths share a turn if both have the same `Turn` object at the same
index and share all turns before it. So a turn is shared because it was forked, never because its tokens happen to be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncmoe.rollout.episodes.trajectory_builder import Turn

Turns = Sequence[Turn]


def common(one: Turns, other: Turns) -> int:
    """Return the number of turns that two paths share."""
    most = min(len(one), len(other))
    return next((n for n in range(most) if one[n] is not other[n]), most)


def leaves(paths: Sequence[Turns]) -> list[int]:
    """Return the indices of the paths that have a turn and are not a prefix of another; of equal paths, the first index."""
    found = []
    for i, path in enumerate(paths):
        longer = (j for j, other in enumerate(paths) if j != i and common(path, other) == len(path))
        if path and all(len(paths[j]) == len(path) and j > i for j in longer):
            found.append(i)
    return found


def forks(paths: Sequence[Turns]) -> list[tuple[int, int]]:
    """Return where each path leaves the earlier paths: the index of the path that shares most turns with it (the first of several), and the
    number of these turns; (0, 0) if no path shares any."""
    found = []
    for i, path in enumerate(paths):
        shared = [common(path, earlier) for earlier in paths[:i]]
        most = max(shared, default=0)
        found.append((shared.index(most), most) if most else (0, 0))
    return found
