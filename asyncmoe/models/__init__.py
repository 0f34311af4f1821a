"""Model families: map a Hugging Face configuration to Megatron's configuration and the three weight layouts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncmoe.config import Config, sglang_arguments
from asyncmoe.config.engines import EngineSection
from asyncmoe.errors import ConfigError, DataError, LayoutError, UserError, together
from asyncmoe.models import checks, headers, hf_folder
from asyncmoe.models.config_keys import FAMILY, misfits
from asyncmoe.models.families import FAMILIES, family_of, shape_of, try_family, with_family
from asyncmoe.models.family import Family
from asyncmoe.models.hub import is_id
from asyncmoe.models.lora import halves
from asyncmoe.models.lora.adapter import Kind, kind_of
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.payload import Payload
from asyncmoe.models.quantised import float8_of
from asyncmoe.models.shape import Shape
from asyncmoe.trajectory import Recording, Routing

__all__ = [
    "FAMILIES",
    "EngineParallel",
    "Family",
    "MegatronParallel",
    "adapter_of",
    "check",
    "engine_dtype",
    "engine_parallel",
    "family_of",
    "hf_config_of",
    "kept_routing",
    "load_hf_config",
    "recording",
    "shape_of",
    "trainer_parallel",
    "with_family",
]


def load_hf_config(path: Path) -> dict[str, Any]:
    """Read `config.json` of a model directory, or the file itself, and fill in absent keys (`Family.completed`).

    Raises:
        DataError: there is no such directory or file, or the file is not a JSON object.
    """
    file = path if path.is_file() else path / "config.json"
    if not file.is_file():
        found = "no config.json" if path.is_dir() else "no such directory"
        fetch = f"put one there: hf download ORG/NAME --local-dir {path}; or give ORG/NAME as model.path"
        hint = "asyncmoe run downloads a model of this id from the hub" if is_id(path) else fetch
        raise DataError(str(path), got=found, expected="a Hugging Face model directory", hint=hint)
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        broken = DataError(str(file), got=str(error), expected="valid JSON")
        raise next(iter(hf_folder.pointers(file.parent)), broken) from error
    if not isinstance(values, dict):
        raise DataError(str(file), got=type(values).__name__, expected="a JSON object")
    if FAMILY in values:
        raise DataError(str(file), got=f"the key {FAMILY}", expected="no such key: only model.family names a family's code")
    family = FAMILIES.get(str(values.get("model_type")))
    return values if family is None else family.completed(values)


def hf_config_of(config: Config) -> dict[str, Any]:
    """Read the configuration of a run's model, with its family (`model.family`). Raises as `load_hf_config`."""
    return with_family(load_hf_config(config.model.path), config.model.family)


def check(config: Config, hf: Mapping[str, Any], *, weights: Path | None = None) -> None:
    """Refuse a model that cannot be trained, and impossible combinations of model and parallel sizes, before a run starts.

    Args:
        weights: the model's directory, to compare its files with `hf` (`headers.faults`).

    Raises:
        UserError: unsupported model family, or faults of the model, one per line.
        ConfigError: an impossible combination; names the key and the possible values.
    """
    family = family_of(hf)
    try_family(hf)
    faults = [*family.faults({**hf, "architectures": hf.get("architectures") or (weights and "none")}), *checks.untrained_layers(hf)]
    ends = config.model.path / "generation_config.json"
    try:
        if not misfits(hf):  # values of wrong kinds allow no further checks
            faults += misfits({**hf, "eos_token_id": load_hf_config(ends).get("eos_token_id")}, ends.name) if ends.is_file() else []
            faults += headers.faults(weights, hf) if weights is not None else []
    except UserError as error:
        faults += [error] if str(error) not in map(str, faults) else []
    if faults:
        raise together(faults)
    _check_lengths(config, hf)
    if (ids := config.objective.score_centering) > hf["vocab_size"]:  # a request for more would end the engine
        raise ConfigError("objective.score_centering", got=ids, expected=f"at most {hf['vocab_size']}, the size of the vocabulary")
    family.check(hf, trainer_parallel(config), engine_parallel(config))
    _check_quantised(config, hf)
    if (kind := adapter_of(config, hf)) is not None:
        halves.check(kind, family.shape_of(hf))
    _check_router_bias(config, family.shape_of(hf))
    kept_routing(config, hf)


def _check_lengths(config: Config, hf: Mapping[str, Any]) -> None:
    """Refuse responses that may be longer than the context of the model or of the engines."""
    limits = (hf.get("max_position_embeddings"), sglang_arguments.number(config.engines.args, "--context-length"), sys.maxsize)
    most = min(one for one in limits if one is not None)
    expected = f"at most {most}, the context (max_position_embeddings of the model, --context-length of engines.args)"
    lengths = {"rollout": config.rollout.max_new_tokens, "evaluation": config.evaluation.max_new_tokens}
    lengths |= {f"evaluation.sets.{name}": one.max_new_tokens for name, one in config.evaluation.sets.items()}
    for section, got in lengths.items():
        if got is not None and got > most:
            raise ConfigError(f"{section}.max_new_tokens", got=got, expected=expected)


def adapter_of(config: Config, hf: Mapping[str, Any]) -> Kind | None:
    """Return the kind of adapter that a run trains instead of the weights; None if it trains the weights.

    Raises:
        ConfigError: a key of the model's configuration is missing.
        UserError: unsupported model family.
    """
    return None if config.adapter is None else kind_of(config.adapter, shape_of(hf))


def _check_quantised(config: Config, hf: Mapping[str, Any]) -> None:
    if float8_of(hf) is None:
        if config.engines.quantises and config.adapter is None and config.sync.method == "reshard":
            expected = "broadcast because engines.args quantise the weights; change either key"
            raise ConfigError("sync.method", got="reshard", expected=expected)
        return
    if config.adapter is not None:
        hint = "use the model's bfloat16 checkpoint"
        raise ConfigError("train", got="lora", expected="full because the model's checkpoint is in float8", hint=hint)
    if config.sync.method == "disk":
        raise ConfigError("sync.method", got="disk", expected="reshard or broadcast because the model's checkpoint is in float8")
    payload, engines = Payload(hf), engine_parallel(config)
    what = "trainer"
    try:
        payload.trainer(trainer_parallel(config), "bfloat16")
        what = "engines"
        payload.engines(engines, "bfloat16")
    except LayoutError as error:
        hint = f"lower tp of the {what}, or use the model's bfloat16 checkpoint"
        raise ConfigError("shards of float8", got=str(error), expected="whole blocks in every rank", hint=hint) from error


def _check_router_bias(config: Config, m: Shape) -> None:
    why = "train is lora, and engines get only adapters" if config.adapter is not None else None
    why = "the model's routers have no selection bias" if not m.router_bias else why
    if config.trainer.router_bias_rate and why:
        raise ConfigError("trainer.router_bias_rate", got=config.trainer.router_bias_rate, expected=f"0 because {why}", hint="leave it out")


def trainer_parallel(config: Config) -> MegatronParallel:
    """Return the trainer's parallel sizes, with the parameter names of Megatron's own layers."""
    trainer = config.trainer
    return MegatronParallel(
        tp=trainer.tp,
        pp=trainer.pp,
        ep=trainer.ep,
        etp=trainer.expert_tp,
        dp=trainer.dp * trainer.cp,
        vpp=trainer.vpp,
        first_layers=trainer.first_stage_layers,
        last_layers=trainer.last_stage_layers,
    )


def engine_parallel(config: Config) -> EngineParallel:
    """Return the parallel sizes of an engine."""
    return EngineParallel(config.engines.tp, config.engines.ep, config.engines.dp_attention)


def kept_routing(config: Config, hf: Mapping[str, Any]) -> Routing | None:
    """Return the routing that engines record for every token and the trainer replays; None if routing is not kept (`keep.routing`).

    Raises:
        ConfigError: routing must be kept for a model without experts, or with an interruption that loses it.
    """
    routing = family_of(hf).routing(hf)
    if routing is None and config.keep.routing == "on":
        raise ConfigError("keep.routing", got="on", expected="off or auto because the model has no experts")
    if routing is not None and config.keep.routing != "off" and config.rollout.interruption == "retract":
        expected = "another value because routing is kept (SGLang would report the new weights' routes for tokens of the old weights)"
        hint = "set rollout.interruption to in_place, or keep.routing to off"
        raise ConfigError("rollout.interruption", got="retract", expected=expected, hint=hint)
    return None if config.keep.routing == "off" else routing


def recording(config: Config, hf: Mapping[str, Any]) -> Recording:
    """Return the data that engines record for every sampled token, and what else its trajectory holds.

    Raises: see `kept_routing`.
    """
    objective = config.objective
    return Recording(
        kept_routing(config, hf),
        config.keeps_sampling_mask,
        hf["vocab_size"],
        rewards=objective.process.weight > 0,
        teacher=objective.distill.weight > 0,
        top=objective.score_centering,
    )


def engine_dtype(hf: Mapping[str, Any], engines: EngineSection) -> str:
    """Return the dtype of an engine's weights: the configured one, or the checkpoint's."""
    if engines.dtype != "auto":
        return engines.dtype
    return str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16")
