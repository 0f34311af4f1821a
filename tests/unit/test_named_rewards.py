"""Metrics beside the reward, from a finished response to the advantage, the step's record, an evaluation's and a reader's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.queue.group_buffer import describe
from asyncmoe.rollout.evaluation import measure
from asyncmoe.rollout.workers.worker import summed_up
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.worker_messages import Made
from asyncmoe.telemetry.live import line
from asyncmoe.telemetry.measured import means
from asyncmoe.telemetry.summary import evaluated
from asyncmoe.trainer import objective
from asyncmoe.trainer.data.credit import outcome_advantages
from asyncmoe.trainer.objective import Responses
from tests.unit import kept_trajectory
from tests.unit.test_telemetry_metric import recorded

OWN = "tests.unit.plugin_functions"
Named = Mapping[str, float]


def item(episode: int, metrics: Named, group: int = 0, reward: float = 0.0, branch: int = 0) -> Item:
    return Item(f"g{group}.e{episode}.b{branch}", group, episode, 0, 10, 3, reward, 4, 5, branch=branch, metrics=metrics)


def test_they_go_with_the_response_to_the_trainer_and_to_an_evaluation() -> None:
    made, _, _ = kept_trajectory.trajectory(6, 1)
    made.metrics["format"] = 0.5
    assert describe(made).metrics == summed_up(made).metrics == {"format": 0.5}


# ---------------------------------------------------------------- advantages

ITEMS = [
    item(0, {"format": 1.0, "words": 30.0}),
    item(1, {"format": 0.0}),
    item(1, {"format": 1.0}, branch=1),
    item(2, {"format": 1.0}, group=1),
    item(3, {"format": 0.0, "rare": 2.0}, group=1),
]
"""Four trees; the second has two paths."""


def test_an_advantage_of_ones_own_gets_columns_with_nan_where_a_response_has_none() -> None:
    section = ObjectiveSection(advantage=f"{OWN}:of_metrics")
    got, reported = outcome_advantages(ITEMS, section, objective.load(section))
    assert got.tolist() == [1.0, 0.5, 0.5, 1.0, 0.0]  # of trees: the mean over paths
    assert reported == {"advantage/words": 30.0, "advantage/rare": 2.0, "advantage/other": 0.0}


def test_columns_are_read_only_and_complete() -> None:
    counts = {key: [1, 1] for key in ("groups", "sampled", "tokens", "oldest_versions", "newest_versions")}
    made = Responses.of({"a": [1, np.nan]}, rewards=[1.0, 0.0], **counts)
    for column in (made.metrics["a"], made.metrics["b"]):
        assert (column.dtype, column.shape) == (np.float64, (2,))
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1.0
    assert np.isnan(made.metrics["b"]).all()
    assert list(made.metrics) == ["a"]


def of_gdpo(items: Sequence[Item], weights: Named | None = None) -> list[float]:
    options = None if weights is None else {"weights": dict(weights)}
    return outcome_advantages(items, ObjectiveSection(advantage="gdpo", advantage_options=options))[0].tolist()


def test_gdpo_sums_each_metric_or_those_with_a_weight() -> None:
    groups = [0, 0, 1, 1]
    items = [
        item(i, {"a": a, "b": b, "length": 9.0 * i}, g) for i, (a, b, g) in enumerate(zip([1, 0, 1, 0], [1, 0, 0, 1], groups, strict=True))
    ]
    columns = {name: np.array([one.metrics[name] for one in items]) for name in ("a", "b", "length")}
    all_ = objective.group_advantages([0] * 4, groups, "gdpo", (), [(1.0, column) for column in columns.values()])
    two = objective.group_advantages([0] * 4, groups, "gdpo", (), [(2.0, columns["a"]), (-1.0, columns["b"])])
    assert of_gdpo(items) == all_.tolist()
    assert of_gdpo(items, {"b": -1.0, "a": 2.0, "absent here": 1.0}) == two.tolist()
    bare = [item(i, {}, 0, reward) for i, reward in enumerate([1.0, 0.0, 0.0])]
    assert of_gdpo(bare) == objective.group_advantages([1.0, 0.0, 0.0], [0] * 3, "gdpo").tolist()


def test_gdpo_trains_nothing_on_a_batch_without_the_metrics_that_have_a_weight() -> None:
    """The policy may answer so that no response has one."""
    assert of_gdpo(ITEMS, {"brief": 1.0}) == [0.0] * len(ITEMS)


@pytest.mark.parametrize(
    "options", [{}, {"weights": {}}, {"weights": [1.0]}, {"weights": {"a": "1"}}, {"weights": {"a": float("nan")}}, {"names": ["a"]}]
)
def test_gdpo_takes_weights_only(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"objective\.advantage_options"):
        ObjectiveSection(advantage="gdpo", advantage_options=options)


# ---------------------------------------------------------------- records


def test_means_are_over_those_that_have_the_name() -> None:
    every = [{"a": 1.0, "b": 5.0}, {"a": 2.0}, {}]
    assert means(every) == {"a": 1.5, "b": 5.0}
    assert means(every, 1) == {"a": 1.5}
    assert means([]) == {}


def test_a_step_records_the_means_over_responses() -> None:
    found = recorded(ITEMS)
    assert found.metrics == {"format": (1.0 + 0.5 + 1.0 + 0.0) / 4, "rare": 2.0, "words": 30.0}
    assert line(found, 0, 2).endswith("format 0.625  rare 2  words 30")
    assert recorded([item(0, {})]).metrics is None
    many = [item(i, {"all": 1.0, **{f"of{i}.{n}": 0.0 for n in range(60)}}) for i in range(9)]
    assert len(recorded(many).metrics or {}) == 64
    assert "all" in (recorded(many).metrics or {})


def test_an_evaluation_records_means_over_questions() -> None:
    def made(metrics: Named, agent: int = 0) -> Made:
        return Made(agent, 1.0, 1, 5, 5, metrics=metrics)

    outcomes = [
        (0, (made({"a": 1.0}),)),
        (0, (made({"a": 0.0, "b": 4.0}),)),
        (1, (made({"a": 1.0}), made({"a": 0.0}, agent=1))),
        (2, (made({}),)),
    ]
    found = measure(5, outcomes, 1.0, 0, name="math", samples=2)
    assert found.metrics == {"a": 0.5, "b": 4.0}
    assert "a 0.5   b 4" in evaluated(found)
    assert measure(5, outcomes[3:], 1.0, 0).metrics == {}
