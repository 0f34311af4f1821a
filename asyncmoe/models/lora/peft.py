"""PEFT's form of an adapter: adapter_config.json and adapter_model.safetensors.

Source: PEFT 0.21.2 on transformers 5.19. There are two forms for experts.

- *Named*: a pair for every expert's linear layer, `...mlp.experts.3.gate_proj.lora_A.weight`. PEFT wrote this form while transformers 4
  had a module for every expert, and still reads it (`peft.utils.transformers_weight_conversion`: all three layers of an expert, or only
  down_proj). All adapter servers accept it. This module writes it.
- *Stacked*: transformers 5 holds the experts of a layer as two parameters, gate_up_proj [experts, 2 width, hidden] and down_proj
  [experts, hidden, width], and PEFT adapts them with nested `ParamWrapper`s: `mlp.experts.base_layer.lora_A.weight` belongs to
  gate_up_proj and `mlp.experts.lora_A.weight` to down_proj, or to the only adapted parameter. A is [experts * rank, in], and B is
  [out, rank * experts] with the expert index varying fastest. Gate and up share one A.

This module reads both forms. PEFT has no form in which experts share a half.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors import SafetensorError

from asyncmoe.config.lora import ATTENTION, MLP, TARGETS
from asyncmoe.errors import DataError, UserError, together
from asyncmoe.models.lora.adapter import DTYPES, Adapter, Arrays, Kind, Pair, halves, pairs
from asyncmoe.models.shape import Shape
from asyncmoe.storage import share

CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"
_raw: Any = safetensors
"""The functions of safetensors on bytes, which have no type hints."""
_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LAYERS = "base_model.model.model.layers."
_NAME = re.compile(r"(.+)\.lora_([AB])\.weight")
_STACKED = re.compile(rf"{re.escape(_LAYERS)}(\d+)\.mlp\.experts(\.base_layer)?")
_CONVERT = "save it with path_initial_model_for_weight_conversion of PEFT's save_pretrained, as an adapter of the unchanged weights"
_UNDERSTOOD = frozenset({
    "peft_type", "r", "lora_alpha", "base_model_name_or_path", "init_lora_weights", "target_parameters",
    "auto_mapping", "peft_version", "task_type", "revision", "inference_mode", "target_modules", "exclude_modules", "layers_pattern",
    "lora_dropout", "megatron_core", "qalora_group_size", "eva_config", "ensure_weight_tying",
})  # fmt: skip
"""Keys that are read; from the second line on, keys without effect here: notes, training settings, and modules, which the tensors imply.
Any other key, if set, may change the computation."""


@dataclass(frozen=True)
class Files:
    """The contents of PEFT's two files.

    Attributes:
        config: contents of adapter_config.json.
        dtype: dtype of all tensors, from `adapter.DTYPES`.
        tensors: arrays as in `Adapter`, by PEFT's names.
    """

    config: Mapping[str, Any]
    dtype: str
    tensors: Arrays


def check_expressible(m: Shape, kind: Kind) -> None:
    """Refuse a kind of adapter that PEFT cannot represent. It can represent halves that experts share, as one copy per expert.

    Raises:
        UserError: names what PEFT can represent.
    """
    of_experts = set(kind.targets) & set(MLP) if m.experts else set()
    if of_experts not in (set(), {"down_proj"}, set(MLP)):
        # PEFT 0.21.2 refuses gate_proj without up_proj, and without down_proj drops both with only a warning.
        got, expected = ", ".join(kind.targets), f"all of {', '.join(MLP)}, or down_proj alone: PEFT supports no other targets on experts"
        raise UserError("adapter's targets", got=got, expected=expected)


def to_peft(m: Shape, adapter: Adapter, base: str) -> Files:
    """Convert an adapter to the named form.

    Args:
        base: value of base_model_name_or_path.

    Raises:
        UserError: see `check_expressible`.
    """
    kind = adapter.kind
    check_expressible(m, kind)
    tensors = {}
    for pair in pairs(m, kind):
        inner = _inner(m, pair)
        for half, name in (("A", pair.a), ("B", pair.b)):
            tensors[f"{_LAYERS}{pair.layer}.{inner}.lora_{half}.weight"] = adapter.values[name]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": kind.rank,
        "lora_alpha": int(kind.alpha) if kind.alpha == int(kind.alpha) else kind.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({_inner(m, pair).rsplit(".", 1)[-1] for pair in pairs(m, kind)}),
        "inference_mode": True,
        "bias": "none",
    }
    # Name these adapted weights outside the routed experts one by one: in target_modules, PEFT takes their names to mean only the experts'
    # parameters (`_convert_peft_config_moe`).
    if beside := {f"{_inner(m, pair)}.weight" for pair in pairs(m, kind) if m.experts and pair.expert is None and pair.target in MLP}:
        config["target_parameters"] = sorted(beside)
    return Files(config, adapter.dtype, tensors)


def from_peft(m: Shape, files: Files) -> Adapter:
    """Convert either form to an adapter whose experts share no halves.

    Raises:
        UserError: an unsupported feature, a module that cannot have an adapter here, or halves of a wrong shape.
    """
    check_features(files.config)
    values: dict[str, np.ndarray] = {}
    known = {f"{_LAYERS}{pair.layer}.{_inner(m, pair)}": pair for pair in pairs(m, Kind(m.adapters, 1, 1.0))}
    for name, value in files.tensors.items():
        module, half = match.groups() if (match := _NAME.fullmatch(name)) else ("", "")
        if (pair := known.get(module)) is not None:
            values[pair.a if half == "A" else pair.b] = value
        elif (stacked := _STACKED.fullmatch(module)) is not None:
            front, first = f"layers.{stacked[1]}.", stacked[2] is not None
            values |= {front + rest: part for rest, part in _unstacked(m, files.config, first, half.lower(), name, value)}
        else:
            expected = f"one of {', '.join(m.adapters)} of its {m.layers} layers"
            raise UserError(f"{name} in {MODEL}", got="a module that cannot have an adapter in this model", expected=expected)
    targets = tuple(target for target in TARGETS if any(name.split(".")[-2] == target for name in values))
    kind = Kind(targets, files.config["r"], files.config["lora_alpha"])
    _check_halves(m, kind, values)
    return Adapter(kind, files.dtype, {name: np.ascontiguousarray(value) for name, value in values.items()})


def _check_halves(m: Shape, kind: Kind, values: Arrays) -> None:
    """Refuse halves that do not match the model.

    Raises:
        UserError: names the first that is missing, unexpected, or of a wrong shape.
    """
    expected = halves(m, kind)
    for name in [*expected, *(values.keys() - expected.keys())]:
        got, wanted = values[name].shape if name in values else "nothing", expected.get(name, "nothing")
        if got != wanted:
            experts = f", {m.experts} experts of width {m.expert_width}" if m.experts else ""
            hint = f"the model has {m.layers} layers, hidden size {m.hidden}{experts}"
            raise UserError(f"adapter's {name}", got=got, expected=wanted, hint=hint)


def _inner(m: Shape, pair: Pair) -> str:
    """Return the module name of a pair's linear layer, within the decoder layer."""
    if pair.expert is not None:
        experts, *names = m.expert_names
        return f"{experts}.{pair.expert}.{names[MLP.index(pair.target)]}"
    owner = "self_attn" if pair.target in ATTENTION else "mlp.shared_experts" if pair.place == "shared" else "mlp"
    return f"{owner}.{pair.target}"


def start_from(path: Path, m: Shape, kind: Kind, base: str) -> Adapter:
    """Read an adapter from which training starts.

    Args:
        kind: the kind of adapter to train.
        base: path or name of the base model; only the last component is compared.

    Raises:
        DataError: files are missing or damaged.
        UserError: the adapter has a different kind, shape or base model.
    """
    files = read(path)
    named = files.config.get("base_model_name_or_path")
    if named and Path(named).name != Path(base).name:
        hint = f"if they are the same weights, set base_model_name_or_path in {path / CONFIG} to {base}"
        raise UserError(f"base model of the adapter in {path}", got=named, expected=base, hint=hint)
    adapter = from_peft(m, files)
    for key in ("targets", "rank", "alpha"):
        got, wanted = getattr(adapter.kind, key), getattr(kind, key)
        if got != wanted:
            shown = ", ".join(got) if key == "targets" else got
            raise UserError(f"{key} of the adapter in {path}", got=shown, expected=wanted, hint=f"set lora.{key} to {shown}")
    return shared(m, adapter) if kind.experts == "shared_outer" else adapter


def shared(m: Shape, adapter: Adapter) -> Adapter:
    """Convert a `per_expert` adapter to an equivalent one with shared outer halves.

    Raises:
        UserError: experts of one layer differ in a half that they would share.
    """
    kind = replace(adapter.kind, experts="shared_outer")
    found: dict[str, np.ndarray] = {}
    for old, new in zip(pairs(m, adapter.kind), pairs(m, kind), strict=True):
        for name, to in ((old.a, new.a), (old.b, new.b)):
            value = adapter.values[name]
            if not np.array_equal(found.setdefault(to, value), value):
                hint = "set lora.experts to per_expert"
                raise UserError(
                    f"adapter's {name}", got="values of its own", expected=f"the values of the layer's other experts ({to})", hint=hint
                )
    return Adapter(kind, adapter.dtype, found)


def write(path: Path, files: Files) -> None:
    """Write both files into the existing directory `path`."""
    # serialize_file reads the arrays by address, so they must live until it returns.
    held = {name: np.ascontiguousarray(value) for name, value in files.tensors.items()}
    specs = {
        name: _raw.TensorSpec(dtype=files.dtype, shape=value.shape, data_ptr=value.ctypes.data, data_len=value.nbytes)
        for name, value in held.items()
    }
    _raw.serialize_file(specs, path / MODEL, {"format": "pt"})
    (path / CONFIG).write_text(json.dumps(dict(files.config), indent=2) + "\n")
    share(path, CONFIG)


def read(path: Path) -> Files:
    """Read both files of the directory `path`.

    Raises:
        DataError: a file is missing or damaged, or tensors have several dtypes.
    """
    for file in (CONFIG, MODEL):
        if not (path / file).is_file():
            raise DataError(str(path), got=f"no {file}", expected="an adapter that PEFT has saved")
    try:
        config = json.loads((path / CONFIG).read_text())
    except ValueError as error:
        raise DataError(str(path / CONFIG), got=error, expected="valid JSON") from error
    whole = {"r", "lora_alpha"} <= config.keys() if isinstance(config, dict) else False
    if not whole or not isinstance(config["r"], int) or not isinstance(config["lora_alpha"], int | float):
        raise DataError(str(path / CONFIG), got="no numbers r and lora_alpha", expected="the configuration of a LoRA adapter")
    try:
        stored: list[tuple[str, dict[str, Any]]] = _raw.deserialize((path / MODEL).read_bytes())
    except SafetensorError as error:
        raise DataError(str(path / MODEL), got=error, expected="a safetensors file") from error
    dtypes: set[str] = {entry["dtype"] for _, entry in stored}
    known = {short: name for name, short in _STORED.items()}
    if len(dtypes) != 1 or not dtypes <= known.keys():
        got = ", ".join(sorted(dtypes)) or "no tensors"
        raise DataError(str(path / MODEL), got=got, expected=f"tensors of one dtype: {' or '.join(known)}")
    dtype = known[dtypes.pop()]
    return Files(config, dtype, {name: np.frombuffer(e["data"], DTYPES[dtype]).reshape(e["shape"]) for name, e in stored})


def check_features(config: Mapping[str, Any]) -> None:
    """Refuse keys of an adapter's configuration that are not understood.

    Raises:
        UserError: names the keys, one per line.
    """
    faults = [
        UserError(f"{key} in {CONFIG}", got=value, expected="none" if key == "bias" else "false or null")
        for key, value in config.items()
        if value and key not in _UNDERSTOOD and (key, value) != ("bias", "none")
    ]
    if config.get("peft_type") != "LORA":
        faults.append(UserError(f"peft_type in {CONFIG}", got=config.get("peft_type"), expected="LORA"))
    if (init := config.get("init_lora_weights", True)) not in (True, False, "gaussian", "orthogonal"):
        kept = "an initialisation that keeps the base weights"
        faults.append(UserError(f"init_lora_weights in {CONFIG}", got=init, expected=kept, hint=_CONVERT))
    if faults:
        raise together(faults)


def _unstacked(
    m: Shape, config: Mapping[str, Any], first: bool, half: str, name: str, value: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (canonical name within the layer, value) for each half in a tensor of the stacked form.

    Args:
        first: whether the tensor is the inner one (`base_layer`), which belongs to gate_up_proj if both parameters are adapted.
    """
    parameters = {str(target).rsplit(".", 1)[-1] for target in config.get("target_parameters") or ()} - {"weight"}
    unknown = parameters - {"gate_up_proj", "down_proj"}
    if unknown or not parameters:
        got = ", ".join(sorted(unknown)) or "none"
        raise UserError(f"target_parameters in {CONFIG}", got=got, expected="mlp.experts.gate_up_proj, mlp.experts.down_proj or both")
    of_gate_up = first or parameters == {"gate_up_proj"}
    rank: int = config["r"]
    inputs, outputs = (m.hidden, 2 * m.expert_width) if of_gate_up else (m.expert_width, m.hidden)
    expected = (m.experts * rank, inputs) if half == "a" else (outputs, rank * m.experts)
    if value.shape != expected or not m.experts:
        raise UserError(name, got=value.shape, expected=f"shape {expected}, for {m.experts} experts")
    each = value.reshape(m.experts, rank, inputs) if half == "a" else value.reshape(outputs, rank, m.experts).transpose(2, 0, 1)
    parts = {"down_proj": each}
    if of_gate_up:
        gate, up = (each, each) if half == "a" else np.split(each, 2, axis=1)
        parts = {"gate_proj": gate, "up_proj": up}
    for target, stack in parts.items():
        for expert, own in enumerate(stack):
            yield f"experts.{expert}.{target}.{half}", own
