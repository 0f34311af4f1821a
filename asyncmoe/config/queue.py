"""The bounded queue, its staleness rules, and where its trajectories lie."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import FINITE, NUMBER, NonNegative, Positive, Seconds, Section, Share
from asyncmoe.config.journal import check_address

StalenessRule = Literal["drop", "requeue", "downweight"]
Unit = Literal["group", "trajectory"]
Payloads = Literal["workers", "redis", "ray", "mooncake"]


class StalenessSection(Section):
    """Staleness: how many versions a trained token may be behind the trainer."""

    max_staleness: NonNegative = Field(
        1,
        description="Versions a trained token may be behind (eta in AReaL's paper). Capacity law: a response starts only while accepted + "
        "running < (max_staleness + version + 1) * batch. Raise it if engines and trainer wait for each other; lower it if too many ratios "
        "are clipped.",
    )
    rule: StalenessRule = Field(
        "drop",
        description="What happens to a group whose oldest token is more than max_staleness versions old when its turn to train comes. "
        "drop: it is discarded. requeue: its prompt is sampled again. downweight: it is trained with less weight, up to drop_above.",
    )
    downweight: Share | None = Field(None, description="downweight: factor on a group's weight for each version beyond max_staleness.")
    drop_above: Positive | None = Field(None, description="downweight: drop a group with a token older than this many versions.")

    @model_validator(mode="after")
    def _check(self) -> StalenessSection:
        for name, value in (("downweight", self.downweight), ("drop_above", self.drop_above)):
            if self.rule == "downweight" and value is None:
                what = (
                    "a factor of at most 1"
                    if name == "downweight"
                    else f"a number above queue.staleness.max_staleness = {self.max_staleness}"
                )
                raise ValueError(
                    f"queue.staleness.{name}: got nothing, expected {what} because queue.staleness.rule is downweight; give both"
                )
            if self.rule != "downweight" and value is not None:
                raise ValueError(
                    f"queue.staleness.{name}: got {value}, expected nothing because queue.staleness.rule is {self.rule}; leave it out, or "
                    "set the rule to downweight"
                )
        if self.drop_above is not None and self.drop_above <= self.max_staleness:
            raise ValueError(
                f"queue.staleness.drop_above: got {self.drop_above}, expected more than queue.staleness.max_staleness = "
                f"{self.max_staleness}; raise it, or set queue.staleness.rule to drop"
            )
        return self


class MooncakeSection(Section):
    """Mooncake's store, for payloads mooncake. All processes of the run must reach its master, and each other."""

    master: str | None = Field(
        None, description="host:port of mooncake_master, which the site runs. Needs the extra mooncake and libibverbs."
    )
    metadata: str = Field(
        "P2PHANDSHAKE",
        description="Where the store's clients find each other: P2PHANDSHAKE (they ask each other), or the URL of its metadata server, "
        "http://host:port/metadata.",
    )
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="How trajectories travel. rdma was never tried: no machine here has it.")
    segment_bytes: NonNegative = Field(
        0,
        description="Memory that each process that samples gives to the store: the controller, or each rollout worker. What lies there is "
        "lost with the process. 0: none; the site's nodes (mooncake_client) give it.",
    )
    patience_s: Annotated[float, Field(gt=0, le=240), FINITE, NUMBER] = Field(
        30.0,
        description="Seconds for which the master is asked again while it does not answer. Then a rank asks the controller, which reads "
        "the journal, and a process that has something to put ends the run.",
    )

    @model_validator(mode="after")
    def _check(self) -> MooncakeSection:
        if self.master is not None:
            host, _, port = self.master.rpartition(":")
            if not (host and not set(host) & set("/@[]: ") and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ValueError(f"queue.mooncake.master: got {self.master}, expected host:port")
        if self.metadata != "P2PHANDSHAKE" and not self.metadata.startswith(("http://", "https://")):
            raise ValueError(f"queue.mooncake.metadata: got {self.metadata}, expected P2PHANDSHAKE or http://host:port/metadata")
        return self


class QueueSection(Section):
    """The bounded queue between engines and trainer."""

    staleness: StalenessSection = StalenessSection()
    admission: Unit = Field(
        "group",
        description="Unit that the capacity law admits. group: all responses to a prompt together. trajectory: single responses; a "
        "response that an engine failed is started over alone.",
    )
    capacity: Positive | None = Field(
        None, description="Trajectories the queue holds before adding waits; null: (max_staleness + 1) * batch. Lower it to save memory."
    )
    lease_timeout_s: Seconds = Field(
        600.0, description="Seconds the trainer waits for a batch before the run fails. Raise it if responses are long."
    )
    payloads: Payloads = Field(
        "workers",
        description="Where the trajectories of finished groups lie until they are trained; the trainer's ranks fetch them from there. "
        "workers: the memory of the controller, or of the rollout worker that sampled them. redis: a Redis server, queue.redis; needs the "
        "extra redis. ray: objects of the Ray cluster that RAY_ADDRESS names, by default the machine's; needs the extra ray. "
        "mooncake: Mooncake's store, queue.mooncake; needs the extra mooncake. What a store has lost is read from the journal.",
    )
    redis: str | None = Field(
        None,
        description="payloads redis: the server (6.2 or later), redis://host:port/database, rediss:// (TLS) or unix:///path?db=database; a "
        "user is named before an @. All processes of the run must reach it. It needs memory for all that is queued, and a maxmemory-policy "
        "that deletes none of it (noeviction or volatile-*); nothing needs to be on its disk.",
    )
    redis_password_variable: str | None = Field(
        None, description="Environment variable of all processes of the run with the password of queue.redis; null: it requires none."
    )
    redis_patience_s: Annotated[float, Field(gt=0, le=240), FINITE, NUMBER] = Field(
        30.0,
        description="Seconds for which queue.redis is asked again while it does not answer. Then a rank asks the controller, which reads "
        "the journal, and a process that has something to put ends the run.",
    )
    mooncake: MooncakeSection = MooncakeSection()
    payload_bytes: Positive = Field(
        64 << 30,
        description="Bound on the bytes of a run's trajectories in Redis or Ray; with workers and mooncake queue.capacity bounds them. "
        "What would exceed it waits for the trainer, up to lease_timeout_s.",
    )

    @model_validator(mode="after")
    def _check(self) -> QueueSection:
        wanted = self.payloads == "redis"
        if wanted and self.redis is None:
            raise ValueError("queue.redis: got null, expected the address of a server because queue.payloads is redis")
        for name in ("redis", "redis_password_variable"):
            if not wanted and (got := getattr(self, name)) is not None:
                raise ValueError(f"queue.{name}: got {got}, expected null because queue.payloads is {self.payloads}; set that to redis")
        if self.redis is not None:
            check_address(self.redis, "queue.redis")
        master = self.mooncake.master
        if self.payloads == "mooncake" and master is None:
            raise ValueError("queue.mooncake.master: got null, expected host:port because queue.payloads is mooncake")
        if self.payloads != "mooncake" and master is not None:
            raise ValueError(
                f"queue.mooncake.master: got {master}, expected null because queue.payloads is {self.payloads}; set that to mooncake"
            )
        return self
