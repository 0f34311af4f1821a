"""Write a GGUF file as a Hugging Face checkpoint, in bfloat16: python examples/real/from_gguf.py FILE OUT

transformers reads the file and dequantises its weights; it needs the package gguf. `make real-model` runs this on SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from asyncmoe.models import FAMILIES


def convert(file: Path, out: Path) -> None:
    """Write `out`, which must not exist. Exits with one line if the file cannot be used."""
    if not file.is_file():
        sys.exit(f"error: {file}: got no file, expected a GGUF file")
    if out.exists():
        sys.exit(f"error: {out}: got an existing path, expected a new directory")
    place = {"gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(file.parent, **place)
    except (ValueError, KeyError, OSError) as error:
        sys.exit(f"error: {file}: {' '.join(str(error).split())[:300]}")
    if config.model_type not in FAMILIES:
        sys.exit(f"error: {file}: got a model of {config.model_type}, expected {' or '.join(sorted(FAMILIES))}")
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **place)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **place)
    if tokenizer.chat_template is None:
        print(f"warning: {file} has no chat template: train with task.chat_template=false, or put one into {out}/chat_template.jinja")
    # A model that was read from GGUF counts as quantised, which transformers refuses to save.
    config = read.config
    del config.quantization_config
    config.dtype = torch.bfloat16
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {config.model_type}, {sum(value.numel() for value in plain.parameters()) / 1e6:.1f} million parameters")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"error: got {len(sys.argv) - 1} arguments, expected FILE and OUT")
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
