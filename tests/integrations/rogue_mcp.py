"""An MCP server without the SDK that misbehaves as told: `python -I -S rogue_mcp.py WHEN [FILE]`; standard library only, so it starts fast.

WHEN is empty, or `start:HOW`: before the handshake. A call of `act` with {"how": HOW} misbehaves in the call; with other words it echoes.
`count` counts the session's calls. A FILE gets the id of this process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any, NoReturn


def send(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def forever() -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def note(process: int) -> None:
    if len(sys.argv) > 2:
        with open(sys.argv[2], "a") as file:
            file.write(f"{process}\n")


def misbehave(how: str) -> bool:
    """Returns False if it is no misbehaviour."""
    if how == "hang":
        forever()
    elif how == "die":
        print("out of luck", file=sys.stderr, flush=True)
        sys.exit(3)
    elif how == "close":
        os.close(1)
        forever()
    elif how == "flood":
        while True:
            sys.stdout.write("x" * 65536)
    elif how == "rubbish":
        print("hello, I am no server", flush=True)
        print(b"\xff\xfe{".decode("latin1"), flush=True)
        forever()
    else:
        return False
    return True


def answer(message: dict[str, Any]) -> None:
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        said = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}}
        send({"id": message["id"], "result": {**said, "serverInfo": {"name": "rogue", "version": "1"}}})
    elif method == "tools/list":
        schema = {"type": "object", "properties": {"how": {"type": "string"}}, "required": ["how"]}
        named = [("act", schema), ("count", {"type": "object"})]
        send({"id": message["id"], "result": {"tools": [{"name": name, "inputSchema": one} for name, one in named]}})
    elif method == "tools/call":
        call(message["id"], params["name"], params.get("arguments", {}))
    elif "id" in message:
        send({"id": message["id"], "error": {"code": -32601, "message": f"no method {method}"}})


calls = 0


def call(number: object, name: str, arguments: dict[str, Any]) -> None:
    global calls
    calls += 1
    how = arguments.get("how", "")
    if misbehave(how):
        return
    if how == "wrong":
        send({"id": number, "result": {"content": "no list"}})
    elif how == "refuse":
        send({"id": number, "error": {"code": -32602, "message": "not like this"}})
    elif how == "fail":
        send({"id": number, "result": {"isError": True, "content": [{"type": "text", "text": "it failed"}]}})
    elif how == "long":
        send({"id": number, "result": {"content": [{"type": "text", "text": "x" * 100_000}]}})
    elif how == "picture":
        send({"id": number, "result": {"content": [{"type": "image", "data": "QUJD", "mimeType": "image/png"}]}})
    elif how == "structure":
        send({"id": number, "result": {"content": [], "structuredContent": {"a": "é"}}})
    elif how == "variables":
        send({"id": number, "result": {"content": [{"type": "text", "text": " ".join(sorted(os.environ))}]}})
    else:
        text = str(calls) if name == "count" else how
        send({"id": number, "result": {"content": [{"type": "text", "text": text}]}})


if __name__ == "__main__":
    note(os.getpid())
    misbehave(sys.argv[1].removeprefix("start:") if len(sys.argv) > 1 else "")
    for line in sys.stdin:
        answer(json.loads(line))
