"""Checkpoints as users of Megatron-LM have them, made by plain megatron-core: `plain_megatron.py OUT MODEL...` on one process, and
`plain_megatron.py OUT MODEL... --from DIR --sizes TP PP EP ETP` under torchrun, which saves what is in DIR/MODEL anew in another layout.

Model, weights and files are Megatron's own; of asyncmoe only what lets megatron-core run without a GPU. OUT/MODEL gets `hf`, a Hugging Face
configuration of the same model, `megatron`, what Megatron-LM's --save would have, and `logits.pt`. Arguments and their meaning:
`core_transformer_config_from_args` and `model_provider` of Megatron-LM.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

ITERATION = 10
VOCAB, PADDED = 90, 128
_HF: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_ARGS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "group_query_attention": True,
    "num_query_groups": 2, "kv_channels": 16, "swiglu": True, "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False,
    "normalization": "RMSNorm", "norm_epsilon": 1e-6, "untie_embeddings_and_output_weights": True, "vocab_size": VOCAB,
    "padded_vocab_size": PADDED, "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0,
    "rotary_interleaved": False, "use_rope_scaling": False, "rope_scaling_factor": 8.0, "apply_layernorm_1p": False,
    "num_experts": None, "moe_layer_freq": 1, "moe_ffn_hidden_size": None, "moe_router_topk": 2,
    "moe_router_score_function": "softmax", "moe_router_pre_softmax": False, "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False, "moe_router_num_groups": None, "moe_router_group_topk": None,
    "moe_shared_expert_intermediate_size": None, "multi_latent_attention": False, "rope_type": None,
    "max_position_embeddings": 64, "seq_length": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (
        {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        {"qk_layernorm": True, "rotary_base": 1000000, "untie_embeddings_and_output_weights": False},
    ),
    "moe": (
        {
            "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        },
        {"qk_layernorm": True, "num_experts": 8, "moe_ffn_hidden_size": 48},
    ),
    "mla": (
        {
            "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 4,
            "moe_intermediate_size": 48, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 14, "qk_rope_head_dim": 8,
            "v_head_dim": 18, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32,
                "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
            },
        },
        {
            "group_query_attention": False, "num_query_groups": 1, "kv_channels": 16, "qk_layernorm": True, "num_experts": 8,
            "moe_ffn_hidden_size": 48, "moe_layer_freq": [0, 1, 1, 1], "moe_router_topk": 4, "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": 2.5, "moe_router_enable_expert_bias": True, "moe_router_num_groups": 4,
            "moe_router_group_topk": 2, "moe_shared_expert_intermediate_size": 48, "multi_latent_attention": True, "q_lora_rank": 24,
            "kv_lora_rank": 20, "qk_head_dim": 14, "qk_pos_emb_head_dim": 8, "v_head_dim": 18, "rope_type": "yarn",
            "rotary_scaling_factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7,
            "mscale_all_dim": 1.0,
        },
    ),
}  # fmt: skip
"""By name, the configuration of Hugging Face and the arguments of Megatron-LM; both add to what is common."""
_ALIKE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "add_bias_linear", "add_qkv_bias"),
    *("qk_layernorm", "normalization", "rotary_interleaved", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk"),
    *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size", "hidden_dropout", "attention_dropout"),
)
_LATENT = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_scaling_factor", "mscale"),
    *("mscale_all_dim", "beta_fast", "beta_slow", "original_max_position_embeddings", "rotary_base"),
)
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")


def hf_of(name: str) -> dict[str, Any]:
    return {**_HF, **MODELS[name][0]}


def arguments(name: str, sizes: tuple[int, int, int, int]) -> argparse.Namespace:
    """The arguments as Megatron-LM keeps and stores them, enumerations and dtypes among them."""
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    others = {
        "params_dtype": torch.float32,
        "attention_backend": AttnBackend.auto,
        "model_type": ModelType.encoder_or_decoder,
        "iteration": 0,
    }
    return argparse.Namespace(**{**_ARGS, **MODELS[name][1], **dict(zip(_SIZES, sizes, strict=True)), **others})


def build(args: argparse.Namespace) -> Any:
    """This rank's GPTModel, of Megatron's own layers, with zeros as weights."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    made = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    values = {name: getattr(args, name) for name in (*_ALIKE, *(_LATENT if args.multi_latent_attention else ()), *_SIZES)}
    if args.num_experts is None:
        values = {name: value for name, value in values.items() if not name.startswith("moe")}
    config = made(
        **values,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        num_moe_experts=args.num_experts,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu,
        params_dtype=args.params_dtype,
        pipeline_dtype=args.params_dtype,
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is MLASelfAttention:
            attention.submodules.core_attention = _core()
    model = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
    )
    return model.eval()


def _core() -> Any:
    """Attention between the projections, whose kernel for latent attention Megatron takes from Transformer Engine alone."""
    import torch
    from megatron.core.transformer.module import MegatronModule

    class Core(MegatronModule):
        def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **named: Any) -> None:
            super().__init__(config)
            self.scale = softmax_scale

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **named: Any) -> Any:
            q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)

    return Core


def fill(model: Any) -> None:
    """Give one rank's model weights."""
    import torch

    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.1) + (1 if "norm" in name else 0))
        for name, buffer in model.named_buffers():
            if "expert_bias" in name:
                buffer.copy_(0.1 * torch.randn_like(buffer))


def save(model: Any, args: argparse.Namespace, folder: Path, singleton: bool = False) -> None:
    """What Megatron-LM saves of an iteration: `generate_state_dict` of its training/checkpointing.py."""
    import numpy as np
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        **({"singleton_local_shards": True} if singleton else {}),
    }
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    drawn = [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}]
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "num_floating_point_operations_so_far": 1.0e9,
        "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": ITERATION},
        "model": model.sharded_state_dict(metadata=metadata),
        "rng_state": ShardedObject("rng_state", drawn, (world,), (rank,)),
        "optimizer": {
            "param_groups": [{"lr": 1e-4, "step": ITERATION}],
            "moment": ShardedTensor.from_rank_offsets(
                "optimizer.state.exp_avg.embedding.word_embeddings.weight", torch.ones(4, 64), (0, rank, world)
            ),
        },
    }
    if rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(folder), content_metadata={"singleton_local_shards": singleton})
    if rank == 0:
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    torch.distributed.barrier()


def tokens() -> Any:
    import torch

    return torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))


def main(out: Path, names: list[str], origin: Path | None, sizes: tuple[int, int, int, int]) -> None:
    from asyncmoe.platform import megatron

    megatron.prepare()
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.set_num_threads(1)
    alone = {} if origin is not None else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **alone)
    tp, pp, ep, etp = sizes
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    model_parallel_cuda_manual_seed(1)
    for name in names:
        model_name, _, how = name.partition("-")
        args = arguments(model_name, sizes)
        model = build(args)
        place = Path("megatron") / f"iter_{ITERATION:07d}"
        if origin is None:
            fill(model)
        else:
            load(model, origin / name / place)
        save(model, args, out / name / place, how == "singleton")
        if origin is None:
            write_others(model, out / name, hf_of(model_name))


def load(model: Any, folder: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, str(folder))["model"])


def write_others(model: Any, folder: Path, hf: dict[str, Any]) -> None:
    import torch

    ids = tokens()
    with torch.no_grad():
        logits = model(ids, torch.arange(ids.shape[1])[None].expand_as(ids), None)
    torch.save(logits[..., :VOCAB].clone(), folder / "logits.pt")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(hf))
    (folder / "hf" / "tokenizer.json").write_text("{}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--from", dest="origin", type=Path)
    parser.add_argument("--sizes", nargs=4, type=int, default=(1, 1, 1, 1))
    given = parser.parse_args()
    main(given.out, given.models, given.origin, tuple(given.sizes))
