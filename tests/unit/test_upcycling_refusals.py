"""What `asyncmoe upcycle` refuses, says and deletes: places, checkpoints, widths and trainings that lead nowhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.models import load_hf_config
from asyncmoe.models.upcycling.distil import Distillation
from asyncmoe.models.upcycling.inputs import check_width
from asyncmoe.models.upcycling.mixture import Upcycling
from asyncmoe.models.upcycling.write import upcycle
from tests import families


def test_places_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    first = families.write_dense(tmp_path / "dense", "llama")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "other").symlink_to(first)
    (tmp_path / "empty").mkdir()
    for source, out, line in (
        (first / "config.json", tmp_path / "out", "got a file, expected the directory of a dense model"),
        (
            tmp_path / "none",
            tmp_path / "out",
            "got no such directory, expected the directory of a dense model, with config.json and safetensors",
        ),
        (tmp_path / "empty", tmp_path / "out", "empty: got no config.json, expected the directory of a dense model"),
        (first, first / "deep" / "out", "got a path inside .*dense, expected one outside"),
        (first, tmp_path / "other" / "out", "got a path inside .*dense, expected one outside"),
        (first, tmp_path / "link", "got a symbolic link to nothing, expected a new path"),
        (first, Path("/proc/mixture"), r"got a path where in /proc nothing can be made \(.*\), expected a path on a disk"),
    ):
        with pytest.raises(DataError, match=line) as caught:
            upcycle(source, out, Upcycling(2, 1))
        assert "model.path" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "empty", "link", "other"]


def test_a_checkpoint_that_is_not_its_configuration_is_refused(tmp_path: Path) -> None:
    first = families.write_dense(tmp_path / "dense", "llama")
    whole = load_file(first / "model.safetensors")
    config = (first / "config.json").read_text()
    gate = "model.layers.1.mlp.gate_proj.weight"
    for changed, line in (
        ({gate: torch.full_like(whole[gate], float("nan"))}, f"tensor {gate}: got infinite values or no numbers, expected finite ones"),
        ({gate: whole[gate].to(torch.int8)}, f"tensor {gate}: got int8, expected float32, bfloat16 or float16"),
        ({gate: whole[gate].to(torch.float8_e4m3fn)}, f"tensor {gate}: got float8_e4m3fn, expected float32"),
        (
            {"model.extra.weight": torch.zeros(2)},
            "tensor model.extra.weight: got a tensor, expected none but those of config.json: 3 layers",
        ),
        ({gate: None}, f"tensor {gate}: got nothing, expected a tensor, as config.json has it"),
    ):
        tensors = {name: value for name, value in {**whole, **changed}.items() if value is not None}
        save_file(tensors, first / "model.safetensors", {"format": "pt"})
        with pytest.raises(DataError, match=line):
            upcycle(first, tmp_path / "out", Upcycling(2, 1))
    save_file({**whole, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, first / "model.safetensors", {"format": "pt"})
    (first / "config.json").write_text(json.dumps({**json.loads(config), "num_hidden_layers": 2}))
    with pytest.raises(
        DataError, match=r"tensor model\.layers\.2\..*: got a tensor, .*2 layers of llama; config.json is not this checkpoint's"
    ):
        upcycle(first, tmp_path / "out", Upcycling(2, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    (first / "config.json").write_text(config)
    upcycle(first, tmp_path / "out", Upcycling(2, 1))


def test_widths_that_nothing_runs_are_refused_and_narrow_ones_said(tmp_path: Path) -> None:
    first, said = families.write_dense(tmp_path / "dense", "llama"), list[str]()
    with pytest.raises(ConfigError, match=r"the width of an expert: got 2, expected a multiple of 4, .*; choose another --shared"):
        upcycle(first, tmp_path / "out", Upcycling(2, 2, shared=63))
    with pytest.raises(ConfigError, match=r"got 97, expected a multiple of 8, rows of 16 bytes.*; choose another dense model"):
        check_width(97, 1, 2)
    upcycle(first, tmp_path / "narrow", Upcycling(2, 2, shared=7), say=said.append)
    assert said == ["warning: experts of width 16 run on GPUs only: SGLang on a CPU wants a multiple of 32"]
    upcycle(first, tmp_path / "wide", Upcycling(2, 2, shared=3), say=said.append)
    assert len(said) == 1


def test_a_distillation_that_makes_it_worse_is_refused(tmp_path: Path) -> None:
    first, few = families.write_dense(tmp_path / "dense", "llama"), Distillation(steps=2, batch=2, tokens=8, held_out=2)
    with pytest.raises(
        UserError,
        match=r"got a KL divergence of .* on held-out text, expected at most .*; nothing was written: lower --lr = 1e\+06, or raise",
    ):
        upcycle(first, tmp_path / "far", Upcycling(2, 1), share=0.1, how=replace(few, lr=1e6), say=lambda _: None)
    with pytest.raises(ConfigError, match="--tokens: got 513, expected at most max_position_embeddings = 512"):
        upcycle(first, tmp_path / "long", Upcycling(2, 1), share=0.1, how=replace(few, tokens=513))
    with pytest.raises(ConfigError, match=r"--diversify: got 0\.1 with --experts 1, expected at least 2 experts"):
        upcycle(first, tmp_path / "one", Upcycling(1, 1), share=0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_logits_of_one_batch_are_held_at_once(tmp_path: Path) -> None:
    first, sizes = families.write_dense(tmp_path / "dense", "llama"), list[int]()
    vocab = load_hf_config(first)["vocab_size"]

    def watch(_module: torch.nn.Module, _inputs: object, out: object) -> None:
        if isinstance(out, torch.Tensor) and out.shape[-1] == vocab:
            sizes.append(out.numel() // vocab)

    hook = torch.nn.modules.module.register_module_forward_hook(watch)
    try:
        few = Distillation(steps=1, batch=2, tokens=16, held_out=12)
        upcycle(first, tmp_path / "out", Upcycling(2, 1), share=0.2, how=few, say=lambda _: None)
    finally:
        hook.remove()
    assert max(sizes) == 2 * 16


def test_several_chat_templates_are_copied(tmp_path: Path) -> None:
    first = families.write_dense(tmp_path / "dense", "llama")
    (first / "additional_chat_templates").mkdir()
    (first / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    upcycle(first, tmp_path / "out", Upcycling(1, 1))
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """A command started here is ended by SIGHUP, which it would ignore if these tests were started by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(one, marks=pytest.mark.thorough) for one in (signal.SIGTERM, signal.SIGHUP))]
)
def test_what_a_stopped_command_wrote_is_deleted(tmp_path: Path, number: signal.Signals) -> None:
    """At once, or by the next one with the same place if it was killed."""
    first, out = families.write_dense(tmp_path / "dense", "llama"), tmp_path / "out"
    words = [sys.executable, "-m", "asyncmoe", "upcycle", str(first), str(out), "--experts", "2", "--top-k", "1"]
    with subprocess.Popen([*words, "--diversify", "0.5", "--steps", "100000"], stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        child.stderr.readline()
        assert len(list(tmp_path.iterdir())) == 2
        child.send_signal(number)
        child.communicate(timeout=120)
    assert len(list(tmp_path.iterdir())) == (2 if number == signal.SIGKILL else 1)
    upcycle(first, out, Upcycling(2, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]
