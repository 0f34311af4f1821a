"""What configurations and commands of before had, and what to do instead: the one table of it.

A key with a value that asks for nothing is passed over, so that the configuration of an older run, which has every key, is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LAST = "64a8fbaf"
"""Commit that still has all of it."""


@dataclass(frozen=True)
class Gone:
    """A removed key.

    Attributes:
        instead: what to do instead, after "expected".
        idle: values that ask for nothing that is gone; None: all, because another key does.
    """

    instead: str
    idle: tuple[Any, ...] | None = ()


_MEMORY = "nothing: trajectories stay in the memory of the process that sampled them, and in the log"
_STORE = "nothing: sync.method disk writes versions to sync.directory"
_VERIFY = "nothing: sync.verify_every compares the checksums of every engine"
_LOGS = "nothing: logs grow; logrotate bounds them with copytruncate"
_PROFILE = "nothing: a profile has the names of operators and their times"
_HOST = "nothing: /metrics is on 127.0.0.1, where an agent of Prometheus on the same machine reads it"
_TO_COMMAND = "watch.alerts.command, a program of your own that gets every alert"
_SANDBOX = "nothing for bubblewrap; environment.sandbox.url for a server of your own"
_PREFIX = "nothing: a request goes to the engine that answered before, else to the one with the fewest"
_LEFT_OUT = "nothing: training leaves out the questions that the evaluation asks"
_OVERRIDDEN = "nothing: the run's own sampling is used, and the answer's header asyncmoe-overridden names the parameter"
_OUTAGE = "nothing: a scorer that cannot be reached is asked again until scoring.deadline_s"
_WHOLE = "nothing: a data set is read whole; it is mapped into memory, so it may be larger than that"
_CHECKED = "nothing: verify.max_logprob_diff and verify.anomalies.kl_engine look at every step, without another forward pass"
_BOUND = "the bound itself, above: running medians are kept no more"
_REWARD = "nothing: watch.alerts.command and the report show a reward that falls"
_TAIL = "nothing: run.mode async has no batches whose tail could be cut"
_ORDER = "nothing: which prompts come next is for a task of your own (examples/real/curriculum.py, docs/guides/task.md)"

KEYS: Mapping[str, Gone] = {
    "cluster.clock_s": Gone("cluster.max_clock_skew_s"),
    "cluster.silence_s": Gone("cluster.heartbeat_timeout_s"),
    "lora.dropout": Gone("nothing: engines sample without dropout, and what is sampled is what is trained", (0.0,)),
    "objective.tis_cap": Gone("objective.correction.cap"),
    "queue.staleness.eta": Gone("queue.staleness.max_staleness"),
    "queue.staleness.max_age": Gone("queue.staleness.drop_above"),
    "task.scorer": Gone("scoring.scorer"),
    "task.scorer_timeout_s": Gone("scoring.timeout_s"),
    "journal.enabled": Gone("nothing: a run always keeps its log", (True,)),
    "log.enabled": Gone("nothing: a run always keeps its log", (True,)),
    "journal.folder": Gone("log.folder", (None,)),
    "journal.max_bytes": Gone("log.max_bytes", (256 << 30,)),
    "journal.piece_tokens": Gone("log.piece_tokens", (1024,)),
    "journal.redis": Gone("log.redis", (None,)),
    "journal.redis_password_variable": Gone("the password in the variable ASYNCMOE_LOG_PASSWORD", (None,)),
    "journal.redis_patience_s": Gone("nothing: a server that does not answer is waited for for a minute", None),
    "journal.segment_bytes": Gone("nothing: a file of the log has 64 MiB", None),
    "journal.turns": Gone("nothing: turns are recorded; log.piece_tokens=0 records whole responses only", (True,)),
    "engines.host": Gone("nothing: a server listens on the address of cluster.network", ("127.0.0.1",)),
    "environment.sandbox.backend": Gone(_SANDBOX, None),
    "environment.sandbox.image": Gone(_SANDBOX, (None,)),
    "environment.sandbox.python": Gone("nothing: the python3 of the system or of the server runs programs", ("python3",)),
    "environment.sandbox.retries": Gone("nothing: a program that has not begun is posted again for as long as it may run", (2,)),
    "environment.sandbox.runtime": Gone(_SANDBOX, ("docker",)),
    "environment.tools.options.python.namespaces": Gone(_SANDBOX + ", where there are no user namespaces", (True,)),
    "environment.on_conflict": Gone(_OVERRIDDEN, ("run",)),
    **dict.fromkeys(("evaluation.min_p", "evaluation.sets.min_p"), Gone("rollout.min_p, which evaluations use too", (None,))),
    **dict.fromkeys(("evaluation.overlap", "evaluation.sets.overlap"), Gone(_LEFT_OUT, ("refuse", "leave_out", None))),
    "queue.mooncake.master": Gone(_MEMORY, (None,)),
    "queue.mooncake.metadata": Gone(_MEMORY, None),
    "queue.mooncake.patience_s": Gone(_MEMORY, None),
    "queue.mooncake.protocol": Gone(_MEMORY, None),
    "queue.mooncake.segment_bytes": Gone(_MEMORY, None),
    "queue.admission": Gone("nothing: all responses to a prompt start together", ("group",)),
    "queue.payload_bytes": Gone("nothing: queue.capacity bounds what is queued", None),
    "queue.payloads": Gone(_MEMORY, ("workers",)),
    "queue.redis": Gone(_MEMORY + "; log.redis keeps the log in Redis", (None,)),
    "queue.redis_password_variable": Gone(_MEMORY, (None,)),
    "queue.redis_patience_s": Gone(_MEMORY, None),
    "rollout.affinity_slack": Gone(_PREFIX, None),
    "rollout.oversample": Gone("nothing: a group is of all its responses; the first to finish would be the short ones", (0,)),
    "rollout.tail_batching": Gone(_TAIL, (1.0,)),
    "rollout.balance": Gone(_PREFIX, ("least_loaded",)),
    **dict.fromkeys(("scoring.breaker_failures", "scoring.breaker_cooldown_s"), Gone(_OUTAGE, None)),
    "sync.audit_every": Gone(_VERIFY, (0, 20)),
    "sync.delta_base": Gone("nothing: a trainer rank keeps what it sent last in the memory of its weights", ("device",)),
    "sync.relay": Gone("nothing: the trainer sends to every engine", (False, True, "auto", "off")),
    "sync.spot_check_every": Gone(_VERIFY, (0, 50)),
    "sync.staging": Gone("nothing: a whole version is staged where memory allows, else engines pause for it", (True, "auto", "full")),
    "sync.store.full_every": Gone(_STORE, None),
    "sync.store.grace_s": Gone(_STORE, None),
    "sync.store.keep": Gone(_STORE, None),
    "sync.store.url": Gone(_STORE, (None,)),
    **dict.fromkeys(("task.streaming", "task.sources.streaming", "evaluation.sets.streaming"), Gone(_WHOLE, (None, False))),
    "task.curriculum.enabled": Gone(_ORDER, (False,)),
    "task.curriculum.floor": Gone(_ORDER, None),
    "task.curriculum.memory": Gone(_ORDER, None),
    "task.curriculum.pass_reward": Gone(_ORDER, None),
    "telemetry.live": Gone("nothing: a line for each step, on a terminal and elsewhere", None),
    "telemetry.loggers.finish_timeout_s": Gone("nothing: the end of a run waits 30 s for its loggers", (30.0,)),
    "telemetry.loggers.samples": Gone("nothing: asyncmoe show and asyncmoe report show the samples", (False,)),
    "telemetry.logs.keep": Gone(_LOGS, (3,)),
    "telemetry.logs.max_bytes": Gone(_LOGS, (64 << 20,)),
    "telemetry.mlflow.name": Gone("nothing: the run has the name of run.dir", (None,)),
    "telemetry.mlflow.tags": Gone("nothing: a run of MLflow has every key of the configuration as a parameter", ({},)),
    "telemetry.profile.max_mb": Gone(_PROFILE, (2048,)),
    "telemetry.nvtx": Gone("nothing: nsys profile --pytorch=autograd-nvtx names the parts of a step", (False,)),
    "telemetry.profile.trace": Gone("nothing: a profile has a trace", (True,)),
    "telemetry.profile.shapes": Gone(_PROFILE, (False,)),
    "telemetry.profile.stack": Gone(_PROFILE, (False,)),
    "telemetry.prometheus_host": Gone(_HOST, ("127.0.0.1", "localhost", "::1")),
    "telemetry.samples.max_bytes": Gone("nothing: the folder of samples has 256 MiB at most", (1 << 28,)),
    "telemetry.samples.max_tokens": Gone("nothing: 8,192 tokens are kept of a prompt, and of what follows it", (8192,)),
    "telemetry.trackio.group": Gone("nothing: Trackio's own page groups runs by their configuration", (None,)),
    "telemetry.trackio.name": Gone("nothing: the run has the name of run.dir", (None,)),
    "telemetry.trackio.space_id": Gone("the id in the variable TRACKIO_SPACE_ID", (None,)),
    "telemetry.trackio.server_url": Gone("the address in the variable TRACKIO_SERVER_URL", (None,)),
    "telemetry.wandb.entity": Gone("the name in the variable WANDB_ENTITY", (None,)),
    "telemetry.wandb.group": Gone("the name in the variable WANDB_RUN_GROUP", (None,)),
    "telemetry.wandb.name": Gone("nothing: the run has the name of run.dir", (None,)),
    "telemetry.wandb.mode": Gone("the word in the variable WANDB_MODE", (None,)),
    "telemetry.wandb.tags": Gone("the tags, with commas between them, in the variable WANDB_TAGS", ([], ())),
    **dict.fromkeys(
        tuple(
            f"trainer.megatron.{name}"
            for name in ("moe_permute_fusion", "moe_router_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
        ),
        Gone(
            "nothing: on where Transformer Engine has it and it computes correctly; trainer.megatron.transformer_impl=local is without",
            (None,),
        ),
    ),
    "trainer.memory.overlap_optimizer_offload": Gone("nothing: copies between GPU and host overlap with the CPU's updates", (True,)),
    "trainer.standby": Gone("nothing: a trainer that is lost starts again, and imports its programs then", (True, False)),
    "verify.logprobs_every": Gone(_CHECKED, None),
    "verify.max_kl": Gone("verify.anomalies.kl_engine.above", (None,)),
    "verify.max_replay_drift": Gone(_CHECKED, (0.5,)),
    "verify.probe_every": Gone(_CHECKED, None),
    "verify.probe_tokens": Gone(_CHECKED, None),
    "verify.show": Gone("nothing: asyncmoe show shows the tokens on which engine and trainer differ", None),
    "verify.anomalies.after": Gone(_BOUND, None),
    "verify.anomalies.window": Gone(_BOUND, None),
    "verify.anomalies.kl_engine.factor": Gone(_BOUND, (None,)),
    "verify.anomalies.grad_norm.factor": Gone(_BOUND, (None, 100.0)),
    "verify.anomalies.age.above": Gone("queue.staleness.drop_above", (None,)),
    "verify.anomalies.age.action": Gone("queue.staleness.drop_above", None),
    "verify.anomalies.reward.action": Gone(_REWARD, None),
    "verify.anomalies.reward.below": Gone(_REWARD, (None,)),
    "verify.anomalies.reward.spreads": Gone(_REWARD, None),
    "watch.alerts.no_step_s": Gone("nothing: half an hour without a step is told", (1800.0,)),
    "watch.alerts.on": Gone(_TO_COMMAND + ", and can pass over events", None),
    "watch.alerts.timeout_s": Gone("nothing: the command may take ten seconds", (10.0,)),
    "watch.alerts.webhook": Gone(_TO_COMMAND + ", for example curl with --data @-", (None,)),
}
_CONTEXTS = (
    "nothing: measure engines.step_s and step_batch with contexts of the usual length; engines.max_running is what has room for them"
)
_STEADY = "nothing: engines, trainer and scoring are simulated without failures, and as fast as they are on average"

PLANT: Mapping[str, Gone] = {
    **dict.fromkeys(("prompt_tokens", "tool_tokens"), Gone(_CONTEXTS, (0,))),
    **{
        f"engines.{key}": Gone(_CONTEXTS, (0, None))
        for key in ("context_s", "prefill_token_s", "prefill_chunk", "prefix_hits", "kv_tokens")
    },
    "engines.balance": Gone("nothing: a request goes to the engine with the fewest", ("least_loaded",)),
    "engines.affinity_slack": Gone("nothing: a request goes to the engine with the fewest", None),
    **{f"engines.{key}": Gone(_STEADY, None) for key in ("slow_share", "slow_factor", "per_node")},
    **{
        f"trainer.{key}": Gone("trainer.step_s", (0, None))
        for key in ("token_s", "attention_width", "bytes_per_token", "fetch_bytes_per_s")
    },
    "tail_batching": Gone(_TAIL, (1.0,)),
    "sync.plan": Gone("sync.seconds, as asyncmoe plan prints them", (None,)),
    "sync.landing": Gone("nothing: engines pause for a new version", ("pause",)),
    "sync.recompute": Gone(_CONTEXTS, (False,)),
    "scaling.first": Gone("engines.count: try several", (None,)),
    **{f"scaling.{key}": Gone("engines.count: try several", None) for key in ("least", "low", "high", "patience_s", "start_s")},
    "workers.count": Gone(_STEADY, None),
    "workers.tokens_per_s": Gone(_STEADY, (None,)),
    **{f"failures.{key}": Gone(_STEADY, (0, None)) for key in ("scoring", "engine_mtbf_s", "node_mtbf_s", "trainer", "jitter")},
    **{f"failures.{key}": Gone(_STEADY, None) for key in ("engine_restart_s", "trainer_restart_s")},
}
"""Removed keys of the plant of `asyncmoe simulate`."""

SECTIONS = (
    *("journal", "queue.mooncake", "sync.store", "task.curriculum", "telemetry.loggers", "telemetry.logs"),
    *("verify.anomalies.age", "verify.anomalies.reward"),
)
"""Sections of which every key is removed."""
VALUES: Mapping[tuple[str, str], str] = {
    ("trainer.precision", "bf16"): "trainer.dtype=bfloat16",
    ("trainer.precision", "fp32"): "trainer.dtype=float32",
    ("sync.method", "store"): "disk, which writes versions to sync.directory, reshard or broadcast",
}
"""(Key, removed value of it) -> what to do instead."""

TASK: Mapping[str, Any] = {"curriculum": {"enabled": False, "floor": 0.1, "memory": 0.8, "pass_reward": 1.0}, "streaming": None}
"""What the section `task` had besides: logs have a digest of all of it."""

_UNMEASURED = "nothing: it is measured no more"
_RUN = "--config FILE with the keys of a run, for example trainer.tp=4 engines.count=16"
OPTIONS: Mapping[str, str] = {
    "bench changes --dither": _UNMEASURED,
    "doctor --compare": "jq -c .versions of each node's asyncmoe doctor --json, which sort -u shows where they differ (docs/cluster.md)",
    "plan --bucket-bytes": "--config FILE with sync.bucket_bytes",
    "plan --dtype": "nothing: weights on GPUs are bfloat16, or float8 as the checkpoint says",
    "plan --engines": _RUN,
    "plan --hbm": "nothing: only the time of the wire is estimated",
    "plan --nvlink": "--nic 450, the speed within a node",
    "plan --trainer": _RUN,
    "report --port": "asyncmoe report, which writes the page of a running run too; TensorBoard and the loggers are live",
    "simulate --mode": "nothing: all modes are simulated",
    "simulate --staleness": "max_staleness=N, which --sweep tries besides 1, 2, 4 and 8",
    "show --plain": "asyncmoe show --json, for programs",
    "report --serve": "asyncmoe report, which writes the page of a running run too; TensorBoard and the loggers are live",
}
"""Removed option of a command -> what to do instead."""
COMMANDS: Mapping[str, str] = {
    "journal": "asyncmoe log",
    "resend": "nothing: a run sends its records itself; wandb sync sends what W&B kept without a network",
    "upcycle": "examples/real/make_mixture.py, which makes a mixture of experts from a dense model",
    "bench context": _UNMEASURED,
    "bench interruption": _UNMEASURED,
    "bench journal": "asyncmoe bench log",
    "bench hang": _UNMEASURED,
    "bench ledger": _UNMEASURED,
    "bench routes": _UNMEASURED,
    "bench peers": "asyncmoe bench learning --arms dense-trl, which trains next to TRL",
    "bench policies": "asyncmoe simulate",
    "bench queue": "asyncmoe bench batches",
    "bench redis": "asyncmoe bench log",
    "bench samples": _UNMEASURED,
    "bench sandbox": _UNMEASURED,
    "bench soak": _UNMEASURED,
    "bench segments": "asyncmoe bench log",
    "bench staging": "asyncmoe plan --config FILE",
    "bench store": "asyncmoe bench sync",
}
"""Removed command of `asyncmoe` -> what to do instead."""


def take(values: dict[str, Any], keys: Mapping[str, Gone] = KEYS) -> dict[tuple[str, ...], tuple[Any, str]]:
    """Remove what is gone from the values of a configuration.

    Returns:
        The path of every key that asked for it -> its value, and what to do instead.
    """
    found: dict[tuple[str, ...], tuple[Any, str]] = {}
    for path, value in list(_leaves(values)):
        key = _key(path)
        gone = keys.get(key)
        if isinstance(value, str) and (key, value) in VALUES:
            found[path] = value, VALUES[key, value]
        elif gone is None:
            continue
        elif gone.idle is not None and not any(value == idle and isinstance(value, bool) == isinstance(idle, bool) for idle in gone.idle):
            found[path] = value, gone.instead
        _remove(values, path)
    return found


def _key(path: tuple[str, ...]) -> str:
    """Return the name of a key in the tables, without the number of a mixture's source and the name of an evaluation set."""
    of_many = path[:2] in (("task", "sources"), ("evaluation", "sets"))
    return ".".join((*path[:2], *path[3:]) if of_many else path)


def _leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of every key that is no section, or an empty one."""
    for name, value in values.items():
        path = (*above, str(name))
        if path == ("task", "sources") and isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _remove(values: dict[str, Any], path: tuple[str, ...]) -> None:
    """Remove a key, and a removed section that has nothing else."""
    for depth in range(len(path), 0, -1):
        inner: Any = values
        for name in path[: depth - 1]:
            inner = inner[int(name)] if isinstance(inner, list) else inner[name]
        if depth == len(path) or (".".join(path[:depth]) in SECTIONS and not inner.get(path[depth - 1])):
            inner.pop(path[depth - 1], None)  # two keys of a YAML file may share a value
