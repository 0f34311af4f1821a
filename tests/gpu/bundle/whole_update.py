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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist

from asyncmoe.errors import TransferError, WeightSyncError
from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.payload import Payload
from asyncmoe.platform.sglang.receiver_command import CommitCommand, JoinCommand
from asyncmoe.reshard.layout import Storage
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
_ENGINE = EngineParallel()
_TIMEOUT_S = 60.0


def main() -> None:
    card = torch.cuda.is_available()
    hf, device = (MODEL, torch.device("cuda", 0)) if card else (SMALL, torch.device("cpu"))
    needed = 4 * sum(storage.nbytes for storage in engine_storages(hf).values())
    if card and torch.cuda.mem_get_info(0)[1] < 1.1 * needed:
        write_outcome(Path(sys.argv[1]), {}, f"the card has too little memory: expected {1.1 * needed / 1e9:.0f} GB")
        return
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    engine = context.Process(target=receive, args=(hf, str(device), there), daemon=True)
    engine.start()
    there.close()  # so that `here` ends with the engine
    figures: dict[str, tuple[Any, str]] = {"device": (torch.cuda.get_device_name(0) if card else "cpu", "")}
    figures["bytes"] = (needed // 4, "bytes")
    publish(Trained(hf, device), Controller(here), card, figures, Path(sys.argv[1]))
    here.send(None)
    engine.join(_TIMEOUT_S)


def publish(model: Trained, controller: Controller, card: bool, figures: dict[str, tuple[Any, str]], result: Path) -> None:
    """Publish all versions, and write what each took by part: "prepare" (what changed; first also the meeting), "stage", "commit"."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = minimal(engines={"dtype": "bfloat16", "share_gpus": card}, sync={"delta": "auto", "timeout_s": _TIMEOUT_S})
    unverified: Any = SimpleNamespace(of_next=lambda: ())
    publisher = ReshardPublisher(config, model, controller, unverified)  # type: ignore[arg-type]  # stands for a client
    for version, (name, each) in enumerate(UPDATES, 1):
        model.change(each, version)
        controller.times = [time.perf_counter()]
        publisher.begin(version)
        published = publisher.settle()
        assert published is not None
        assert published.traffic is not None
        begun, staging, committing = controller.times
        commit_s = published.pause_ms / 1e3
        seconds = {"prepare": staging - begun, "stage": committing - staging, "commit": commit_s, "whole": published.seconds}
        figures |= {f"{name}_{part}": (round(took, 4), "s") for part, took in seconds.items()}
        figures[f"{name}_sent"] = (published.traffic.nbytes, "bytes")
        figures["digests_equal"] = (version, "versions")  # or `Controller.tell` has raised
        write_outcome(result, figures)
    publisher.close()
    dist.destroy_process_group()
    if 4 * figures["delta_sent"][0] > figures["full_sent"][0]:
        sys.exit(f"a delta of one element in {UPDATES[-1][1]}: got {figures['delta_sent'][0]} bytes, expected under a quarter of all")


@dataclass(eq=False)
class Trained:
    """What a sender sees of a trainer of one rank (`asyncmoe.weights.sender.trained`), with weights of random bits."""

    hf: dict[str, Any]
    device: torch.device
    parallel: MegatronParallel = field(default_factory=MegatronParallel)
    dtype: torch.dtype = torch.bfloat16
    adapter: None = None

    def __post_init__(self) -> None:
        self.mesh = SimpleNamespace(rank=0, world=1, device=self.device, backend="nccl" if self.device.type == "cuda" else "gloo")
        self._tensors = empty(Payload(self.hf).weights_of_trainer(self.parallel, 0, "bfloat16").storages, self.device)
        for tensor in self._tensors.values():
            tensor.view(torch.int16).random_(-(1 << 15), 1 << 15)

    def weights(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def adapter_values(self) -> dict[str, torch.Tensor]:
        return {}

    def change(self, each: int, number: int) -> None:
        """Flip a bit of one in so many elements, at random distances from each other."""
        draws = torch.Generator(self.device).manual_seed(number)
        for tensor in self._tensors.values():
            bits = tensor.view(torch.int16).view(-1)
            if each == 1:
                bits ^= 1
                continue
            first = torch.arange(0, max(1, len(bits) - each + 1), each, device=self.device)
            bits[first + torch.randint(min(each, len(bits)), first.shape, device=self.device, generator=draws)] ^= 1


class Controller:
    """Answers a trainer as the controller of a run does, for the engine at the other end of a pipe.

    Attributes:
        times: when staging began and when it was over, added to it.
    """

    def __init__(self, engine: Connection) -> None:
        self.times: list[float] = []
        self._engine = engine

    def ask(self, request: messages.Request, timeout_s: float) -> tuple[messages.Reply, Sequence[bytes]]:
        match request:
            case messages.EnginesAsk():
                return messages.Engines((messages.EngineInfo("engine.0", 1, 1, 1, 0, address.host_id()),), 2, 1), ()
            case messages.WeightsJoin():
                self.tell(JoinCommand(request.host, request.port, request.group, 1))
            case messages.WeightsStage():
                self.times.append(time.perf_counter())
            case messages.WeightsCommit():
                self.times.append(time.perf_counter())
                return messages.Committed(request.version, (1e3 * self.tell(CommitCommand(request.version, request.update)),)), ()
            case messages.WeightsAbort():
                print(request.why, flush=True)
        return messages.Done(), ()

    def tell(self, command: JoinCommand | CommitCommand) -> float:
        """Have the engine obey; return the seconds that it took."""
        self._engine.send(msgspec.json.encode(command))
        if not self._engine.poll(_TIMEOUT_S):
            raise WeightSyncError(f"{command}: got no answer of the engine in {_TIMEOUT_S:g} s")
        answer = self._engine.recv()
        if isinstance(answer, str):
            raise WeightSyncError(answer)
        return float(answer)


def receive(hf: dict[str, Any], device: str, controller: Connection) -> None:
    """The receiving process: obey commands until told None."""
    model = torch.nn.Module()
    for name, tensor in empty(engine_storages(hf), torch.device(device)).items():
        *path, last = name.split(".")
        inner = model
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(last, torch.nn.Parameter(tensor.zero_(), requires_grad=False))
    places = {"tp_rank": 0, "moe_ep_rank": 0}
    with patch.object(handshake, "places", lambda: places), patch.object(handshake, "obstacles", lambda _: []):
        while (text := controller.recv()) is not None:
            began = time.perf_counter()
            worker.obey(model, text.decode())
            took = time.perf_counter() - began
            controller.send(took if (wrong := _wrong(model)) is None else wrong)


def _wrong(model: torch.nn.Module) -> str | None:
    """What is wrong with the parameters after a commit: their digests are read anew."""
    receiver = worker._receivers[model]
    decoder, store = receiver._decoder, receiver._store
    if decoder is None or store is None or decoder.version is None:
        return None  # no version is committed yet
    try:
        decoder.adopt(decoder.version, store.get(protocol.coming(receiver._number - 1, 1), _TIMEOUT_S).digests)
    except TransferError as error:
        return str(error)
    return None


def engine_storages(hf: dict[str, Any]) -> Mapping[str, Storage]:
    """The parameters of an engine of one rank, by SGLang's names."""
    (layout,) = Payload(hf).engines(_ENGINE, "bfloat16", first=1)
    return layout.storages


if __name__ == "__main__":
    main()
