"""Users' own losses, importance weights, advantages and model families: equal to the built-in ones they copy, refused if unsuitable."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe import models, plugins
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.engines.sglang import process as engine_process
from asyncmoe.errors import ConfigError, DataError, InvariantBroken, ProtocolError, UserError
from asyncmoe.launch import local, plugin_probe
from asyncmoe.models import MegatronParallel, families, make, qwen3_moe
from asyncmoe.platform.sglang.receiver_command import FAMILY_VARIABLE
from asyncmoe.rpc.item import Item
from asyncmoe.trainer import objective
from asyncmoe.trainer.data.credit import outcome_advantages
from asyncmoe.trainer.losses import PolicyLoss
from asyncmoe.trainer.objective import Plugins, Rows, segments
from asyncmoe.weights.protocol import EngineRanks, Terms
from asyncmoe.weights.receiver import handshake
from tests.configs import minimal
from tests.unit import doc_pages, plugin_functions
from tests.unit.model_cases import MODELS

HF = MODELS["qwen3_moe"]
OWN = "tests.unit.plugin_functions"
FILE = "tests/unit/plugin_functions.py"


def own(**names: Any) -> tuple[ObjectiveSection, Plugins]:
    section = ObjectiveSection.model_validate(names)
    return section, objective.load(section)


def rows(seed: int, versions: tuple[int, ...] = (4, 5)) -> tuple[torch.Tensor, Rows]:
    """Random rows of three sequences, on and off policy, with an own advantage each; and their log-probabilities."""
    rng = torch.Generator().manual_seed(seed)
    lengths, count = [9, 5, 7], 24
    mask = torch.rand(count, generator=rng) < 0.7
    mask[sum(lengths) :] = False
    places = segments(lengths, count)
    new = -torch.rand(count, generator=rng) * 3
    picked = torch.randint(len(versions), (count,), generator=rng)
    return new, Rows(
        mask=mask,
        weights=mask * torch.rand(count, generator=rng),
        advantages=torch.randn(4, generator=rng)[places],
        behaviour=new + torch.randn(count, generator=rng) * 0.4,
        versions=torch.where(mask, torch.tensor(versions)[picked], -1),
        pure=torch.zeros_like(mask),
        segments=places,
        sequences=len(lengths),
        proximal=new + torch.randn(count, generator=rng) * 0.2,
    )


def loss_of(
    section: ObjectiveSection, plugins: Plugins, seed: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], PolicyLoss]:
    new, at = rows(seed)
    leaf = new.clone().requires_grad_()
    loss, sums = objective.policy_loss(leaf, at, section, 5, plugins=plugins)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, sums, PolicyLoss(section, 1.0, 5, plugins=plugins)


# ---------------------------------------------------------------- equal to what they copy


@pytest.mark.parametrize(
    "names",
    [
        {"loss": f"{OWN}:ppo_with_metrics"},
        {"correction": {"weight": f"{OWN}:truncated", "cap": 1.2, "token_band": [0.5, 2]}},
        {"loss": f"{OWN}:ppo", "correction": {"weight": f"{OWN}:truncated"}, "aggregation": "sequence_mean"},
    ],
)
def test_a_copy_of_a_built_in_part_gives_the_same_bits(names: dict[str, Any]) -> None:
    section, loaded = own(**names)
    built_in = {**names, "loss": "surrogate", "correction": {**names.get("correction", {}), "weight": "token"}}
    wanted_loss, wanted_gradient, wanted_sums, _ = loss_of(ObjectiveSection.model_validate(built_in), objective.NO_PLUGINS, 0)
    loss, gradient, sums, policy = loss_of(section, loaded, 0)
    assert torch.equal(loss, wanted_loss)
    assert torch.equal(gradient, wanted_gradient)
    assert gradient.abs().sum() > 0
    assert sums.keys() == policy.sums.keys()
    assert all(torch.equal(sums[name], value) for name, value in wanted_sums.items() if loaded.loss is None or name != "clipped")


def test_a_weight_of_zero_rejects_and_metrics_are_means_over_sampled_tokens() -> None:
    section, loaded = own(correction={"weight": f"{OWN}:young", "cap": None})
    loss, gradient, sums, policy = loss_of(section, loaded, 2)
    wanted = ObjectiveSection.model_validate({"correction": {"weight": "none", "max_age": 0}})
    by_rule = loss_of(wanted, objective.NO_PLUGINS, 2)
    assert torch.equal(loss, by_rule[0])
    assert torch.equal(gradient, by_rule[1])
    figures, rule = policy.figures(sums), by_rule[3].figures(by_rule[2])
    assert 0 < figures["rejected_fraction"] == rule["rejected_fraction"] < 1
    assert figures["rejected_by_rule"] == {"weight": rule["rejected_by_rule"]["max_age"]}
    _, at = rows(2)
    assert figures["plugin_metrics"] == {"weight/age": pytest.approx(float((5 - at.versions[at.mask]).double().mean()))}
    assert rule["plugin_metrics"] == {}
    policy.check(sums)


def items(rewards: list[float], groups: list[int]) -> list[Item]:
    each = zip(rewards, groups, strict=True)
    return [Item(f"g{g}.e{i}", g, i, 0, 10 + i, 3 + i, reward, 4, 5) for i, (reward, g) in enumerate(each)]


def test_an_advantage_sees_the_batch_and_replaces_the_built_in_one() -> None:
    section, loaded = own(advantage=f"{OWN}:centred")
    batch = items([1.0, 0.0, 2.0, 0.5, 0.5], [7, 7, 7, 3, 3])
    got, metrics = outcome_advantages(batch, section, loaded)
    assert got.dtype == np.float32
    assert got.tolist() == outcome_advantages(batch, ObjectiveSection(advantage="dr_grpo"))[0].tolist()
    assert metrics == {}


def test_a_wrong_value_during_a_run_names_the_function_and_changes_nothing() -> None:
    section, loaded = own(loss=f"{OWN}:breaks_later")
    new, at = rows(0)
    for wrong, fault in ((False, 0.0), (True, 1.0)):
        at.behaviour[int(at.mask.nonzero()[0])] = -3.0 if wrong else -2.0
        _, sums = objective.policy_loss(new.requires_grad_(), at, section, 5, plugins=loaded)
        policy = PolicyLoss(section, 1.0, 5, plugins=loaded)
        assert sums["objective.loss/faults"] == fault
    with pytest.raises(InvariantBroken, match=rf"objective\.loss: got 1 wrong values from {OWN}:breaks_later \({FILE}:\d+\), expected"):
        policy.check(sums)
    poisoned = new.detach().clone()
    poisoned[at.mask] = torch.nan  # the model's fault, not the function's
    _, sums = objective.policy_loss(poisoned.requires_grad_(), at, section, 5, plugins=own(loss=f"{OWN}:ppo")[1])
    assert sums["objective.loss/faults"] == 0


# ---------------------------------------------------------------- what is refused before anything starts

LOSS, WEIGHT, ADVANTAGE = "objective.loss", "objective.correction.weight", "objective.advantage"
BAD: list[tuple[str, str, str]] = [
    (LOSS, "no.such.module:f", "ModuleNotFoundError"),
    (LOSS, f"{OWN}:nome", f"did you mean {OWN}:none"),
    (LOSS, f"{OWN}:NUMBER", "an integer"),
    (LOSS, f"{OWN}:no_argument", "takes 0 positional arguments"),
    (LOSS, f"{OWN}:exits", "SystemExit: 3"),
    (LOSS, f"{OWN}:raises", "ZeroDivisionError: no mean"),
    (LOSS, f"{OWN}:none", "NoneType"),
    (LOSS, f"{OWN}:detached", "without gradient"),
    (LOSS, f"{OWN}:unclamped", "-inf for a token with logprobs -2"),
    (LOSS, f"{OWN}:infinite_gradient", "a gradient that is not finite"),
    (LOSS, f"{OWN}:random_loss", "different results for equal rows"),
    (LOSS, f"{OWN}:across_sequences", "own sequence only"),
    (LOSS, f"{OWN}:changes_advantages", r"rows\.advantages"),
    (LOSS, f"{OWN}:mean_metric", "the metric 'mean'"),
    (LOSS, f"{OWN}:nan_metric", "the metric 'log'"),
    (LOSS, f"{OWN}:other_metrics", r"the metrics \[\]"),
    (WEIGHT, f"{OWN}:negative", "-0.5 for a token"),
    (ADVANTAGE, f"{OWN}:writes", "read-only"),
    (ADVANTAGE, f"{OWN}:stateful", "different advantages"),
    (ADVANTAGE, f"{OWN}:not_a_number", "the advantage nan of response 8"),
    (ADVANTAGE, f"{OWN}:whole_numbers", "an array of int64"),
    (ADVANTAGE, f"{OWN}:nan_of_responses", "the metric 'mean' = nan"),
]


def section_with(key: str, target: str) -> ObjectiveSection:
    if key == WEIGHT:
        return ObjectiveSection.model_validate({"correction": {"weight": target}})
    return ObjectiveSection.model_validate({key.rpartition(".")[2]: target})


@pytest.mark.parametrize(("key", "target", "said"), BAD)
def test_an_unfit_function_is_refused_with_its_name_file_and_line(key: str, target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        objective.load(section_with(key, target))
    line = str(caught.value)
    assert line.startswith(f"{key}: got ")
    assert "\n" not in line
    assert target in line
    if hasattr(plugin_functions, name := target.rpartition(":")[2]) and name != "NUMBER":
        assert re.search(rf"\({FILE}:\d+\)", line)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("whole_sequences", ""),
        ("own_sums", "got different values if two ranks hold parts of a sequence"),
        ("nothing_without_tokens", "called more often for one part of some sequences than for the other"),
    ],
)
def test_context_parallel_ranks_see_whole_sequences_through_their_rows_only(function: str, said: str) -> None:
    section = section_with(WEIGHT, f"{OWN}:{function}")
    objective.load(section)
    if not said:
        objective.load(section, cp=2)
        return
    with pytest.raises(ConfigError, match=said):
        objective.load(section, cp=2)


def test_options_that_no_function_takes() -> None:
    for names, said in (
        ({"loss": f"{OWN}:ppo", "loss_options": {"lwo": 1}}, "an unexpected keyword argument 'lwo'"),
        ({"loss": f"{OWN}:ppo", "loss_options": {"rows": 1}}, "multiple values for argument 'rows'"),
        ({"loss": f"{OWN}:tempered"}, "missing 1 required keyword-only argument: 'tau'"),
        ({"advantage": f"{OWN}:centred", "advantage_options": {"x": 1}}, "an unexpected keyword argument 'x'"),
    ):
        with pytest.raises(ConfigError, match=said):
            own(**names)
    own(loss=f"{OWN}:tempered", loss_options={"tau": 2.0, "anything": 1})


# ---------------------------------------------------------------- code that does not return


def test_what_a_user_s_code_raises_is_its_failure_but_for_ctrl_c() -> None:
    for error, said in ((SystemExit(3), "SystemExit: 3"), (StopIteration(), "StopIteration")):
        with pytest.raises(plugins.Failed, match=rf"^{said} at tests/unit/test_plugins\.py:\d+$"), plugins.guarded(9.0):
            raise error
    with pytest.raises(KeyboardInterrupt), plugins.guarded(9.0):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(ConfigError, match="mine"), plugins.guarded(9.0):
        raise ConfigError("mine", got=1, expected=2)


def test_a_wait_of_a_user_s_code_ends_and_the_alarm_is_as_before() -> None:
    def stubborn() -> None:
        try:
            threading.Event().wait(60)
        except BaseException:  # noqa: BLE001  as such code does
            return

    before = signal.getsignal(signal.SIGALRM)
    for code in (stubborn, lambda: time.sleep(60), lambda: subprocess.run(["sleep", "60"], check=False)):
        began = time.monotonic()
        with pytest.raises(plugins.Failed, match=r"^no result within 0\.05 s, at tests/unit/test_plugins\.py:\d+$"), plugins.guarded(0.05):
            code()
        assert time.monotonic() - began < 30
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


STUBBORN = """
import sys, threading, time
print("noise on standard output")
threading.Thread(target=time.sleep, args=(600,)).start()  # the interpreter's own end would wait for it

def exits(rows): sys.exit(3)
"""


def test_whatever_the_code_does_the_launcher_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(doc_pages.ROOT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends.py").write_text("import os\nos._exit(0)\n")
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    config = prepared(tmp_path, family="no.such:F", correction={"weight": "stubborn:exits"})
    scoring = config.scoring.model_copy(update={"scorer": "no.such:score"})
    with pytest.raises(ConfigError) as caught:
        plugin_probe.check(config.model_copy(update={"scoring": scoring}))
    family, scorer, weight = str(caught.value).splitlines()
    assert scorer.startswith("scoring.scorer: got no.such:score: ModuleNotFoundError")
    assert family.startswith("model.family: got no.such:F: ModuleNotFoundError")
    assert re.search(r"got SystemExit: 3 at stubborn\.py:6 from stubborn:exits \(stubborn\.py:6\), expected a result", weight)
    with pytest.raises(ConfigError, match=r"^model\.family: got ends:F: the process that tried it ended with status 0, expected code that"):
        plugin_probe.check(prepared(tmp_path, family="ends:F"))


# ---------------------------------------------------------------- model families


def prepared(tmp_path: Path, **objective_keys: Any) -> Config:
    made = tmp_path / "model"
    if not made.exists():
        make.make_model(made, MadeModel(), seed=0)
    family = objective_keys.pop("family", "auto")
    return minimal(tmp_path / "run", {"path": str(made), "family": family}, objective=objective_keys)


@pytest.mark.usefixtures("engines_here")
def test_a_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = prepared(tmp_path, loss=f"{OWN}:raises", advantage="no.such:f", family=f"{OWN}:BROKEN")
    with pytest.raises(UserError) as caught:
        local.prepare(config)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["model.family", ADVANTAGE, LOSS]
    assert not config.run.dir.exists()
    local.prepare(prepared(tmp_path, family=f"{OWN}:SAME", loss=f"{OWN}:ppo", advantage=f"{OWN}:centred"))


UNFIT_FAMILIES = [
    (f"{OWN}:BROKEN", r"model\.family: got KeyError: 'no_such_key' at .*plugin_functions.py:\d+ from router"),
    (f"{OWN}:WRONG_TYPE", r"model\.family: got a wrong type from shape_of of "),
    (f"{OWN}:NUMBER", r"model\.family: got .*NUMBER, an integer, expected an object of asyncmoe\.models\.Family"),
    (f"{OWN}:OTHER", r"model\.family: .* for a model of model_type 'qwen3_moe', expected model_type other or"),
]


@pytest.mark.parametrize(("family", "said"), UNFIT_FAMILIES)
def test_an_unfit_family_is_refused_where_it_is_tried(family: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        families.try_family(families.with_family(make.settings(MadeModel()), family))


def test_every_process_finds_the_family_of_the_configuration(tmp_path: Path) -> None:
    config = prepared(tmp_path, family=f"{OWN}:SAME")
    hf = models.hf_config_of(config)
    assert models.family_of(hf) is plugin_functions.SAME
    assert models.family_of(families.without_family(hf)) is qwen3_moe.FAMILY
    assert families.with_family(hf, "auto") == models.load_hf_config(config.model.path)
    assert models.family_of(json.loads(json.dumps(hf))) is plugin_functions.SAME, "as the terms of a meeting carry it"
    assert engine_process.environment(config, 0)[FAMILY_VARIABLE] == f"{OWN}:SAME"
    assert FAMILY_VARIABLE not in engine_process.environment(prepared(tmp_path), 0)


def test_a_checkpoint_must_not_choose_the_code_that_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**HF, families.FAMILY: f"{OWN}:SAME"}))
    with pytest.raises(DataError, match=r"config\.json: got the key asyncmoe_family, expected no such key"):
        models.load_hf_config(tmp_path)
    terms = Terms(
        {**HF, families.FAMILY: "os:path"}, None, MegatronParallel(), (EngineRanks("e", 1, 1, 1),), "float32", "float32", "shm", "s", 1, 1.0
    )
    for ours in (None, f"{OWN}:SAME"):
        with pytest.raises(ProtocolError, match=f"got os:path, expected {ours}, with which the engine was started"):
            handshake.check_family(terms, ours)
    handshake.check_family(terms, "os:path")


def test_the_form_of_a_name() -> None:
    with pytest.raises(ConfigError, match=r"a\.key: got 'nothing', expected some forms"):
        plugins.load("nothing", "a.key", forms="some forms", wanted="x")
    assert plugins.is_name("a.b:c")
    assert not any(map(plugins.is_name, ("a", "a:", ":a", "a:b.c", "http://h:1/p", "a b:c")))
