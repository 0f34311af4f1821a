"""The engine's records of each token reach the row that needs them."""

from __future__ import annotations

import numpy as np
import pytest
from kept_trajectory import ROUTING, trajectory

from asyncmoe.errors import InvariantBroken
from asyncmoe.trainer.data.batch import MicroBatch, pack
from asyncmoe.trainer.data.schedule import BatchGrid
from asyncmoe.trajectory import Routing, Trajectory, decode, encode


def packed(trajectories: list[Trajectory], routing: Routing | None) -> MicroBatch:
    known = dict(enumerate(trajectories))
    nothing = np.zeros(len(trajectories))
    return pack(known, list(known), advantages=nothing, weights=nothing, grid=BatchGrid(8), packed=True, routing=routing)


@pytest.mark.parametrize("layers", [(1, 2, 3), (1, 3)])  # the second: a stage with two of the three
def test_every_row_has_its_own(monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]) -> None:
    """The digests of routes are checked when a trajectory is decoded, not each time it is packed."""
    made = [trajectory(7, 1), trajectory(4, 2)]
    decoded = [decode(encode(one)) for one, _, _ in made]
    monkeypatch.setattr("asyncmoe.trajectory.routes.check_routes", None)
    micro = packed(decoded, Routing(4, layers, 2, 300))
    assert micro.experts.layers == layers
    assert micro.experts.ids.shape == (len(layers), 16, 2)
    assert micro.experts.known.tolist() == [*[True] * 6, False, *[True] * 3, False, *[False] * 5]
    np.testing.assert_array_equal(micro.experts.ids[:, :6].numpy(), made[0][1][:, layers].transpose(1, 0, 2))
    np.testing.assert_array_equal(micro.experts.ids[:, 7:10].numpy(), made[1][1][:, layers].transpose(1, 0, 2))
    for row in (6, 10, 15):  # the load of rows without any is spread
        assert (micro.experts.ids[:, row].numpy() == [row * 2 % 300, (row * 2 + 1) % 300]).all()

    got: list[list[int]] = [[] for _ in range(16)]
    for row, token in zip(micro.support.rows.tolist(), micro.support.ids.tolist(), strict=True):
        got[row].append(token)
    assert got == [*made[0][2][1:], [], *made[1][2][1:], [], *[[]] * 5]
    assert micro.support.here.tolist() == [bool(row) for row in got]
    assert all(int(micro.targets[row]) in ids for row, ids in enumerate(got) if ids)


def test_filler_has_experts_too_and_nothing_recorded_leaves_none() -> None:
    filler = packed([], ROUTING)
    assert filler.experts.ids.shape == (3, 8, 2)
    assert not filler.experts.known.any()
    assert filler.support is None
    assert packed([trajectory(5, 1)[0]], None).experts is None


def test_routes_that_are_missing_or_of_other_layers_stop_the_run() -> None:
    made = trajectory(5, 1)[0]
    with pytest.raises(InvariantBroken, match="routes of g1: got layers"):
        packed([made], Routing(4, (0, 1), 2, 300))
    with pytest.raises(InvariantBroken, match="routes of g1: got layers"):
        packed([made], Routing(4, (1, 2), 3, 300))
    without = trajectory(5, 2)[0]
    object.__setattr__(without, "routes", None)
    with pytest.raises(InvariantBroken, match="g2 has no routes"):
        packed([without], ROUTING)
