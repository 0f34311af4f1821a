"""The interface of an inference engine. The rest of the code uses engines only through it.

`Engine` is the interface of a running server, `EngineHandle` adds its process as the pool sees it, and `EngineProcess` adds starting and
ending a process on this machine. SGLang (`asyncmoe.engines.sglang`) implements all three, and `asyncmoe.engines.backend`
alone chooses the implementation; docs/guides/engine.md says how to add another.

Every coroutine of `Engine` waits a bounded time, and either succeeds or raises:

- `EngineLost`: the connection or the process is gone. The pool fences the engine.
- `EngineError`: the engine refused, or its answer is malformed. A refused request's trajectory is rejected; a refused weight update
  fences the engine.
- `WaitTimeout`: no answer in time, with the same consequences as an `EngineError`.

Calls without a `timeout_s` have the implementation's own limit, about a minute. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from asyncmoe.engines.types import Generation, Listener, MemoryTag, ParsedCall, Sampling, Tokens
from asyncmoe.platform.sglang.receiver_command import Command
from asyncmoe.rpc.messages import WeightsBucket, WeightsJoin


class Engine(Protocol):
    """A running server that samples responses, records what training on them needs, and changes its weights while requests wait.

    A weight update is one call of `command_receivers`, if the engine already has the weights, or a sequence of calls, which the coordinator
    makes for all engines at the same time:

        pause, begin_update, then any number of load_bucket or command_receivers, end_update, checksums, set_version, resume

    From `pause` to `resume` no token is sampled, but requests are accepted and wait.

    Attributes:
        name: name of the engine in errors and records: "engine.0".
        url, key: with these, another process can `asyncmoe.engines.backend.connect`.
    """

    name: str
    url: str
    key: str

    # Health

    async def ready(self) -> bool:
        """Return True if the engine accepts requests; False also while nothing listens yet. Never raises."""

    async def alive(self, timeout_s: float) -> bool:
        """Return True as soon as the engine produces a token for any request; an idle engine is made to sample one. Never raises.

        Call it while the engine is not paused.
        """

    async def close(self) -> None:
        """Close the connections to the engine, which then cancels the requests in flight but continues to run."""

    # Generation

    async def generate(
        self,
        tokens: Tokens,
        sampling: Sampling,
        salt: str,
        timeout_s: float,
        routed: int = 0,
        adapter: str | None = None,
        listener: Listener | None = None,
        dp_rank: int | None = None,
    ) -> Generation:
        """Sample one response to a prompt of token ids.

        Args:
            tokens: the prompt; no text passes through an engine.
            salt: cached prefixes are shared only between requests with the same salt.
            routed: number of leading tokens whose routes are omitted, because earlier turns have them; 0 without recorded routes.
            adapter: name of the adapter to sample with; None: the model without an adapter.
            listener: receives every token once and in order, before this call returns. Once it ends the response, it gets no more, and the
                engine ends the request soon; tokens sampled until then are part of the result, which `decode.cut` shortens.
            dp_rank: the group of ranks that samples it (`engines.dp_attention`), from 0; None: any.

        Raises:
            EngineLost: the connection failed.
            EngineError: the engine refused or itself aborted the request, or its answer is malformed.
            WaitTimeout: no answer within `timeout_s`.
        """

    async def prompt_logprobs(self, tokens: Sequence[int], timeout_s: float) -> tuple[float, ...]:
        """Return each token's log-probability given those before it, in nats, at temperature 1 over the whole vocabulary; 0 for the first.

        They are computed without cached prefixes or an adapter, and under one version.

        Args:
            tokens: two or more.
        """

    async def parse_calls(self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]) -> tuple[ParsedCall, ...]:
        """Return the tool calls in a response's text.

        Args:
            text: the response with its special tokens, without the token that ended it.
            parser: name of one of the engine's parsers.
            tools: OpenAI function schemas of the available tools.
        """

    async def abort(self) -> None:
        """End all requests; each is answered with the tokens sampled so far and finish `ABORTED`."""

    async def pause(self, retract: bool = False) -> None:
        """Stop between two forward passes; returns when no more tokens of the current weights will arrive.

        Args:
            retract: drop the keys and values of running requests, which `resume` recomputes; False: keep them.
        """

    async def flush(self) -> None:
        """Drop all cached prefixes; requires an engine without running requests (retracted requests count as waiting)."""

    async def resume(self) -> None:
        """Continue after `pause`."""

    # Weights

    async def begin_update(self) -> None:
        """Open a weight update; the engine is paused."""

    async def end_update(self) -> None:
        """Close the weight update; the engine still waits for `resume`."""

    async def join_group(self, join: WeightsJoin, rank_offset: int, world: int, timeout_s: float) -> None:
        """Have the engine's ranks join a process group with the sender, for `load_bucket`; returns when all `world` ranks have joined.

        Args:
            join: the group's name and backend, and its rendezvous, a torch store that the sender keeps.
            rank_offset: the engine's first rank; the sender is rank 0.
            world: number of ranks in the group: one of the sender, and `tp` of each engine.
        """

    async def load_files(self, folder: str, timeout_s: float) -> None:
        """Load the Hugging Face checkpoint in a directory; returns when it is loaded."""

    async def load_bucket(self, bucket: WeightsBucket, group: str, timeout_s: float) -> None:
        """Receive one bucket, broadcast by rank 0 of `group`, and load it; returns when it is loaded.

        The bucket is one uint8 tensor: the bytes of whole tensors of the checkpoint, in C order, one after another.

        Args:
            bucket: the tensors' names in the Hugging Face checkpoint, dtypes and shapes.
        """

    async def command_receivers(self, commands: Sequence[Command], timeout_s: float, version: int | None = None) -> None:
        """Have `asyncmoe.weights.receiver.worker.obey` execute one command in each rank's main thread.

        The engine is either paused, between `begin_update` and `end_update`, or generating. If it is generating, all ranks execute their
        commands between the same two forward passes, without disturbing requests in progress. Returns when all have executed them.

        Args:
            commands: one per rank.
            version: version of the weights from then on; None: unchanged.
        """

    # Memory

    async def release_memory(self, tags: Sequence[MemoryTag], timeout_s: float) -> None:
        """Give memory of an engine without requests to the machine; returns when it is free. Contents are lost.

        The engine must have no request, no probe (`alive`) and no update until `resume_memory`.

        Raises:
            EngineError: requests run; nothing was released.
        """

    async def resume_memory(self, tags: Sequence[MemoryTag], timeout_s: float) -> None:
        """Take released memory again; weights then need a full update, written in place, before the engine samples."""

    async def poisoned(self, timeout_s: float) -> tuple[dict[str, str], ...]:
        """Return for each rank the tensors of the model that have not been written since `resume_memory`: {name: how much}.

        Only an engine without a GPU, started with a memory saver, can tell.
        """

    async def weights_version(self) -> int:
        """Return the weights' version, as `command_receivers` or `set_version` last set it; 0 initially."""

    async def set_version(self, version: int) -> None:
        """Set the version of the weights from the next sampled token on; the checkpoint's weights are version 0."""

    async def checksums(self, timeout_s: float) -> tuple[dict[str, str], ...]:
        """Return {parameter or buffer: checksum} for each rank.

        Names are the engine's own; a checksum is `asyncmoe.reshard.checksum` of the bytes.
        """


class EngineHandle(Protocol):
    """An engine and its process, as the pool sees them; the process may run on another machine.

    Attributes:
        name: "engine.0"; its name in records and messages.
        tp, ep: tensor- and expert-parallel ranks; the engine has `tp` workers.
        host: its machine, as `asyncmoe.rpc.address.host_id`.
        pid: id of its server's process group; 0 if the pool has no need to know that it is gone.
    """

    name: str
    tp: int
    ep: int
    host: str
    pid: int

    @property
    def client(self) -> Engine:
        """The interface of the server."""

    @property
    def died(self) -> str | None:
        """Why the process ended, or None while it runs."""

    def kill(self, why: str = "") -> None:
        """End the process, at once or when its machine receives the order; its requests in progress fail with `EngineLost`."""


class EngineProcess(EngineHandle, Protocol):
    """An engine on this machine, started by this process.

    Attributes:
        url: "http://host:port", from which `asyncmoe.engines.backend.connect` makes a client in another process.
    """

    url: str

    async def wait_ready(self) -> None:
        """Return once the server accepts requests, including requests for the adapter that the receivers write, if any.

        Raises:
            EngineError: the server died during its start.
            WaitTimeout: the start took longer than engines.start_timeout_s.
        """

    async def stop(self) -> None:
        """Close the client, and end the server with every process it spawned."""
