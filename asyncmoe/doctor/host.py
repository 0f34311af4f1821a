"""Checks of system resources of a process: shared memory, limits, names, sockets, the clock."""

from __future__ import annotations

import ipaddress

from asyncmoe.doctor import verdict
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.verdict import Verdict
from asyncmoe.storage import size

_SHM_BYTES = 1 << 30
"""Shared memory for SGLang's processes and NCCL, in addition to weights; Docker's default is 64 MB."""
_OPEN_FILES = 4096
"""File descriptors of a process for engines, checkpoint shards and sockets, excluding requests."""
_AHEAD_S = 2.0
"""Tolerated clock difference in seconds, because NFS timestamps have a resolution between nanoseconds and a second."""


def shm(machine: Machine) -> Verdict:
    """Check that /dev/shm has room for weights in transit and for SGLang and NCCL."""
    total, free = machine.limits.shm_bytes, machine.limits.shm_free
    if total is None or free is None:
        return verdict.error("there is no /dev/shm", "mount a tmpfs there: mount -t tmpfs tmpfs /dev/shm")
    needed = _SHM_BYTES + (machine.run.shm_bytes if machine.run else 0)
    told = f"{size(free)} free of {size(total)}"
    if free >= needed:
        return verdict.ok(told)
    hint = f"docker run --shm-size={-(-needed >> 30)}g, or as root: mount -o remount,size={-(-needed >> 30)}G /dev/shm"
    if machine.run and machine.run.shm_bytes > free:
        return verdict.warning(f"{told}; weights under way may take {size(machine.run.shm_bytes)}", f"{hint}; or lower sync.bucket_bytes")
    return verdict.warning(f"{told}, expected {size(needed)}", hint)


def open_files(machine: Machine) -> Verdict:
    """Check that the file descriptor limit covers every socket and file of the busiest process."""
    limits = machine.limits
    needed = _OPEN_FILES + 2 * (machine.run.connections if machine.run else 0)
    told = f"{limits.open_files}, of at most {limits.open_files_hard}"
    if limits.open_files >= needed:
        return verdict.ok(told)
    if limits.open_files_hard >= needed:
        return verdict.warning(f"{told}; {needed} may be needed", f"ulimit -n {needed} in the shell or the batch script")
    return verdict.warning(
        f"{told}; {needed} may be needed", f"as root: nofile {needed} in /etc/security/limits.conf, LimitNOFILE= of slurmd or the container"
    )


def memlock(machine: Machine) -> Verdict:
    """Check the locked-memory limit, because InfiniBand registers memory by locking it."""
    limit = machine.limits.memlock
    if limit is None:
        return verdict.ok("unlimited")
    if not machine.fabric.ports:
        return verdict.ok(f"{size(limit)}; more is needed for InfiniBand only, which is not here")
    return verdict.error(
        f"{size(limit)}: NCCL cannot register memory with InfiniBand",
        "ulimit -l unlimited; as root: memlock unlimited in /etc/security/limits.conf, LimitMEMLOCK=infinity of slurmd",
    )


def hostname(machine: Machine) -> Verdict:
    """Check that this machine's name resolves, because other machines and gloo use it."""
    network, several = machine.network, bool(machine.run and machine.run.several_machines)
    judge = verdict.error if machine.run and machine.run.network == "hostname" else verdict.warning
    if network.name_trouble is not None:
        return judge(
            f"{machine.host} cannot be resolved: {network.name_trouble}",
            f"add a line with this machine's address and {machine.host} to /etc/hosts, or mend DNS",
        )
    told = f"{machine.host} is {', '.join(network.addresses)}"
    if any(not ipaddress.ip_address(address).is_loopback for address in network.addresses):
        return verdict.ok(told)
    if not several:
        return verdict.ok(f"{told}; enough for one machine")
    return judge(
        f"{told}: other machines cannot reach that",
        f"give {machine.host} its network address in /etc/hosts, or name the interface in cluster.network",
    )


def interfaces(machine: Machine) -> Verdict:
    """Check that the network interfaces named by environment and configuration exist; otherwise NCCL and gloo fail at startup."""
    there, network = machine.network.interfaces, machine.run.network if machine.run else "loopback"
    if network not in ("loopback", "hostname", *there) and "/" not in network:
        return verdict.error(f"cluster.network={network}, but there are only {', '.join(there)}", "set cluster.network to one of those")
    for variable, value in machine.network.chosen.items():
        if not _matches(value, there, prefixes=variable.startswith("NCCL")):
            return verdict.error(
                f"{variable}={value}, but there are only {', '.join(there)}",
                f"unset {variable}, or give it one of those that other machines reach",
            )
    named = ", ".join(f"{variable}={value}" for variable, value in machine.network.chosen.items())
    return verdict.ok(f"{named or 'none is chosen'}; there are {', '.join(there)}")


def loopback(machine: Machine) -> Verdict:
    """Check 127.0.0.1, over which the processes of this machine communicate."""
    if machine.network.loopback_trouble is not None:
        return verdict.error(f"127.0.0.1: {machine.network.loopback_trouble}", "as root: ip link set lo up; look for a firewall on lo")
    return verdict.ok("127.0.0.1 can be listened on and connected to")


def clock(machine: Machine) -> Verdict:
    """Check that the clock is synchronized, because timestamps of several machines are compared."""
    run, hint = machine.run, "start chrony or systemd-timesyncd (timedatectl set-ntp true), or ask who runs the machine"
    ahead = run.disk.ahead_s if run and run.disk else None
    allowed = (run.max_clock_skew_s if run else None) or _AHEAD_S
    if ahead is not None and abs(ahead) > max(allowed, _AHEAD_S):
        judge = verdict.error if run and run.several_machines else verdict.warning
        return judge(f"{abs(ahead):.1f} s {'behind' if ahead > 0 else 'ahead of'} the file system of run.dir", hint)
    if machine.clock.synchronised is None:
        return verdict.warning(
            f"it cannot be told whether it is synchronised ({machine.clock.told_by})", "look with timedatectl or chronyc"
        )
    if not machine.clock.synchronised:
        enough = "clocks of several machines drift apart" if run and run.several_machines else "enough for one machine"
        return verdict.warning(f"not synchronised by NTP ({machine.clock.told_by}); {enough}", hint)
    within = "" if machine.clock.error_s is None else f", within {machine.clock.error_s:.3g} s"
    return verdict.ok(f"synchronised{within} ({machine.clock.told_by})")


def _matches(value: str, there: tuple[str, ...], prefixes: bool) -> bool:
    """Return whether a list names an existing interface. NCCL accepts name prefixes, exact names after `=`, and exclusions after `^`."""
    if value.startswith("^"):
        return True
    exact = value.startswith("=") or not prefixes
    wanted = [name.split(":")[0] for name in value.lstrip("=").split(",") if name]
    return any(name == want or (not exact and name.startswith(want)) for want in wanted for name in there)
