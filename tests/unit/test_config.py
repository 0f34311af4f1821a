"""Every mistake in a configuration is reported in one line: the key, the given value, the expected one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncmoe.config import Config, load, parse
from asyncmoe.errors import ConfigError
from tests.configs import minimal

GOOD: dict[str, Any] = {
    "run": {"dir": "runs/x", "steps": 3},
    "model": {"path": "m", "make": {"layers": 2}},
    "task": {"kind": "arithmetic"},
}
DOWNWEIGHT = {"rule": "downweight", "downweight": 0.5}
SOURCES = {"scorer": "mine:judge", "teacher": {"url": "http://127.0.0.1:1"}}


def tools(names: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    return {"kind": "tools", "tools": {"names": names, **more}}


PYTHON = tools(["python"])


def with_value(path: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(GOOD)
    at = values
    *parents, last = path.split(".")
    for parent in parents:
        at = at.setdefault(parent, {})
    at[last] = value
    return values


def refused(values: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    assert "\n" not in str(caught.value)
    assert caught.value.what.startswith("config: ")
    assert caught.value.expected not in (None, "")
    return caught.value


def test_defaults_are_valid_and_frozen() -> None:
    config = parse(GOOD)
    assert config.rollout.batch == 128
    assert config.queue_capacity == 256
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("path", "value", "key", "got", "expected"),
    [
        ("run.steps", 0, "", "0", "greater than 0"),
        ("run.steps", True, "", "True", "a number"),
        ("rollout.temperature", float("nan"), "", "nan", "a finite number"),
        ("trainer.optimizer", {"lr": 1e-6, "min_lr": 1e-5, "decay": "linear"}, ".min_lr", "1e-05", "at most lr = 1e-06"),
        ("trainer.optimizer.betas", [0.9], ".1", "nothing", "a value"),
        ("trainer.dtype", "float16", "", "'float16'", "'float32', 'bfloat16' or 'auto'"),
        ("task.kind", "gsm8k", "", "'gsm8k'", "'arithmetic', 'jsonl', 'dataset' or package.module:name"),
        ("task", {"kind": "jsonl"}, ".path", "nothing", "the path of a JSONL file"),
        ("engines.args", ["--enable-mixed-chunk", "--tp", "2"], "", "--tp", "set engines.tp"),
        ("engines.args", ["--device", "cpu"], "", "--device", "a supported argument of SGLang"),
        ("queue.capacity", 127, "", "127", "at least a step's batch"),
        ("trainer", None, "", "None", "a section"),
        ("engines.ep", 2, "", "2", "engines.tp = 1"),
        ("rollout.group_size", 1, "", "1", "greater than or equal to 2"),
        ("objective.updates_per_batch", 3, "", "3", "rollout.groups_per_step = 16"),
        ("objective.correction.token_band", [1.5, 2.0], "", "[1.5, 2.0]", "one number below 1 and one above"),
        ("sync.every", 3, "", "3", "queue.staleness.max_staleness + 1 = 2"),
        ("rollout", {"max_concurrent": 1, "workers": 2}, ".max_concurrent", "1", "rollout.workers = 2"),
        ("rollout", {"workers": 17}, ".max_concurrent", "16", "rollout.workers = 17"),
        ("log.max_bytes", 2**63, "", str(2**63), "64 bits"),
        ("objective", {"proximal": "behaviour"}, ".proximal", "behaviour", "recompute or loglinear because objective.correction.weight"),
        ("objective", {"clip": "cispo", "dual_clip": 3.0}, ".dual_clip", "3.0", "objective.clip is cispo"),
        ("objective", {"clip": "ipo", "ratio": "sequence"}, ".ratio", "sequence", "objective.clip is ipo"),
        ("objective", {"process": {"weight": 0.5}, "advantage": "dr_grpo"}, ".process.weight", "0.5", "objective.advantage is dr_grpo"),
        ("objective", {"distill": {"weight": 1.0}}, ".distill.weight", "1", "no scoring.teacher"),
        ("objective", {"process": {"weight": 0.5}}, ".process.weight", "0.5", "scoring.scorer is auto"),
        ("trainer", {"ranks": 3, "cp": 2}, ".ranks", "3", "tp * cp * pp = 2"),
        ("trainer", {"ranks": 2, "tp": 2, "etp": 1}, ".etp", "1", "tp = 2"),
        ("trainer", {"vpp": 2}, ".vpp", "2", "trainer.pp is 1"),
        ("trainer", {"first_stage_layers": 1}, ".first_stage_layers", "1", "trainer.pp is 1"),
        ("sync", {"directory": "/shared"}, ".directory", "/shared", "sync.method is reshard"),
        ("sync", {"method": "disk", "directory": "s3://bucket/w"}, ".directory", "s3:/bucket/w", "an absolute path"),
        ("trainr", 1, "", "an unknown key", "run, model, task"),
        ("trainer.optimizer.learning_rate", 1, "", "an unknown key", "lr, min_lr"),
        ("run.mode", "later", "", "'later'", "'async', 'sync' or 'one_step_off'"),
        ("run", {"dir": "x"}, ".steps", "nothing", "a value"),
        ("telemetry.profile", {"steps": [4]}, ".steps", "4", "at most warmup.steps + run.steps = 3"),
        ("telemetry.profile", {"steps": [1], "ranks": [1]}, ".ranks", "1", "less than trainer.ranks = 1"),
        ("telemetry.profile", {"steps": []}, ".steps", "[]", "at least 1 item"),
        ("telemetry.profile", {"steps": [0, 1]}, ".steps.0", "0", "greater than 0"),
        ("lora.targets", ["q_proj", "linear_qkv"], ".1", "'linear_qkv'", "'q_proj', "),
        ("lora.targets", [], "", "none", "at least one target"),
        ("lora.targets", "q_proj", "", "'q_proj'", "a list"),
        ("lora", {"targets": ["q_proj"], "experts": "shared_outer"}, ".experts", "shared_outer", ""),
        ("objective.advantage", "grop", "", "'grop'", "did you mean grpo?"),
        ("objective.loss", "my.objective.sapo", "", "'my.objective.sapo'", "did you mean my.objective:sapo?"),
        ("objective", {"loss": "m:f", "clip": "cispo"}, ".clip", "cispo", "ppo"),
        ("objective.loss_options", {"a": 1}, "", "{'a': 1}", "null because objective.loss is"),
        ("queue.staleness", DOWNWEIGHT, ".drop_above", "nothing", "a number above queue.staleness.max_staleness"),
        ("queue.staleness", {**DOWNWEIGHT, "drop_above": 1}, ".drop_above", "1", "more than queue.staleness.max_staleness = 1"),
        ("queue.staleness.drop_above", 3, "", "3", "nothing because queue.staleness.rule is drop"),
        ("environment", {"kind": "tools"}, ".tools.names", "nothing", ""),
        ("environment", tools(["calculator"], style="qwen3_code"), ".tools.style", "'qwen3_code'", "did you mean qwen3_coder?"),
        ("environment", {"kind": "openai", "agent": "a:b", "tools": {"style": "brackets"}}, ".tools.style", "'brackets'", ""),
        ("environment", tools(mcp={"a b": {"command": "x"}}), ".tools.mcp", "the name 'a b'", ""),
        ("environment", {"tools": {"mcp": {"a": {"command": "x"}}}}, ".tools.mcp", "servers", ""),
        ("environment", {**tools(["calculator"]), "sandbox": {"url": "http://x"}}, ".sandbox", "keys", ""),
        ("environment", {**PYTHON, "sandbox": {"url": "http://me:pw@x"}}, ".sandbox.url", "an address with a user's name or password", ""),
        ("environment", {**PYTHON, "sandbox": {"token_env": "A"}}, ".sandbox.token_env", "'A'", ""),
        ("verify.anomalies.kl_engine", {"above": 0}, ".above", "0", "greater than 0"),
        ("verify.anomalies.grad_norm", {"above": float("inf")}, ".above", "inf", "a finite number"),
        ("verify.anomalies.kl_engine", {"action": "halt"}, ".action", "'halt'", "'warn', 'skip' or 'stop'"),
        ("verify.anomalies", {"skips": 0}, ".skips", "0", "greater than 0"),
        ("verify.anomalies.not_finite", False, "", "False", "'skip' or 'stop'"),
    ],
)
def test_a_mistake_names_its_key_what_was_got_and_what_was_expected(path: str, value: Any, key: str, got: str, expected: str) -> None:
    error = refused(with_value(path, value))
    assert (error.what, str(error.got)) == (f"config: {path}{key}", got)
    assert expected in str(error).partition(", expected ")[2]


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("objective", {"proximal": "behaviour", "correction": {"weight": "none", "token_band": [0.5, 5.0]}, "clip": "none"}),
        ("objective", {"process": {"weight": 0.5}, "distill": {"weight": 0.1, "clip": 2.0}, "advantage": "reinforce_plus_plus_baseline"}),
        ("environment", {**tools(["python"], mcp={"time": {"command": "x"}}), "sandbox": {"url": "http://x"}}),
    ],
)
def test_sections_survive_being_written_out(section: str, values: Any) -> None:
    config = parse({**with_value(section, values), "scoring": SOURCES})
    assert parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(("given", "total"), [(None, 36), (7, 7)])
def test_requests_in_flight_fill_the_engines_and_are_shared_by_the_workers(given: int | None, total: int) -> None:
    config = minimal(engines={"count": 3, "max_running": 12}, rollout={"max_concurrent": given, "workers": 5})
    shares = [config.worker_share(number) for number in range(1, 6)]
    assert config.max_concurrent == sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_an_address_of_redis_has_no_password() -> None:
    for url in ("redis://:secret@redis.site:6379", "redis://me:secret@redis.site", "rediss://redis.site?password=secret"):
        error = refused(with_value("log.redis", url))
        assert error.what.endswith("log.redis")
        assert "secret" not in str(error.got)


def write(path: Path, more: str = "") -> Path:
    file = path / "c.yaml"
    file.write_text(yaml.safe_dump(GOOD) + more)
    return file


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    more = "trainer: {optimizer: {lr: 1e-5}}\n"
    assert yaml.safe_load(more)["trainer"]["optimizer"]["lr"] == "1e-5"
    assert load(write(tmp_path, more)).trainer.optimizer.lr == 1e-5


@pytest.mark.parametrize(("word", "value"), [("off", "off"), ("on", "on"), ("auto", "auto"), ("'off'", "off")])
def test_an_unquoted_on_or_off_is_taken_as_written(tmp_path: Path, word: str, value: str) -> None:
    assert load(write(tmp_path, f"telemetry: {{tensorboard: {word}}}\n")).telemetry.tensorboard == value


def test_overrides_are_yaml_and_reach_any_depth(tmp_path: Path) -> None:
    config = load(write(tmp_path), ["trainer.optimizer.lr=1e-3", "engines.args=[--log-level]", "queue.staleness.max_staleness=0"])
    assert config.trainer.optimizer.lr == 1e-3
    assert config.engines.args == ("--log-level",)
    assert config.queue.staleness.max_staleness == 0


@pytest.mark.parametrize(
    ("override", "key", "got"),
    [
        ("run.steps", "", "'run.steps'"),
        ("run.steps.more=1", "run.steps.more", "steps, which is no section"),
        ("run.steps=[1", "run.steps", "'[1'"),
        ("run.stps=1", "run.stps", "an unknown key"),
        ("telemetry.profile.memory=true", "telemetry.profile.steps", "nothing"),
        ("run.dir=", "run.dir", "None"),
        ("task.sources=[{weight: 1e308}, {weight: 1e308}]", "task.sources", "weights whose sum is not finite"),
    ],
)
def test_a_bad_override_is_one_line(tmp_path: Path, override: str, key: str, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path), [override])
    assert (caught.value.what, caught.value.got) == (f"command line: {key}".removesuffix(": "), got)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"run: [", "expected valid YAML"),
        (b"run: !!python/object/apply:os.system [ls]", "expected valid YAML"),
        (b"run: {steps: 1}\nrun: {steps: 2}\n", "key 'run' is given twice"),
        (b"\xff", "expected valid YAML"),
        (b"", "got NoneType"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: bytes, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert (said in str(caught.value), caught.value.what, "\n" in str(caught.value)) == (True, str(file), False)


@pytest.mark.parametrize(("path", "got"), [("/dev/zero", "no such file"), ("a" * 5000, "File name too long"), ("a\0b", "no such file")])
def test_what_cannot_be_read_is_refused_unread(path: str, got: str) -> None:
    with pytest.raises(ConfigError, match=f": got {got}, "):
        load(Path(path))


def test_digest_tells_configurations_apart_and_is_stable(tmp_path: Path) -> None:
    file = write(tmp_path)
    assert load(file).digest == load(file).digest == Config.model_validate_json(load(file).model_dump_json()).digest
    assert load(file, ["rollout.temperature=0.9"]).digest != load(file).digest


def test_colocated_sets_what_it_needs_and_refuses_the_rest() -> None:
    made = parse(with_value("placement", "colocated"))
    assert (made.run.mode, made.rollout.interruption, made.queue.staleness.max_staleness) == ("sync", "abort_resume", 0)
    for key, value in (
        ("run.mode", "async"),
        ("run.mode", "one_step_off"),
        ("rollout.interruption", "in_place"),
        ("rollout.interruption", "retract"),
        ("queue.staleness.max_staleness", 1),
        ("sync.method", "broadcast"),
        ("sync.method", "disk"),
        ("sync.delta", "auto"),
        ("sync.transport", "nccl"),
        ("cluster.network", "10.0.0.0/8"),
        ("cluster.trainer_nodes", 2),
        ("cluster.engine_nodes", 2),
        ("launch", "ray"),
        ("engines.join", True),
        ("engines.nodes", 2),
        ("engines.first_gpu", 1),
    ):
        values = {**with_value(key, value), "placement": "colocated"}
        values.setdefault("engines", {})["tp"] = values.setdefault("trainer", {})["ranks"] = 2
        error = refused(values)
        assert (error.what, str(error.got).lower()) == (f"config: {key}", str(value).lower())
        assert "placement is colocated" in str(error.expected)


def test_modes_to_compare_with_decide_how_old_a_batch_may_be() -> None:
    sync, ahead = parse(with_value("run.mode", "sync")), parse(with_value("run.mode", "one_step_off"))
    assert (sync.queue.staleness.max_staleness, sync.rollout.interruption) == (0, "in_place")
    assert (ahead.queue.staleness.max_staleness, ahead.rollout.interruption) == (1, "drain")
    assert parse(ahead.model_dump(mode="json")) == ahead
    for queue, key, got in (({"staleness": {"max_staleness": 2}}, "queue.staleness.max_staleness", "2"), (3, "queue", "3")):
        error = refused({**with_value("run.mode", "sync"), "queue": queue})
        assert (error.what, str(error.got)) == (f"config: {key}", got)


def test_all_mistakes_of_a_file_are_named_at_once_with_their_lines(tmp_path: Path) -> None:
    file = write(tmp_path, "rolout: {group_size: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load(file, ["trainer.tpp=2", "run.steps=0", "trainer.lr=1e-3"])
    by_key = {line.partition(": got ")[0].rpartition(": ")[2]: line for line in str(caught.value).split("\n")}
    assert set(by_key) == {"rolout", "trainer.tpp", "run.steps", "trainer.lr"}
    assert by_key["rolout"].startswith(f"{file}:{len(file.read_text().splitlines())}: rolout: got an unknown key")
    assert by_key["run.steps"].startswith("command line: run.steps: "), "the override is wrong, not the line of the file"
    for key, meant in (("rolout", "rollout"), ("trainer.tpp", "trainer.tp"), ("trainer.lr", "trainer.optimizer.lr")):
        assert f"did you mean {meant}" in by_key[key]
