"""Every YAML in the repository can be started: it loads, suits its model, plans, fits, and its comments are right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncmoe import models
from asyncmoe.config import Config, load
from asyncmoe.models import EngineParallel
from asyncmoe.plan import budget, traffic

REPOSITORY = Path(__file__).parents[2]
YAMLS = sorted(
    path.relative_to(REPOSITORY)
    for folder in ("examples", "slurm")
    for path in (REPOSITORY / folder).rglob("*.yaml")
    if path.name != "plant.yaml"
)
GPUS = 8
"""Of a node."""
LONG = {"qwen3-235b-a22b-lora.yaml"}
"""Whose plans take seconds, and are those of another model that is planned for anyway."""


def configured(path: Path) -> tuple[Config, Mapping[str, Any]]:
    """A configuration, and its model's. One that a YAML's head says how to make is the demo's."""
    config = load(REPOSITORY / path)
    shipped = REPOSITORY / "examples" / "cluster" / "models" / f"{config.model.path.name}.json"
    if config.model.path == Path("runs/models/base"):
        return config, budget.hf_of(load(REPOSITORY / "examples" / "demo.yaml"))
    return config, budget.hf_of(config, shipped if config.model.make is None else None)


@pytest.mark.parametrize("path", YAMLS, ids=str)
def test_it_suits_its_model_its_nodes_are_equally_full_and_its_comments_say_what_it_holds(path: Path) -> None:
    text = (REPOSITORY / path).read_text()
    config, hf = configured(path)
    models.check(config, hf)
    ((gpu_gb, where),) = re.findall(r"^# memory: trainer \S+ GB, engine \S+ GB of ([\d.]+)( on CPU| in turn)?$", text, re.MULTILINE)
    cpu = where == " on CPU"
    found = budget.of_run(config, hf, float(gpu_gb), cpu)
    assert found.line in text.splitlines()
    assert found.refusals == ()
    if cpu:
        assert budget.for_cpu(config) or config.model.path in (Path("runs/models/base"), Path("runs/models/smollm2"))
    ranks, over = divmod(config.trainer.ranks, config.cluster.trainer_nodes)
    engines, left = divmod(config.engines.count, config.cluster.engine_nodes)
    assert (over, left) == (0, 0)
    if not budget.for_cpu(config) and path.parent.name == "cluster":
        assert ranks == GPUS
        assert engines * config.engines.tp == GPUS
    if path.parent.name == "one-node":
        assert f"asyncmoe run {path}\n" in text
        assert f"--nodes=1 --gpus-per-node={ranks if config.in_turn else GPUS} " in text
        assert f"with {ranks} H100" in text if config.in_turn else f"{ranks} train, {GPUS - ranks} generate" in text
        assert engines * config.engines.tp == (ranks if config.in_turn else GPUS - ranks)


@pytest.mark.parametrize("path", [pytest.param(p, marks=pytest.mark.thorough) if p.name in LONG else p for p in YAMLS], ids=str)
def test_its_weights_can_be_moved(path: Path) -> None:
    """Every engine gets all of the model or the adapter."""
    config, hf = configured(path)
    found = traffic.foresee(
        hf,
        models.trainer_parallel(config),
        EngineParallel(config.engines.tp, config.engines.ep),
        config.engines.count,
        dtype=models.engine_dtype(hf, config.engines),
        adapter=budget.serving(config, hf).adapter,
    )
    assert found.wire >= config.engines.count * found.model_bytes
