"""Publish a weight version through a directory that trainer and engines share: works with any engine, and weights need no other connection.

While the engines generate, rank 0 gathers the version and writes it as a checkpoint in Hugging Face's layout. Then the controller has every
engine pause, load it with SGLang's own loader, and resume. The previous version stays until all engines serve the new one.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.rpc.client import ANSWER_S, Client
from asyncmoe.rpc.messages import Committed, EnginesAsk, WeightsFiles
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums
from asyncmoe.weights.sender.gather import Gatherer
from asyncmoe.weights.sender.hf_files import SHARD_BYTES, write_hf
from asyncmoe.weights.sender.publisher import Published, Publisher
from asyncmoe.weights.sender.trained import TrainedModel


def folder_of(config: Config) -> Path:
    """Return where a run writes its versions: a folder of its own, whose contents it may delete."""
    run = config.run.dir.absolute()
    if config.sync.directory is None:
        return run / "weights"
    return config.sync.directory / f"{run.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}"


class DiskPublisher(Publisher):
    """See `Publisher`.

    Args:
        client: connection to the controller; used on rank 0 only.
    """

    def __init__(self, config: Config, model: TrainedModel, client: Client, expected: ExpectedChecksums) -> None:
        self._config, self._sync, self._model, self._client = config, config.sync, model, client
        self._folder = folder_of(config)
        self._gatherer = Gatherer(model, SHARD_BYTES, config.sync.timeout_s)
        self._expected = expected

    def publish(self, version: int) -> Published:
        """Publish a version; return when every engine has resumed with it.

        Raises:
            StorageError: rank 0 could not write the version; the engines serve the previous one.
            WeightSyncError: an engine was fenced, because it refused the version or its checksums differ.
            Disagreement: the checksums of all engines differ.
            WaitTimeout: an engine or the controller did not answer in time.
            RunStopping: on rank 0, if the run is stopped before engines have started.
        """
        begin = time.perf_counter()
        checksums = self._expected.of_next()
        folder, first, pause_ms = self._folder / f"version_{version}", self._model.mesh.rank == 0, 0.0
        if first:
            shutil.rmtree(folder, ignore_errors=True)  # left by an earlier trainer, whose updates have ended
        write_hf(self._model, self._config.model.path, folder, self._gatherer, f"weights of version {version}")
        if first:
            start_s = self._config.engines.start_timeout_s
            self._client.ask(EnginesAsk(start_s), start_s + ANSWER_S)
            # Finishing responses, pausing engines and loading each take at most the limit.
            reply = self._client.ask(WeightsFiles(version, str(folder), checksums), 3 * self._sync.timeout_s + ANSWER_S)[0]
            assert isinstance(reply, Committed)
            pause_ms = max(reply.pause_ms, default=0.0)
            for path in self._folder.glob("*version_*"):
                if path != folder:
                    shutil.rmtree(path, ignore_errors=True)
        return Published(version, time.perf_counter() - begin, pause_ms)
