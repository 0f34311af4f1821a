"""A metric is its declaration: every reader shows the declared metrics, and the declarations are consistent."""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
import torch

from asyncmoe.errors import InvariantBroken
from asyncmoe.queue.group_buffer import describe
from asyncmoe.rpc.item import Item
from asyncmoe.telemetry import metric
from asyncmoe.telemetry.metric import Metric, declared
from asyncmoe.telemetry.report.plots import PLOTS, SECTIONS
from asyncmoe.telemetry.rollout_schema import Calls, Evaluation, Rollout, Scoring
from asyncmoe.telemetry.schema import Step
from asyncmoe.trainer import objective
from asyncmoe.trainer.records import combined, step_record
from tests.unit import kept_trajectory

ROOT = Path(__file__).parents[2]
KINDS: tuple[type[msgspec.Struct], ...] = (Step, Rollout, Evaluation, Scoring, Calls)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_a_record_is_declared_and_described_and_its_declaration_makes_sense(kind: type[msgspec.Struct]) -> None:
    hints = get_type_hints(kind)
    for name, hint in get_type_hints(kind, include_extras=True).items():
        (about,) = getattr(hint, "__metadata__", (None,))
        assert isinstance(about, Metric) or (isinstance(about, str) and name in ("step", "phase", "time", "name")), name
        text = about if isinstance(about, str) else about.help
        assert text.endswith("."), f"{name}: {text}"
    for name, found in declared(kind).items():
        assert bool(found.key) == _is_mapping(hints[name]), f"{name}: a mapping needs a key, and only a mapping"
        assert not (found.word and found.key), f"{name}: the terminal shows plain numbers"
        assert found.source is None or kind is Rollout, f"{name}: only rollout records are copied"


def test_the_page_on_metrics_is_what_is_declared() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "generate_metrics.py"))["generate"]()
    assert (ROOT / "docs" / "metrics.md").read_text() == page, "run: make docs"


def _is_mapping(hint: Any) -> bool:
    return any(get_origin(option) is Mapping for option in (hint, *get_args(hint)))


def test_the_figures_of_the_report_are_of_metrics_that_are_alike() -> None:
    for plot in PLOTS:
        of_kind, hints = declared(plot.kind), get_type_hints(plot.kind)
        metrics = [of_kind[field] for field in plot.curves]
        assert plot.section in SECTIONS
        assert {one.unit for one in metrics} | ({of_kind[plot.error].unit} if plot.error else set()) == {metrics[0].unit} != {""}, plot
        from_numbers = all("Mapping[int" in str(hints[field]) or "float, int" in str(hints[field]) for field in plot.curves)
        assert plot.heat is None or from_numbers, plot
        assert len(metrics) == 1 or all(plot.curves.values()), plot
    named = [(plot.kind, field) for plot in PLOTS for field in plot.curves]
    assert len(named) == len(set(named)), "each metric is drawn once"


def test_figures_of_the_objective_are_recorded() -> None:
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in objective.SUMS.items()}
    figures = objective.metrics(sums)
    assert set(combined([figures, figures])) == set(figures) <= set(declared(Step))


def recorded(items: Sequence[Item]) -> Step:
    """The record of a step that was trained on a batch."""
    numbers = {"loss": 0.5, "grad_norm": 1.0, "lr": 0.1, "rows": 23, "tokens": 15, "entropy": 0.1, "refused": False}
    learned = SimpleNamespace(updates=[SimpleNamespace(**numbers, routing_mismatch={}, figures={})], anomalies={})
    leased = SimpleNamespace(items=items, queue_depth=1, dropped={}, lineage=0)
    stood: Any = SimpleNamespace(seconds=0.0, waited=0.0)
    return step_record(1, leased, "rl", learned, None, 0.0, (0.0, 0.0, 1.0, 2.0), stood)  # type: ignore[arg-type]


def test_lengths_and_truncation_of_a_batch_are_recorded() -> None:
    """Sampled tokens of trajectory n: n - 2 of n; the first of four ended at its limit."""
    made = [kept_trajectory.trajectory(length, length)[0] for length in (3, 4, 6, 10)]
    record = recorded([describe(replace(one, finish="length" if number == 0 else "stop")) for number, one in enumerate(made)])
    assert record.rewards == {one.reward: 4 for one in made[:1]}
    assert record.truncated_fraction == 0.25
    assert record.response_tokens_quantiles == pytest.approx({"0.1": 1.3, "0.5": 3.0, "0.9": 6.8, "1.0": 8.0})  # linear, by hand


def test_figures_of_several_updates_become_one() -> None:
    one = {"ess": 0.5, "ages": {0: 3}, "logprob_diff_max_same_version": 0.1, "rejected_by_rule": {"veto": 0.2}, "kl_reference": None}
    other = {"ess": 1.0, "ages": {0: 1, 2: 4}, "logprob_diff_max_same_version": 7.0, "rejected_by_rule": {}, "kl_reference": None}
    assert combined([one, other]) == {
        "ess": 0.75,
        "ages": {0: 4, 2: 4},
        "logprob_diff_max_same_version": 0.1,  # afterwards the trainer's weights are not the engines' any more
        "rejected_by_rule": {"veto": 0.1},
        "kl_reference": None,
    }
    assert combined([{}, {}]) == {}
    with pytest.raises(InvariantBroken, match=r"figures without a declaration: surprize; declare them in asyncmoe/telemetry/schema\.py"):
        combined([{"surprize": 1.0}])


def test_numbers_of_nested_records_have_their_own_help() -> None:
    record = Rollout(time=1.0, scoring={"teacher": Scoring(failed={"a": 2, "b": 1})}, dropped={"stale": 4})
    found = {(number.name, number.label, number.key): (number.value, number.metric.help) for number in metric.numbers(record)}
    assert found["scoring_failed", "who", "teacher"] == (3.0, "Failed samples by reason.")
    assert found["dropped", "reason", "stale"][0] == 4.0
    assert found["started", None, None][0] == 0.0
    assert "time" not in {name for name, _, _ in found}
