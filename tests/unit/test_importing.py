"""What plain Megatron has saved computes the same as a Hugging Face model, and what is no such checkpoint is refused in a line each."""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from asyncmoe.cli import app
from asyncmoe.errors import DataError, UserError
from asyncmoe.models.importing import command, folder, settings, unpickling
from asyncmoe.models.importing.tensors import CheckpointTensors
from asyncmoe.platform.megatron.reader import Unreadable
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


def imported(plain: Path, name: str, out: Path, **named: Any) -> command.Imported:
    return command.import_checkpoint(plain / name / "megatron", out, plain / name / "hf", **named)


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: torch.Tensor = model(plain_megatron.tokens()).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_megatron_computes(plain: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers, from a checkpoint with padded vocabulary, optimizer and random states; in several files."""
    monkeypatch.setattr(command, "_SHARD_BYTES", 300_000)
    found = imported(plain, name, tmp_path / "out")
    wanted = torch.load(plain / name / "logits.pt", weights_only=True)
    assert float((logits(tmp_path / "out") - wanted).abs().max()) < 1e-5
    assert (found.dtype, found.notes) == ("float32", ())
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "out/tokenizer.json").exists()
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float32"
    assert sum(len(load_file(file)) for file in (tmp_path / "out").glob("*.safetensors")) == found.tensors


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    """A checkpoint, `megatron`, and its model's directory, `hf`, to be changed."""
    shutil.copytree(plain / "mla", tmp_path / "mla")
    return tmp_path / "mla"


def rewritten(copy: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Save all tensors anew, by torch alone, whole or in halves of their rows; leave out those for which there is None."""
    import torch.distributed.checkpoint as dcp

    place = copy / "megatron" / ITERATION
    tensors = CheckpointTensors(place)
    state = {}
    for name in tensors.names():
        shape = tensors.shape(name)
        if (value := change(name, tensors.read(name, Box((0,) * len(shape), shape)))) is not None:
            state[name] = value
    for path in (place / ".metadata", *place.glob("*.distcp")):
        path.unlink()
    kept = {name: (place / name).read_bytes() for name in ("common.pt", "metadata.json")}
    dcp.save(state, checkpoint_id=place, no_dist=True)
    for name, content in kept.items():
        (place / name).write_bytes(content)


def test_weights_keep_their_dtype_and_biases_of_routers_are_float32(copy: Path, tmp_path: Path) -> None:
    rewritten(copy, lambda _, value: value.bfloat16())
    found = command.import_checkpoint(copy / "megatron" / ITERATION, tmp_path / "out", copy / "hf")
    assert found.dtype == json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    written = load_file(tmp_path / "out/model.safetensors")
    wide = {name for name, value in written.items() if value.dtype == torch.float32}
    assert wide == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    assert {value.dtype for name, value in written.items() if name not in wide} == {torch.bfloat16}


def test_prediction_layers_and_a_model_within_another(copy: Path, tmp_path: Path) -> None:
    """Names of the whole model may have a prefix; layers of multi-token prediction are left out, and it is said."""
    whole = load_file(_written(copy, tmp_path / "one"))
    rewritten(copy, lambda name, value: value)
    place = copy / "megatron" / ITERATION
    import torch.distributed.checkpoint as dcp

    tensors = CheckpointTensors(place)
    state = {
        f"{'' if name.startswith('optimizer.') else 'language_model.'}{name}": tensors.read(
            name, Box((0,) * len(tensors.shape(name)), tensors.shape(name))
        )
        for name in tensors.names()
    }
    state["language_model.mtp.layers.0.eh_proj.weight"] = torch.ones(2, 2)
    (copy / "hf/config.json").write_text(json.dumps({**plain_megatron.hf_of("mla"), "num_nextn_predict_layers": 1}))
    for path in (place / ".metadata", *place.glob("*.distcp")):
        path.unlink()
    dcp.save(state, checkpoint_id=place, no_dist=True)
    found = command.import_checkpoint(copy / "megatron", tmp_path / "two", copy / "hf")
    assert found.notes == ("layers of multi-token prediction are left out: asyncmoe neither trains nor serves them",)
    assert json.loads((tmp_path / "two/config.json").read_text())["num_nextn_predict_layers"] == 0
    again = load_file(tmp_path / "two/model.safetensors")
    assert whole.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def _written(copy: Path, out: Path) -> Path:
    command.import_checkpoint(copy / "megatron", out, copy / "hf")
    return out / "model.safetensors"


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        (
            {"rope_parameters": {**plain_megatron.hf_of("mla")["rope_parameters"], "rope_theta": 5e5}},
            ["rotary_base of the checkpoint: got 10000, "],
        ),
        (
            {"num_hidden_layers": 5, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0},
            [
                "num_layers of the checkpoint: got 4, expected 5, as config.json in ",
                "layernorm_epsilon ",
                "moe_layer_freq ",
                "moe_router_topk_scaling_factor of the checkpoint: got 2.5, expected 1.0, ",
            ],
        ),
        ({"n_group": 1, "topk_group": 1}, ["moe_router_num_groups of the checkpoint: got 4"]),
    ],
)
def test_settings_that_differ_are_a_line_each(copy: Path, tmp_path: Path, changed: dict[str, Any], lines: list[str]) -> None:
    (copy / "hf/config.json").write_text(json.dumps({**plain_megatron.hf_of("mla"), **changed}))
    with pytest.raises(UserError) as caught:
        command.import_checkpoint(copy / "megatron", tmp_path / "out", copy / "hf")
    said = str(caught.value).splitlines()
    assert len(said) == len(lines)
    for line in lines:
        assert any(one.startswith(line) for one in said), (line, said)
    assert not (tmp_path / "out").exists()


def test_every_field_of_megatrons_configuration_is_understood_or_refused() -> None:
    """A field that a newer Megatron has belongs among those of the model or of the system; until then, Bridge's that set it are refused."""
    found: set[str] = set()
    for file in ("core/transformer/transformer_config.py", "core/model_parallel_config.py"):
        (path,) = (Path(root) / file for root in find_spec("megatron").submodule_search_locations)  # type: ignore[union-attr]
        fields = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AnnAssign)]
        found |= {field.target.id for field in fields if isinstance(field.target, ast.Name)}
    wanted = [settings.expected(plain_megatron.hf_of(name)) for name in plain_megatron.MODELS]
    refused = {field for field in found if any(settings.differences({field: 7}, one) for one in wanted)}
    assert refused == found & {name for one in wanted for name in one}
    left = found - refused - set(settings.unknown(dict.fromkeys(found, 7), every=False))
    assert settings.unknown(dict.fromkeys(left, 7), every=True) == []


ODD = {
    "rotary_seq_len_interpolation_factor": 4, "no_rope_freq": [1, 0, 0, 0], "softmax_type": "off-by-one", "squared_relu": True,
    "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"], "window_size": (4, 0), "spec": ["my.layers", "spec"], "use_mup": True,
    "attention_output_gate": True, "moe_shared_expert_gate": True, "rotary_percent": 0.5,
}  # fmt: skip
USUAL = {"moe_router_load_balancing_type": "seq_aux_loss", "spec": ["local"], "fp8": "hybrid", "hybrid_attention_ratio": 0.0, "lr": 1e-4}


def test_arguments_that_change_what_a_model_computes_are_refused(copy: Path, tmp_path: Path) -> None:
    file = copy / "megatron" / ITERATION / "common.pt"
    plain = {name: value for name, value in vars(unpickling.common(file)["args"]).items() if isinstance(value, str | float | list | None)}
    torch.save({"args": argparse.Namespace(**plain | USUAL)}, file)
    command.import_checkpoint(copy / "megatron", tmp_path / "out", copy / "hf")
    torch.save({"args": argparse.Namespace(**plain | ODD)}, file)
    with pytest.raises(UserError) as caught:
        command.import_checkpoint(copy / "megatron", tmp_path / "more", copy / "hf")
    assert {line.split()[0] for line in str(caught.value).splitlines()} == ODD.keys()


def test_a_model_of_another_kind_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        command.import_checkpoint(plain / "moe/megatron", tmp_path / "out", plain / "dense/hf")
    assert "num_moe_experts of the checkpoint: got 8, expected None, as config.json in" in str(caught.value)


BRIDGE = {"_target_": "megatron.bridge.models.qwen.qwen_provider.Qwen3MoEModelProvider", "num_layers": 4, "hidden_size": 64}


def test_what_megatron_bridge_writes_is_compared(plain: Path, tmp_path: Path) -> None:
    """Its run_config.yaml has the fields of TransformerConfig."""
    shutil.copytree(plain / "moe", tmp_path / "moe")
    file = tmp_path / "moe/megatron" / ITERATION / "run_config.yaml"
    model = {
        **BRIDGE,
        "num_query_groups": 2,
        "moe_ffn_hidden_size": None,
        "ffn_hidden_size": 48,
        "rotary_base": 10000.0,
        "num_moe_experts": 8,
    }
    usual = {"activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False}, "tensor_model_parallel_size": 8, "new": None}
    file.write_text(yaml.safe_dump({"model": model | usual}))
    assert imported(tmp_path, "moe", tmp_path / "out").notes == ()
    odd = {"rotary_base": 1e6, "layernorm_zero_centered_gamma": True, "activation_func": {"_target_": "torch.nn.functional.gelu"}, "new": 2}
    file.write_text(yaml.safe_dump({"model": {**model, **odd}}))
    with pytest.raises(UserError) as caught:
        imported(tmp_path, "moe", tmp_path / "more")
    assert {line.partition(" ")[0] for line in str(caught.value).splitlines()} == odd.keys()
    file.write_text("model: !!python/object/apply:os.system [touch /tmp/x]")
    with pytest.raises(DataError, match=r"run_config\.yaml: got ConstructorError: .*expected the configuration that Megatron-Bridge"):
        imported(tmp_path, "moe", tmp_path / "more")


def test_without_arguments_shapes_alone_are_compared(copy: Path, tmp_path: Path) -> None:
    torch.save({"iteration": 10}, copy / "megatron" / ITERATION / "common.pt")
    (note,) = command.import_checkpoint(copy / "megatron", tmp_path / "out", copy / "hf").notes
    assert "no arguments of Megatron's" in note
    (copy / "hf/config.json").write_text(json.dumps({**plain_megatron.hf_of("mla"), "kv_lora_rank": 16}))
    with pytest.raises(DataError, match=r"linear_kv_down_proj.weight: got shape \[28, 64\], expected shape \[24, 64\], as the model"):
        command.import_checkpoint(copy / "megatron", tmp_path / "more", copy / "hf")


class Reaching:
    """Reaches a function through `getattr`."""

    def __reduce__(self) -> Any:
        return getattr, (argparse.Namespace, "__init__")


def test_what_a_pickle_names_is_not_run(copy: Path, tmp_path: Path) -> None:
    file = copy / "megatron" / ITERATION / "common.pt"
    for value, named in ((Hostile(tmp_path / "mark"), "posix.system"), (Reaching(), "builtins.getattr")):
        torch.save({"args": argparse.Namespace(num_layers=4), "more": value}, file)
        with pytest.raises(DataError, match=rf"got a pickle that names {named}, expected the common.pt that Megatron writes"):
            command.import_checkpoint(copy / "megatron", tmp_path / "out", copy / "hf")
    assert not (tmp_path / "mark").exists()


def test_enumerations_and_arrays_are_records(plain: Path, tmp_path: Path) -> None:
    import numpy as np

    read = unpickling.common(plain / "moe/megatron" / ITERATION / "common.pt")
    assert repr(read["args"].attention_backend).startswith("megatron.core.transformer.enums.AttnBackend(")
    assert read["args"].params_dtype is torch.float32
    torch.save({"state": np.arange(3), "tensor": torch.ones(3), "path": Path("a")}, tmp_path / "common.pt")
    assert set(unpickling.common(tmp_path / "common.pt")) == {"state", "tensor", "path"}
    for content in (b"", b"PK\x03\x04", b"\x80\x02}q\x00."):
        (tmp_path / "common.pt").write_bytes(content)
        with pytest.raises(Unreadable, match=r"common\.pt, which cannot be read"):
            unpickling.common(tmp_path / "common.pt")


def _other_tracker(root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text("20\n")


def _broken_tracker(root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text("../../etc")


def _no_metadata(root: Path) -> None:
    (root / ITERATION / ".metadata").unlink()


def _zarr(root: Path) -> None:
    (root / ITERATION / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))


def _legacy(root: Path) -> None:
    shutil.rmtree(root / ITERATION)
    (root / ITERATION / "mp_rank_00").mkdir(parents=True)


def _cut(root: Path) -> None:
    file = max((root / ITERATION).glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def _gone(root: Path) -> None:
    max((root / ITERATION).glob("*.distcp"), key=lambda path: path.stat().st_size).unlink()


def _damaged(root: Path) -> None:
    for file in (root / ITERATION).glob("*.distcp"):
        content = bytearray(file.read_bytes())
        content[: len(content) // 2] = bytes(len(content) // 2)
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (_other_tracker, "got 20, and there is no .*iter_0000020, expected an iteration that is there: iter_0000010; name one with"),
        (_broken_tracker, r"got '\.\./\.\./etc', expected the number of an iteration, or release"),
        (_no_metadata, "got no .metadata, .*; it may be half written: take an earlier iteration with --iteration N, if there is one"),
        (_zarr, "got format 'zarr', expected a torch_dist checkpoint .*--ckpt-convert-format torch_dist"),
        (_legacy, "got mp_rank_00, of Megatron's legacy format .*--ckpt-convert-format torch_dist --ckpt-convert-save OUT"),
        (_cut, r"tensor .*: got __0_\d.distcp of \d+ bytes, where its bytes .*, expected a checkpoint that is whole; take another"),
        (_gone, r"tensor .*: got no __0_\d.distcp, where its bytes"),
        (_damaged, "tensor .*: got __0_.*, which cannot be read, expected a checkpoint that is whole"),
    ],
)  # fmt: skip
def test_what_is_no_whole_checkpoint_is_one_line(copy: Path, tmp_path: Path, act: Callable[[Path], None], line: str) -> None:
    act(copy / "megatron")
    with pytest.raises(DataError, match=line) as caught:
        command.import_checkpoint(copy / "megatron", tmp_path / "out", copy / "hf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def _without(copy: Path) -> None:
    rewritten(copy, lambda name, value: None if name.endswith("2.self_attention.linear_proj.weight") else value)


def _with_more(copy: Path) -> None:
    rewritten(copy, lambda name, value: value)
    tensors = CheckpointTensors(copy / "megatron" / ITERATION)
    state = {name: tensors.read(name, Box((0,) * len(tensors.shape(name)), tensors.shape(name))) for name in tensors.names()}
    import torch.distributed.checkpoint as dcp

    dcp.save({**state, "decoder.layers.0.self_attention.linear_qkv.bias": torch.ones(4)}, checkpoint_id=copy / "more", no_dist=True)
    for path in (copy / "more").iterdir():
        shutil.move(path, copy / "megatron" / ITERATION / path.name)


def _not_finite(copy: Path) -> None:
    rewritten(copy, lambda name, value: value / 0 if name.endswith("final_layernorm.weight") else value)


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (
            _without,
            "the checkpoint: got no tensor decoder.layers.2.self_attention.linear_proj.weight, expected the weights of the model that",
        ),
        (
            _with_more,
            "got a tensor decoder.layers.0.self_attention.linear_qkv.bias, expected the weights of the model that --model names only",
        ),
        (_not_finite, "tensor decoder.final_layernorm.weight: got infinite values or no numbers, expected finite ones"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(copy: Path, tmp_path: Path, act: Callable[[Path], None], line: str) -> None:
    act(copy)
    with pytest.raises(DataError, match=line):
        command.import_checkpoint(copy / "megatron", tmp_path / "out", copy / "hf")
    assert not list(tmp_path.glob("out*"))


def test_places_that_cannot_be_written(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match="there: got an existing path, expected a new path"):
        imported(plain, "moe", tmp_path / "there")
    for place in (plain / "moe/hf", plain / "moe/megatron"):
        with pytest.raises(DataError, match=f"OUT: got {place}/out, inside {place}, expected a new path elsewhere"):
            imported(plain, "moe", place / "out")
    with pytest.raises(DataError, match=r"--model: got the file .*config\.json, expected the directory"):
        command.import_checkpoint(plain / "moe/megatron", tmp_path / "new/out", plain / "moe/hf/config.json")
    assert not (tmp_path / "new").exists()
    with pytest.raises(DataError, match="/proc/nope/out: got a path where in /proc nothing can be made"):
        imported(plain, "moe", Path("/proc/nope/out"))


def test_an_iteration_is_named_or_is_the_last(plain: Path, tmp_path: Path) -> None:
    root = plain / "moe/megatron"
    assert folder.find(root) == folder.find(root / ITERATION) == folder.find(root, 10) == root / ITERATION
    with pytest.raises(DataError, match=r"--iteration: got 3, and there is no .*iter_0000003, expected .*there: iter_0000010"):
        folder.find(root, 3)
    with pytest.raises(DataError, match=r"--iteration: got 3 with .*, which is one iteration, expected the folder above it"):
        folder.find(root / ITERATION, 3)
    (tmp_path / "root").mkdir()
    shutil.copytree(root / ITERATION, tmp_path / "root/release")
    (tmp_path / "root/latest_checkpointed_iteration.txt").write_text("release")
    assert folder.find(tmp_path / "root") == tmp_path / "root/release"


def test_the_command(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["import-checkpoint", str(plain / "moe/megatron"), str(out), "--model", str(plain / "moe/hf"), "--iteration", "10"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert f"{out}: 135 tensors of {plain / 'moe/megatron' / ITERATION}, 0.0 GB, float32" in done.output


def test_a_model_without_a_tokenizer_is_said(copy: Path, tmp_path: Path) -> None:
    def notes(out: str) -> str:
        done = CliRunner().invoke(app, ["import-checkpoint", str(copy / "megatron"), str(tmp_path / out), "--model", str(copy / "hf")])
        assert done.exit_code == 0
        return done.output

    assert "has no tokenizer" not in notes("with")
    (copy / "hf/tokenizer.json").unlink()
    assert f"note: {copy / 'hf'} has no tokenizer, so {tmp_path / 'without'} has none, and a run needs one" in notes("without")


def test_defaults_of_megatron_are_compared_as_what_they_mean() -> None:
    heads = {"group_query_attention": False, "num_attention_heads": 4, "num_query_groups": 1, "multi_latent_attention": False}
    found = settings.normal({"num_experts": 4, "moe_ffn_hidden_size": None, "ffn_hidden_size": 48, "rope_type": None, **heads})
    assert (found["num_moe_experts"], found["moe_ffn_hidden_size"], found["num_query_groups"], found["rope_type"]) == (4, 48, 4, "rope")
    wanted = {"num_layers": 4, "moe_layer_freq": [1, 0, 1, 0], "moe_router_topk_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    alike = {"num_layers": 4, "moe_layer_freq": 2, "moe_router_topk_scaling_factor": None, "mscale_all_dim": 1.0, "rope_type": "rope"}
    assert settings.differences({**alike, "rotary_scaling_factor": 1.0}, wanted) == []
    assert settings.differences({**alike, "rotary_scaling_factor": 40.0}, wanted) == [("mscale_all_dim", 1.0, 0.0)]
