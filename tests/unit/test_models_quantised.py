"""Float8 checkpoints: the supported ones, and the messages for refused ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_models_check import config, refused

from asyncmoe import models
from asyncmoe.errors import DataError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.hf_checkpoint import HFCheckpoint
from asyncmoe.models.payload import Payload
from asyncmoe.models.quantised import Float8, float8_of, quantised, without
from asyncmoe.reshard import buckets, plan
from asyncmoe.weights.sender.sources import WeightSources, empty
from tests import families, float8

LARGE = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip
LEFT_OUT = ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]
QWEN = {**families.sized(LARGE, "qwen3_moe"), "head_dim": 128, "quantization_config": float8.CONFIG}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (float8.CONFIG, Float8(power_of_two=False)),
        ({**float8.CONFIG, "scale_fmt": "ue8m0"}, Float8(power_of_two=True)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Float8(power_of_two=False)),
        ({**float8.CONFIG, "modules_to_not_convert": LEFT_OUT}, Float8(False)),
    ],
)
def test_how_published_checkpoints_are_quantised(given: dict[str, Any] | None, expected: Float8 | None) -> None:
    assert float8_of({"quantization_config": given} if given else {}) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "awq"}, ["quantization_config.quant_method", "got 'awq'", "expected 'fp8'"]),
        ({"weight_block_size": None}, ["quantization_config.weight_block_size", "got None", "expected [128, 128]"]),
        ({"weight_block_size": [1, 128]}, ["weight_block_size", "got [1, 128]"]),
        ({"fmt": "e5m2"}, ["quantization_config.fmt", "'e5m2'"]),
        ({"activation_scheme": "static"}, ["activation_scheme", "'static'", "'dynamic'"]),
        ({"ignored_layers": ["model.layers.0.mlp.down_proj"]}, ["model.layers.0.mlp.down_proj unquantised"]),
    ],
)
def test_other_ways_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    models.check(config(), QWEN)
    refused(lambda: models.check(config(), {**QWEN, "quantization_config": {**float8.CONFIG, **changes}}), words)


def test_engines_that_quantise_what_they_load_get_whole_weights() -> None:
    loads = {"args": ["--quantization", "fp8"]}
    models.check(config({}, loads), QWEN)
    plain = {key: value for key, value in QWEN.items() if key != "quantization_config"}
    refused(lambda: models.check(config({}, loads), plain), ["sync.method", "expected broadcast"])


def test_sizes_that_cut_blocks_are_refused() -> None:
    models.check(config({"ranks": 2, "tp": 2}, {"tp": 2}), QWEN)
    words = ["shards of float8", "blocks of 128 x 128", "lower tp of the"]
    refused(lambda: models.check(config({"ranks": 4, "tp": 4, "etp": 4}, {}), {**QWEN, "num_key_value_heads": 4}), ["trainer", *words])
    refused(lambda: models.check(config({}, {"tp": 4}), QWEN), ["engines", *words])


def test_half_as_many_bytes_go_to_engines() -> None:
    """All except embeddings, the output layer, routers and norms."""

    def bytes_of(hf: dict[str, Any]) -> int:
        payload = Payload(hf)
        engines = payload.engines(EngineParallel(2), "bfloat16", first=1)
        return plan(payload.tensors(), payload.trainer(MegatronParallel(), "bfloat16"), engines).wire_bytes

    shapes = family_of(QWEN).tensors(QWEN)
    large = sum(shape[0] * shape[1] for name, shape in shapes.items() if quantised(name))
    assert bytes_of(without(QWEN)) - bytes_of(QWEN) == large - 4 * large // 128**2


@pytest.mark.parametrize("more", [{}, {"quantization_config": float8.CONFIG}])
def test_tensors_that_an_engine_takes_only_together_are_in_one_bucket(more: dict[str, Any]) -> None:
    """SGLang's loader puts q_a_proj and kv_a_proj_with_mqa into one parameter, and forgets half of it, or of its scales, when a call has
    only one of them."""
    sizes = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    payload = Payload({**families.sized(LARGE, "deepseek"), **sizes, **more})
    made = {bucket.names for bucket in buckets(payload.whole("bfloat16"), 1, payload.glued())}
    for end in ("weight", "weight_scale_inv") if more else ("weight",):
        pairs = {tuple(f"model.layers.{i}.self_attn.{name}.{end}" for name in ("q_a_proj", "kv_a_proj_with_mqa")) for i in range(2)}
        assert pairs <= made


def test_a_trainer_reads_what_the_numbers_stand_for(tmp_path: Any) -> None:
    weight = torch.randn(200, 300)
    made, scales = float8.quantise(weight)
    save_file({"w": made, "w_scale_inv": scales, "lonely": made.clone()}, tmp_path / "model.safetensors")
    checkpoint = HFCheckpoint(tmp_path)
    expected = float8.dequantised_weights({"w": made, "w_scale_inv": scales})["w"]
    torch.testing.assert_close(checkpoint.read("w", (200, 300), torch.float32), expected, rtol=0, atol=0)
    assert checkpoint.read("w", (200, 300), torch.bfloat16).equal(expected.bfloat16())
    with pytest.raises(DataError, match="lonely_scale_inv: got nothing"):
        checkpoint.read("lonely", (200, 300), torch.float32)


def test_scales_are_of_the_weights_where_they_are_now() -> None:
    """A trainer's weights have other addresses each time they come back to its device."""
    layout = Payload(QWEN).weights_of_trainer(MegatronParallel(), 0, "bfloat16")
    made = empty({name: one for name, one in layout.storages.items() if not name.endswith("_scale_inv")}, torch.device("cpu"))
    mesh = SimpleNamespace(rank=0, device=torch.device("cpu"))
    model: Any = SimpleNamespace(hf=QWEN, dtype=torch.bfloat16, parallel=MegatronParallel(), mesh=mesh, weights=lambda: made)
    sources = WeightSources(model, moves=True)
    for seed in range(2):
        elsewhere = [tensor.clone() for tensor in made.values()]  # so that no address is free to be taken again
        for tensor in made.values():
            tensor.untyped_storage().resize_(0)
            tensor.untyped_storage().resize_(2 * tensor.numel())
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
        sources.refresh()
        scales = {name for name in sources.tensors if name.endswith("_scale_inv")}
        assert scales
        for name in scales:
            expected = float8.quantise(made[name.removesuffix("_scale_inv")].float())[1]
            torch.testing.assert_close(sources.tensors[name], expected, rtol=1e-6, atol=0)
        del elsewhere
