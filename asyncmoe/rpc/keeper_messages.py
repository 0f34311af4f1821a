"""Messages between a controller and the keeper of the engines of its machine (`asyncmoe.rollout.engines.keeper`).

A controller sends `KeeperTake` first and gets an epoch. The keeper refuses the requests of older epochs: a controller that was only
suspended changes nothing when it wakes up and another has taken its place.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncmoe.rpc import nccl_settings
from asyncmoe.rpc.base import Count, Message

Changing = Literal["", "loading", "writing"]


class EngineWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the engines of a run hold. The controller tells the keeper before each change of them, and after it."""

    version: Count = 0
    """Version that the engines serve; `coming` if one of them serves weights of that number from another lineage."""
    lineage: Count = 0
    """Of `version`; see `asyncmoe.rpc.messages.Leased`."""
    landed: bool = False
    """Whether any version has landed; without one, engines hold the weights that they started with."""
    changing: Changing = ""
    """"loading": each engine may take `coming`, as a whole; "writing": their parameters are written in place, so that each may hold a part
    of it."""
    coming: Count = 0
    """Version under way, if engines are loading."""
    coming_lineage: Count = 0


class KeptEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine that the keeper started."""

    index: Count
    """Its number on its machine."""
    name: str
    url: str
    key: str = ""
    """API key that its server requires."""
    tp: Count = 1
    ep: Count = 1
    host: str = ""
    """`asyncmoe.rpc.address.host_id` of its machine."""
    ready: bool = False
    """Whether it accepts requests."""
    died: str | None = None
    """Why it ended, or did not start; None while it runs."""


class KeeperTake(Message, frozen=True):
    """A controller takes over the engines that there are; or its launcher does, before the controller has started."""

    config_digest: str
    """Must be that of the configuration with which the engines were started."""
    pid: Count
    """Process of this machine; the engines end `engines.orphan_s` after it, unless another has taken its place."""
    nccl: dict[str, str] = msgspec.field(default_factory=nccl_settings.shared)
    """Settings of the sender, which a trainer has too that is started with it; must be those with which the engines were started."""


class KeeperStart(Message, frozen=True):
    """Start engine `index`, which must not run."""

    epoch: Count
    index: Count
    memory: tuple[str, ...] = ()
    """Arguments that limit its GPU memory (`asyncmoe.plan.budget.engine_arguments`)."""


class KeeperStop(Message, frozen=True):
    """Kill engine `index` with every process it spawned. `wait`: answer when all have ended."""

    epoch: Count
    index: Count
    wait: bool = False


class KeeperNote(Message, frozen=True):
    """Keep what the engines hold, for the next controller."""

    epoch: Count
    weights: EngineWeights


class KeeperAsk(Message, frozen=True):
    """Ask for the state of all engines."""

    epoch: Count


class KeeperEnd(Message, frozen=True):
    """The run is over: end all engines, then the keeper. Epoch 0: the next launcher of the run asks, before any controller."""

    epoch: Count


class Kept(Message, frozen=True):
    """Reply to `KeeperTake`, `KeeperStart` and `KeeperAsk`: the controller's epoch and all engines, by index."""

    epoch: Count
    engines: tuple[KeptEngine, ...] = ()
    weights: EngineWeights = EngineWeights()


KeeperRequest = KeeperTake | KeeperStart | KeeperStop | KeeperNote | KeeperAsk | KeeperEnd
