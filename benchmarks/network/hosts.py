"""Hosts of a network, as namespaces of this machine: nothing but TCP/IP over links of a set rate joins them.

A host has its own network, host name, processes and /dev/shm (SGLang and asyncmoe take a shared one for one machine). Files, memory and
cores are shared, and so is /sys, whose /sys/class/net is the machine's; Unix sockets in a shared folder join hosts, too (`Host.hide`). One
more network namespace is the switch: a bridge that joins the hosts' links.

No namespace has a name, and none of their devices is ever in the machine's own network: each belongs to a process that reads a pipe of
ours, and ends when the pipe closes. So two networks cannot meet although their addresses are equal, and whatever ends this process, SIGKILL
too, the kernel closes the pipes, kills all that runs on the hosts and frees their devices.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from asyncmoe.errors import AsyncmoeError, UserError

INTERFACE = "eth0"
"""Of every host."""
MOST_HOSTS = 250
_NETWORK = "10.77.0.0/24"
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
_READY = b"ready\n"
_ANSWER_S = 60.0
_PROBE = (
    "mount -t tmpfs none /dev/shm && hostname probe && ip link add port0 type veth peer name eth0 && ip link add hub type bridge "
    "&& tc qdisc add dev eth0 root tbf rate 1mbit burst 32kb latency 50ms"
)


@dataclass(frozen=True)
class Wire:
    """A link between a host and the switch.

    Attributes:
        rate: bits a second, in each direction, Ethernet and IP headers included.
        mtu: bytes of the largest IP packet.
        burst_bytes: what may pass at once after an idle time (tc-tbf(8)).
        queue_ms: how long a packet may wait at either end before it is dropped.
        congestion: TCP's congestion control, of those that the machine has.
    """

    rate: int
    mtu: int = 1500
    burst_bytes: int = 64 << 10
    queue_ms: int = 50
    congestion: str = "cubic"

    @property
    def shaping(self) -> str:
        """The arguments of tc."""
        return f"tbf rate {self.rate}bit burst {self.burst_bytes} latency {self.queue_ms}ms"


@dataclass(frozen=True)
class Host:
    """A host that runs.

    Attributes:
        name: its host name.
        address: its IPv4 address, in all networks of this kind the same.
        keeper: process to which its namespaces belong; its first child is the host's process 1.
    """

    name: str
    address: str
    keeper: subprocess.Popen[bytes]

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on this host. It is a child of the one returned, whose exit status is its own; both end with the host.

        Args:
            environment: variables added to those of this process.
        """
        inside = ["nsenter", *_entrances(self.keeper.pid), f"--pid=/proc/{self.keeper.pid}/ns/pid_for_children"]
        return subprocess.Popen(
            [*inside, "--", *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def hide(self, folder: Path) -> None:
        """Have the host see an empty folder of its own there, so that no Unix socket in it joins it with other hosts.

        Raises:
            AsyncmoeError: it cannot be mounted.
        """
        mounting = self.start(["mount", "-t", "tmpfs", "none", str(folder)], stderr=subprocess.PIPE)
        if said := mounting.communicate(timeout=_ANSWER_S)[1].decode(errors="replace").strip():
            raise AsyncmoeError(f"mount of {folder}: {said}")

    def die(self) -> None:
        """End the host as a loss of power does: its processes are killed, and its link is gone."""
        _end(self.keeper)


def missing() -> str:
    """Return why there can be no such network here; empty if there can."""
    if platform.system() != "Linux":
        return f"network namespaces are Linux's, this is {platform.system()}"
    absent = [name for name in _PROGRAMS if _program(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "making network namespaces wants root"
    tried = subprocess.run([*_apart(), "sh", "-c", _PROBE], capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    said = tried.stderr.strip().splitlines()
    return "" if tried.returncode == 0 else f"no namespaces with shaped links: {said[-1] if said else f'status {tried.returncode}'}"


@contextmanager
def network(hosts: int, wire: Wire) -> Iterator[list[Host]]:
    """Make hosts on one switch; in the end kill what still runs on them, and remove them.

    Raises:
        UserError: this machine cannot, or `hosts` is not from 1 to `MOST_HOSTS`.
        AsyncmoeError: a command failed.
    """
    if not 1 <= hosts <= MOST_HOSTS:
        raise UserError("hosts of a network", got=hosts, expected=f"1 to {MOST_HOSTS}")
    if why := missing():
        raise UserError("hosts as network namespaces", got=why, expected="Linux, root, iproute2 and util-linux")
    with ExitStack() as stack:
        switch = stack.enter_context(_kept(["unshare", "--net"], "true"))
        _batch("ip", switch, ["link add hub type bridge mcast_snooping 0", "link set hub addrgenmode none", "link set hub up"])
        made = [stack.enter_context(_host(number, wire)) for number in range(hosts)]
        for number, host in enumerate(made):
            _plug(number, host, switch, wire)
        yield made


@contextmanager
def _host(number: int, wire: Wire) -> Iterator[Host]:
    name = f"host{number}"
    with _kept(_apart(), f"mount -t tmpfs none /dev/shm && hostname {name} && ip link set lo up") as keeper:
        yield Host(name, f"10.77.0.{number + 1}", keeper)


def _plug(number: int, host: Host, switch: subprocess.Popen[bytes], wire: Wire) -> None:
    """Join a host to the switch. What it sends is shaped at its own end, what it receives at the switch's."""
    port, batch = f"port{number}", f"mtu {wire.mtu}"
    _batch("ip", switch, [f"link add {port} {batch} type veth peer name {INTERFACE} {batch} netns {host.keeper.pid}"])
    _batch("ip", switch, [f"link set {port} addrgenmode none", f"link set {port} master hub up"])
    ours = [
        f"link set {INTERFACE} addrgenmode none",
        f"addr add {host.address}/24 dev {INTERFACE} noprefixroute",
        f"link set {INTERFACE} up",
        f"route add {_NETWORK} dev {INTERFACE} congctl {wire.congestion}",
    ]
    _batch("ip", host.keeper, ours)
    for keeper, device in ((host.keeper, INTERFACE), (switch, port)):
        _batch("tc", keeper, [f"qdisc add dev {device} root {wire.shaping}"])


@contextmanager
def _kept(unshare: Sequence[str], set_up: str) -> Iterator[subprocess.Popen[bytes]]:
    """New namespaces, as long as this process keeps a pipe open.

    Raises:
        AsyncmoeError: `set_up`, run inside, failed.
    """
    command = [*unshare, "sh", "-c", f"{set_up} && echo {_READY.decode().strip()} && exec cat"]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    try:
        if keeper.stdout.readline() != _READY:
            raise AsyncmoeError(f"making a namespace: {keeper.stderr.read().decode(errors='replace').strip()}")
        yield keeper
    finally:
        _end(keeper)


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """Return when all processes of its namespaces are gone; a second call does nothing."""
    for pipe in (keeper.stdin, keeper.stdout, keeper.stderr):
        if pipe is not None:
            pipe.close()
    try:
        keeper.wait(_ANSWER_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()


def _apart() -> list[str]:
    """The command that runs another in all namespaces of a new host; killed, it takes all processes of the host with it."""
    return ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]


def _entrances(keeper: int) -> list[str]:
    return [f"--target={keeper}", "--net", "--mount", "--uts"]


def _batch(program: str, keeper: subprocess.Popen[bytes], lines: Sequence[str]) -> None:
    """Run lines of ip or tc in the network of a keeper.

    Raises:
        AsyncmoeError: one of them failed.
    """
    command = ["nsenter", f"--target={keeper.pid}", "--net", "--", program, "-batch", "-"]
    done = subprocess.run(command, input="\n".join([*lines, ""]), capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    if done.returncode:
        raise AsyncmoeError(f"{program} {'; '.join(lines)}: {done.stderr.strip()}")


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
