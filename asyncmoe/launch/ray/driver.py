"""`asyncmoe run CONFIG launch=ray`: one run on the nodes of a Ray cluster, watched from here.

The cluster is that of RAY_ADDRESS, or else that of this machine. Needed on every node: this package in the Python that Ray was started
with, and the directory this command is started in, with `run.dir` and the model at the same paths. One placement group is reserved: a
bundle for every engine node (the controller lives on the first) and one for every trainer node, a GPU and a CPU for each rank, on nodes
of their own where there are more than two. It is waited for as long as `engines.start_timeout_s`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.launch import local
from asyncmoe.launch.ray import cluster, planning
from asyncmoe.launch.ray.node import Node
from asyncmoe.launch.ray.planning import Bundle
from asyncmoe.launch.ray.post import Post, Remote
from asyncmoe.launch.watch import STOP_GRACE_S, Processes, supervise

_END_S = STOP_GRACE_S + 15.0
"""For a node to end all it started."""


def run(config: Config) -> dict[str, object]:
    """Run a configuration from start to end and return its summary. Whatever happens, no process of it is left.

    Raises:
        UserError: the configuration, the model, the run directory or the cluster cannot be used.
        AsyncmoeError: a process failed or a node was lost: names node, process and cause.
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
    """An actor in every bundle. They end with the placement group.

    Raises:
        AsyncmoeError: one did not start.
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
        posts.append(Post(ray, actor, bundle, found, config.cluster.silence_s))
    return posts


def _supervise(ray: Any, config: Config, posts: Sequence[Post]) -> dict[str, object]:
    try:
        return supervise(config, partial(_start, ray, config, posts))
    except AsyncmoeError:
        # Others notice a lost node before Ray does, and fail; it is their cause.
        for post in posts:
            post.check()
        raise


def _start(ray: Any, config: Config, posts: Sequence[Post], ending: ExitStack) -> Processes:
    addresses = [post.place.address for post in posts]
    file = local.prepare(planning.joining(config, addresses)).absolute()
    _check_shared(posts, file)
    _say(f"logs: {config.run.dir / 'logs'}; " + ", ".join(post.title for post in posts))
    master = next(post.place for post in posts if post.bundle.part == "trainer")
    ending.callback(_end, ray, posts)
    started: dict[str, list[Remote]] = {"trainer": [], "engines": []}
    for post in posts:
        variables = planning.environment(config, post.place.address, addresses, os.environ)
        launches = planning.launches(config, file, post.bundle, (master.address, master.port), variables)
        post.call("start", launches)
        started[post.bundle.part] += [Remote(post, launch) for launch in launches]
    controller, *engines = started["engines"]
    return Processes(controller, tuple(started["trainer"]), tuple(engines))


def _check_shared(posts: Sequence[Post], file: Path) -> None:
    """Every node sees the file that we have written, in the directory where we are."""
    here = hashlib.sha256(file.read_bytes()).hexdigest()
    for post in posts:
        if post.call("seen", os.getcwd(), str(file)) != here:
            raise UserError(
                "run.dir",
                got=f"{file.parent}, which is not there or another one for {post.title}",
                expected=f"a directory that all nodes share, and {os.getcwd()} on each",
                cure="put both on a shared file system",
            )


def _end(ray: Any, posts: Sequence[Post]) -> None:
    """End what runs on all nodes at once. A node that is lost has nothing to end: its processes end with its actor."""
    ray.wait([post.tell("end", STOP_GRACE_S) for post in posts], num_returns=len(posts), timeout=_END_S)


def _say(text: str) -> None:
    print(text, flush=True)
