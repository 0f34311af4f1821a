"""Contents and loading of a checkpoint, with Megatron's dist_checkpointing (torch_dist format); `checkpoint_saver` saves it.

A checkpoint can be loaded under any other layout, with the optimizer's state sharded or not
(`asyncmoe.platform.megatron.any_layout`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from asyncmoe import checkpoints
from asyncmoe.config import Config
from asyncmoe.errors import DataError
from asyncmoe.models import family_of
from asyncmoe.models.origin import facts_of
from asyncmoe.platform import collectives, megatron
from asyncmoe.platform.megatron import adam, any_layout, reader, writer
from asyncmoe.platform.megatron.any_layout import AVOID_PREFIX, AskedState
from asyncmoe.platform.megatron.writer import FORMAT
from asyncmoe.trainer.model.gpt import Model

megatron.prepare()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.optimizer import MegatronOptimizer  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

reader.install()
writer.install()


def target(config: Config, step: int) -> tuple[str, Path, str]:
    """Return the arguments of `storage.writing` for a save: what is written, where, and where the run resumes if it fails."""
    newest = checkpoints.newest(config.run.dir)
    then = f"the run resumes from {newest.name}" if newest else "the run starts from step 0"
    return f"checkpoint of step {step}", checkpoints.temporary(config.run.dir, step), then


def facts_now(config: Config, step: int, model: Model) -> dict[str, Any]:
    """Return the facts about the run that are stored with the checkpoint of `step`."""
    return {
        "step": step,
        "family": family_of(model.hf).name,
        **config.checkpoint_kind,
        "distributed_optimizer": distributed(model),
        **facts_of(config, model.hf),
        "dtype": str(model.dtype).removeprefix("torch."),
        "time": time.time(),
    }


def load(checkpoint: Path, config: Config, model: Model, optimizer: MegatronOptimizer | None) -> int:
    """Restore the model and, if given, the optimizer; return the step. Collective over all ranks.

    Raises:
        ConfigError: the checkpoint is of a different model family, or of a different kind of training.
        DataError: it lacks a part of the optimizer's state, its trained parameters differ from the configuration's, or a file cannot be
            read or holds anything but tensors and plain values.
    """
    facts, kind = checkpoints.facts(checkpoint), {} if optimizer is None else config.checkpoint_kind
    for fault in checkpoints.kind_faults(checkpoint, {"family": family_of(model.hf).name, **kind}):
        raise fault
    state, asked = read(checkpoint, sharded_state(model, optimizer, loading=True), optimizer)
    for chunk, name in zip(model.chunks, _chunk_names(model), strict=True):
        trained(chunk).load_state_dict(state[name])
    if optimizer is not None:
        without_masters = asked is not None and not asked.masters
        if without_masters:
            any_layout.take_weights(state["optimizer"], any_layout.optimizers(optimizer))
        optimizer.load_state_dict(state["optimizer"])
        if without_masters:
            optimizer.reload_model_params()
        adam.fuse(optimizer)
    return int(facts["step"])


def read(checkpoint: Path, state: dict[str, Any], optimizer: MegatronOptimizer | None) -> tuple[dict[str, Any], AskedState | None]:
    """Return the checkpoint's values of `state`, and which parts of the optimizer state the checkpoint has.

    Raises:
        DataError: `reader` refuses a file, or the optimizer's state is incomplete.
    """
    common, asked = None, None
    try:
        # Check the metadata before Megatron reads them: of an error in Megatron's read, torch 2.13 keeps only the text
        # (checkpoint/state_dict_loader.py).
        saved = reader.metadata(checkpoint / reader.METADATA_FILE)
        if optimizer is not None:
            asked = any_layout.take_names_of(state["optimizer"], saved.state_dict_metadata)
            common = any_layout.common_strategy(state["optimizer"], any_layout.optimizers(optimizer))
            if lacking := next(filter(None, collectives.everyones(asked.lacking)), ""):
                raise any_layout.Missing(lacking)
        # Load with FORMAT whatever the checkpoint's metadata.json says: it is the only format whose files `reader` checks.
        found = dist_checkpointing.load(state, str(checkpoint), sharded_strategy=FORMAT, common_strategy=common)
        return dict(found), asked
    except any_layout.Missing as missing:
        expected = "the optimizer's state of the model that the run trains"
        raise DataError(str(checkpoint), got=f"no {missing}", expected=expected, hint="choose another run.dir") from missing
    except reader.Unreadable as error:
        raise _unreadable(checkpoint, error) from error
    except CheckpointException as error:  # raised on all ranks if one rank failed between collectives
        refused = next((cause for cause, _ in error.failures.values() if isinstance(cause, reader.Unreadable)), None)
        if refused is None:
            raise
        raise _unreadable(checkpoint, refused) from None


def _unreadable(checkpoint: Path, found: reader.Unreadable) -> DataError:
    hint = "it is damaged, or another program has written it; remove it to resume from the previous checkpoint"
    return DataError(str(checkpoint), got=str(found), expected="a checkpoint that asyncmoe has written", hint=hint)


def sharded_state(model: Model, optimizer: MegatronOptimizer | None, loading: bool) -> dict[str, Any]:
    """Return Megatron's description of everything to save or load, tensors included. Collective over all ranks."""
    metadata: dict[str, Any] = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), **AVOID_PREFIX}
    if distributed(model):
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
    chunks = [trained(chunk) for chunk in model.chunks]
    names = _chunk_names(model)
    state: dict[str, Any] = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return state


def trained(chunk: Any) -> Any:
    """Return the saved part of a chunk: its adapters, because the rest never changes; without adapters, the whole chunk."""
    return getattr(chunk, "adapters", chunk)


def _chunk_names(model: Model) -> list[str]:
    """Return each chunk's key in the state. Saved names of tensors number the whole model's layers, however the model is split."""
    return [f"model{chunk}" for chunk in range(len(model.chunks))] if len(model.chunks) > 1 else ["model"]


def distributed(model: Model) -> bool:
    """Return True if the optimizer state is sharded over data-parallel ranks."""
    return bool(model.ddp[0].ddp_config.use_distributed_optimizer)
