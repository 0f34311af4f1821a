"""Compares the checksums of an engine's weights with those the trainer expects (`sync.verify_every`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncmoe.errors import Disagreement, WeightSyncError

Checksums = Sequence[Mapping[str, str]]
_NAMED = 8
"""Maximum number of differing parameters that an error names; the rest are counted."""


def compare(expected: Checksums, found: Checksums) -> None:
    """Raise if an engine's ranks do not have the expected values; names without an expected checksum (buffers) are not compared.

    Raises:
        Disagreement: names the parameters.
        WeightSyncError: the engine has another number of ranks.
    """
    if len(expected) != len(found):
        raise WeightSyncError(f"checksums: got {len(found)} ranks, expected {len(expected)}")
    wrong = [
        f"{name} of rank {rank}"
        for rank, (ours, theirs) in enumerate(zip(expected, found, strict=True))
        for name, checksum in ours.items()
        if theirs.get(name) != checksum
    ]
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise Disagreement(f"checksums differ: {', '.join(wrong[:_NAMED])}{more}")
