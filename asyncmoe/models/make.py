"""Makes a tiny random model on disk, so that every part of the system runs on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncmoe.config.model import MadeModel, ModelSection
from asyncmoe.errors import ConfigError
from asyncmoe.models.hf_folder import CONFIG
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.qwen3_moe import FAMILY
from asyncmoe.models.sglang import VOCAB_MULTIPLE
from asyncmoe.models.shards import padded
from asyncmoe.storage import new_directory, share, writing

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>")
"""Tokens 0, 1, ... of the tokenizer; a token for every byte follows, then unused tokens up to the padded vocabulary."""
VOCAB = padded(len(SPECIALS) + 256, VOCAB_MULTIPLE)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACE = Path("runs/models")
"""A run may make a model only below this directory or its own run directory."""
_INIT_STD_TIMES_ROOT_HIDDEN = 0.9
"""Standard deviation of weights times the square root of the hidden size (Qwen's: 0.02 at 2048): outputs have one scale at any size."""


def to_make(model: ModelSection, run_dir: Path) -> bool:
    """Return whether a run must make its model first.

    A leftover `model.make` must not turn a mistyped path, or the name of a model elsewhere, into a random model.

    Raises:
        ConfigError: `model.path` does not exist, and no run may make a model there.
    """
    if model.make is None or model.path.exists():
        return False
    if not any(model.path.resolve().is_relative_to(place.resolve()) for place in (PLACE, run_dir)):
        raise ConfigError(
            "model.path",
            got=f"{model.path}, which does not exist",
            expected=f"a model directory; model.make writes a random model only below {PLACE} and run.dir",
            hint=f"correct the path, or run asyncmoe make-model {model.path} for a random model there",
        )
    return True


def make_model(out: Path, shape: MadeModel, seed: int) -> None:
    """Write a random Qwen3-MoE (float32 safetensors) and a byte-level tokenizer that encodes any text with one token per byte.

    The directory is written atomically.

    Args:
        out: directory to write; missing parents are created.
        seed: equal seeds and shapes give equal bytes.

    Raises:
        DataError: `out` exists.
        ConfigError: an impossible shape, such as more experts per token than experts.
        StorageError: the model could not be written.
    """
    written = settings(shape)
    FAMILY.check(written, MegatronParallel(), EngineParallel())
    with new_directory("model", out) as scratch, writing("model", out):
        _write_model(scratch, written, seed)
        write_tokenizer(scratch, shape.context)


def settings(shape: MadeModel) -> dict[str, Any]:
    """Return the Hugging Face configuration."""
    return {
        "model_type": FAMILY.name,
        "vocab_size": VOCAB,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.expert_hidden * shape.experts_per_token,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_hidden,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": shape.context,
        "initializer_range": _INIT_STD_TIMES_ROOT_HIDDEN / shape.hidden**0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "pad_token_id": SPECIALS.index("<pad>"),
        "bos_token_id": SPECIALS.index("<bos>"),
        "eos_token_id": SPECIALS.index("<eos>"),
    }


def _write_model(folder: Path, values: dict[str, Any], seed: int) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    arguments = {key: value for key, value in values.items() if key != "model_type"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**arguments, dtype="float32")).float()
    model.save_pretrained(folder)
    share(folder, CONFIG)


def write_tokenizer(folder: Path, context: int) -> None:
    """Write the byte-level tokenizer of a made model, for conversations of up to `context` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known += [f"<unused{i}>" for i in range(VOCAB - len(known))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(known)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
