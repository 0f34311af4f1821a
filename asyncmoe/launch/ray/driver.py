"""`asyncmoe run CONFIG launch=ray`: a run on the nodes of a Ray cluster, supervised from this process.

RAY_ADDRESS names the cluster; the default is this machine's cluster. Every node needs this package in the Python that Ray was started
with, and the working directory of this command, with `run.dir` and the model at the same paths. The driver reserves one placement
group, with a bundle for every engine node (the controller runs on the first) and a bundle for every trainer node, and waits up to
`engines.start_timeout_s` for it. A bundle has a GPU and a CPU for each rank; more than two bundles are placed on separate nodes.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncmoe import storage
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.launch import commands, local
from asyncmoe.launch.commands import Launch, Launcher
from asyncmoe.launch.ray import cluster, planning
from asyncmoe.launch.ray.node import Node, Post, Remote
from asyncmoe.launch.ray.planning import Bundle
from asyncmoe.launch.rule import TRAINER
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process, RunParts
from asyncmoe.launch.watch import supervise

_say = partial(print, flush=True)
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
        wanted = planning.bundles(config, gpus=bool(ray.cluster_resources().get("GPU")))
        with local.claim(config.run.dir):
            found = local.check(planning.joining(config))
            with cluster.reserved(ray, wanted, config.engines.start_timeout_s, _say) as group:
                posts = _posts(ray, group, wanted, config)
                _check_shared(posts, config.run.dir.absolute())
                file = local.prepare(planning.joining(config, [post.address for post in posts]), found).absolute()
                return _supervise(ray, config, posts, file)


def _posts(ray: Any, group: Any, wanted: Sequence[Bundle], config: Config) -> list[Post]:
    """Start an actor in every bundle. Actors end with the placement group.

    Raises:
        AsyncmoeError: an actor did not start.
    """
    actor = ray.remote(Node)
    actors = []
    for index, bundle in enumerate(wanted):
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        cpus, gpus = (bundle.resources.get(what, 0.0) for what in ("CPU", "GPU"))
        actors.append(actor.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy).remote())
    asked = [actor.place.remote() for actor in actors]
    begin, limit = time.monotonic(), config.engines.start_timeout_s
    posts = []
    for bundle, actor, place in zip(wanted, actors, asked, strict=True):
        waited = time.monotonic() - begin
        address, host = cluster.result(ray, place, f"Ray's worker for {bundle.title}", "start", waited, limit - waited)
        posts.append(Post(ray, actor, bundle, address, host, config.cluster.heartbeat_timeout_s))
    return posts


def _supervise(ray: Any, config: Config, posts: Sequence[Post], file: Path) -> dict[str, object]:
    try:
        return supervise(config, _table(ray, config, posts, file), partial(_end, ray, posts))
    except AsyncmoeError:
        # Processes notice a lost node before Ray does, and fail because of it: report the node as the root cause.
        for post in posts:
            post.call("ended")  # raises if the node is lost
        raise


def _table(ray: Any, config: Config, posts: Sequence[Post], file: Path) -> RunParts:
    addresses = [post.address for post in posts]
    _say(f"logs: {config.run.dir / 'logs'}; " + ", ".join(post.title for post in posts))
    trainers = [post for post in posts if post.bundle.machine is None]
    engines = [(post, post.bundle.machine) for post in posts if post.bundle.machine is not None]
    running = dict[str, Remote]()

    def start(post: Post, launch: Launch) -> Process:
        shared = planning.environment(config, post.address, addresses, os.environ)
        launch = replace(launch, environment=shared | dict(launch.environment))
        post.start(launch)
        running[launch.name] = Remote(post, launch)
        return running[launch.name]

    def end(name: str) -> None:
        if name == TRAINER:
            _end(ray, trainers)
        else:
            running[name].signal(signal.SIGKILL)
            running[name].wait(STOP_GRACE_S)

    def master(epoch: int) -> tuple[str, int]:
        return trainers[0].address, trainers[0].call("port")

    return commands.table(config, file, Launcher(engines, trainers, start, end, master))


def _check_shared(posts: Sequence[Post], run_dir: Path) -> None:
    """Check that every node has this working directory and this run directory."""
    with storage.writing("run directory", run_dir), tempfile.NamedTemporaryFile(prefix=".shared-", dir=run_dir) as probe:
        for post in posts:
            if not post.call("sees", os.getcwd(), probe.name):
                got = f"{run_dir}, which is missing or a different directory for {post.title}"
                expected = f"a directory that all nodes share, and {os.getcwd()} on each"
                raise UserError("run.dir", got=got, expected=expected, hint="put both on a shared file system")


def _end(ray: Any, posts: Sequence[Post]) -> None:
    """End the processes of all nodes concurrently. A lost node needs nothing: its processes end with its actor."""
    ray.wait([post.tell("end", STOP_GRACE_S) for post in posts], num_returns=len(posts), timeout=_END_S)
