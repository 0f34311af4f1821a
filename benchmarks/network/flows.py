"""What a host sends, by connection: a program of its own, which sees each packet that leaves the host's interface (packet(7)).

The kernel's counter of the interface is beside it, so that nobody need believe that all packets were seen.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections import Counter
from pathlib import Path

Connection = tuple[str, int, str, int]
"""Address and port of the sender and of the receiver; ports are 0 if it is not TCP."""
_EVERY, _OUTGOING, _ETHERNET, _TCP = 3, 4, 14, 6
_HEADERS = 128
_ROOM, _RCVBUF_FORCE = 256 << 20, 33
"""Of packets that wait to be looked at, each with all of its bytes; socket(7) has the option, Python no name for it."""
_SAY_S = 1.0


def interface(name: str) -> list[int]:
    """Return the counters of an interface in this process's network, in the order of /proc/net/dev (proc(5)): bytes received come first,
    bytes sent ninth."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith(f"{name}:"))
    return [int(word) for word in line.partition(":")[2].split()]


def connection_of(packet: bytes) -> Connection | None:
    """Return whose an Ethernet frame is; None if it is not IPv4 (ARP)."""
    if packet[12:14] != b"\x08\x00":
        return None
    sender, receiver = socket.inet_ntoa(packet[26:30]), socket.inet_ntoa(packet[30:34])
    at = _ETHERNET + 4 * (packet[_ETHERNET] & 15)
    first = struct.unpack_from(">H", packet, _ETHERNET + 6)[0] & 0x1FFF == 0  # the later fragments of a packet have no ports
    ports = struct.unpack_from(">HH", packet, at) if packet[_ETHERNET + 9] == _TCP and first else (0, 0)
    return sender, ports[0], receiver, ports[1]


def follow(name: str, file: Path) -> None:
    """Count until this process is killed; write the counts to a file every second.

    The file has {"interface": bytes that the kernel counted, "other": bytes of packets without IPv4, "connections": [[sender's address, its
    port, receiver's address, its port, bytes]]}.
    """
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY))
    packets.setsockopt(socket.SOL_SOCKET, _RCVBUF_FORCE, _ROOM)
    packets.bind((name, 0))
    packets.settimeout(_SAY_S)
    before, sent, other, told = interface(name)[8], Counter[Connection](), 0, 0.0
    head = bytearray(_HEADERS)
    while True:
        if time.monotonic() - told > _SAY_S:
            told = time.monotonic()
            counts = [[*connection, nbytes] for connection, nbytes in sent.items()]
            part = file.with_suffix(".part")
            part.write_text(json.dumps({"interface": interface(name)[8] - before, "other": other, "connections": counts}))
            os.replace(part, file)
        try:
            nbytes, address = packets.recvfrom_into(head, _HEADERS, socket.MSG_TRUNC)
        except TimeoutError:
            continue
        if address[2] != _OUTGOING:
            continue
        if (connection := connection_of(bytes(head))) is None:
            other += nbytes
        else:
            sent[connection] += nbytes


if __name__ == "__main__":
    follow(sys.argv[1], Path(sys.argv[2]))
