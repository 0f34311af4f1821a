"""The SGLang servers that a tiny run may be tried with, the best first. Only the standard library is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MODE = "ASYNCMOE_BARE_SERVER"
"""Environment variable that names the server for `bare_server`: a `Server.name`."""


@dataclass(frozen=True)
class Server:
    """One way to serve the tiny model.

    Attributes:
        name: what `MODE` and the command line of `tiny_run` call it.
        says: what the summary calls it.
        bare: it runs where SGLang's kernel wheels are missing, as `bare_server`.
        triton: SGLang's Triton kernels compute the experts; they compute in 16 bits.
        graphs: decoding replays CUDA graphs.
        arguments: of its command line, after the defaults that a CPU needs.
    """

    name: str
    says: str
    bare: bool = True
    triton: bool = False
    graphs: bool = False
    arguments: tuple[str, ...] = ()


_ON_CARD = ("--device", "cuda", "--mem-fraction-static", "0.3")
_NO_GRAPHS = "--disable-cuda-graph"
_TRITON_ATTENTION = ("--attention-backend", "triton")
WHOLE = Server("sglang", "SGLang's kernels", bare=False)
GRAPHS = Server(
    "graphs",
    "Triton's experts and attention, CUDA graphs",
    triton=True,
    graphs=True,
    # SGLang takes no graphs with torch's attention (arg_groups/attention_hook.py). Few sizes: every one is captured before the start.
    arguments=(*_TRITON_ATTENTION, "--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", "4", "16"),
)
EAGER = Server("triton", "Triton's experts and attention", triton=True, arguments=_TRITON_ATTENTION)
EXPERTS = Server("experts", "Triton's experts, torch's attention", triton=True)
PLAIN = Server("plain", "torch's operators")
CPU = Server("cpu", PLAIN.says, bare=False)
KNOWN = {server.name: server for server in (WHOLE, GRAPHS, EAGER, EXPERTS, PLAIN, CPU)}


def ladder(card: bool, whole: bool, triton: bool) -> tuple[Server, ...]:
    """Servers to try on a machine, in order.

    Args:
        card: there is a GPU.
        whole: all that SGLang needs there is installed; on a GPU its kernel wheels too.
        triton: Triton is.
    """
    if whole:
        return (WHOLE if card else CPU,)
    return (GRAPHS, EXPERTS, PLAIN) if card and triton else (PLAIN,)


def arguments(server: Server, card: bool, defaults: Sequence[str]) -> list[str]:
    """Of a bare server's command line; what the caller gives comes after them and wins.

    Args:
        defaults: what a server needs on a CPU (`asyncmoe.platform.sglang.cpu.ARGUMENTS`).
    """
    common = [word for word in defaults if word != _NO_GRAPHS or not (server.graphs and card)]
    return [*common, *(_ON_CARD if card else ()), *server.arguments]
