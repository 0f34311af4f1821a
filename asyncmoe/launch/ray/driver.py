"""`asyncmoe run CONFIG launch=ray`: a run on the nodes of a Ray cluster, supervised from this process.

RAY_ADDRESS names the cluster; the default is this machine's cluster. Every node needs this package in the Python that Ray was started
with, and the working directory of this command, with `run.dir` and the model at the same paths. The driver reserves one placement
group, with a bundle for every engine node (the controller runs on the first) and a bundle for every trainer node, and waits up to
`engines.start_timeout_s` for it. A bundle has a GPU and a CPU for each rank; more than two bundles are placed on separate nodes.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.launch import local
from asyncmoe.launch.ray import cluster, planning
from asyncmoe.launch.ray.node import Node
from asyncmoe.launch.ray.planning import Bundle, Launch
from asyncmoe.launch.ray.post import Post, Remote
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process, Processes
from asyncmoe.launch.watch import supervise
from asyncmoe.rpc.environment import TRAINER_EPOCH

_END_S = STOP_GRACE_S + 15.0
"""Seconds for a node to end all its processes."""


def run(config: Config) -> dict[str, object]:
    """Run a configuration from start to end and return its summary. No process of the run is left, even after a failure.

    Raises:
        UserError: the configuration, the model, the run directory or the cluster cannot be used.
        AsyncmoeError: a process failed or a node was lost; the message names node, process and cause.
    """
    planning.bundles(config, gpus=False)
    with cluster.connected() as ray:
        wanted = planning.bundles(config, cluster.has_gpus(ray))
        with local.claim(config.run.dir):
            local.prepare(planning.joining(config))
            with cluster.reserved(ray, wanted, config.engines.start_timeout_s, _say) as group:
                posts = _posts(ray, group, wanted, config)
                return _supervise(ray, config, posts)


def _posts(ray: Any, group: Any, wanted: Sequence[Bundle], config: Config) -> list[Post]:
    """Start an actor in every bundle. Actors end with the placement group.

    Raises:
        AsyncmoeError: an actor did not start.
    """
    actor = ray.remote(Node)
    actors = []
    for index, bundle in enumerate(wanted):
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": bundle.cpus, "num_gpus": bundle.gpus, "scheduling_strategy": strategy}
        actors.append(actor.options(**options).remote())
    asked = [actor.place.remote() for actor in actors]
    begin, limit = time.monotonic(), config.engines.start_timeout_s
    posts = []
    for bundle, actor, place in zip(wanted, actors, asked, strict=True):
        waited = time.monotonic() - begin
        found = cluster.result(ray, place, f"Ray's worker for {bundle.title}", "start", waited, limit - waited)
        posts.append(Post(ray, actor, bundle, found, config.cluster.heartbeat_timeout_s))
    return posts


def _supervise(ray: Any, config: Config, posts: Sequence[Post]) -> dict[str, object]:
    try:
        return supervise(config, partial(_start, ray, config, posts))
    except AsyncmoeError:
        # Processes notice a lost node before Ray does, and fail because of it: report the node as the root cause.
        for post in posts:
            post.check()
        raise


def _start(ray: Any, config: Config, posts: Sequence[Post], ending: ExitStack) -> Processes:
    addresses = [post.place.address for post in posts]
    file = local.prepare(planning.joining(config, addresses)).absolute()
    _check_shared(posts, file)
    _say(f"logs: {config.run.dir / 'logs'}; " + ", ".join(post.title for post in posts))
    ending.callback(_end, ray, posts)

    def planned(post: Post, master: tuple[str, int], epoch: int) -> tuple[Launch, ...]:
        variables = planning.environment(config, post.place.address, addresses, os.environ) | {TRAINER_EPOCH: str(epoch)}
        return planning.launches(config, file, post.bundle, master, variables)

    def launched(post: Post, master: tuple[str, int], epoch: int) -> tuple[Remote, ...]:
        return _started(post, planned(post, master, epoch))

    trainer = _RayTrainer(ray, [post for post in posts if post.bundle.part == "trainer"], launched)
    others = [post for post in posts if post.bundle.part != "trainer"]
    controller, *engines = (remote for post in others for remote in launched(post, trainer.master, 0))
    again = _RayController(controller, lambda epoch: _started(others[0], planned(others[0], trainer.master, epoch)[:1]))
    return Processes(controller, trainer.start(0), tuple(engines), trainer, again if config.survives_controller else None)


def _started(post: Post, launches: tuple[Launch, ...]) -> tuple[Remote, ...]:
    post.start(launches)
    return tuple(Remote(post, launch) for launch in launches)


class _RayController:
    """A `Starter`: the controller on its node.

    Args:
        first: as it was started.
        again: starts it there again.
    """

    def __init__(self, first: Process, again: Callable[[int], tuple[Process, ...]]) -> None:
        self._now, self._again = first, again

    def prepare(self) -> None:
        """Do nothing: each start is made when it is needed."""

    def end(self) -> None:
        """Kill it, if it still runs. Raises AsyncmoeError if its node is lost."""
        self._now.signal(signal.SIGKILL)
        self._now.wait(STOP_GRACE_S)

    def start(self, epoch: int) -> Process:
        """Start it again. Raises AsyncmoeError if its node is lost."""
        (self._now,) = self._again(epoch)
        return self._now


class _RayTrainer:
    """A `Starter`: the trainer's processes on their nodes. `master`: where its ranks meet first."""

    def __init__(self, ray: Any, posts: Sequence[Post], launched: Callable[[Post, tuple[str, int], int], tuple[Remote, ...]]) -> None:
        self._ray, self._posts, self._launched = ray, posts, launched
        self.master = posts[0].place.address, posts[0].place.port

    def prepare(self) -> None:
        """Do nothing: each start is made when it is needed."""

    def end(self) -> None:
        """End the processes of all trainer nodes."""
        _end(self._ray, self._posts)

    def start(self, epoch: int) -> tuple[Process, ...]:
        """Start the ranks of every node; later starts meet at another port.

        Raises:
            AsyncmoeError: a node is lost.
        """
        master = (self.master[0], self._posts[0].call("port")) if epoch else self.master
        return tuple(remote for post in self._posts for remote in self._launched(post, master, epoch))


def _check_shared(posts: Sequence[Post], file: Path) -> None:
    """Check that every node has this working directory and reads the configuration file that this process wrote."""
    here = hashlib.sha256(file.read_bytes()).hexdigest()
    for post in posts:
        if post.call("seen", os.getcwd(), str(file)) != here:
            raise UserError(
                "run.dir",
                got=f"{file.parent}, which is missing or a different directory for {post.title}",
                expected=f"a directory that all nodes share, and {os.getcwd()} on each",
                hint="put both on a shared file system",
            )


def _end(ray: Any, posts: Sequence[Post]) -> None:
    """End the processes of all nodes concurrently. A lost node needs nothing: its processes end with its actor."""
    ray.wait([post.tell("end", STOP_GRACE_S) for post in posts], num_returns=len(posts), timeout=_END_S)


def _say(text: str) -> None:
    print(text, flush=True)
