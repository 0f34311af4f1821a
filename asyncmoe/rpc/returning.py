"""The client of a trainer rank, which outlives its controller: it waits for the next one, introduces itself, and asks again.

Every request of a rank may be asked again. A lease is decided once, and the next controller has it from the log, or draws the same
demonstrations. A commit that the log has is accepted. Of a weight update the next controller knows nothing: it refuses the commit, and
the version is sent again (`asyncmoe.trainer.weight_sync.reshard`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from asyncmoe.errors import ProtocolError, WaitTimeout
from asyncmoe.rpc import keys
from asyncmoe.rpc.client import Client, ConnectionGone
from asyncmoe.rpc.messages import Commit, Hello, Lease, Leased, Reply, Request, Welcome
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.trajectory import Buffer

log = logging.getLogger(__name__)
HELLO_S = 60.0
_LOOK_S = 1.0


@dataclass(frozen=True)
class Standing:
    """What a rank tells the next controller.

    Attributes:
        hello: with the steps that it knows to be committed.
        lease: of the step under way, once it was granted; None: none.
        keys: of the trajectories in it.
    """

    hello: Hello
    lease: Lease | None = None
    keys: tuple[str, ...] = ()

    def after(self, request: Request, reply: Reply) -> Standing:
        """Return the standing once a request was answered."""
        if isinstance(request, Lease) and isinstance(reply, Leased) and reply.items:
            return replace(self, lease=request, keys=_keys(reply))
        if isinstance(request, Commit):
            return Standing(msgspec.structs.replace(self.hello, step=request.step + 1))
        return self


class Standings:
    """The standing of one rank, which its clients share; each assignment replaces it whole, so threads need no lock."""

    now: Standing | None = None


class ReturningClient(Client):
    """A `Client` that follows the run to its next controller.

    Args:
        run_dir: where the next controller writes its rendezvous.
        wait_s: how long to wait for it.
        standings: of the rank.
        holds: whether this client holds the rank's leases; only one of them does.
        waiting: called again and again during the wait.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        name: str,
        epoch: int,
        run_dir: Path,
        wait_s: float,
        standings: Standings,
        holds: bool,
        waiting: Callable[[], None],
    ) -> None:
        super().__init__(rendezvous, name, epoch)
        self._run_dir, self._wait_s, self._standings, self._holds, self._waiting = run_dir, wait_s, standings, holds, waiting

    def ask(self, request: Request, timeout_s: float) -> tuple[Reply, list[Buffer]]:
        """As `Client.ask`; if the controller is lost, wait for the next one and ask it.

        Raises:
            ConnectionGone: none came within `wait_s`. Others as `Client.ask`, also for what the next controller refuses.
        """
        gone = self._connection.lost
        until = time.monotonic() + self._wait_s if gone else None
        while True:
            try:
                if until is not None and gone:
                    self._meet(until)
                answer = super().ask(request, timeout_s)
                break
            except ConnectionGone as error:
                if self._standings.now is None:
                    raise  # it has not met this trainer
                until = time.monotonic() + self._wait_s if until is None else until
                if time.monotonic() >= until:
                    raise
                log.warning("%s; waiting for the next controller", error)
                gone = True
        self._note(request, answer[0])
        return answer

    def _note(self, request: Request, reply: Reply) -> None:
        if isinstance(request, Hello):
            # The facts were true when they were sent.
            self._standings.now = Standing(msgspec.structs.replace(request, facts=None, goes_on=True))
        elif self._holds and (now := self._standings.now) is not None:
            self._standings.now = now.after(request, reply)

    def _meet(self, until: float) -> None:
        """Connect to the next controller and tell it where this rank is.

        Raises:
            ConnectionGone: none came, or it was lost too.
            AsyncmoeError: it refused this rank.
        """
        self._connect(self._found(until))
        now = self._standings.now
        if now is None:
            return
        trained = self._introduced(now.hello)
        if self._holds and now.lease is not None and trained <= now.lease.step:
            self._check_lease(now.hello, now.lease, now.keys)
        log.info("%s goes on with the next controller, at step %d", self.name, now.hello.step)

    def _introduced(self, hello: Hello) -> int:
        """Say hello; return the steps that count as trained."""
        welcome = super().ask(hello, HELLO_S)[0]
        assert isinstance(welcome, Welcome)
        return welcome.trained

    def _check_lease(self, hello: Hello, lease: Lease, keys: tuple[str, ...]) -> None:
        """Ask for the lease under way again. Raises ProtocolError if the next controller has other trajectories in it."""
        try:
            leased = super().ask(msgspec.structs.replace(lease, wait_s=HELLO_S / 2), HELLO_S)[0]
        except ProtocolError:
            if self._introduced(hello) <= lease.step:
                raise
            return  # another rank has committed the step since this one said hello
        assert isinstance(leased, Leased)
        if _keys(leased) != keys:
            raise ProtocolError(f"lease of step {leased.step}: got other trajectories from the next controller than from the last one")

    def _found(self, until: float) -> Rendezvous:
        begin = time.monotonic()
        while True:
            self._waiting()
            try:
                return keys.read(self._run_dir, min(_LOOK_S, max(0.0, until - time.monotonic())))
            except WaitTimeout as error:
                if time.monotonic() >= until:
                    raise ConnectionGone(error.whom, f"{self.name}: {error.what}", time.monotonic() - begin) from None


def _keys(leased: Leased) -> tuple[str, ...]:
    return tuple(item.key for item in leased.items)
