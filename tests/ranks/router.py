"""Worker: Megatron's router told what to choose, against the formulae of each kind of router in float64. `router.py RESULT`"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from asyncmoe.config import parse
from asyncmoe.trainer.data.replay_data import Experts
from asyncmoe.trainer.model import mesh
from asyncmoe.trainer.model.replay import Replay
from asyncmoe.trajectory import Routing

ROWS, HIDDEN, EXPERTS, TOP_K, SCALE = 64, 32, 16, 4, 2.5
KINDS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False},
    "softmax of all": {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": SCALE},
    "sigmoid, bias, groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": SCALE,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
}


def main(result: Path) -> None:
    torch.set_num_threads(1)
    config = parse({"run": {"dir": "unused", "steps": 1}, "model": {"path": "unused"}, "task": {"kind": "arithmetic"}})
    mesh.start(config.trainer)
    result.write_text(json.dumps({name: errors(arguments) for name, arguments in KINDS.items()}))
    mesh.stop()


def errors(arguments: dict[str, Any]) -> dict[str, float]:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
        **arguments,
    )
    router = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    router.weight.data.normal_(std=0.3)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.randn(EXPERTS) * 0.3)
    holder = torch.nn.ModuleList([router])
    hidden, upstream = torch.randn(ROWS, 1, HIDDEN), torch.randn(ROWS, EXPERTS)
    recorded = torch.rand(ROWS, EXPERTS).topk(TOP_K).indices
    recorded[: ROWS // 2] = live_choice(router, hidden)[: ROWS // 2]
    known = torch.arange(ROWS) < ROWS - 4
    replay = Replay([holder], config, Routing(1, (0,), TOP_K, EXPERTS))
    with replay.forward(0, Experts((0,), recorded.to(torch.uint8)[None], known)):
        got, where = router(hidden)
    (gradient,) = torch.autograd.grad(got, router.weight, upstream)
    differ = replay.end()[0]

    weight = router.weight.detach().double().requires_grad_()
    shares = formula(hidden[:, 0].double() @ weight.T, recorded, arguments)
    wanted = torch.zeros(ROWS, EXPERTS, dtype=torch.float64).scatter(1, recorded, shares)
    (reference,) = torch.autograd.grad(wanted, weight, upstream.double())
    same = (recorded.sort(1).values == live_choice(router, hidden).sort(1).values).all(1)
    return {
        "weights": float((got - wanted).abs().max()),
        "choice": float((where != (wanted != 0)).sum()),
        "gradient": float((gradient - reference).abs().max() / reference.abs().max()),
        "differ": abs(differ - float((~same & known).sum() / known.sum())),
    }


def formula(logits: torch.Tensor, chosen: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """Weights of the chosen experts: [rows, top_k]. The selection bias and the groups have no part in them (DeepSeek-V3, arXiv 2412.19437
    equations 13 to 16)."""
    if arguments["moe_router_score_function"] == "sigmoid":
        scores = logits.sigmoid().gather(1, chosen)
        return SCALE * scores / scores.sum(1, keepdim=True)
    if arguments["moe_router_pre_softmax"]:
        return logits.softmax(1).gather(1, chosen)
    return logits.gather(1, chosen).softmax(1)


def live_choice(router: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What the router chooses by itself, of its own accord or, with groups, by DeepSeek-V3's router in transformers."""
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    logits = hidden[:, 0] @ router.weight.detach().T
    if not router.config.moe_router_num_groups:
        return logits.topk(TOP_K).indices
    config = DeepseekV3Config(
        hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, n_group=4, topk_group=2, routed_scaling_factor=SCALE
    )
    theirs = DeepseekV3TopkRouter(config)
    theirs.weight.data.copy_(router.weight.detach())
    theirs.e_score_correction_bias.copy_(router.expert_bias)
    with torch.no_grad():
        ids: torch.Tensor = theirs(hidden[:, 0])[2]
    return ids


if __name__ == "__main__":
    main(Path(sys.argv[1]))
