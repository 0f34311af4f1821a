"""One connection to a server that tracks whether it is up: a DEALER socket and its monitor.

It uses the Unix socket if the server is on this host (`asyncmoe.rpc.local`), else encrypted TCP.
"""

from __future__ import annotations

import time
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncmoe.rpc import local
from asyncmoe.rpc.codec import MAX_FRAME_BYTES
from asyncmoe.rpc.rendezvous import Rendezvous

_HEARTBEAT_MS = 5_000
_SILENCE_MS = 60_000
_MONITOR_STOP_S = 5.0
"""Longest wait for the monitor's pipe to end."""
_MONITOR_POLL_S, _MONITOR_QUIET = 0.002, 3
"""Seconds between checks of the pipe, and the number of successive checks that must find it ended."""
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Connection:
    """Connects in the background and reconnects after a loss.

    Attributes:
        up: the handshake succeeded, so each side has verified the other's keys, and the connection still exists.
        losses: number of times that an `up` connection ended. A request sent before a loss gets no reply: the server forgets its sender.
        refused: the server rejected our key.
    """

    def __init__(self, to: Rendezvous) -> None:
        self.up, self.losses, self.refused = False, 0, False
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        here = local.reachable(to.local_dir)
        if here:
            self.socket.plain_username = local.USER.encode()
            self.socket.plain_password = to.local_secret.encode()
        else:
            self.socket.curve_serverkey = to.server_public.encode()
            self.socket.curve_publickey = to.client_public.encode()
            self.socket.curve_secretkey = to.client_secret.encode()
        for option, value in {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1_000,
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: _SILENCE_MS,
        }.items():
            self.socket.setsockopt(option, value)
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self.socket.connect(local.address(Path(to.local_dir)) if here else to.address)

    def wait(self, seconds: float) -> bool:
        """Sleep until a message arrives, the connection's state changes, or `seconds` pass. True if a message is ready."""
        ready = dict(self._poller.poll(max(0, round(seconds * 1000))))
        if self._monitor in ready:
            self.look()
        return self.socket in ready

    def why_lost(self, losses: int) -> str:
        """Return why no reply can come to a request sent after this number of losses, or "" if one still can."""
        if self.losses > losses:
            return "the connection was lost; the server has probably died, see its log"
        return "it rejected our key" if self.refused else ""

    def close(self) -> None:
        """Close the connection; unsent messages are lost."""
        self._stop_monitor()
        self._monitor.close(0)
        self.socket.close(0)
        self._context.term()

    def _stop_monitor(self) -> None:
        """Stop the events, and wait until libzmq has closed its end of the monitor's inproc pipe and our end has acknowledged that.

        libzmq's reaper thread was seen to crash (SIGSEGV in `ctx_t::send_command`) while sending to a socket that was already freed. The
        only pipe it can end towards such a socket appears to be the monitor's. So the two ends are closed one after the other: libzmq's end
        closes while ours is open, and ours closes without a pipe to end.
        A PAIR that is neither readable nor writable has acknowledged the end of its pipe, or will with the next command it reads.
        """
        self.socket.disable_monitor()
        until, ended = time.monotonic() + _MONITOR_STOP_S, 0
        while ended < _MONITOR_QUIET and time.monotonic() < until:
            ready = int(self._monitor.getsockopt(zmq.EVENTS))
            if ready & zmq.POLLIN:
                self._monitor.recv(zmq.NOBLOCK)
            else:
                ended = 0 if ready else ended + 1
                time.sleep(_MONITOR_POLL_S)

    def look(self) -> None:
        """Process the connection's events, without receiving messages: an event loop may wait for those."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.up = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refused = True
            elif self.up:
                self.up, self.losses = False, self.losses + 1


def answers(to: Rendezvous, timeout_s: float) -> bool:
    """Return whether a holder of the run's server key accepts our connection within `timeout_s`."""
    if local.reachable(to.local_dir) and local.is_left_behind(Path(to.local_dir)):
        return False  # at once: a server on this host listens on its Unix socket as long as on its port
    connection = Connection(to)
    deadline = time.monotonic() + timeout_s
    try:
        while not connection.up and not connection.refused and time.monotonic() < deadline:
            connection.wait(deadline - time.monotonic())
        return connection.up
    finally:
        connection.close()
