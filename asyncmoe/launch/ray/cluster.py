"""Connect to a Ray cluster and reserve a placement group for the duration of a run."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncmoe import installed
from asyncmoe.errors import AsyncmoeError, UserError, WaitTimeout
from asyncmoe.launch.ray import planning
from asyncmoe.launch.ray.planning import Bundle
from asyncmoe.process import wait_until

_ANSWER_S = 5.0
_POLL_S = 0.25
_MOST = 400
"""Longest part of a Ray error message to show, in characters."""
_START = "ray start --head on one node and ray start --address=HEAD:6379 on the others, or set RAY_ADDRESS=HEAD:PORT"


@contextmanager
def connected() -> Iterator[Any]:
    """Yield the `ray` module, connected to the cluster of RAY_ADDRESS, by default to this machine's cluster.

    Raises:
        UserError: Ray is not installed, no cluster answers, or this process cannot be a driver of it.
    """
    installed.need("ray", "launch: ray")
    import ray
    import ray.util.placement_group
    import ray.util.scheduling_strategies

    where = _address()
    try:
        ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        if where == "auto":
            raise UserError("Ray cluster", got="none on this machine", expected="a running one", hint=_START) from error
        hint = "run this on a node of the cluster, with the Python and the Ray that its nodes have"
        raise UserError(f"Ray cluster at {where}", got=_in_one_line(error), expected="a running cluster", hint=hint) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def reserved(ray: Any, wanted: Sequence[Bundle], wait_s: float, say: Callable[[str], None]) -> Iterator[Any]:
    """Reserve a placement group with these bundles, and release it at the end.

    Args:
        wait_s: seconds to wait for nodes to join or to become free.
        say: called with a message if the nodes are not available at once.

    Raises:
        UserError: the nodes did not become available; the message lists available and wanted resources.
    """
    group = ray.util.placement_group([bundle.resources for bundle in wanted], strategy=planning.strategy(wanted))
    try:
        if not wait_until(lambda: group.wait(_POLL_S), min(_ANSWER_S, wait_s)):
            say(f"waiting {wait_s:.0f} s for Ray: {planning.wanted_words(wanted)}; the cluster has {_there(ray)}")
            if not wait_until(lambda: group.wait(_POLL_S), wait_s - _ANSWER_S):
                hint = "add nodes, end what runs there (ray status), or change cluster.trainer_nodes and cluster.engine_nodes"
                raise UserError("Ray cluster", got=_there(ray), expected=planning.wanted_words(wanted), hint=hint)
        yield group
    finally:
        ray.util.remove_placement_group(group)


class Unreachable(AsyncmoeError):
    """A node cannot be reached, temporarily or permanently."""


def result(ray: Any, reference: Any, whom: str, what: str, waited_s: float, wait_s: float) -> Any:
    """Wait for the result of a call on a node.

    Args:
        whom, what: the node and the expected answer, for error messages.
        waited_s: seconds waited so far.
        wait_s: seconds to wait from now on.

    Raises:
        WaitTimeout: there was no result in that time.
        Unreachable: the node cannot be reached, temporarily or permanently.
        AsyncmoeError: the call failed, or Ray's worker on the node has ended.
    """
    try:
        return ray.get(reference, timeout=max(0.0, wait_s))
    except ray.exceptions.GetTimeoutError as error:
        raise WaitTimeout(whom, f"{what}; see that node, and `ray status`", waited_s + wait_s) from error
    except ray.exceptions.ActorUnavailableError as error:
        raise Unreachable(f"{whom}: it cannot be reached any more; see that node, and `ray status`") from error
    except ray.exceptions.RayError as error:
        raise AsyncmoeError(f"{whom}: {_in_one_line(getattr(error, 'cause', None) or error)}") from error


def _there(ray: Any) -> str:
    """Describe the cluster: "nodes with 2 CPUs, 1 CPU; free: 3 CPUs"."""
    nodes = [planning.resources_words(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return f"nodes with {', '.join(sorted(nodes, reverse=True)) or 'nothing'}; free: {planning.resources_words(ray.available_resources())}"


def _address() -> str:
    """Return the address of the cluster's head, from RAY_ADDRESS or the file that `ray start` writes; "auto" if there is no such file.

    Raises:
        UserError: RAY_ADDRESS is malformed or is an address of Ray Client (ray://), or the head does not answer, and `ray.init` would
            retry for minutes.
    """
    given = os.environ.get("RAY_ADDRESS") or "auto"
    if given == "auto":
        file = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
        if not file.is_file():
            return given
        given = file.read_text().strip()
    if given.startswith("ray://"):
        hint = "start asyncmoe on a node of the cluster, for instance with ray job submit"
        raise UserError("RAY_ADDRESS", got=given, expected="HOST:PORT of the head", hint=hint)
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError("RAY_ADDRESS", got=repr(given), expected="HOST:PORT of the head, or auto", hint=_START)
    address = (host.strip("[]"), int(port))
    try:
        socket.create_connection(address, _ANSWER_S).close()
    except OSError as error:
        got = f"no answer ({error.strerror or error})"
        raise UserError(f"Ray's head at {given}", got=got, expected="a head that listens", hint=_START) from error
    return f"{address[0]}:{address[1]}"


def _in_one_line(error: BaseException) -> str:
    """Return the most informative line of a Ray message: the last one, except that advice follows the line about exhausted memory."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "running low on memory" in line), lines[-1])[:_MOST]
