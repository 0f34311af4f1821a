"""Records a run's origin, so that a resume under other conditions is refused before a process starts: the facts about model and training in
a checkpoint, the files that every start reads again, and the settings that the counts of steps and prompts depend on.

`RUN/origin.json` and every checkpoint have a text for each of these: a value of the configuration, or size and digest of files. Files of
more than `_WHOLE_BYTES` are not read whole: their sizes and evenly spaced samples are enough to detect other weights or rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from asyncmoe import checkpoints
from asyncmoe.config import Config
from asyncmoe.config.evaluation import EvaluationSection
from asyncmoe.config.fields import Section, said
from asyncmoe.config.task import READ, TaskSection
from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.models.families import family_of
from asyncmoe.models.hf_folder import texts
from asyncmoe.models.hub import is_id

FILE = "origin.json"
_WEIGHTS = "model.path weights"
_OF_SET = {"kind", "options", "prompts", "subset", "split", "where", "filter", "columns"}
_ASKED: dict[str, Any] = {"prompts": True, "sets": {"__all__": _OF_SET}}
"""Keys that determine the evaluation's questions, which are also held out from training; files are compared by content."""
_OF_WARMUP = {"warmup.batch", "warmup.wrong_share"}
"""Keys that matter only with a warm-up, and are recorded only then."""
_WHOLE_BYTES = 64 << 20
_SAMPLES, _SAMPLE_BYTES = 4096, 4096
_ELSEWHERE = "or choose another run.dir"


def origin_of(config: Config) -> dict[str, str]:
    """Return the texts by key. Keys of `task` and `evaluation` that have their default values have no text.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    model, evaluation = config.model.path, config.evaluation
    warmup = config.warmup
    found: dict[str, Any] = {"warmup.steps": warmup.steps, "rollout.groups_per_step": config.rollout.groups_per_step}
    if warmup.steps:
        found |= {"warmup.batch": warmup.batch, "warmup.wrong_share": warmup.wrong_share}
    dumped = config.task.model_dump(mode="json", exclude_defaults=True, exclude={"path": True, "sources": {"__all__": {"path"}}})
    found |= {f"task.{key}": value for key, value in dumped.items()}
    if evaluation.every and (config.task.kind != "arithmetic" or evaluation.path or evaluation.sets):
        dumped = evaluation.model_dump(mode="json", exclude_defaults=True, include=_ASKED)
        found |= {f"evaluation.{key}": value for key, value in dumped.items()} | {"evaluation.every": "above 0"}
    files = {f"model.path {path.relative_to(model)}": [path] for path in texts(model)}
    files[_WEIGHTS] = sorted(model.glob("*.safetensors"))
    for key, path in _named(config):
        if path.exists() or path.suffix == ".jsonl" or not is_id(path):
            files[key] = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        else:
            found[key] = path
    found |= {key: _digest(key, paths) for key, paths in files.items()}
    return {key: str(value) for key, value in found.items()}


def facts_of(config: Config, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seed, the model's sizes, the trainer's layout and the run's origin, for a checkpoint's facts."""
    section = config.trainer
    layout = {"ranks": section.ranks, "tp": section.tp, "pp": section.pp, "vpp": section.vpp, "ep": section.ep, "etp": section.expert_tp}
    return {"seed": config.run.seed, "model": _sizes_of(hf), "layout": layout, "origin": read(config.run.dir)}


def differing(config: Config, hf: Mapping[str, Any], newest: Path | None) -> Iterator[UserError]:
    """For each difference that keeps a run from resuming, yield an error that names the key.

    Args:
        newest: the checkpoint to resume from; None: the run has groups in its log, but no checkpoint yet.

    Raises:
        DataError: the checkpoint's facts cannot be read.
    """
    if newest is not None:
        yield from differing_kind(config, hf, newest)
    if config.model.path.exists():  # a model that is yet to be made will be made as before
        try:
            yield from differing_reads(config, newest)
        except DataError as error:
            yield error


def differing_kind(config: Config, hf: Mapping[str, Any], checkpoint: Path) -> Iterator[ConfigError]:
    """Yield an error for each fact which shows that a checkpoint belongs to a different run: family, kind of training, sizes of the model,
    seed, dtype, and the steps already taken.

    Facts that an older checkpoint lacks are not compared. The layout may change, and so may the dtype if the optimizer's state is sharded
    before and after.

    Raises:
        DataError: the checkpoint's facts cannot be read.
    """
    saved, name = checkpoints.facts(checkpoint), checkpoint.name
    yield from checkpoints.kind_faults(checkpoint, {"family": family_of(hf).name, **config.checkpoint_kind})
    sizes, here = saved.get("model", {}), _sizes_of(hf)
    if others := [what for what, now in here.items() if sizes.get(what, now) != now]:
        got, then = (", ".join(f"{what} {of[what]}" for what in others) for of in (here, sizes))
        hint = f"set model.path to the model that the run began with, {_ELSEWHERE}"
        yield ConfigError("model.path", got=f"a model with {got}", expected=f"{then}, as {name} has", hint=hint)
    if (seed := saved.get("seed", config.run.seed)) != config.run.seed:
        hint = f"another seed would change which prompts are left; set run.seed={seed}, {_ELSEWHERE}"
        yield ConfigError("run.seed", got=config.run.seed, expected=f"{seed}, with which {name} was made", hint=hint)
    dtype = saved.get("dtype", config.trainer.weights_dtype)
    # A sharded optimizer has float32 masters for every dtype. An unsharded one has none for float32, so its weights would be rounded.
    sharded = saved.get("distributed_optimizer")
    if config.trainer.weights_dtype not in (dtype, "auto") and (sharded is False or (sharded and not config.trainer.distributed_optimizer)):
        shard = ", or trainer.optimizer.distributed=true, with which the dtype may change" if sharded else ""
        hint = f"set trainer.dtype={dtype}{shard}, {_ELSEWHERE}"
        yield ConfigError("trainer.dtype", got=config.trainer.weights_dtype, expected=f"{dtype}, with which {name} was made", hint=hint)
    if (taken := int(saved["step"]) - config.warmup.steps) > config.run.steps:
        hint = f"{config.run.dir} has these steps in {name}; raise run.steps to go on, or choose another run.dir"
        yield ConfigError("run.steps", got=config.run.steps, expected=f"at least {taken}, the steps already taken", hint=hint)


def differing_reads(config: Config, newest: Path | None) -> Iterator[ConfigError]:
    """For each change in the run's origin, yield an error that names the key. Texts that an older asyncmoe did not record are not compared.

    Args:
        newest: the checkpoint to resume from; None: the run has groups in its log, but no checkpoint yet.

    Raises:
        DataError: see `origin_of`.
    """
    facts: dict[str, Any] = {"step": 0, "origin": read(config.run.dir)} if newest is None else checkpoints.facts(newest)
    since, step, then, now = newest.name if newest else "the run", facts["step"], facts.get("origin", {}), origin_of(config)
    if config.adapter is None and not config.objective.kl.coefficient:
        now[_WEIGHTS] = then.get(_WEIGHTS, "")  # all weights are in the checkpoint
    for key in sorted((then.keys() | now.keys()) - (_OF_WARMUP - (then.keys() & now.keys()))) if then else ():
        told, got = (one.get(key) or _default(key) for one in (then, now))
        questions = key.startswith(("task.", "evaluation."))
        if told != got and not (questions and config.run.new_data_at == step):
            on = f"set run.new_data_at={step} to continue with other questions, in a newly drawn order"
            hint = f"set it back, or {on if questions else 'choose another run.dir'}"
            yield ConfigError(key, got=f"{got:.200}", expected=f"{told:.200}, as {since} has it", hint=hint)


def check_weights(config: Config, checkpoint: Path) -> None:
    """Refuse to merge a checkpoint's adapter into weights it was not trained on. Raises ConfigError, DataError."""
    told = checkpoints.facts(checkpoint).get("origin", {}).get(_WEIGHTS)
    found = _digest(_WEIGHTS, sorted(config.model.path.glob("*.safetensors")))
    if told not in (None, found):
        hint = "the adapter was trained on the expected weights"
        raise ConfigError(_WEIGHTS, got=found, expected=f"{told}, as {checkpoint.name} has it", hint=hint)


def read(run_dir: Path) -> dict[str, str]:
    """Return the origin recorded by the newest start of a run; {} if an older version started it."""
    file = run_dir / FILE
    return cast(dict[str, str], json.loads(file.read_text())) if file.exists() else {}


def _sizes_of(hf: Mapping[str, Any]) -> dict[str, int]:
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


def _default(key: str) -> str:
    """Describe the value of a key that has no text."""
    section, _, name = key.partition(".")
    kinds: dict[str, type[Section]] = {"task": TaskSection, "evaluation": EvaluationSection}
    field = kinds.get(section, Section).model_fields.get(name)
    return "nothing" if field is None else f"{said(field.get_default())} (the default)"


def _named(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield key and path, or hub id, of the adapter and of all data sets that are read."""
    if config.lora.start is not None:
        yield "lora.start", config.lora.start
    sets = config.evaluation.every_set if config.evaluation.every else {}
    own = {f"evaluation.sets.{name}" if name else "evaluation": one.task(config.task) for name, one in sets.items() if not one.held_out}
    for section, task in {"task": config.task, **own}.items():
        for index, source in enumerate(task.mixture if task.kind in READ else ()):
            yield f"{section}.sources.{index}.path" if task.sources else f"{section}.path", cast(Path, source.path)


def _digest(key: str, files: Sequence[Path]) -> str:
    """Describe files by total size and digest."""
    found = hashlib.sha256()
    try:
        sizes = [file.stat().st_size for file in files]
        for path, size in zip(files, sizes, strict=True):
            found.update(f"{size} ".encode())
            apart = size * len(files) // _SAMPLES if sum(sizes) > _WHOLE_BYTES else 0
            with path.open("rb") as file:
                for place in range(0, size, max(apart, _SAMPLE_BYTES)):
                    file.seek(place)
                    found.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise DataError(key, got=f"{error.filename}: {error.strerror}", expected="a readable file") from error
    return f"{sum(sizes)} bytes with digest {found.hexdigest()[:12]}"
