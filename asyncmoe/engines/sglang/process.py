"""One SGLang server as a child process: its command line, start and end, including every process it spawned.

The server is a whole engine, or one node of an engine over several machines (`asyncmoe.engines.nodes`).
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from asyncmoe import models
from asyncmoe.config import Config, devices, sglang_arguments
from asyncmoe.engines.engine_python import engine_python
from asyncmoe.engines.nodes import ALONE, NodePlace, process_name, reserve
from asyncmoe.engines.sglang import lora
from asyncmoe.engines.sglang.client import SGLangClient
from asyncmoe.engines.sglang.connection import KEEP_ALIVE_S
from asyncmoe.engines.types import EngineLost
from asyncmoe.errors import AsyncmoeError, EngineError, UserError, WaitTimeout
from asyncmoe.models import family_of
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.platform.sglang.lifetime import API_KEY, PARENT
from asyncmoe.platform.sglang.packed_routes import ROUTING_VARIABLE
from asyncmoe.platform.sglang.private_meeting import NODES_KEY
from asyncmoe.platform.sglang.receiver_command import FAMILY_VARIABLE, LOADER
from asyncmoe.process import Child, likely
from asyncmoe.rpc import address, nccl_settings, peers
from asyncmoe.rpc.address import LOOPBACK
from asyncmoe.scratch import Scratch

_POLL_S = 0.2
_SEEDS = 1 << 31
_GPUS = Path("/dev/nvidiactl")
_TCP = "tcp://"


class SGLangProcess:
    """A running server; an `asyncmoe.engines.engine.EngineProcess`, which documents its attributes."""

    def __init__(
        self,
        name: str,
        config: Config,
        index: int,
        *,
        host: str = LOOPBACK,
        key: str = "",
        seed: int | None = None,
        memory: Sequence[str] = (),
        place: NodePlace = ALONE,
    ) -> None:
        """Start the process. Call it from the main thread, because Linux ends the server when the thread that started it ends.

        Args:
            name: name of the engine in records and messages.
            index: index of this engine on its machine.
            host: address to listen on.
            key: API key that every request needs; empty: a random one that only this process knows.
            seed: added to the run's seed, so that no two engines draw the same samples; default: `index`.
            memory: arguments that limit its GPU memory (`asyncmoe.plan.budget.engine_arguments`).
            place: which node of the engine it is.

        Raises:
            UserError: the port is taken.
        """
        section = config.engines
        self.name, self.tp, self.ep, self.host = name, section.tp, section.ep, address.host_id()
        self._ready_by = time.monotonic() + section.start_timeout_s
        self._start_timeout_s = section.start_timeout_s
        self._reserved = reserve(host, section.port + index if section.port and not place.node else 0)
        port = int(self._reserved.getsockname()[1])
        log = config.run.dir / "logs" / f"{process_name(name, place.node).replace('.', '-')}.log"
        hf = models.hf_config_of(config)
        self._adapter, dtype = models.adapter_of(config, hf), models.engine_dtype(hf, section)
        routing = models.kept_routing(config, hf)
        own = ("--dtype", dtype, *family_of(hf).engine.arguments, *memory)
        arguments = command(config, index, host, port, routing is not None, index if seed is None else seed, self._adapter, own, place)
        key = key or secrets.token_urlsafe()
        # Passed in the environment, because every user of this machine can read arguments.
        kept = {} if routing is None else {ROUTING_VARIABLE: msgspec.json.encode(routing).decode()}
        given = environment(config, index, host, place) | kept
        given[peers.STARTER] = msgspec.json.encode(peers.facts("its starter", ())).decode()
        self._scratch = Scratch()
        try:
            self._child = Child(name, arguments, log, given | self._scratch.environment() | {API_KEY: key})
        except AsyncmoeError:
            self._reserved.close()
            self._scratch.remove()
            raise
        self.pid, self.url = self._child.pid, f"http://{host}:{port}"
        self.client = SGLangClient(name, self.url, key)

    @property
    def died(self) -> str | None:
        """See `EngineHandle`."""
        if self._child.returncode is None:
            return None
        output = self._child.output()
        if (reason := reason_in(output)) is None:
            reason = f"ended with status {self._child.returncode}{likely(self._child.returncode)}"
            reason += "".join(f"; its last line: {line.strip()[-400:]}" for line in output.rstrip().splitlines()[-1:])
        return f"{reason} (log: {self._child.log})"

    async def wait_ready(self) -> None:
        """See `EngineProcess`."""
        while not await self.client.ready():
            if (why := self.died) is not None:
                raise EngineError(f"{self.name} did not start: {why}")
            if time.monotonic() > self._ready_by:
                raise WaitTimeout(self.name, f"its start; its log is {self._child.log}", self._start_timeout_s)
            await asyncio.sleep(_POLL_S)
        if self._adapter is not None:
            await lora.install(self.client, self._adapter, self._start_timeout_s)
        with suppress(EngineLost):  # it only makes the server faster; whoever uses a lost one notices
            await self.client.freeze()

    async def stop(self) -> None:
        """End the server with every process it spawned, and remove the files they left.

        It is killed at once: nothing waits for its responses any more. If asked to stop, SGLang would take up to 5 s until it checks
        for remaining requests, and then kill its processes itself (`sigterm_watchdog`).
        """
        await self.client.close()
        self._reserved.close()
        await asyncio.to_thread(self._child.end, 0.0)
        await asyncio.to_thread(self._scratch.remove)

    def kill(self, why: str = "") -> None:
        """Kill the server with every process it spawned, without waiting; its requests in progress fail with `EngineLost`."""
        self._child.kill()


def command(
    config: Config,
    index: int,
    host: str,
    port: int,
    keeps_routing: bool,
    seed: int,
    adapter: Kind | None,
    own: Sequence[str] = (),
    place: NodePlace = ALONE,
) -> list[str]:
    """Return the command line of engine `index`; on a CPU, `asyncmoe.platform.sglang` adds the arguments that only a CPU needs.

    - The tokenizer is not loaded: requests and responses are token ids.
    - A streamed response has every token once (`streaming.py`).
    - Version "0" is the checkpoint's weights.
    - Shared-expert fusion is off on every device, because weights are sent unfused; on a GPU, SGLang would otherwise turn the shared
      experts of some models into one more routed expert.

    Args:
        own: arguments for its model (`EngineClass.arguments`), such as the dtype (SGLang would run a float32 model in float16), and
            arguments that limit its GPU memory (`asyncmoe.plan.budget.engine_arguments`). The user's arguments follow and take precedence.
        place: as for `SGLangProcess`.
    """
    section = config.engines
    flags: dict[str, object] = {
        "model-path": config.model.path,
        "host": host,
        "port": port,
        "tp": section.tp,
        "ep": section.ep,
        "max-running-requests": section.max_running,
        "random-seed": (config.run.seed + seed) % _SEEDS,
        "weight-version": "0",
        "log-level-http": "warning",
        "custom-weight-loader": LOADER,
    }
    if _GPUS.exists():
        flags["base-gpu-id"] = devices.engine_gpu(config, index, place.node, address.several(config.cluster.network))
    if place.meeting:
        flags |= {"nnodes": section.nodes, "node-rank": place.node}
        if place.meeting.startswith(_TCP):
            flags["dist-init-addr"] = place.meeting.removeprefix(_TCP)
    if section.dp_attention > 1:
        # Without a limit, SGLang reserves memory for graphs in which one group runs all requests.
        flags |= {"attn-dp-size": section.dp_attention, "cuda-graph-max-bs-decode": section.max_running // section.dp_attention}
    if section.max_total_tokens is not None:
        flags["max-total-tokens"] = section.max_total_tokens // section.dp_attention  # of each group
    switches = ["--skip-tokenizer-init", "--incremental-streaming-output", "--disable-shared-experts-fusion"]
    if config.model.trust_remote_code:
        switches.append("--trust-remote-code")
    if keeps_routing:
        switches.append("--enable-return-routed-experts")
    if config.in_turn:
        switches += ["--enable-memory-saver", *(["--enable-weights-cpu-backup"] if adapter is not None else ())]
    if adapter is not None:
        switches += lora.flags(adapter, sglang_arguments.number(section.args, lora.LIMIT))
    named = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return [str(engine_python(section.python)), "-m", "asyncmoe.platform.sglang", *named, *switches, *own, *section.args]


def environment(config: Config, index: int, host: str = "", place: NodePlace = ALONE) -> dict[str, str]:
    """Return the variables set for engine `index` in addition to ours; the user's values take precedence.

    Args:
        host: address it listens on.
        place: as for `SGLangProcess`.

    Raises:
        UserError: our environment has a variable of SGLang that asyncmoe does not support.
    """
    if unknown := sglang_arguments.unknown_variables(os.environ):
        raise UserError("environment of an engine", got=", ".join(unknown), expected="supported variables of SGLang", hint="unset them")
    given = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"} | nccl_settings.set_defaults(os.environ)
    given["SGLANG_TIMEOUT_KEEP_ALIVE"] = f"{60 * KEEP_ALIVE_S:.0f}"
    # A server whose worker died would keep its requests waiting for 5 s until the GPU settles, then for stack and core dumps.
    given |= {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    if config.engines.tp > 1:
        # Without it, SGLang on CPU binds each rank to a NUMA node of its own; ignored on GPU.
        each = config.engines.ranks_per_node
        first = index * each if address.several(config.cluster.network) else index * config.engines.tp + place.node * each
        cores = sorted(os.sched_getaffinity(0))  # one for each rank; ranks share them in turn if there are fewer
        given["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[(first + rank) % len(cores)]) for rank in range(each))
    if place.meeting:
        given |= _between_nodes(host, place)
    family = {} if config.model.family == "auto" else {FAMILY_VARIABLE: config.model.family}
    return {PARENT: str(os.getpid()), **family, **{name: os.environ.get(name, value) for name, value in given.items()}}


def _between_nodes(host: str, place: NodePlace) -> dict[str, str]:
    """Return the variables that the ranks of several nodes need to meet.

    SGLang's request queue would open a port on every interface and unpickle what arrives there; without it, requests travel over the ranks'
    gloo group. Gloo and NCCL would each choose an interface by themselves.
    """
    given = {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false"}
    if not place.meeting.startswith(_TCP):
        return {**given, "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": place.meeting}
    given[NODES_KEY] = place.key
    interface = next((name for name, addresses in address.interfaces().items() if host in addresses), None)
    return given if interface is None else {**given, "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def reason_in(log: str) -> str | None:
    """Return the log line that best explains the exit: a failed bind, else the last root-cause exception, else a usage error, else the last
    exception of any kind; or None."""
    lines = [line.strip() for line in log.splitlines()]
    every = [line for line in lines if _RAISED.match(line)]
    raised = [line for line in every if not _CONSEQUENCE.search(line)]
    usage = [line for line in lines if ": error: " in line]
    bind = [line for line in lines if "error while attempting to bind" in line]
    found = [*usage, *raised, *bind] or every
    return found[-1][:400] if found else None


_RAISED = re.compile(r"(\[[^]]*\] )?[\w.]*(Error|Exception|Gone|Interrupt|Exit)\b: .+")
_CONSEQUENCE = re.compile(r"ConnectionRefused|Connection refused|BrokenPipe|EOFError|died during initialization|HTTPConnectionPool")
