"""Publishes adapters as files that SGLang loads: works with any engine that sees the same files, and does not touch its memory.

Every version is a separate adapter in the engines (`asyncmoe.engines.adapter_slots`): running requests keep their version, and no
engine pauses. Version k + 1 has to wait until the responses of version k - 1 have ended.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from asyncmoe.config import Config
from asyncmoe.models import family_of
from asyncmoe.models.lora import peft
from asyncmoe.models.lora.adapter import Adapter
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import EnginesAsk, WeightsAdapter
from asyncmoe.trainer.model.gpt import Model
from asyncmoe.weights.sender.gather import Gatherer, tensors_in
from asyncmoe.weights.sender.publisher import Published, Publisher

_MEMORY = Path("/dev/shm")
_GRACE_S = 10.0


class AdapterFiles(Publisher):
    """Publishes each version as adapter files; see `Publisher`.

    Args:
        client: connection to the controller; used on rank 0 only.
    """

    def __init__(self, config: Config, model: Model, client: Client) -> None:
        self._config, self._model, self._client = config, model, client
        self._gatherer = Gatherer(model, config.sync.bucket_bytes, config.sync.timeout_s, adapter=True)

    def publish(self, version: int) -> Published:
        """Make all engines sample new requests with `version`; return when they do.

        Raises:
            WeightSyncError: an engine refused.
            WaitTimeout: an engine or the controller did not answer in time, or responses of an older version did not end.
        """
        begin = time.perf_counter()
        adapter = gathered(self._model, self._gatherer)
        if adapter is not None:
            self._send(version, adapter)
        return Published(version, time.perf_counter() - begin, 0.0)

    def _send(self, version: int, adapter: Adapter) -> None:
        start_s = self._config.engines.start_timeout_s
        self._client.ask(EnginesAsk(start_s), start_s + _GRACE_S)
        # Engines on other machines see the run's directory.
        place = self._config.run.dir if self._config.engines.join else _MEMORY if _MEMORY.is_dir() else None
        with TemporaryDirectory(prefix="asyncmoe-adapter-", dir=place) as folder:
            peft.write_served(Path(folder), family_of(self._model.hf).shape_of(self._model.hf), adapter)
            # The request waits for responses, and then for the engine.
            limit = self._config.rollout.request_timeout_s + self._config.sync.timeout_s
            self._client.ask(WeightsAdapter(version, folder), limit + _GRACE_S)


def gathered(model: Model, gatherer: Gatherer) -> Adapter | None:
    """Gather the current adapter on rank 0; return None on other ranks. Collective over the trainer's ranks.

    Args:
        gatherer: gatherer of `model`'s adapter.
    """
    assert model.adapter is not None
    halves: dict[str, np.ndarray] = {}
    for bucket, flat in gatherer.run():
        if flat is not None:
            halves |= {name: _array(tensor) for name, tensor in tensors_in(bucket, flat.cpu()).items()}
    return None if model.mesh.rank else Adapter(model.adapter, str(model.dtype).removeprefix("torch."), halves)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
