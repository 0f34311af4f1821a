"""What plain Megatron has saved computes the same as a Hugging Face model, and what is no such checkpoint is refused."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from asyncmoe.cli import app
from asyncmoe.errors import DataError, UserError
from asyncmoe.models.importing import command, folder, settings
from asyncmoe.models.importing.folder import CheckpointTensors
from asyncmoe.reshard.layout import Box
from tests import plain_megatron
from tests.hostile import Hostile

ITERATION = f"iter_{plain_megatron.ITERATION:07d}"
MODELS = ("dense", "moe", "mla", "moe-singleton")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of Megatron's, made in a process of their own; not to be changed."""
    out = tmp_path_factory.mktemp("plain")
    words = [sys.executable, "-m", "tests.plain_megatron", str(out), *MODELS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.fail(done.stdout[-2000:] + done.stderr[-4000:], pytrace=False)
    return out


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    """A checkpoint, `megatron`, and its model's directory, `hf`, to be changed."""
    shutil.copytree(plain / "mla", tmp_path / "mla")
    return tmp_path / "mla"


def imported(root: Path, out: Path) -> command.Imported:
    return command.import_checkpoint(root / "megatron", out, root / "hf")


def refused(root: Path, out: Path) -> str:
    """What is said; nothing is left."""
    with pytest.raises(UserError) as caught:
        imported(root, out)
    assert not list(out.parent.glob(f"{out.name}*"))
    return str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_megatron_computes(plain: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers, from a checkpoint with padded vocabulary, optimizer and random states; in several files."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(command, "_SHARD_BYTES", 300_000)
    found, out = imported(plain / name, tmp_path / "out"), tmp_path / "out"
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()(plain_megatron.tokens()).logits
    assert float((logits - torch.load(plain / name / "logits.pt", weights_only=True)).abs().max()) < 1e-5
    assert (found.dtype, found.notes) == ("float32", ())
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert (out / "tokenizer.json").exists()
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    assert sum(len(load_file(file)) for file in out.glob("*.safetensors")) == found.tensors


def rewritten(copy: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Save all tensors anew, by torch alone."""
    place = copy / "megatron" / ITERATION
    tensors = CheckpointTensors(place)
    state = {name: tensors.read(name, Box((0,) * len(one.size), tuple(one.size))) for name, one in tensors.stored.items()}
    for path in (place / ".metadata", *place.glob("*.distcp")):
        path.unlink()
    kept = {name: (place / name).read_bytes() for name in ("common.pt", "metadata.json")}
    dcp.save(change(state), checkpoint_id=place, no_dist=True)
    for name, content in kept.items():
        (place / name).write_bytes(content)


def written(out: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}


def test_weights_keep_their_dtype_and_biases_of_routers_are_float32(copy: Path, tmp_path: Path) -> None:
    rewritten(copy, lambda state: {name: value.bfloat16() for name, value in state.items()})
    found = command.import_checkpoint(copy / "megatron" / ITERATION, tmp_path / "out", copy / "hf")
    assert found.dtype == json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    wide = {name for name, value in written(tmp_path / "out").items() if value.dtype == torch.float32}
    assert wide == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}


def test_prediction_layers_and_a_model_within_another(copy: Path, tmp_path: Path) -> None:
    """Names of the whole model may have a prefix; layers of multi-token prediction are left out, and it is said."""
    imported(copy, tmp_path / "one")
    front = "language_model."
    rewritten(
        copy,
        lambda state: {
            **{name if name.startswith("optimizer.") else front + name: value for name, value in state.items()},
            f"{front}mtp.layers.0.eh_proj.weight": torch.ones(2, 2),
        },
    )
    (copy / "hf/config.json").write_text(json.dumps({**plain_megatron.hf_of("mla"), "num_nextn_predict_layers": 1}))
    (note,) = imported(copy, tmp_path / "two").notes
    assert "prediction" in note
    assert json.loads((tmp_path / "two/config.json").read_text())["num_nextn_predict_layers"] == 0
    whole, again = written(tmp_path / "one"), written(tmp_path / "two")
    assert whole.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


ROPE = {**plain_megatron.hf_of("mla")["rope_parameters"], "rope_theta": 5e5}
FEWER = {"num_hidden_layers": 5, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0}


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"rope_parameters": ROPE}, {"rotary_base": "10000"}),
        (FEWER, {"num_layers": "4", "layernorm_epsilon": "1e-06", "moe_layer_freq": "[", "moe_router_topk_scaling_factor": "2.5"}),
        ({"n_group": 1, "topk_group": 1}, {"moe_router_num_groups": "4"}),
    ],
)
def test_settings_that_differ_are_a_line_each(copy: Path, tmp_path: Path, changed: dict[str, Any], names: dict[str, str]) -> None:
    (copy / "hf/config.json").write_text(json.dumps({**plain_megatron.hf_of("mla"), **changed}))
    lines = {line.partition(" ")[0]: line for line in refused(copy, tmp_path / "out").splitlines()}
    assert lines.keys() == names.keys()
    assert all(f"got {names[name]}" in line for name, line in lines.items())


ODD = {
    "rotary_seq_len_interpolation_factor": 4, "no_rope_freq": [1, 0, 0, 0], "softmax_type": "off-by-one", "squared_relu": True,
    "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"], "window_size": (4, 0), "use_mup": True, "rotary_percent": 0.5,
}  # fmt: skip
USUAL = {"moe_router_load_balancing_type": "seq_aux_loss", "no_rope_freq": None, "fp8": "hybrid", "lr": 1e-4}


@pytest.mark.parametrize("bridge", [False, True])
def test_settings_that_change_what_a_model_computes_are_refused(plain: Path, tmp_path: Path, bridge: bool) -> None:
    """Of Megatron-LM's arguments, dtypes and paths among them, and of Bridge's run_config.yaml, which has TransformerConfig's fields."""
    copy = Path(shutil.copytree(plain / "moe", tmp_path / "moe"))
    place = copy / "megatron" / ITERATION
    base = {"num_layers": 4, "num_query_groups": 2, "moe_ffn_hidden_size": None, "ffn_hidden_size": 48, "num_moe_experts": 8}
    silu = {"activation_func": {"_target_": "torch.nn.functional.silu"}, "tensor_model_parallel_size": 8}

    def write(values: dict[str, Any]) -> None:
        if bridge:
            values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
            (place / "run_config.yaml").write_text(yaml.safe_dump({"model": base | silu | values}))
        else:
            torch.save({"args": argparse.Namespace(params_dtype=torch.float32, path=Path("a"), **values)}, place / "common.pt")

    assert imported(copy, tmp_path / "as saved").notes == ()
    write(USUAL)
    assert imported(copy, tmp_path / "usual").notes == ()
    write(ODD)
    assert {line.partition(" ")[0] for line in refused(copy, tmp_path / "odd").splitlines()} == ODD.keys()


class Reaching:
    """Reaches a function through `getattr`."""

    def __reduce__(self) -> Any:
        return getattr, (argparse.Namespace, "__init__")


def test_what_a_file_names_is_not_run(copy: Path, tmp_path: Path) -> None:
    place = copy / "megatron" / ITERATION
    plain = {name: value for name, value in (settings.read(place) or {}).items() if isinstance(value, str | float | list | None)}
    torch.save({"args": argparse.Namespace(**plain), "more": [Hostile(tmp_path / "mark"), Reaching()]}, place / "common.pt")
    assert imported(copy, tmp_path / "out").notes == ()
    (place / "run_config.yaml").write_text(f"model: !!python/object/apply:os.system [touch {tmp_path / 'mark'}]")
    assert "ConstructorError" in refused(copy, tmp_path / "more")
    assert not (tmp_path / "mark").exists()


def _largest(root: Path) -> Path:
    return max((root / ITERATION).glob("*.distcp"), key=lambda path: path.stat().st_size)


def _legacy(root: Path) -> None:
    shutil.rmtree(root / ITERATION)
    (root / ITERATION / "mp_rank_00").mkdir(parents=True)


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text(text)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (_write("latest_checkpointed_iteration.txt", "20\n"), "iter_0000020"),
        (_write("latest_checkpointed_iteration.txt", "../../etc"), "iter_../../etc"),
        (_write(f"{ITERATION}/metadata.json", json.dumps({"sharded_backend": "zarr"})), "format 'zarr'"),
        (_write(f"{ITERATION}/common.pt", "PK"), "common.pt: got BadZipFile"),
        (lambda root: (root / ITERATION / ".metadata").unlink(), "no .metadata"),
        (_legacy, "FileNotFoundError"),
        (lambda root: os.truncate(_largest(root), _largest(root).stat().st_size // 2), "tensor "),
        (lambda root: _largest(root).unlink(), ".distcp"),
        (lambda root: _largest(root).write_bytes(bytes(_largest(root).stat().st_size)), "tensor "),
    ],
)
def test_what_is_no_whole_checkpoint_is_one_line(copy: Path, tmp_path: Path, act: Callable[[Path], object], words: str) -> None:
    act(copy / "megatron")
    line = refused(copy, tmp_path / "out")
    assert words in line
    assert "\n" not in line


LINEAR = "decoder.layers.2.self_attention.linear_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: {name: value for name, value in state.items() if name != LINEAR}, f"got no tensor {LINEAR}"),
        (lambda state: {**state, f"{LINEAR}.bias": torch.ones(4)}, f"got a tensor {LINEAR}.bias"),
        (lambda state: {**state, LINEAR: state[LINEAR] / 0}, "model.layers.2.self_attn.o_proj.weight: got infinite"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(copy: Path, tmp_path: Path, change: Any, words: str) -> None:
    rewritten(copy, change)
    assert words in refused(copy, tmp_path / "out")


def test_without_arguments_shapes_alone_are_compared(copy: Path, tmp_path: Path) -> None:
    torch.save({"iteration": 10}, copy / "megatron" / ITERATION / "common.pt")
    assert len(imported(copy, tmp_path / "out").notes) == 1
    (copy / "hf/config.json").write_text(json.dumps({**plain_megatron.hf_of("mla"), "kv_lora_rank": 16}))
    assert "linear_kv_down_proj.weight: got shape [28, 64], expected shape [24, 64]" in refused(copy, tmp_path / "more")


def test_an_iteration_is_named_or_is_the_last(plain: Path, tmp_path: Path) -> None:
    root = plain / "moe/megatron"
    assert folder.find(root) == folder.find(root / ITERATION) == folder.find(root, 10) == root / ITERATION
    with pytest.raises(DataError, match="iter_0000003"):
        folder.find(root, 3)
    shutil.copytree(root / ITERATION, tmp_path / "root/release")
    (tmp_path / "root/latest_checkpointed_iteration.txt").write_text("release")
    assert folder.find(tmp_path / "root") == tmp_path / "root/release"


def test_the_command_says_what_it_wrote_and_that_there_is_no_tokenizer(copy: Path, tmp_path: Path) -> None:
    (copy / "hf/tokenizer.json").unlink()
    words = ["import-checkpoint", str(copy / "megatron"), str(tmp_path / "out"), "--model", str(copy / "hf"), "--iteration", "10"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert f"tensors of {copy / 'megatron' / ITERATION}, 0.0 GB, float32" in done.output
    assert "has no tokenizer" in done.output


def test_defaults_of_megatron_are_compared_as_what_they_mean() -> None:
    heads = {"group_query_attention": False, "num_attention_heads": 4, "num_query_groups": 1, "multi_latent_attention": False}
    given = {"num_experts": 4, "moe_ffn_hidden_size": None, "ffn_hidden_size": 48, "rope_type": None, "num_layers": 4, "moe_layer_freq": 2}
    found = settings.normal({**given, **heads, "moe_router_topk_scaling_factor": None, "moe_router_num_groups": 1, "mscale_all_dim": 1.0})
    wanted = {"num_moe_experts": 4, "moe_ffn_hidden_size": 48, "num_query_groups": 4, "rope_type": "rope", "moe_layer_freq": [1, 0, 1, 0]}
    wanted |= {"moe_router_topk_scaling_factor": 1.0, "moe_router_num_groups": None, "mscale_all_dim": 0.0}
    assert found.items() >= wanted.items()
    assert settings.normal({**given, **heads, "rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0})["mscale_all_dim"] == 1.0
