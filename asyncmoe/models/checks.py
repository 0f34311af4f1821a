"""Checks for unsupported features and for parallel sizes that do not divide the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

from asyncmoe.errors import ConfigError, UserError
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.sglang import VOCAB_MULTIPLE
from asyncmoe.models.shape import HfConfig, Shape, rope
from asyncmoe.models.shards import padded

UNTRAINED = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of config.json that count layers of multi-token prediction."""
_ROTARY = "partial_rotary_factor"

Wanted = tuple[str, object, tuple[object, ...]]
"""(key of config.json, its value, the supported values)."""


def common_features(hf: HfConfig) -> list[Wanted]:
    """Return restrictions common to all families: without them the trained model would differ from the served one."""
    turned = rope(hf)
    return [
        ("length of layer_types", len(hf.get("layer_types") or ()), (0, hf.get("num_hidden_layers"))),
        *((f"{key} beside rope_parameters", hf.get(key), (None, turned.get(key, hf.get(key)))) for key in ("rope_theta", _ROTARY)),
        ("hidden_act", hf.get("hidden_act", "silu"), ("silu",)),
        ("attention_bias", bool(hf.get("attention_bias")), (False,)),
        ("attention_dropout", hf.get("attention_dropout") or 0, (0,)),
        ("use_sliding_window", bool(hf.get("use_sliding_window")), (False,)),
        ("layer_types", sorted({*(hf.get("layer_types") or ())} - {"full_attention"}), ([],)),
        ("rope_parameters.rope_type", turned["rope_type"], ("default",)),
        (_ROTARY, turned.get(_ROTARY, hf.get(_ROTARY)) or 1.0, (1.0,)),
    ]


def unsupported(family: str, wanted: Iterable[Wanted]) -> list[UserError]:
    """Return an error for each unsupported feature.

    Args:
        wanted: the features to check; of several entries for a key, the last applies.
    """
    last = {one[0]: one for one in wanted}.values()
    found = [(f"{key} in config.json", repr(got), " or ".join(map(repr, carried))) for key, got, carried in last if got not in carried]
    why = f"({family} is supported only with that)"
    return [ConfigError(what, got=got, expected=f"{carried} {why}".replace("[]", "none")) for what, got, carried in found]


def several_experts(hf: HfConfig) -> Wanted:
    """Return the restriction for routers that divide the chosen experts' weights by their sum. A single expert's weight would always be 1:
    the router would not learn, and Megatron builds no such router."""
    several = hf.get("num_experts_per_tok") != 1
    return ("num_experts_per_tok with routing weights divided by their sum", "several" if several else 1, ("several",))


def check_shape(m: Shape) -> None:
    """Refuse contradictory sizes.

    Raises:
        ConfigError: names the first fault.
    """
    m.attention.check(m)
    if m.experts_per_token > m.experts:
        raise ConfigError("num_experts_per_tok in config.json", got=m.experts_per_token, expected=f"at most num_experts = {m.experts}")


def untrained_layers(hf: HfConfig) -> list[UserError]:
    """Return an error if a model has multi-token prediction layers, which would stay untrained."""
    if not (extra := next(filter(None, map(hf.get, UNTRAINED)), 0)):
        return []
    expected = "0, as multi-token prediction layers are neither trained nor sent to engines"
    hint = "with 0, the model is trained, served and exported without them"
    return [ConfigError("num_nextn_predict_layers in config.json", got=extra, expected=expected, hint=hint)]


def check_trainer(family: str, m: Shape, parallel: MegatronParallel) -> None:
    """Refuse sizes of Megatron's process grid that do not divide the model.

    Raises:
        ConfigError: names the first unsuitable size and the possible ones.
    """
    _check_stages(m, parallel)
    check_divides("trainer.tp", parallel.tp, "num_attention_heads", m.heads)
    check_divides("trainer.tp", parallel.tp, "num_key_value_heads", m.kv_heads)
    check_divides("trainer.tp", parallel.tp, "vocab_size", m.vocab)
    _check_layers("trainer", family, m, parallel.tp, parallel.ep)
    check_divides("trainer.etp", parallel.etp, "moe_intermediate_size", m.expert_width)


def check_engine(family: str, m: Shape, parallel: EngineParallel, dp_attention: bool = False) -> None:
    """Refuse sizes of an engine that do not divide the model.

    Args:
        dp_attention: as `EngineClass.dp_attention`.

    Raises:
        ConfigError: names the first unsuitable size and the possible ones.
    """
    if parallel.attn_dp > 1 and (m.tied or not dp_attention):
        why = "tie_word_embeddings is true" if dp_attention else f"SGLang's class for {family} lacks data-parallel attention"
        raise ConfigError("engines.dp_attention", got=parallel.attn_dp, expected=f"1, as {why}", hint="leave it out")
    key, ranks = "engines.tp" if parallel.attn_dp == 1 else "engines.tp / engines.dp_attention", parallel.attn_tp
    check_divides(key, ranks, "num_attention_heads", m.heads)
    if ranks % m.kv_heads and m.kv_heads % ranks:
        raise ConfigError(key, got=ranks, expected=f"a divisor or a multiple of the model's num_key_value_heads = {m.kv_heads}")
    check_divides("engines.tp", parallel.tp, "padded vocab_size", padded(m.vocab, VOCAB_MULTIPLE))
    _check_layers("engines", family, m, parallel.tp, parallel.ep)
    check_divides("engines.tp / engines.ep", parallel.moe_tp, "moe_intermediate_size", m.expert_width)


def _check_layers(side: str, family: str, m: Shape, tp: int, ep: int) -> None:
    """Refuse sizes of a trainer or an engine that do not divide the layers with experts, or the layers without."""
    if not m.experts and ep > 1:
        raise ConfigError(f"{side}.ep", got=ep, expected=f"1, as {family} has no experts")
    check_divides(f"{side}.ep", ep, "num_experts", m.experts)
    check_divides(f"{side}.tp", tp, "moe_intermediate_size * n_shared_experts", m.shared_width)
    if m.dense_layers:
        check_divides(f"{side}.tp", tp, "intermediate_size", m.dense_width)


def check_divides(key: str, size: int, name: str, total: int) -> None:
    """Refuse a parallel size that does not divide a size of the model.

    Raises:
        ConfigError: names the possible sizes.
    """
    if total % size:
        raise ConfigError(key, got=size, expected=f"a divisor of the model's {name} = {total}", hint=_possible(divisors(total)))


def _check_stages(m: Shape, parallel: MegatronParallel) -> None:
    """Refuse pipeline stages that cannot hold all layers equally, and model chunks that do not divide a stage."""
    counts = parallel.stage_layers(m.layers)
    if counts is None:
        first, last, pp = parallel.first_layers, parallel.last_layers, parallel.pp
        if first is None and last is None:
            check_divides("trainer.pp", pp, "num_hidden_layers", m.layers)
        key, got = ("first_stage_layers", first) if first is not None else ("last_stage_layers", last)
        others = [replace(parallel, first_layers=n) if first is not None else replace(parallel, last_layers=n) for n in range(1, m.layers)]
        fit = [n for n, other in enumerate(others, 1) if other.stage_layers(m.layers)]
        expected = f"a count that lets the other stages of trainer.pp = {pp} share the rest of num_hidden_layers = {m.layers} equally"
        raise ConfigError(f"trainer.{key}", got=got, expected=expected, hint=_possible(fit))
    if any(count % parallel.vpp for count in counts):
        sizes = ", ".join(map(str, sorted(set(counts))))
        expected = f"a divisor of each pipeline stage's number of layers ({sizes})"
        raise ConfigError("trainer.vpp", got=parallel.vpp, expected=expected, hint=_possible(divisors(gcd(*counts))))


def divisors(total: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    return [d for d in range(1, total + 1) if total % d == 0]


def _possible(values: list[int]) -> str | None:
    """Return the values as a hint; None if there are none or too many to read."""
    listed = ", ".join(map(str, values))
    return f"possible: {listed}" if 0 < len(listed) <= 100 else None
