"""Runs that train adapters, end to end: learning, export, resume, refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncmoe import checkpoints
from tests.system.runs import Command, demo, logs, metrics, refused, run, silent_engines, start, summary_of, wait_for

pytestmark = [pytest.mark.system, pytest.mark.thorough]

LORA = ("train=lora", "lora.rank=4", "lora.alpha=8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt the format of sums and little else."""
    folder = tmp_path_factory.mktemp("base")
    where = (f"run.dir={folder / 'run'}", f"model.path={folder / 'run' / 'model'}")
    Command("run", "examples/demo.yaml", *where, "run.steps=1").succeed(300.0)
    Command("export", str(folder / "run"), str(folder / "base")).succeed()
    return folder / "base"


def learn(base: Path, directory: Path, *overrides: str) -> dict[str, Any]:
    Command("run", "examples/lora.yaml", f"run.dir={directory}", f"model.path={base}", *overrides).succeed(300.0, directory)
    return summary_of(directory)


def test_adapters_learn_the_task_and_leave_the_weights_alone(base: Path, tmp_path: Path) -> None:
    """The exported adapter is small, PEFT loads it, and merged into the weights it is what the run's own export has."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    directory = tmp_path / "run"
    summary = learn(base, directory, "run.steps=30")
    assert summary["reward_last"] > summary["reward_first"] + 0.15
    assert summary["max_staleness_seen"] <= 1
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    for arguments in ((str(merged),), (str(adapter), "--adapter")):
        Command("export", str(directory), *arguments).succeed()
    # The adapter has 22 % of this small model's parameters; both checkpoints also have moments and main parameters.
    whole, adapters = (sum(file.stat().st_size for file in one.glob("checkpoints/*/*")) for one in (base.parent / "run", directory))
    assert adapters < whole / 3
    tokens = torch.tensor([[20, 30, 40, 50, 60]])
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base).eval()
        before = plain(tokens).logits
        with_it = PeftModel.from_pretrained(plain, adapter).eval()(tokens).logits
        exported = AutoModelForCausalLM.from_pretrained(merged).eval()(tokens).logits
    assert float((with_it - exported).abs().max()) < 1e-4
    assert float((with_it - before).abs().max()) > 0.1
    old, new = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    same = {name for name, value in old.items() if value.equal(new[name])}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= same
    # Another run starts where this one ended.
    again = learn(base, tmp_path / "again", "run.steps=1", f"lora.start={adapter}")
    assert again["reward_first"] > summary["reward_first"] + 0.1
    (first,) = metrics(tmp_path / "again")
    assert first["logprob_diff_max_same_version"] < 1e-3


def test_a_run_of_adapters_resumes_and_is_not_mistaken_for_another(tmp_path: Path) -> None:
    """Resumed from the adapters of the warm-up, in which no engine has taken part."""
    directory, shape = tmp_path / "run", (*LORA, "objective.kl.coefficient=0.01")
    first = start(directory, *shape, silent_engines(tmp_path), "engines.orphan_s=3")
    assert wait_for(lambda: checkpoints.newest(directory) is not None, 120), logs(directory)
    first.process.kill()
    assert first.gone(60), first.alive()
    assert checkpoints.newest(directory) == checkpoints.directory(directory, 4)
    run(directory, *shape, "sync.verify_every=0")
    said = (directory / "logs" / "controller.log").read_text()
    (found,) = re.findall(r"engine\.0 and trainer on 256 probe tokens: .* divergence (\S+)", said)
    assert float(found) < 1e-8, "of what the engine has loaded, to which neither adds the adapters"
    assert [step["step"] for step in metrics(directory)] == list(range(1, 8))
    line = refused(*demo(directory, "run.steps=6"))
    assert "train: got full, expected lora, as step-" in line
