"""asyncmoe config show, schema and validate: round trips, an independent JSON schema validator, and refusals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from asyncmoe import checkpoints, config_commands
from asyncmoe import config as configuration
from asyncmoe.checkpoints import Retention
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.launch import local
from asyncmoe.launch.validate import validate
from asyncmoe.log import belonging
from asyncmoe.log.belonging import Belonging
from asyncmoe.process import say

ROOT = Path(__file__).parents[2]
FILES = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if path.name != "plant.yaml"]
examples = pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])


@examples
def test_what_is_shown_describes_the_same_run(path: Path, tmp_path: Path) -> None:
    config = configuration.load(path, ("trainer.optimizer.lr=1e-7", "run.dir=läufe/my run"))
    file = tmp_path / "shown.yaml"
    file.write_text(config_commands.shown(config), encoding="utf-8")
    assert configuration.load(file) == config


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(json.dumps(config_commands.json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@examples
def test_examples_fit_the_schema(path: Path, validator: jsonschema.Draft202012Validator) -> None:
    for text in (path.read_text(), config_commands.shown(configuration.load(path))):
        assert [error.message for error in validator.iter_errors(yaml.safe_load(text))] == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"traner": {}}, "traner"),
        ({"run": {}}, "dir"),
        ({"trainer": {"optimizer": {"betas": [0.9, 1]}}}, "1 is greater than or equal to the maximum of 1"),
        ({"task": {"kind": "arithmetic", "filter": "rows"}}, "rows"),
    ],
)
def test_an_editor_underlines_what_is_wrong(change: dict[str, object], word: str, validator: jsonschema.Draft202012Validator) -> None:
    values = {"run": {"dir": "r", "steps": 1}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}}
    assert not list(validator.iter_errors(values))
    assert any(word in error.message for error in validator.iter_errors({**values, **change}))


def demo(tmp_path: Path, *overrides: str) -> Config:
    # The engines' Python is tried in test_engine_python.py.
    places = (f"run.dir={tmp_path / 'run'}", f"model.path={tmp_path / 'run' / 'model'}")
    return configuration.load(ROOT / "examples" / "demo.yaml", (*places, *overrides))


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "check_engine_python", lambda configured: Path("python"))


@pytest.mark.usefixtures("no_engine")
def test_a_valid_configuration_is_described_and_nothing_is_written(tmp_path: Path) -> None:
    assert validate(demo(tmp_path)) == "100 steps of 128 trajectories, 2 trainer rank(s), 1 engine of 1 rank(s)"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("launch=ray", "cluster.engine_nodes=2"), "cluster.engine_nodes: got 2"),
        (("task={kind: jsonl, path: no-such.jsonl}", "warmup.steps=0"), "no-such.jsonl"),
        (("environment={kind: openai, agent: 'no_such_module:agent'}",), "no_such_module"),
    ],
)
def test_what_would_stop_a_run_is_refused(tmp_path: Path, overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(UserError) as refused:
        validate(demo(tmp_path, *overrides))
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


FAULTS = (
    ("run.seed=x", "run.seed"),
    ("trainer.tpp=2", "trainer.tpp"),
    ("trainer.ranks=3", "trainer.ranks"),  # of trainer.tp 2
    ("objective.updates_per_batch=3", "objective.updates_per_batch"),  # of other sections
    ("telemetry.mlflow={experiment: e}", "telemetry.mlflow"),
    ("scoring.scorer=no_such_module:f", "scoring.scorer"),
    ("objective.loss=no_such_module:f", "objective.loss"),
    ("model={path: no-such-model}", "no-such-model"),
    ("sync={directory: /proc/foo}", "sync.directory"),
)


def subjects(refused: pytest.ExceptionInfo[UserError]) -> list[str]:
    return [line.partition(": got ")[0].rpartition(": ")[2] for line in str(refused.value).split("\n")]


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("first", [0, 3, 7])
def test_all_faults_are_named_at_once(tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them is corrected: the others neither hide each other nor cause further lines."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    given = [one for one in FAULTS if one is not FAULTS[first]]
    overrides = [f"run.dir={tmp_path / 'run'}", "trainer.tp=2", *(one for one, _ in given)]
    with pytest.raises(UserError) as refused:
        config_commands.validate(ROOT / "examples" / "demo.yaml", overrides)
    assert set(subjects(refused)) == {key for _, key in given}
    assert len(subjects(refused)) == len(given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_engine")
def test_what_the_first_worker_would_refuse_is_named_with_the_rest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By `asyncmoe run` too, if it is refused anyway: a scorer that is imported but gives no score."""
    given = [f"run.dir={tmp_path / 'run'}", "scoring.scorer=operator:index", "telemetry.mlflow={experiment: e}"]
    with pytest.raises(UserError) as refused:
        local.run(configuration.load(ROOT / "examples" / "demo.yaml", given))
    assert subjects(refused) == ["telemetry.mlflow", "scoring.scorer"]
    say(refused.value)
    assert capfd.readouterr().err.splitlines()[-1] == "2 errors"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("path", ["taken/run", "taken" * 60, "loop/run", "/proc/foo"])
def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "taken").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    config = demo(tmp_path, f"run.dir={tmp_path / path}")
    for refuses in (local.check, lambda one: local.claim(one.run.dir).__enter__()):
        with pytest.raises(AsyncmoeError, match=r"^run directory: cannot write |^run\.dir: got /proc/foo"):
            refuses(config)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["loop", "taken"]


def test_an_output_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "asyncmoe", "--version"]
    with Path("/dev/full").open("w") as full:
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(command, cwd=ROOT, env=buffered, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [b"error: standard output: got No space left on device, expected a writable file, pipe or terminal"]


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("fault", ["telemetry.prometheus_port=PORT", "train=lora"])
def test_a_run_that_is_refused_leaves_everything_as_it_was(tmp_path: Path, fault: str) -> None:
    run_dir, file = tmp_path / "runs" / "a", ROOT / "examples" / "demo.yaml"
    faults = r"^lora\.rank: got 32, .*\nlora\.alpha: got 32.0, .*\nrun\.seed: got 0, "
    begun = fault == "train=lora"
    settings = [f"run.dir={run_dir}", f"model.path={run_dir / 'model'}", fault]
    if begun:
        with local.claim(run_dir):
            checkpoints.start(run_dir, 3)
            checkpoints.finish(run_dir, 3, {"step": 3, "train": "lora", "lora": {"rank": 4, "alpha": 4.0}, "seed": 7}, Retention(2))

    def there() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (run_dir, *run_dir.rglob("*")) if path.exists()}

    before = there()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings[-1] = fault.replace("PORT", str(taken.getsockname()[1]))
        with pytest.raises(UserError, match=faults if begun else f"^{fault.partition('=')[0]}: "):
            local.run(configuration.load(file, settings))
    assert there() == before
    assert begun or not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ((), False),
        (("cluster.trainer_nodes=2",), True),
        (("cluster.network=hostname",), True),
        (("cluster.engine_nodes=2", "trainer.checkpoint_every=5"), False),
    ],
)
def test_nodes_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...], warned: bool) -> None:
    local.check(demo(tmp_path, *settings))
    assert capsys.readouterr().err.startswith("warning: trainer.checkpoint_every: got 0 ") == warned


@pytest.mark.usefixtures("no_engine")
def test_groups_of_an_engine_over_several_nodes_do_not_meet_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the name of a host often is an address of loopback."""
    over = demo(tmp_path, "cluster.network=hostname", "engines.tp=2", "engines.nodes=2", "engines.dp_attention=2")
    monkeypatch.setenv("ASYNCMOE_HOST", "127.0.1.1")
    with pytest.raises(UserError, match=r"^cluster\.network: got hostname, which is 127\.0\.1\.1 here"):
        local.check(over)


def test_what_is_shown_says_how_many_requests_null_means(tmp_path: Path) -> None:
    assert "rollout.max_concurrent: 128\n" in config_commands.shown(demo(tmp_path, "engines.count=2"))
    assert "rollout.max_concurrent: " not in config_commands.shown(demo(tmp_path, "rollout.max_concurrent=9"))


@pytest.mark.usefixtures("no_engine")
def test_fewer_steps_than_a_run_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = demo(tmp_path, "warmup.steps=2", "run.steps=5")
    for step, said in ((6, ""), (7, "run.steps: all 5 steps are taken already; a higher number goes on from ")):
        checkpoints.start(config.run.dir, step)
        checkpoints.finish(config.run.dir, step, {"step": step, "family": "qwen3_moe", **config.checkpoint_kind}, Retention(2))
        local.check(config)
        assert capsys.readouterr().err.startswith(said)
    with pytest.raises(UserError, match=r"^run\.steps: got 4, expected at least 5, the steps already taken; .* has these steps in"):
        local.check(demo(tmp_path, "warmup.steps=2", "run.steps=4"))


@pytest.mark.usefixtures("no_engine")
def test_a_damaged_checkpoint_is_set_aside_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = demo(tmp_path, "warmup.steps=2", "run.steps=5")
    for step in (3, 4, 5):
        checkpoints.start(config.run.dir, step)
        (checkpoints.temporary(config.run.dir, step) / "part").write_bytes(b"1234")
        checkpoints.finish(config.run.dir, step, {"step": step, "family": "qwen3_moe", **config.checkpoint_kind}, Retention(3))
    for step, content in ((4, b"123"), (5, b"1235")):
        (checkpoints.directory(config.run.dir, step) / "part").write_bytes(content)
    left = {"step-00000003", "step-00000004.damaged", "step-00000005.damaged"}
    for damaged in (2, 0):
        local.prepare(config)
        assert capsys.readouterr().err.count("is damaged: part has ") == damaged
        assert {path.name for path in (config.run.dir / "checkpoints").iterdir()} == left
    (checkpoints.directory(config.run.dir, 3) / "asyncmoe.json").write_text("")
    with pytest.raises(UserError, match=r"step-00000003 is damaged: asyncmoe\.json has 0 bytes"):
        local.prepare(config)
    assert {path.name for path in (config.run.dir / "checkpoints").iterdir()} == left


@pytest.mark.usefixtures("no_engine")
def test_a_run_with_a_log_keeps_its_records_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before its first checkpoint, too."""
    monkeypatch.setattr(local.versions, "record", lambda *_: None)
    run = tmp_path / "run"
    run.mkdir()
    for begun in (True, False):
        (run / "metrics.jsonl").write_text("{}\n")
        belonging.write(run, Belonging(belonging.FORM, {}, run="x", begun=begun))
        local.prepare(demo(tmp_path))
        assert (run / "metrics.jsonl").exists() == begun
