"""A whole run over hosts: the controller's, two of a rollout worker and an engine each, two of a trainer rank each; and what each sends.

The two ranks are one tensor-parallel group over both trainer hosts, so a trajectory needs to leave its worker once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asyncmoe.config.model import MadeModel
from asyncmoe.errors import AsyncmoeError, InvariantBroken, WaitTimeout
from asyncmoe.log.files import scan
from asyncmoe.models.make import make_model
from asyncmoe.queue import records
from benchmarks.network import flows
from benchmarks.network.flows import Connection
from benchmarks.network.hosts import INTERFACE, Host, Wire, missing, network
from benchmarks.provenance import here

CONTROLLER, WORKERS, TRAINERS = "controller", ("worker_1", "worker_2"), ("trainer_0", "trainer_1")
HOSTS = (CONTROLLER, *WORKERS, *TRAINERS)
_REPOSITORY = Path(__file__).parents[2]
_PORT = 29500
_LAST_S, _LOOK_S = 120.0, 0.5
_COUNTED = 0.98
"""Least share of the bytes that the kernel counted on an interface which must be known by connection."""
_OVERHEAD = 1.25
"""Most bytes on the links for a byte of a trajectory: headers of every layer, encryption, requests, acknowledgements."""
OPTIONS = (
    "trainer.ranks=2",
    "trainer.ep=1",
    "trainer.tp=2",
    "engines.count=2",
    "engines.join=true",
    "rollout.workers=2",
    "rollout.start_workers=false",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "warmup.steps=4",
    "warmup.batch=16",
    "warmup.lr=1e-9",  # a random model writes long responses
    "trainer.keep_checkpoints=9",  # so that the log keeps what was trained
    "sync.verify_every=1",
    "cluster.network=10.77.0.0/24",
    "engines.start_timeout_s=600",
    "trainer.timeout_s=600",
    "engines.hang_timeout_s=300",
    'engines.args=["--mem-fraction-static","0.9"]',
    "telemetry.samples.groups=0",  # what is kept to be read travels to the controller
)


@dataclass(frozen=True)
class Payloads:
    """What a run trained, by its log: groups, trajectories, and the bytes that workers wrote of them."""

    groups: int
    trajectories: int
    nbytes: int


def run(rate: float, steps: int, tokens: int) -> dict[str, Any]:
    """Measure a run of the demo's model.

    Args:
        rate: of each link, Mbit/s.
        steps: of 16 trajectories.
        tokens: most of a response.

    Returns:
        {"date", "machine", "load", "skipped"}, "skipped" the reason or empty, and unless skipped what `measured` returns, which also says
        what is raised.
    """
    at = here()
    if why := missing():
        return {**at, "skipped": why}
    with TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), MadeModel(layers=2, hidden=64, experts=8, experts_per_token=2, expert_hidden=64), seed=0)
        options = (f"run.steps={steps}", f"rollout.max_new_tokens={tokens}")
        found = measured(Path(folder, "run"), Path(folder, "model"), Wire(rate=round(rate * 1e6)), options)
    return {**at, "skipped": "", **found}


def measured(run: Path, model: Path, wire: Wire, options: Sequence[str] = (), timeout_s: float = 1500.0) -> dict[str, Any]:
    """Run the demo with `OPTIONS` over hosts, and count.

    Args:
        run: directory of the run; logs are beside it.
        model: exists.
        options: further overrides of the configuration.

    Returns:
        as `summary`.

    Raises:
        UserError: this machine cannot have such hosts.
        AsyncmoeError: a part of the run failed.
        WaitTimeout: it took too long.
        InvariantBroken: as `check`.
    """
    settings = ["examples/demo.yaml", f"run.dir={run}", f"model.path={model}", *OPTIONS, *options]
    with TemporaryDirectory() as scratch, network(len(HOSTS), wire) as made:
        hosts = dict(zip(HOSTS, made, strict=True))
        counted = [run.parent / f"{name}.json" for name in HOSTS]
        for host, file in zip(made, counted, strict=True):
            host.hide(Path(scratch))  # the controller and workers have their Unix sockets there, which must reach no other host
            host.start([sys.executable, flows.__file__, INTERFACE, str(file)])
        for file in counted:
            _wait(file.exists, 60.0, "the counters of the hosts")
        with _parts(hosts, settings, run.parent, scratch) as parts:
            _wait(lambda: _ended(parts, run), timeout_s, "the run")
            _wait(lambda: all(one.poll() is not None for one in parts.values()), _LAST_S, "the end of its parts")
        time.sleep(3.0)  # the counters are written every second
        sent = [json.loads(file.read_text()) for file in counted]
    found = summary(sent, {host.address: name for name, host in hosts.items()}, trained(run))
    check(found)
    return {"wire": asdict(wire), "options": list(options), **found}


def trained(run: Path) -> Payloads:
    """Return what a run trained; the log must still have all of it (`trainer.keep_checkpoints`)."""
    entries = [records.entry(data) for _, _, data in scan(run / "log" / "0") if data is not None]
    leased = [group for one in entries if isinstance(one.change, records.StepLeased) for group in one.change.groups]
    sizes = {(log.name, at): len(data) for log in (run / "log").iterdir() for at, _, data in scan(log) if data is not None}
    places = [(str(group.place.writer), group.place.position) for group in leased]
    return Payloads(len(leased), sum(len(group.keys) for group in leased), sum(sizes[place] for place in places))


def summary(sent: Sequence[Mapping[str, Any]], names: Mapping[str, str], payloads: Payloads) -> dict[str, Any]:
    """Put together what the hosts sent.

    Args:
        sent: of each host in the order of `HOSTS`, what `flows.follow` wrote.
        names: of `HOSTS`, by address.

    Returns:
        {"groups", "trajectories", "payload_bytes" (of what was trained), "fetched" (bytes that workers sent to each of the trainer's
        ranks in answer), "copies" (all of them for a byte of payload), "ledger_bytes" (between controller and workers, both ways),
        "ledger_bytes_a_trajectory", "lease_bytes" (between controller and trainer, both ways), "lease_bytes_a_trajectory",
        "controller_bytes_a_trajectory" (all that its link carried, weight updates and engines too), "links" (bytes from host to host),
        "counted" (of each host, the share of what its interface sent that is in them)}
    """
    connections: dict[Connection, int] = {tuple(one[:4]): one[4] for host in sent for one in host["connections"]}
    links: Counter[tuple[str, str]] = Counter()
    for (sender, _, receiver, _), nbytes in connections.items():
        links[names.get(sender, sender), names.get(receiver, receiver)] += nbytes
    serving = {(address, port) for address, name in names.items() if name in WORKERS for port in _served(address, names, connections)}
    fetched = {
        name: sum(n for (a, port, b, _), n in connections.items() if (a, port) in serving and names.get(b) == name) for name in TRAINERS
    }
    ledger = sum(
        n
        for (a, sender, b, receiver), n in connections.items()
        if ((a, sender) in serving and names.get(b) == CONTROLLER) or ((b, receiver) in serving and names.get(a) == CONTROLLER)
    )
    lease = sum(links[CONTROLLER, name] + links[name, CONTROLLER] for name in TRAINERS)
    controller = sum(n for link, n in links.items() if CONTROLLER in link)
    each = payloads.trajectories
    return {
        "groups": payloads.groups,
        "trajectories": each,
        "payload_bytes": payloads.nbytes,
        "fetched": fetched,
        "copies": sum(fetched.values()) / payloads.nbytes,
        "ledger_bytes": ledger,
        "ledger_bytes_a_trajectory": ledger / each,
        "lease_bytes": lease,
        "lease_bytes_a_trajectory": lease / each,
        "controller_bytes_a_trajectory": controller / each,
        "links": {f"{a}_to_{b}": n for (a, b), n in sorted(links.items()) if a in HOSTS and b in HOSTS},
        "counted": [(sum(one[4] for one in host["connections"]) + host["other"]) / host["interface"] for host in sent],
    }


def check(found: Mapping[str, Any]) -> None:
    """Refuse a run whose trajectories took another way than from their worker to one rank of the group, once.

    Raises:
        InvariantBroken: they did.
    """
    if min(found["counted"]) < _COUNTED:
        raise InvariantBroken(f"connections: got {found['counted']} of what the interfaces sent, expected all of it")
    if not 1.0 <= found["copies"] <= _OVERHEAD:
        raise InvariantBroken(f"bytes from workers to the trainer: got {found['copies']:.2f} for one of payload, expected one copy")
    other = sum(sorted(found["fetched"].values())[:-1])
    if other > 0.01 * found["payload_bytes"]:
        raise InvariantBroken(f"bytes from workers to the trainer: got {found['fetched']}, expected all at one rank of the group")


def table(found: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    size = found["payload_bytes"] / found["trajectories"]
    lines = [
        f"{found['trajectories']} trajectories of {size:,.0f} bytes were trained",
        f"workers to trainer: {found['copies']:.2f} bytes a byte of them, by rank: {found['fetched']}",
        f"controller and workers: {found['ledger_bytes_a_trajectory']:,.0f} bytes a trajectory, both ways together",
        f"controller and trainer: {found['lease_bytes_a_trajectory']:,.0f}",
        f"the controller's link: {found['controller_bytes_a_trajectory']:,.0f}",
        *(f"  {link}: {nbytes:,}" for link, nbytes in found["links"].items()),
    ]
    return "\n".join(lines)


@contextmanager
def _parts(hosts: Mapping[str, Host], settings: Sequence[str], folder: Path, scratch: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The processes of a run; those that still run in the end are killed with their hosts."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(_REPOSITORY),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TMPDIR": scratch,
    }

    def start(host: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            command = ["env", "-C", str(_REPOSITORY), sys.executable, "-m", *arguments]
            return hosts[host].start(command, environment, log, subprocess.STDOUT)

    parts = {CONTROLLER: start(CONTROLLER, "controller", "asyncmoe", "rollout", *settings)}
    for number, host in enumerate(WORKERS, 1):
        parts[f"engine {number}"] = start(host, f"engine-{number}", "asyncmoe", "engine", *settings, "--name", f"engine.{number}")
        parts[host] = start(host, f"worker-{number}", "asyncmoe", "worker", *settings, "--number", str(number))
    for rank, host in enumerate(TRAINERS):
        where = (f"--node-rank={rank}", f"--master-addr={hosts[TRAINERS[0]].address}", f"--master-port={_PORT}")
        parts[host] = start(
            host,
            f"trainer-{rank}",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
            *where,
            "-m",
            "asyncmoe.trainer",
            *settings,
        )
    yield parts


def _ended(parts: Mapping[str, subprocess.Popen[bytes]], run: Path) -> bool:
    """Whether the controller and the trainer have ended. Raises AsyncmoeError if a part failed."""
    for name, part in parts.items():
        if part.poll():
            said = "".join(
                f"== {path}\n{path.read_text(errors='replace')[-2000:]}"
                for path in (*sorted(run.parent.glob("*.log")), *sorted((run / "logs").glob("*.log")))
            )
            raise AsyncmoeError(f"{name} ended with status {part.returncode}\n{said}")
    return all(parts[name].poll() is not None for name in (CONTROLLER, *TRAINERS))


def _served(address: str, names: Mapping[str, str], connections: Mapping[Connection, int]) -> set[int]:
    """Return the port of a worker at an address: the one that serves the controller and the trainer. Engines serve only one of them."""
    told = {(port, names.get(there)) for (sender, port, there, _) in connections if sender == address}
    return {port for port, name in told if name == CONTROLLER and any((port, rank) in told for rank in TRAINERS)}


def _wait(done: Any, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            raise WaitTimeout("a run over hosts", what, seconds)
        time.sleep(_LOOK_S)
