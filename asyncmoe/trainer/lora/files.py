"""Publishing adapters as files that SGLang loads: works with any engine that sees the same files, and touches none of its memory.

Every version is an adapter of its own in the engines (`asyncmoe.rollout.engines.adapter_slots`): requests under way keep theirs, and
nothing stands
still. The next version has to wait for the end of the responses of the one before the last.
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
from asyncmoe.trainer.weight_sync.gather import Gatherer, tensors_in
from asyncmoe.trainer.weight_sync.publisher import AtOnce, Published

_MEMORY = Path("/dev/shm")
_GRACE_S = 10.0


class AdapterFiles(AtOnce):
    """See `AtOnce`.

    Args:
        client: connection to the controller; used on rank 0 only.
    """

    def __init__(self, config: Config, model: Model, client: Client) -> None:
        super().__init__()
        self._config, self._model, self._client = config, model, client
        self._gatherer = Gatherer(model, config.sync.bucket_bytes, config.sync.timeout_s, adapter=True)

    def publish(self, version: int) -> Published:
        """Make `version` what all engines sample new requests with. Returns when they do.

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
        # Engines of other machines see the run's directory.
        place = self._config.run.dir if self._config.engines.join else _MEMORY if _MEMORY.is_dir() else None
        with TemporaryDirectory(prefix="asyncmoe-adapter-", dir=place) as folder:
            peft.write_served(Path(folder), family_of(self._model.hf).shape_of(self._model.hf), adapter)
            # It waits for responses, and then for the engine.
            limit = self._config.rollout.request_timeout_s + self._config.sync.timeout_s
            self._client.ask(WeightsAdapter(version, folder), limit + _GRACE_S)


def gathered(model: Model, gatherer: Gatherer) -> Adapter | None:
    """The adapter as it is, on rank 0. Collective over the trainer's ranks.

    Args:
        gatherer: of `model`'s adapter.
    """
    assert model.adapter is not None
    halves: dict[str, np.ndarray] = {}
    for bucket, flat in gatherer.run():
        if flat is not None:
            halves |= {name: _array(tensor) for name, tensor in tensors_in(bucket, flat.cpu()).items()}
    return None if model.mesh.rank else Adapter(model.adapter, str(model.dtype).removeprefix("torch."), halves)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
