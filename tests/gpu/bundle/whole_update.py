"""Updates of a whole model between two processes, as trainer and engine make them: `python -m tests.gpu.bundle.whole_update RESULT`.

The sending process has a trainer rank's weights of Qwen3-30B-A3B in Megatron's layout and publishes them (`ReshardPublisher`); the
receiving one has an engine rank's parameters in SGLang's layout, and a receiver. Left out are Megatron, SGLang and the controller between
them. Two full updates, of which the first connects, are followed by a delta. After each commit the canonical digest of the engine's
parameters must be that of the trainer's weights. Both processes use one card and CUDA IPC; without a GPU the model is small and crosses
shared memory.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist

from asyncmoe.errors import TransferError, WeightSyncError
from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.payload import Payload
from asyncmoe.platform.sglang.receiver_command import CommitCommand, JoinCommand, parse
from asyncmoe.rpc import address, messages
from asyncmoe.weights import protocol
from asyncmoe.weights.receiver import handshake, worker
from asyncmoe.weights.sender.reshard import ReshardPublisher
from asyncmoe.weights.sender.sources import empty
from benchmarks.published import REAL
from tests.configs import minimal
from tests.gpu.bundle.summary import write_outcome

MODEL = {**REAL["Qwen3-30B-A3B"], "num_hidden_layers": 23}
"""About 30 GB, which a card holds four times: weights, what was last sent, parameters, and what is staged."""
SMALL = {
    **MODEL, "num_hidden_layers": 2, "vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "num_experts": 16, "moe_intermediate_size": 128,
}  # fmt: skip
UPDATES = (("first", 1), ("full", 1), ("delta", 100))
"""Name -> of so many elements one changes."""
_TIMEOUT_S = 60.0


def main() -> None:
    """Publish all versions, and write what each took by part: "prepare" (what changed; first also the meeting), "stage", "commit"."""
    card = torch.cuda.is_available()
    hf, device = (MODEL, torch.device("cuda", 0)) if card else (SMALL, torch.device("cpu"))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=receive, args=(hf, str(device), there), daemon=True).start()
    there.close()  # so that `here` ends with the engine
    parallel = MegatronParallel()
    tensors = empty(Payload(hf).weights_of_trainer(parallel, 0, "bfloat16").storages, device)
    for tensor in tensors.values():
        tensor.view(torch.int16).random_(-(1 << 15), 1 << 15)
    mesh = SimpleNamespace(rank=0, world=1, device=device, backend="nccl" if card else "gloo")
    model: Any = SimpleNamespace(hf=hf, dtype=torch.bfloat16, parallel=parallel, mesh=mesh, adapter=None, weights=lambda: tensors)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    transport = "ipc" if card else "shm"
    config = minimal(engines={"dtype": "bfloat16"}, sync={"transport": transport, "delta": "auto", "timeout_s": _TIMEOUT_S})
    controller: Any = Controller(here)
    unverified: Any = SimpleNamespace(of_next=lambda: ())
    publisher = ReshardPublisher(config, model, controller, unverified)
    figures: dict[str, tuple[Any, str]] = {"device": (torch.cuda.get_device_name(0) if card else "cpu", "")}
    for version, (name, each) in enumerate(UPDATES, 1):
        for tensor in tensors.values():
            tensor.view(torch.int16).view(-1)[version::each].bitwise_xor_(1)
        begun = time.perf_counter()
        publisher.begin(version)
        published = publisher.settle()
        assert published is not None
        assert published.traffic is not None
        staging, committing = (controller.times[request] for request in (messages.WeightsStage, messages.WeightsCommit))
        seconds = {"prepare": staging - begun, "stage": committing - staging, "commit": published.pause_ms / 1e3}
        figures |= {f"{name}_{part}": (round(took, 4), "s") for part, took in {**seconds, "whole": published.seconds}.items()}
        figures[f"{name}_sent"] = (published.traffic.nbytes, "bytes")
        figures["digests_equal"] = (version, "versions")  # or `Controller.tell` has raised
        write_outcome(Path(sys.argv[1]), figures)
    publisher.close()
    if 4 * figures["delta_sent"][0] > figures["full_sent"][0]:
        sys.exit(f"a delta of one element in {UPDATES[-1][1]}: got {figures['delta_sent'][0]} bytes, expected under a quarter of all")


class Controller:
    """Answers a trainer as the controller of a run does, for the engine at the other end of a pipe.

    Attributes:
        times: when a request of each type was last made, in seconds of `time.perf_counter()`.
    """

    def __init__(self, engine: Connection) -> None:
        self.times: dict[type[messages.Request], float] = {}
        self._engine = engine

    def ask(self, request: messages.Request, timeout_s: float) -> tuple[messages.Reply, Sequence[bytes]]:
        self.times[type(request)] = time.perf_counter()
        if isinstance(request, messages.EnginesAsk):
            return messages.Engines((messages.EngineInfo("engine.0", 1, 1, 1, 0, address.host_id()),), 2, 1), ()
        if isinstance(request, messages.WeightsJoin):
            self.tell(JoinCommand(request.host, request.port, request.group, 1))
        if isinstance(request, messages.WeightsCommit):
            return messages.Committed((1e3 * self.tell(CommitCommand(request.version, request.update)),)), ()
        return messages.Done(), ()

    def tell(self, command: JoinCommand | CommitCommand) -> float:
        """Have the engine obey; return the seconds that it took."""
        self._engine.send(msgspec.json.encode(command).decode())
        answer = self._engine.recv() if self._engine.poll(_TIMEOUT_S) else f"no answer of the engine in {_TIMEOUT_S:g} s"
        if isinstance(answer, str):
            raise WeightSyncError(answer)
        return float(answer)


class Engine(torch.nn.Module):
    """The parameters of an engine of one rank, by SGLang's names."""

    def __init__(self, hf: dict[str, Any], device: str) -> None:
        super().__init__()
        (layout,) = Payload(hf).engines(EngineParallel(), "bfloat16", first=1)
        made = empty(layout.storages, torch.device(device))
        self.held = {name: torch.nn.Parameter(tensor.zero_(), requires_grad=False) for name, tensor in made.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self.held.items())


def receive(hf: dict[str, Any], device: str, controller: Connection) -> None:
    """The receiving process: obey commands. After a commit the parameters are read anew, and their digest compared with the sender's."""
    model, places = Engine(hf, device), {"tp_rank": 0, "moe_ep_rank": 0, "attn_dp_rank": 0}
    without_sglang = patch.multiple(handshake, places=lambda: places, obstacles=lambda _: [])
    with without_sglang, suppress(EOFError):
        while True:
            text = controller.recv()
            began = time.perf_counter()
            worker.obey(model, text)
            answer: float | str = time.perf_counter() - began
            command, receiver = parse(text), cast("Any", worker._receivers[model])
            if isinstance(command, CommitCommand):
                try:
                    receiver._decoder.adopt(command.version, receiver._store.get(protocol.coming(command.update, 1), _TIMEOUT_S).digests)
                except TransferError as error:
                    answer = str(error)
            controller.send(answer)


if __name__ == "__main__":
    main()
