"""What a checkpoint records of model and run, so that a resume that cannot succeed is refused before a process starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncmoe import checkpoints
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.models import origin
from asyncmoe.models.families import family_of

_ELSEWHERE = "or choose another run.dir"


def facts_of(config: Config, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seed, the model's sizes, the trainer's layout and what the run reads again, for a checkpoint's facts."""
    section = config.trainer
    layout = {"ranks": section.ranks, "tp": section.tp, "pp": section.pp, "vpp": section.vpp, "ep": section.ep, "etp": section.expert_tp}
    return {"seed": config.run.seed, "model": sizes_of(hf), "layout": layout, "origin": origin.read(config.run.dir)}


def sizes_of(hf: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a model that decide the shapes of its tensors."""
    shape = family_of(hf).shape_of(hf)
    return {
        "layers": shape.layers,
        "layers without experts": len(shape.dense_layers),
        "hidden size": shape.hidden,
        "attention heads": shape.heads,
        "key-value heads": shape.kv_heads,
        "head size": shape.head_dim,
        "vocabulary": shape.vocab,
        "dense width": shape.dense_width,
        "experts": shape.experts,
        "expert width": shape.expert_width,
        "shared width": shape.shared_width,
        "tied embeddings": int(shape.tied),
    }


def differing(checkpoint: Path, config: Config, hf: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each value by which another run would be resumed, as far as a checkpoint tells: family, kind of training, sizes
    of the model, seed, dtype, and the steps already taken.

    Facts that an older checkpoint lacks are not compared. The layout may change, and the dtype if the optimizer's state is sharded before
    and after.

    Raises:
        DataError: the checkpoint's facts cannot be read.
    """
    saved, name = checkpoints.facts(checkpoint), checkpoint.name
    yield from checkpoints.kind_faults(checkpoint, {"family": family_of(hf).name, **config.checkpoint_kind})
    sizes, here = saved.get("model", {}), sizes_of(hf)
    if others := [what for what, now in here.items() if sizes.get(what, now) != now]:
        got, then = (", ".join(f"{what} {of[what]}" for what in others) for of in (here, sizes))
        hint = f"set model.path to the model that the run began with, {_ELSEWHERE}"
        yield ConfigError("model.path", got=f"a model with {got}", expected=f"{then}, as {name} has", hint=hint)
    if (seed := saved.get("seed", config.run.seed)) != config.run.seed:
        hint = f"with another seed the prompts left would not be those left of the run; set run.seed={seed}, {_ELSEWHERE}"
        yield ConfigError("run.seed", got=config.run.seed, expected=f"{seed}, as {name} was made with", hint=hint)
    dtype = saved.get("dtype", config.trainer.weights_dtype)
    # A sharded optimizer has float32 masters with every dtype; without, there are none with float32, and its weights would be rounded ones.
    sharded = saved.get("distributed_optimizer")
    if config.trainer.weights_dtype not in (dtype, "auto") and (sharded is False or (sharded and not config.trainer.distributed_optimizer)):
        shard = ", or trainer.optimizer.distributed=true, with which the dtype may change" if sharded else ""
        hint = f"set trainer.dtype={dtype}{shard}, {_ELSEWHERE}"
        yield ConfigError("trainer.dtype", got=config.trainer.weights_dtype, expected=f"{dtype}, as {name} was made with", hint=hint)
    if (taken := int(saved["step"]) - config.warmup.steps) > config.run.steps:
        hint = f"the run in {config.run.dir} has them, with {name}; set a higher number to go on, or another run.dir"
        yield ConfigError("run.steps", got=config.run.steps, expected=f"at least {taken}, the steps already taken", hint=hint)
