"""Commands use a run at its current path, whatever directory its configuration names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import yaml
from huggingface_hub import ModelCard

from asyncmoe import config as configuration
from asyncmoe.checkpoints import intact, manifest, overview
from asyncmoe.config import Config, moved
from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.launch import export, model_card
from asyncmoe.models import origin
from tests.configs import minimal
from tests.unit.model_cases import MODELS
from tests.unit.test_checkpoints import flip, saved


def written(run: Path, **more: Any) -> Config:
    """A run's directory with its configuration."""
    config = minimal(run, run / "model", 9, **more)
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return config


def test_the_directory_wins_and_paths_below_the_former_one_move_with_it(tmp_path: Path) -> None:
    former, now = tmp_path / "runs/a", tmp_path / "elsewhere/b ü"
    own = {"sets": {"near": {"kind": "jsonl", "path": str(former / "data/x.jsonl")}, "far": {"kind": "jsonl", "path": "/data/y.jsonl"}}}
    config = written(former, evaluation=own)
    now.parent.mkdir()
    former.rename(now)
    found = configuration.of_run(now)
    assert found.run.dir == now
    assert found.model.path == now / "model"
    assert {name: one.path for name, one in found.evaluation.sets.items()} == {"near": now / "data/x.jsonl", "far": Path("/data/y.jsonl")}
    assert found.digest == config.digest
    assert configuration.load(now, ["run.steps=20"]).run.steps == 20
    assert configuration.of_run(now, [f"run.dir={former}"]).model.path == former / "model"


def test_a_kept_configuration_means_the_same_in_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "adapter", "rows.jsonl"):
        Path(name).touch()
    own = {"kind": "dataset", "sources": [{"path": "rows.jsonl"}, {"path": "org/name"}]}
    more = {"task": own, "lora": {"start": "adapter"}, "model": {"path": "model"}, "log": {"folder": "own/log"}}
    kept = moved.absolute(configuration.parse({"run": {"dir": "run", "steps": 9}, **more}))
    assert [kept.run.dir, kept.model.path, kept.lora.start] == [tmp_path / "run", tmp_path / "model", tmp_path / "adapter"]
    assert [one.path for one in kept.task.sources] == [tmp_path / "rows.jsonl", Path("org/name")]
    assert kept.log.folder == tmp_path / "own" / "log"


def test_a_home_directory_is_expanded_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    rows = {"kind": "dataset", "sources": [{"path": "~/a.jsonl"}, {"path": "b~/~.jsonl"}]}
    given = {"run": {"dir": "~/r", "steps": 9}, "model": {"path": "~/$A"}, "task": rows, "log": {"folder": "~"}}
    shown = str(configuration.parse(given).model_dump(mode="json"))
    assert [shown.count(part) for part in ("'/home/me", "'/home/me/$A'", "'b~/~.jsonl'")] == [4, 1, 1]
    for name in ("~no-such-user/r", "", "a\0b"):
        with pytest.raises(ConfigError, match=r"run\.dir: got "):
            configuration.parse({**given, "run": {"dir": name, "steps": 9}})


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match=f"RUN: got {path}"):
            configuration.of_run(path)
    (tmp_path / "config.yaml").write_text("run: {}")
    assert not moved.is_run(tmp_path)


def test_the_file_of_a_moved_run_starts_no_other_run(tmp_path: Path) -> None:
    former, now = tmp_path / "a", tmp_path / "b"
    written(former)
    moved.check_place(former / "config.yaml", ())
    shutil.copytree(former, now)
    with pytest.raises(ConfigError, match=r"b/config.yaml: run\.dir: got .*/a, expected .*/b; the run was moved or copied: "):
        moved.check_place(now / "config.yaml", ())
    moved.check_place(now / "config.yaml", [f"run.dir={former}"])


def test_an_export_names_the_steps_there_are_and_what_is_damaged(tmp_path: Path) -> None:
    run = tmp_path / "a"
    written(run)
    with pytest.raises(DataError, match="got no complete checkpoint"):
        export.export(run, tmp_path / "out")
    saved(run, 3)
    flip(saved(run, 12) / "common.pt")
    with pytest.raises(DataError, match=r"--step 4: got no complete checkpoint of this step in .*, expected one of 3, 12"):
        export.export(run, tmp_path / "out", step=4)
    with pytest.raises(DataError, match=r"damaged checkpoint: common\.pt .*--step 3"):
        export.export(run, tmp_path / "out")
    assert intact.fault(run / "checkpoints/step-00000003") is None


def test_without_a_manifest_an_export_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "a")
    (saved(tmp_path / "a", 3) / manifest.MANIFEST).unlink()
    monkeypatch.setattr(export, "trainer_command", Mock(side_effect=NotImplementedError))  # the exporting processes would start
    with pytest.raises(NotImplementedError):
        export.export(tmp_path / "a", tmp_path / "out")
    assert "step-00000003 has no manifest.json" in capsys.readouterr().err


def test_an_adapter_is_merged_into_the_weights_it_was_trained_on_only(tmp_path: Path) -> None:
    config = written(tmp_path / "a", train="lora")
    (tmp_path / "a" / "model").mkdir()
    (tmp_path / "a" / "model" / "model.safetensors").write_text("one")
    checkpoint = saved(tmp_path / "a", 3)
    (checkpoint / "asyncmoe.json").write_text(json.dumps({"step": 3, "origin": origin.origin_of(config)}))
    manifest.write(checkpoint, {name: manifest.seal(checkpoint / name) for name in manifest.names_in(checkpoint)})
    origin.check_weights(config, checkpoint)
    (tmp_path / "a" / "model" / "model.safetensors").write_text("two")
    with pytest.raises(ConfigError, match=r"model.path weights: got 3 bytes .*, expected 3 bytes .*, as step-00000003 has it"):
        export.export(tmp_path / "a", tmp_path / "out")


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(
    ("model", "base"),
    [("/home/me/models/mine", None), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("/c/models--Qwen--Qwen3-8B/snapshots/1f", "Qwen/Qwen3-8B")],
)
def test_the_hub_reads_the_card_of_an_export_and_its_code_loads_it(model: str, base: str | None, adapter: bool) -> None:
    """As huggingface_hub reads it; a base model that the hub does not know would be refused at the upload."""
    config = minimal("/home/me/runs/sums", model, train="lora", task={"kind": "jsonl", "path": "/home/me/sums.jsonl"})
    text = model_card.card(config, {"step": 40, "time": 1.7e9}, "sums-hf", adapter=adapter)
    found = ModelCard(text, ignore_metadata_errors=False)
    assert (found.data.base_model, found.data.library_name) == (base, "peft" if adapter else "transformers")
    assert all(word in found.text for word in ("step 40", "sums.jsonl", "2023-11-14", "grpo", base or "mine"))
    assert "/home" not in text
    code = found.text.partition("```python")[2].partition("```")[0]
    loader = Mock()
    with patch.dict("sys.modules", {str(found.data.library_name): loader}):
        exec(code)
    (call,) = loader.mock_calls
    assert call.args == ("sums-hf",)


QWEN = {**MODELS["qwen3_moe"], "mlp_only_layers": []}


@pytest.mark.parametrize(
    ("changed", "overrides", "lines"),
    [
        ({"num_experts": 16}, {}, ("model.path: got a model with experts 16, expected experts 8, as step-00000004 has; ",)),
        ({"model_type": "qwen3"}, {}, ("model.family: got qwen3, expected qwen3_moe, ", "model.path: got ")),
        ({"hidden_size": 128}, {"run": {"seed": 5, "steps": 3}}, ("model.path: got ", "run.seed: got 5", "run.steps: got 3, expected ")),
        ({}, {"run": {"seed": 5}}, ("run.seed: got 5, expected 0, with which step-00000004 was made; ",)),
        ({}, {"trainer": {"dtype": "bfloat16"}}, ("trainer.dtype: got bfloat16, expected float32, with which step-00000004 was made; ",)),
        ({}, {"trainer": {"dtype": "bfloat16", "optimizer": {"distributed": True}}}, ()),
        ({}, {"train": "lora"}, ("train: got lora, expected full, as step-00000004 has it; set train=full, or choose another ",)),
        ({}, {"trainer": {"ranks": 2, "tp": 2}}, ()),
    ],
)
def test_a_resume_that_cannot_be(changed: dict[str, Any], overrides: dict[str, Any], lines: tuple[str, ...], tmp_path: Path) -> None:
    values: dict[str, Any] = {"run": {"dir": str(tmp_path), "steps": 9}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}}
    config = configuration.parse(values)
    path = saved(tmp_path, 4)
    sharded = overrides.get("trainer", {}).get("optimizer", {}).get("distributed", False)
    facts = {
        "step": 4,
        "family": "qwen3_moe",
        "dtype": "float32",
        "distributed_optimizer": sharded,
        **config.checkpoint_kind,
        **origin.facts_of(config, QWEN),
    }
    (path / "asyncmoe.json").write_text(json.dumps(facts))
    asked = configuration.parse({**values, **{key: {**values[key], **one} if key in values else one for key, one in overrides.items()}})
    found = [str(error) for error in origin.differing_kind(asked, {**QWEN, **changed}, path)]
    assert len(found) == len(lines)
    assert all(said.startswith(line) for said, line in zip(found, lines, strict=True)), found


def test_what_a_list_of_checkpoints_shows(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    flip(saved(tmp_path, 2) / "common.pt")
    (saved(tmp_path, 3) / "manifest.json").unlink()
    (tmp_path / "checkpoints/step-00000004.writing").mkdir()
    states = [(line.step, line.state) for line in overview.overview(tmp_path)]
    assert states == [(1, "complete"), (2, "complete"), (3, "damaged"), (4, "unfinished")]
    lines = overview.overview(tmp_path, verify=True)
    assert [line.state for line in lines] == ["verified", "damaged", "damaged", "unfinished"]
    assert lines[1].fault.startswith("common.pt has other content")
    head, *rows = overview.table(lines).splitlines()
    assert head.split() == ["checkpoint", "saved", "size", "state"]
    assert {row.index(line.state, 30) for row, line in zip(rows, lines, strict=True)} == {head.index("state")}
    with pytest.raises(DataError, match=r"RUN: got .*none: no such directory"):
        overview.overview(tmp_path / "none")
