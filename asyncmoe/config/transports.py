"""The transports of weights: the choices of `sync.transport`, where each can be used, and the function that opens it.

Everything that depends on a transport's name follows from `TRANSPORTS`. docs/guides/transport.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from asyncmoe.errors import ConfigError

AUTO = "auto"
_KEY = "sync.transport"


@dataclass(frozen=True)
class TransportEntry:
    """A transport of weights from trainer ranks to engine ranks.

    Attributes:
        what: the carrier of the messages, for the description of `sync.transport`.
        opened_by: "module:function". The function takes an `asyncmoe.weights.receiver.channel_end.ChannelEnd`, or its base class
            `asyncmoe.reshard.transport.TransportEnd`, and returns a `Transport` or `SharedTransport`. Its module is imported only when a
            rank opens a channel.
        gpu: moves weights in GPU memory; otherwise in host memory.
        one_host: serves only ranks that share one machine's memory.
        unshared: why a trainer rank and an engine rank cannot use it on the same GPU; empty if they can.
        nccl: sends with NCCL, so all ranks need the same NCCL version, and its communicator takes memory of every GPU.
        reads_sender: receivers read messages where the sender packed them, so they need no message buffers, but between GPUs peer access.
    """

    what: str
    opened_by: str
    gpu: bool
    one_host: bool = False
    unshared: str = ""
    nccl: bool = False
    reads_sender: bool = False


TRANSPORTS: dict[str, TransportEntry] = {
    "shm": TransportEntry(
        "shared memory of one host",
        "asyncmoe.reshard.shm_transport:open_shm",
        gpu=False,
        one_host=True,
        reads_sender=True,
    ),
    "gloo": TransportEntry("TCP", "asyncmoe.weights.receiver.channel_end:open_gloo", gpu=False),
    "ipc": TransportEntry(
        "CUDA IPC between the GPUs of one host",
        "asyncmoe.reshard.ipc_transport:open_ipc",
        gpu=True,
        one_host=True,
        reads_sender=True,
    ),
    "nccl": TransportEntry(
        "NCCL, within and between hosts",
        "asyncmoe.weights.receiver.channel_end:open_nccl",
        gpu=True,
        unshared="NCCL refuses two ranks on one GPU",
        nccl=True,
    ),
}
"""By name. `auto` means the first that can be used."""

if TYPE_CHECKING:
    TransportName = str
    TransportChoice = str
else:
    TransportName = Literal[tuple(TRANSPORTS)]
    TransportChoice = Literal[(AUTO, *TRANSPORTS)]


def transport_for(wanted: TransportChoice, gpu: bool, together: bool = True, shared: bool = False) -> TransportName:
    """Return the transport of a run, from `sync.transport` and where the weights are.

    Args:
        gpu: the weights are in GPU memory.
        together: all ranks share one machine's memory.
        shared: trainer and engines use the same GPUs in turn (`placement`).

    Raises:
        ConfigError: the transport cannot be used there.
    """
    if shared and not together:
        hint = "keep the trainer and all engines on one machine, and ASYNCMOE_HOST unset"
        raise ConfigError("placement", got="colocated", expected="split because the run spans several machines", hint=hint)
    name = resolved(wanted, gpu, together, shared)
    entry = TRANSPORTS[name]
    if not together and entry.one_host:
        hint = "leave it out, or keep the trainer and all engines on one machine"
        expected = f"{choices(lambda one: not one.one_host)} between several machines"
        raise ConfigError(_KEY, got=name, expected=expected, hint=hint)
    if entry.gpu != gpu:
        raise ConfigError(_KEY, got=name, expected=f"{choices(lambda one: one.gpu == gpu)} between {'GPUs' if gpu else 'CPUs'}")
    return name


def resolved(wanted: TransportChoice, gpu: bool, together: bool = True, shared: bool = False) -> TransportName:
    """Return the transport that a choice means, even if it cannot be used there. For the arguments see `transport_for`."""
    if wanted != AUTO:
        return wanted
    able = (name for name, one in TRANSPORTS.items() if one.gpu == gpu and (together or shared or not one.one_host))
    return next(name for name in able if not (shared and TRANSPORTS[name].unshared))


def unshared(wanted: TransportChoice) -> str:
    """Return why a choice cannot serve a trainer and engines on the same GPUs; empty if it can."""
    return "" if wanted == AUTO else TRANSPORTS[wanted].unshared


def choices(serves: Callable[[TransportEntry], bool]) -> str:
    """Return the choices that serve, in words: "auto, nccl or ipc"."""
    return either([AUTO, *(name for name, one in TRANSPORTS.items() if serves(one))])


def description() -> str:
    """Return the description of `sync.transport`."""
    cpu, gpu = (either([f"{name} ({one.what})" for name, one in TRANSPORTS.items() if one.gpu == where]) for where in (False, True))
    apart, others = (resolved(AUTO, gpu=gpu, together=False) for gpu in (False, True))
    return (
        f"Transport of reshard. Between CPUs: {cpu}. Between GPUs: {gpu}. auto: on CPU {resolved(AUTO, gpu=False)}, or {apart} between "
        f"machines; on GPU {resolved(AUTO, gpu=True)}, or {others} between machines or GPUs that cannot read each other's memory."
    )


def shareable(one: TransportEntry) -> bool:
    """Return whether a transport serves a trainer and engines on the same GPUs."""
    return one.gpu and not one.unshared


def either(words: list[str]) -> str:
    """Return "a", "a or b", "a, b or c"."""
    return " or ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])
