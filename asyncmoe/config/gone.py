"""Removed keys and commands, and what to do instead.

A removed key is ignored if its value is harmless (`Gone.idle`), so that the configuration of an older run, which lists every key, can be
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LAST = "64a8fbaf"
"""Last commit that has all removed keys and commands."""


@dataclass(frozen=True)
class Gone:
    """A removed key or section.

    Attributes:
        instead: what to do instead; follows "expected" in the message.
        idle: values that are ignored instead of refused; None: all values.
    """

    instead: str
    idle: tuple[Any, ...] | None


def _table(*rows: tuple[str, str, tuple[Any, ...] | None]) -> Mapping[str, Gone]:
    """Build the table from rows: names of keys or whole sections separated by spaces, `Gone.instead` and `Gone.idle`."""
    return {key: Gone(instead, idle) for keys, instead, idle in rows for key in keys.split()}


ANY = None
_MEMORY = "nothing: trajectories stay in the memory of the process that sampled them, and in the log"
_STORE = "nothing: sync.method disk writes versions to sync.directory"
_NAME = "nothing: the run has the name of run.dir"
_SANDBOX = "nothing for bubblewrap; environment.sandbox.image for containers, environment.sandbox.url for a server"
_LEFT_OUT = "nothing: training leaves out the questions that the evaluation asks"
_OUTAGE = "nothing: a scorer that cannot be reached is retried until scoring.deadline_s"
_WHOLE = "nothing: a data set is read whole; it is mapped into memory, so it may be larger than memory"
_PROFILE = "nothing: a profile has the names of operators and their times"
_HOST = "nothing: /metrics is on 127.0.0.1, where a Prometheus agent on the same machine reads it"
_CHECKED = "nothing: verify.max_logprob_diff and verify.anomalies.kl_engine check every step, without another forward pass"
_BOUND = "a fixed bound, which the rule's key `above` sets: running medians are no longer kept"
_REWARD = "nothing: watch.alerts.command and the report show a reward that falls"
_TAIL = "nothing: run.mode async has no batches whose tail could be cut"
_ORDER = "nothing: a task of your own decides which prompts come next (examples/real/curriculum.py, docs/guides/task.md)"
_FUSED = "nothing: it is on where Transformer Engine has it and computes correctly; trainer.megatron.transformer_impl=local turns it off"
_CLOCKS = "nothing: clocks of two machines may differ by ten seconds; synchronise them (chronyc tracking, timedatectl)"
_COMMAND = "watch.alerts.command, a program of your own that gets every alert, for example curl with --data @-"

KEYS = _table(
    ("cluster.clock_s cluster.max_clock_skew_s", _CLOCKS, (10.0,)),
    ("cluster.silence_s", "cluster.heartbeat_timeout_s", ()),
    ("engines.host", "nothing: a server listens on the address of cluster.network", ("127.0.0.1",)),
    ("environment.on_conflict", "nothing: the run's own sampling is used; a header of the answer says so", ("run",)),
    ("environment.sandbox.backend", _SANDBOX, ANY),
    ("environment.sandbox.python", "nothing: the python3 of the system, of the image or of the server runs programs", ("python3",)),
    ("environment.sandbox.retries", "nothing: a program that has not begun is posted again for as long as it may run", (2,)),
    ("environment.sandbox.runtime", "nothing: containers are docker's, or podman's where there is no docker", ("docker",)),
    ("environment.tools.options.python.namespaces", f"{_SANDBOX}, where there are no user namespaces", (True,)),
    ("evaluation.min_p evaluation.sets.min_p", "rollout.min_p, which evaluations use too", (None,)),
    ("evaluation.top_k evaluation.sets.top_k", "rollout.top_k, which evaluations use too", (None,)),
    ("evaluation.overlap evaluation.sets.overlap", _LEFT_OUT, ("refuse", "leave_out", None)),
    ("journal", "nothing: a log file holds 64 MiB, and the wait for a server is a minute", ANY),
    ("journal.enabled log.enabled", "nothing: a run always keeps its log", (True,)),
    ("journal.folder", "log.folder", (None,)),
    ("journal.max_bytes", "log.max_bytes", (256 << 30,)),
    ("journal.piece_tokens", "log.piece_tokens", (1024,)),
    ("journal.redis", "log.redis", (None,)),
    ("journal.redis_password_variable", "the password in the variable ASYNCMOE_LOG_PASSWORD", (None,)),
    ("journal.turns", "nothing: turns are recorded; log.piece_tokens=0 records whole responses only", (True,)),
    ("lora.dropout", "nothing: engines sample without dropout, and what is sampled is what is trained", (0.0,)),
    ("objective.tis_cap", "objective.correction.cap", ()),
    ("queue.admission", "nothing: all responses to a prompt start together", ("group",)),
    ("queue.mooncake queue.redis_patience_s", _MEMORY, ANY),
    ("queue.mooncake.master queue.redis_password_variable", _MEMORY, (None,)),
    ("queue.payload_bytes", "nothing: queue.capacity bounds what is queued", ANY),
    ("queue.payloads", _MEMORY, ("workers",)),
    ("queue.redis", f"{_MEMORY}; log.redis keeps the log in Redis", (None,)),
    ("queue.staleness.eta", "queue.staleness.max_staleness", ()),
    ("queue.staleness.max_age", "queue.staleness.drop_above", ()),
    ("rollout.affinity_slack", "nothing: a request goes to the engine of its conversation, else to the one with the fewest requests", ANY),
    ("rollout.balance", "nothing: a request goes to the engine of its conversation, else to the least loaded one", ("least_loaded",)),
    ("rollout.oversample", "nothing: a group waits for all its responses; the first to finish would be the short ones", (0,)),
    ("rollout.tail_batching", _TAIL, (1.0,)),
    ("run.resume", "nothing: the same command resumes the run; another run.dir starts a new one", (True,)),
    ("scoring.backoff_s", "nothing: half a second before the first retry, twice as long before each further one, up to 30", ANY),
    ("scoring.breaker_failures scoring.breaker_cooldown_s", _OUTAGE, ANY),
    ("sync.audit_every sync.spot_check_every", "nothing: sync.verify_every compares the checksums of every engine", (0, 20, 50)),
    ("sync.delta_base", "nothing: a trainer rank keeps what it sent last in the memory of its weights", ("device",)),
    ("sync.relay", "nothing: the trainer sends to every engine", (False, True, "auto", "off")),
    ("sync.staging", "nothing: a whole version is staged where memory allows, else engines pause for it", (True, "auto", "full")),
    ("sync.store", _STORE, ANY),
    ("sync.store.url", _STORE, (None,)),
    ("task.curriculum", _ORDER, ANY),
    ("task.curriculum.enabled", _ORDER, (False,)),
    ("task.scorer", "scoring.scorer", ()),
    ("task.scorer_timeout_s", "scoring.timeout_s", ()),
    ("task.streaming task.sources.streaming evaluation.sets.streaming", _WHOLE, (None, False)),
    ("telemetry.live", "nothing: a line for each step, on a terminal and elsewhere", ANY),
    ("telemetry.loggers telemetry.loggers.samples", "nothing: asyncmoe show and asyncmoe report show the samples", (False,)),
    ("telemetry.loggers.finish_timeout_s", "nothing: the end of a run waits 30 s for its loggers", (30.0,)),
    ("telemetry.logs", "nothing: logs grow; logrotate bounds them with copytruncate", (3, 64 << 20)),
    ("telemetry.mlflow.name telemetry.trackio.name telemetry.wandb.name", _NAME, (None,)),
    ("telemetry.mlflow.tags", "nothing: a run of MLflow has every key of the configuration as a parameter", ({},)),
    ("telemetry.mlflow.uri", "the address in the variable MLFLOW_TRACKING_URI", (None,)),
    ("telemetry.nvtx", "nothing: nsys profile --pytorch=autograd-nvtx names the parts of a step", (False,)),
    ("telemetry.profile.max_mb telemetry.profile.shapes telemetry.profile.stack", _PROFILE, (2048, False)),
    ("telemetry.profile.trace", "nothing: a profile has a trace", (True,)),
    ("telemetry.prometheus_host", _HOST, ("127.0.0.1", "localhost", "::1")),
    ("telemetry.samples.max_bytes", "nothing: the folder of samples holds at most 256 MiB", (1 << 28,)),
    ("telemetry.samples.max_tokens", "nothing: at most 8,192 tokens each are kept of a prompt and of the text after it", (8192,)),
    ("telemetry.trackio.group", "nothing: Trackio's own page groups runs by their configuration", (None,)),
    ("telemetry.trackio.space_id", "the id in the variable TRACKIO_SPACE_ID", (None,)),
    ("telemetry.trackio.server_url", "the address in the variable TRACKIO_SERVER_URL", (None,)),
    ("telemetry.wandb.entity", "the name in the variable WANDB_ENTITY", (None,)),
    ("telemetry.wandb.group", "the name in the variable WANDB_RUN_GROUP", (None,)),
    ("telemetry.wandb.mode", "the word in the variable WANDB_MODE", (None,)),
    ("telemetry.wandb.tags", "the tags, with commas between them, in the variable WANDB_TAGS", ([], ())),
    ("trainer.megatron.moe_permute_fusion trainer.megatron.moe_router_fusion", _FUSED, (None,)),
    ("trainer.megatron.apply_rope_fusion trainer.megatron.gradient_accumulation_fusion", _FUSED, (None,)),
    ("trainer.memory.overlap_optimizer_offload", "nothing: copies between GPU and host overlap with the CPU's updates", (True,)),
    ("trainer.standby", "nothing: a lost trainer starts again, and imports its modules then", (True, False)),
    ("verify.logprobs_every verify.probe_every verify.probe_tokens", _CHECKED, ANY),
    ("verify.max_kl", "verify.anomalies.kl_engine.above", (None,)),
    ("verify.max_replay_drift", _CHECKED, (0.5,)),
    ("verify.show", "nothing: asyncmoe show shows the tokens on which engine and trainer differ", ANY),
    ("verify.anomalies.after verify.anomalies.window", _BOUND, ANY),
    ("verify.anomalies.kl_engine.factor", _BOUND, (None,)),
    ("verify.anomalies.grad_norm.factor", _BOUND, (None, 100.0)),
    ("verify.anomalies.age", "queue.staleness.drop_above", ANY),
    ("verify.anomalies.age.above", "queue.staleness.drop_above", (None,)),
    ("verify.anomalies.reward", _REWARD, ANY),
    ("verify.anomalies.reward.below", _REWARD, (None,)),
    ("watch.alerts.no_step_s", "nothing: half an hour without a step is reported", (1800.0,)),
    ("watch.alerts.on", f"{_COMMAND}, and can ignore events", ANY),
    ("watch.alerts.timeout_s", "nothing: the command may take ten seconds", (10.0,)),
    ("watch.alerts.webhook", _COMMAND, (None,)),
)
_CONTEXTS = "nothing: measure engines.step_s with contexts of the usual length; engines.max_running is how many of them fit"
_STEADY = "nothing: engines, trainer and scoring are simulated without failures, and as fast as they are on average"

PLANT = _table(
    ("prompt_tokens tool_tokens", _CONTEXTS, (0,)),
    ("engines.context_s engines.prefill_token_s engines.prefill_chunk engines.prefix_hits engines.kv_tokens", _CONTEXTS, (0, None)),
    ("engines.balance", "nothing: a request goes to the engine with the fewest requests", ("least_loaded",)),
    ("engines.affinity_slack", "nothing: a request goes to the engine with the fewest requests", ANY),
    ("engines.slow_share engines.slow_factor engines.per_node", _STEADY, ANY),
    ("trainer.token_s trainer.attention_width trainer.bytes_per_token trainer.fetch_bytes_per_s", "trainer.step_s", (0, None)),
    ("engines.order", "nothing: requests are simulated in the order of arrival", ("arrival",)),
    ("queue_capacity", "nothing: max_staleness bounds what is queued", (None,)),
    ("tail_batching", _TAIL, (1.0,)),
    ("sync.plan", "sync.seconds, as asyncmoe plan prints it", (None,)),
    ("sync.landing", "nothing: engines pause for a new version", ("pause",)),
    ("sync.recompute", _CONTEXTS, (False,)),
    ("scaling.first", "engines.count: try several", (None,)),
    ("scaling", "engines.count: try several", ANY),
    ("workers failures", _STEADY, ANY),
    ("workers.tokens_per_s", _STEADY, (None,)),
    ("failures.scoring failures.engine_mtbf_s failures.node_mtbf_s failures.trainer failures.jitter", _STEADY, (0, None)),
)
"""Removed keys of the plant of `asyncmoe simulate`."""

VALUES: Mapping[tuple[str, str | int], str] = {
    ("rollout.group_size", 1): "2 or more: advantages compare the responses to a prompt",
    ("rollout.top_k", 1): "2 or more, or null: with 1, all responses to a prompt are the same",
    ("rollout.workers", 0): "1 or more: episodes run in rollout workers",
    ("trainer.precision", "bf16"): "trainer.dtype=bfloat16",
    ("trainer.precision", "fp32"): "trainer.dtype=float32",
    ("sync.method", "store"): "disk, which writes versions to sync.directory, reshard or broadcast",
    **{(f"verify.anomalies.{rule}.action", "off"): f"verify.anomalies.{rule}.above=null" for rule in ("grad_norm", "kl_engine")},
}
"""(Key, one of its values that was removed) -> what to do instead."""

_LIVE = "asyncmoe report, which writes the page of a running run too; TensorBoard and the loggers are live"
_RUN = "--config FILE with the keys of a run, for example trainer.tp=4 engines.count=16"
_UNMEASURED = ("context", "interruption", "hang", "ledger", "routes", "samples", "sandbox", "soak", "changes --dither")
COMMANDS: Mapping[str, str] = {
    "journal": "asyncmoe log",
    "resend": "nothing: a run sends its records itself; wandb sync sends what W&B kept without a network",
    "import-checkpoint": "Megatron-Bridge's export to a Hugging Face directory, and that directory as model.path",
    "upcycle": "examples/real/make_mixture.py, which makes a mixture of experts from a dense model",
    **{f"bench {name}": "nothing: it is no longer measured" for name in _UNMEASURED},
    **{f"bench {name}": "asyncmoe bench log" for name in ("journal", "redis", "segments")},
    "bench peers": "asyncmoe bench learning --arms dense-trl, which trains next to TRL",
    "bench policies": "asyncmoe simulate",
    "bench queue": "asyncmoe bench batches",
    "bench staging": "asyncmoe plan --config FILE",
    "bench store": "asyncmoe bench sync",
    "doctor --compare": "asyncmoe doctor --json on each node: jq -c .versions and sort -u show where nodes differ (docs/cluster.md)",
    "plan --bucket-bytes": "--config FILE with sync.bucket_bytes",
    "plan --dtype": "nothing: weights on GPUs are bfloat16, or float8 as the checkpoint says",
    "plan --engines": _RUN,
    "plan --hbm": "nothing: only the time on the network is estimated",
    "plan --nvlink": "--nic 450, the speed within a node",
    "plan --trainer": _RUN,
    "report --port": _LIVE,
    "report --serve": _LIVE,
    "show --plain": "asyncmoe show --json, for programs",
    "simulate --mode": "nothing: all modes are simulated",
    "simulate --trace": "workload=RUN_DIR for a run's lengths; set sizes and seconds by keys, from its config.yaml and its report",
    "simulate --staleness": "max_staleness=N, which --sweep tries besides 1, 2, 4 and 8",
}
"""Removed command of `asyncmoe`, or removed option of a command -> what to do instead."""


def take(values: dict[str, Any], keys: Mapping[str, Gone] = KEYS) -> dict[tuple[str, ...], tuple[Any, str]]:
    """Delete removed keys from the values of a configuration.

    Returns:
        The path of every removed key whose value is not idle -> the value, and what to do instead.
    """
    found: dict[tuple[str, ...], tuple[Any, str]] = {}
    for path, value in list(_leaves(values)):
        name = _name(path)
        gone = keys.get(name) or next((keys[section] for section in _sections(name) if section in keys), None)
        if isinstance(value, str | int) and not isinstance(value, bool) and (name, value) in VALUES:
            found[path] = value, VALUES[name, value]
        elif gone is None:
            continue
        elif gone.idle is not None and not any(value == idle and isinstance(value, bool) == isinstance(idle, bool) for idle in gone.idle):
            found[path] = value, gone.instead
        _remove(values, path, keys)
    return found


def _name(path: tuple[str, ...]) -> str:
    """Return the name of a key in the tables, without the number of a mixture's source or the name of an evaluation set."""
    of_many = path[:2] in (("task", "sources"), ("evaluation", "sets"))
    return ".".join((*path[:2], *path[3:]) if of_many else path)


def _sections(name: str) -> Iterable[str]:
    """Return the sections of a key, the innermost first."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))


def _leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of every key that is not a section, and of empty sections."""
    for name, value in values.items():
        path = (*above, str(name))
        if path == ("task", "sources") and isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _remove(values: dict[str, Any], path: tuple[str, ...], keys: Mapping[str, Gone]) -> None:
    """Delete a key, and the removed sections that this empties."""
    for depth in range(len(path), 0, -1):
        inner: Any = values
        for name in path[: depth - 1]:
            inner = inner[int(name)] if isinstance(inner, list) else inner[name]
        if depth == len(path) or (".".join(path[:depth]) in keys and not inner.get(path[depth - 1])):
            inner.pop(path[depth - 1], None)  # with YAML aliases two keys share a value
