"""Every mistake in a configuration is one line: the key, what was got, what was expected."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncmoe.config import Config, load, parse
from asyncmoe.errors import ConfigError

GOOD: dict[str, Any] = {
    "run": {"dir": "runs/x", "steps": 3},
    "model": {"path": "m", "make": {"layers": 2}},
    "task": {"kind": "arithmetic"},
}
SOURCES = {"scorer": "mine:judge", "teacher": {"url": "http://127.0.0.1:1"}}


def with_value(path: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(GOOD)
    at = values
    *parents, last = path.split(".")
    for parent in parents:
        at = at.setdefault(parent, {})
    at[last] = value
    return values


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("config: ")
    assert caught.value.got not in (None, "")
    assert caught.value.expected not in (None, "")
    return line


def test_defaults_are_valid_and_frozen() -> None:
    config = parse(GOOD)
    assert config.rollout.batch == 128
    assert config.queue_capacity == 256
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("path", "value", "got", "expected"),
    [
        ("run.steps", 0, "0", "a number above 0"),
        ("run.steps", True, "True", "a number"),
        ("rollout.temperature", float("nan"), "nan", "a finite number"),
        ("trainer.optimizer", {"lr": 1e-6, "min_lr": 1e-5, "decay": "linear"}, "1e-05", "at most lr = 1e-06"),
        ("trainer.optimizer.betas", [0.9, 1.0], "1.0", "a number below 1"),
        ("trainer.optimizer.betas", [0.9], "nothing", "a value"),
        ("trainer.dtype", "float16", "'float16'", "'float32', 'bfloat16' or 'auto'"),
        ("task.kind", "gsm8k", "'gsm8k'", "'arithmetic', 'jsonl', 'dataset' or package.module:name"),
        ("task.operations", ["/"], "'/'", "'+', '-' or '*'"),
        ("task.kind", "jsonl", "nothing", "the path of a JSONL file"),
        (
            "engines.args",
            ["--enable-mixed-chunk", "--tp", "2"],
            "--tp",
            "none of the arguments asyncmoe gives an engine; set engines.tp",
        ),
        ("engines.args", ["--device", "cpu"], "--device", "a supported argument of SGLang"),
        ("queue.capacity", 127, "127", "at least a step's batch"),
        ("trainer", None, "None", "a section"),
        ("engines.ep", 2, "2", "a divisor of engines.tp = 1"),
        ("rollout.group_size", 1, "1", "at least 2"),
        ("objective.updates_per_batch", 3, "3", "a divisor of rollout.groups_per_step = 16"),
        ("objective.correction.token_band", [1.5, 2.0], "[1.5, 2.0]", "one number below 1 and one above"),
        ("sync.every", 3, "3", "at most queue.staleness.max_staleness + 1 = 2"),
        ("telemetry.tensorboard", "maybe", "'maybe'", "'auto', 'on' or 'off'"),
        ("rollout", {"max_concurrent": 1, "workers": 2}, "1", "at least rollout.workers = 2"),
        ("log.max_bytes", 2**63, str(2**63), "a number of at most 64 bits"),
    ],
)
def test_a_bad_value_names_its_key_what_was_got_and_what_was_expected(path: str, value: Any, got: str, expected: str) -> None:
    line = refused(with_value(path, value))
    what, _, rest = line.partition(": got ")
    assert rest.startswith(got), line
    assert expected in rest.partition(", expected ")[2], line
    assert path.split(".")[0] in what, line


@pytest.mark.parametrize(
    ("objective", "got", "expected", "hint"),
    [
        ({"proximal": "behaviour"}, "token", "none because objective.proximal is behaviour", "set it to none"),
        ({"clip": "cispo", "dual_clip": 3.0}, "3.0", "null because objective.clip is cispo", "leave it out"),
        ({"clip": "ipo", "ratio": "sequence"}, "sequence", "token because objective.clip is ipo", "set objective.clip to ppo"),
        ({"process": {"weight": 0.5}, "advantage": "dr_grpo"}, "0.5", "0 because objective.advantage is dr_grpo", "advantage to grpo"),
    ],
)
def test_objectives_that_contradict_themselves_are_refused_with_a_hint(objective: Any, got: str, expected: str, hint: str) -> None:
    line = refused(with_value("objective", objective))
    assert f": got {got}, expected " in line
    assert expected in line
    assert hint in line


@pytest.mark.parametrize(
    "objective",
    [
        {"proximal": "behaviour", "correction": {"weight": "none", "token_band": [0.5, 5.0]}, "clip": "none"},
        {"correction": {"weight": "none", "opsm_delta": 1e-4, "max_age": 0, "veto": [0, 100]}, "kl": {"coefficient": 1e-3}},
        {"process": {"weight": 0.5}, "distill": {"weight": 0.1, "clip": 2.0}, "advantage": "reinforce_plus_plus_baseline"},
    ],
)
def test_objectives_survive_being_written_out(objective: Any) -> None:
    config = parse({**with_value("objective", objective), "scoring": SOURCES})
    assert parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("objective", "scoring", "line"),
    [
        ({"distill": {"weight": 1.0}}, {}, "objective.distill.weight: got 1, expected 0 because there is no scoring.teacher"),
        ({"process": {"weight": 0.5}}, {}, "objective.process.weight: got 0.5, expected 0 because scoring.scorer is auto"),
    ],
)
def test_an_objective_without_what_it_learns_from_is_refused(objective: Any, scoring: Any, line: str) -> None:
    assert line in refused({**GOOD, "objective": objective, "scoring": scoring})
    parse({**GOOD, "objective": objective, "scoring": SOURCES})


def test_an_address_of_redis_has_no_password() -> None:
    for url in ("redis://:secret@redis.site:6379", "redis://me:secret@redis.site", "rediss://redis.site?password=secret"):
        line = refused(with_value("log.redis", url))
        assert "without a password, which is in ASYNCMOE_LOG_PASSWORD" in line
        assert "secret" not in line.partition("expected")[0].partition("got")[2]


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("trainr", "run, model, task"),
        ("trainer.optimizer.learning_rate", "lr, min_lr"),
    ],
)
def test_an_unknown_key_lists_those_there_are(path: str, known: str) -> None:
    line = refused(with_value(path, 1))
    assert f"{path}: got an unknown key, expected one of {known}" in line


def test_a_missing_key_and_a_missing_section() -> None:
    values = copy.deepcopy(GOOD)
    del values["run"]["steps"]
    assert "run.steps: got nothing, expected a value" in refused(values)
    del values["run"]
    assert "run: got nothing, expected a value" in refused(values)


def write(path: Path, text: str) -> Path:
    file = path / "c.yaml"
    file.write_text(text)
    return file


def good_file(path: Path) -> Path:
    return write(path, yaml.safe_dump(GOOD))


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    text = yaml.safe_dump(GOOD) + "trainer: {optimizer: {lr: 1e-5}}\n"
    assert yaml.safe_load(text)["trainer"]["optimizer"]["lr"] == "1e-5"
    assert load(write(tmp_path, text)).trainer.optimizer.lr == 1e-5


@pytest.mark.parametrize(("word", "value"), [("off", "off"), ("on", "on"), ("no", "off"), ("auto", "auto"), ("'off'", "off")])
def test_an_unquoted_on_or_off_is_taken_as_written(tmp_path: Path, word: str, value: str) -> None:
    assert load(write(tmp_path, yaml.safe_dump(GOOD) + f"telemetry: {{tensorboard: {word}}}\n")).telemetry.tensorboard == value


def test_overrides_are_yaml_and_reach_any_depth(tmp_path: Path) -> None:
    config = load(
        good_file(tmp_path), ["trainer.optimizer.lr=1e-3", "engines.args=[--log-level]", "queue.staleness.max_staleness=0", "run.steps=9"]
    )
    assert config.trainer.optimizer.lr == 1e-3
    assert config.engines.args == ("--log-level",)
    assert (config.queue.staleness.max_staleness, config.run.steps) == (0, 9)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("run.steps", "command line: got 'run.steps', expected key.path=value"),
        ("run.steps.more=1", "command line: run.steps.more: got steps is not a section, expected a section"),
        ("run.steps=[1", "command line: run.steps: got '[1', expected a YAML value"),
        ("run.stps=1", "command line: run.stps: got an unknown key, expected one of dir, steps"),
        ("trainer.lr=1", "; did you mean trainer.optimizer.lr"),
        ("telemetry.profile.memory=true", "command line: telemetry.profile.steps: got nothing, expected a value"),
        ("run.dir=", "command line: run.dir: got None, expected a path, which is text"),
        ("run.dir=" + "[" * 3000, "command line: run.dir: got sections or lists nested too deeply"),
        ("task.sources=[{weight: 1e308}, {weight: 1e308}]", "task.sources: got weights whose sum is no finite number"),
    ],
)
def test_a_bad_override_is_one_line(tmp_path: Path, override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(good_file(tmp_path), [override])
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"run: [", "expected valid YAML"),
        (b"run: !!python/object/apply:os.system [ls]", "expected valid YAML"),
        (b"run: {steps: 1}\nrun: {steps: 2}\n", "key 'run' is given twice"),
        (b"a: " + b"[" * 3000 + b"]" * 3000, "got sections or lists nested too deeply, expected valid YAML"),
        (b"", "got NoneType, expected a mapping"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: bytes, expected: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("path", "got"), [("/dev/zero", "no such file"), ("a" * 5000, "File name too long"), ("a\0b", "no such file")])
def test_what_cannot_be_read_is_refused_unread(path: str, got: str) -> None:
    with pytest.raises(ConfigError, match=f": got {got}, expected a YAML configuration"):
        load(Path(path))


def test_digest_tells_configurations_apart_and_is_stable(tmp_path: Path) -> None:
    file = good_file(tmp_path)
    assert load(file).digest == load(file).digest == Config.model_validate_json(load(file).model_dump_json()).digest
    assert load(file, ["rollout.temperature=0.9"]).digest != load(file).digest


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"ranks": 3, "cp": 2}, ["trainer.ranks: got 3, expected a multiple of tp * cp * pp = 2", "change trainer.ranks, tp, cp or pp"]),
        ({"ranks": 2, "tp": 2, "etp": 1}, ["trainer.etp: got 1, expected tp = 2", "expert gradients"]),
        ({"vpp": 2}, ["trainer.vpp: got 2, expected 1", "trainer.pp is 1"]),
        ({"first_stage_layers": 1}, ["trainer.first_stage_layers: got 1", "trainer.pp is 1"]),
    ],
)
def test_sizes_of_the_trainer_that_cannot_be_are_refused(trainer: dict[str, int], words: list[str]) -> None:
    text = refused(with_value("trainer", trainer))
    for word in words:
        assert word in text


def test_modes_to_compare_with_decide_how_old_a_batch_may_be() -> None:
    sync, ahead = parse(with_value("run.mode", "sync")), parse(with_value("run.mode", "one_step_off"))
    assert (sync.queue.staleness.max_staleness, sync.rollout.interruption) == (0, "in_place")
    assert (ahead.queue.staleness.max_staleness, ahead.rollout.interruption) == (1, "drain")
    assert parse(json.loads(ahead.model_dump_json())) == ahead
    contradicting = with_value("run.mode", "sync")
    contradicting["queue"] = {"staleness": {"max_staleness": 2}}
    assert "queue.staleness.max_staleness: got 2, expected 0 because run.mode is sync; leave it out" in refused(contradicting)
    for wrong in ("later", ["sync"], 3):
        assert "run.mode" in refused(with_value("run.mode", wrong))
    assert "queue" in refused({**with_value("run.mode", "sync"), "queue": 3})


def test_all_mistakes_of_a_file_are_named_at_once_with_their_lines(tmp_path: Path) -> None:
    file = good_file(tmp_path)
    file.write_text(file.read_text() + "rolout: {group_size: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load(file, ["trainer.tpp=2", "run.steps=0", "trainer.lr=1e-3"])
    text, lines = file.read_text(), str(caught.value).split("\n")
    by_key = {line.partition(": got ")[0].rpartition(": ")[2]: line for line in lines}
    assert set(by_key) == {"rolout", "trainer.tpp", "run.steps", "trainer.lr"}
    assert by_key["rolout"].startswith(f"{file}:{len(text.splitlines())}: rolout: got an unknown key")
    assert by_key["rolout"].endswith("did you mean rollout?")
    assert by_key["trainer.tpp"].startswith("command line: trainer.tpp: ")
    assert by_key["run.steps"].startswith("command line: run.steps: "), "the override is wrong, not the line of the file"
    assert by_key["trainer.tpp"].endswith("did you mean trainer.tp?")
    assert "did you mean trainer.optimizer.lr" in by_key["trainer.lr"]
    file.write_text(yaml.safe_dump(GOOD) + "objective: {updates_per_batch: 2}\n")
    with pytest.raises(ConfigError) as caught:
        load(file, ["rollout.groups_per_step=3", "rollout.group_size=4"])
    line = len(file.read_text().splitlines())
    assert str(caught.value).startswith(f"{file}:{line} with rollout.groups_per_step=3: objective.updates_per_batch: got 2, expected ")
