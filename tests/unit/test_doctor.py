"""The doctor's checks: every line of the report, over made machines, in every state it can have."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from doctor_machines import DISK, GPUS, LAPTOP, LINKS, NODE, RUN, SOURCES, but
from rich.console import Console

import asyncmoe
from asyncmoe.config.devices import Wanted
from asyncmoe.doctor import versions
from asyncmoe.doctor.examination import CHECKS, examine, failed
from asyncmoe.doctor.facts import Clock, GpuFacts, Machine, Port, SandboxFacts, WantedPort
from asyncmoe.doctor.probes import config_probe
from asyncmoe.doctor.python_facts import Apex, Torch
from asyncmoe.doctor.report import Report, show
from asyncmoe.doctor.verdict import Finding
from asyncmoe.trainer.model.switches import RunFeatures

DEMO = Path(asyncmoe.__file__).resolve().parent.parent / "examples" / "demo.yaml"

TMPFS = replace(DISK, kind="tmpfs")
DOWN = Port("mlx5_1", 1, "DOWN", "10 Gb/sec (4X SDR)", "InfiniBand")
OVERLAP = (Wanted(ranks=4, engines=2, tp=2, first=2),)
SHARED = (replace(OVERLAP[0], share=True),)
APART = (Wanted(ranks=4, engines=0, tp=4, first=0), Wanted(ranks=0, engines=2, tp=4, first=0))
DENSE = RunFeatures(
    dp=1,
    exchanged=1,
    expert_widths=(),
    lora=False,
    keeps_routing=False,
    latent=False,
    interleaved_rope=False,
    float32=False,
    distributed=False,
    published_every=1,
)
EXCLUSIVE = tuple(replace(gpu, compute_mode="Exclusive_Process") for gpu in GPUS[:2])
NO_SANDBOX = SandboxFacts(0, (), "no user namespace", "sysctl x")
FLEX = {"moe_token_dispatcher_type": "flex"}
A100 = GpuFacts(0, "NVIDIA A100-SXM4-80GB", 81920, 4, "Default", "8.0")


def line(machine: Machine, name: str) -> Finding:
    return next(finding for finding in examine(machine) if finding.name == name)


def test_a_healthy_node_has_nothing_to_mend() -> None:
    assert {finding.name: finding.state for finding in examine(NODE)} == dict.fromkeys(CHECKS, "ok") | {"apex": "not here"}


def test_a_laptop_is_fine_without_what_it_does_not_have() -> None:
    states = {finding.name: finding.state for finding in examine(LAPTOP)}
    missing = [
        "transformer-engine",
        "apex",
        "driver",
        "cuda",
        "gpus",
        "nvlink",
        "nccl",
        "infiniband",
        "placement",
        "gpu-memory",
        "transport",
        "megatron-switches",
    ]
    without_config = ["configuration", "ports", "run-dir", "own-code", "model"]
    assert states == dict.fromkeys(CHECKS, "ok") | dict.fromkeys(missing + without_config, "not here")
    assert all("GPU" in line(LAPTOP, name).found for name in ("driver", "cuda", "gpus", "nvlink", "nccl", "placement"))


Case = tuple[str, Machine, dict[str, Any], str, str, str]
"""Line, machine, what is changed on it, state, part of what is found, part of the hint."""

CASES: list[Case] = [
    (
        "placement",
        NODE,
        {"trainer__torch__devices": 7},
        "error",
        "GPUs of this machine: 7, expected 8: 2 x engines.tp 2 from GPU 4 on and 4",
        "share_gpus",
    ),
    ("placement", NODE, {"trainer__torch__devices": 3}, "error", "trainer.ranks: 4 on a machine with 3 GPUs", "trainer.tp"),
    (
        "placement",
        NODE,
        {"run__on_gpus__places": OVERLAP},
        "error",
        "engines.first_gpu: 2: an engine and the trainer on GPUs 2, 3",
        "share_gpus=true",
    ),
    ("placement", NODE, {"run__on_gpus__places": SHARED}, "ok", "GPUs 2, 3 shared on purpose", ""),
    ("placement", NODE, {"run__on_gpus__places": APART, "trainer__torch__devices": 3}, "error", "neither", "cluster.trainer_nodes"),
    ("placement", NODE, {"run__on_gpus__places": APART}, "ok", "trainer on GPUs 0, 1, 2, 3; or 2 engines on GPU 0-3, 4-7", ""),
    (
        "placement",
        NODE,
        {"run__on_gpus__float32": "engines.dtype: got float32"},
        "error",
        "engines.dtype: float32",
        "engines.dtype=bfloat16",
    ),
    ("placement", NODE, {"nvidia__gpus": (*GPUS[:7], replace(GPUS[7], used_mib=9000))}, "error", "9000 MiB of GPU 7", "nvidia-smi says"),
    ("placement", NODE, {"nvidia__gpus": (A100, *GPUS[1:])}, "error", "the trainer would compute on NVIDIA A100", "CUDA_DEVICE_ORDER"),
    ("placement", NODE, {"trainer__torch__apart": ((6, 0),), "run__on_gpus__way": "ipc"}, "error", "GPUs 0 and 6 do not", "=nccl"),
    ("placement", NODE, {"trainer__torch__apart": ((6, 0),)}, "ok", "trainer on GPUs 0, 1, 2, 3, 2 engines on GPU 4-5, 6-7", ""),
    ("gpu-memory", NODE, {"run__on_gpus__engine_bytes": 82 * 10**9}, "error", "an engine would hold 82 GB", "engines.tp"),
    ("gpu-memory", NODE, {"run__on_gpus__trainer_bytes": 82 * 10**9}, "error", "the trainer would hold 82 GB", "trainer.recompute=full"),
    ("gpu-memory", NODE, {"run__on_gpus__places": SHARED}, "error", "the trainer and an engine would hold 130 GB", "share_gpus=false"),
    ("gpu-memory", NODE, {"run__on_gpus__trainer_bytes": None}, "not here", "the model is not known", "line model"),
    ("transport", NODE, {"run__on_gpus__transport": "gloo"}, "error", "sync.transport: gloo, expected auto, ipc or nccl", "leave it out"),
    ("transport", NODE, {"run__on_gpus__transport": "auto"}, "ok", "over ipc", ""),
    ("megatron-switches", NODE, {"run__on_gpus__features": DENSE, "run__on_gpus__megatron": FLEX}, "error", "flex, expected", "leave it"),
    ("megatron-switches", NODE, {"run__on_gpus__features": DENSE}, "ok", "off here", ""),
    ("nccl", NODE, {"engine__nccl__version": 23007, "run__on_gpus__way": "ipc"}, "warning", "2.30.7", "sync.transport: ipc"),
    ("python", NODE, {"trainer__version": "3.10.4"}, "error", "3.10.4, expected >=3.11", "newer Python"),
    ("python", NODE, {"trainer__version": None, "trainer__unfinished": "killed"}, "error", "could not be run: killed", "make setup"),
    ("torch", NODE, {"trainer__packages": {"torch": None}}, "error", "not installed in /env/bin/python", "make setup GPU=1"),
    ("torch", LAPTOP, {"trainer__packages": {"torch": "2.5.1"}}, "error", "2.5.1, expected >=2.6", "make setup"),
    (
        "torch",
        NODE,
        {"trainer__torch": None, "trainer__unfinished": "importing torch: no libcudart"},
        "error",
        "no libcudart",
        "make clean",
    ),
    ("megatron-core", NODE, {"trainer__packages": {"megatron-core": "0.20.0"}}, "error", "0.20.0, expected >=0.16.1,<0.20", "pip install"),
    ("megatron-core", LAPTOP, {"trainer__packages": {"megatron-core": "0.15.3"}}, "error", "0.15.3", '"megatron-core>=0.16.1,<0.20"'),
    ("megatron-core", NODE, {"trainer__packages": {"megatron-core": None}}, "error", "not installed", "pip install"),
    (
        "transformer-engine",
        NODE,
        {"trainer__packages": {"transformer-engine": None}},
        "warning",
        "slower",
        "make transformer-engine GPU=1",
    ),
    ("transformer-engine", NODE, {"trainer__packages": {"transformer-engine": "1.13"}}, "error", "1.13, expected >=2.4", "make trans"),
    (
        "transformer-engine",
        NODE,
        {"trainer__transformer_engine": False, "trainer__unfinished": "undefined symbol"},
        "error",
        "cannot be imported: undefined symbol",
        "uninstall it",
    ),
    ("transformer-engine", LAPTOP, {"trainer__packages": {"transformer-engine": "2.8.0"}}, "ok", "without a GPU", ""),
    (
        "apex",
        NODE,
        {"trainer__apex": Apex(nvidia=False, kernels=False), "trainer__packages": {"apex": "0.9.10.dev0"}},
        "error",
        "0.9.10.dev0 is not NVIDIA's",
        "pip uninstall apex",
    ),
    ("apex", NODE, {"trainer__apex": Apex(nvidia=True, kernels=False)}, "warning", "amp_C", "--cuda_ext"),
    ("apex", NODE, {"trainer__apex": Apex(nvidia=True, kernels=True)}, "ok", "CUDA kernels", ""),
    ("packages", LAPTOP, {"trainer__packages": {"transformers": "5.1.0"}}, "error", "transformers 5.1.0 (expected >=5.12)", "make setup"),
    ("packages", LAPTOP, {"trainer__packages": {"tokenizers": None}}, "error", "tokenizers is missing", "make setup"),
    ("extension", LAPTOP, {"trainer__extension__package": None}, "error", "does not find asyncmoe", "make setup"),
    ("extension", LAPTOP, {"trainer__extension__trouble": "No module named _C"}, "error", "No module named _C", "make setup"),
    ("extension", LAPTOP, {"trainer__extension__built_from": ("0" * 64, SOURCES[1])}, "error", "other sources", "make setup"),
    ("extension", LAPTOP, {"trainer__extension__built_from": (), "sources": ()}, "ok", "without CUDA kernels", ""),
    ("extension", NODE, {"trainer__extension__cuda": False}, "error", "without CUDA kernels", "make setup GPU=1"),
    ("engine-python", NODE, {"engine__version": None, "engine__unfinished": "no such file"}, "error", "no such file", "engines.python"),
    (
        "engine-python",
        NODE,
        {"engine__torch": None, "engine__unfinished": "importing torch: SIGSEGV"},
        "error",
        "SIGSEGV",
        "make setup GPU=1",
    ),
    ("engine-python", NODE, {"engine__extension__package": None}, "error", "does not find asyncmoe", ".pth"),
    ("engine-python", NODE, {"engine__extension__trouble": "wrong ABI"}, "error", "wrong ABI", "Python 3.11.7"),
    (
        "engine-python",
        NODE,
        {"engine__extension__package": "/old/asyncmoe"},
        "warning",
        "/old/asyncmoe, the trainer from /src",
        "make setup",
    ),
    ("sglang", NODE, {"engine__packages": {"sglang": "0.5.22"}}, "error", "0.5.22, expected ==0.5.23", "sglang==0.5.23"),
    ("sglang", LAPTOP, {"engine__packages": {"sglang": None}}, "error", "not installed in /engine/bin/python", "engines.python"),
    ("sglang", LAPTOP, {"engine": None}, "error", "not installed in /env/bin/python", "engines.python"),
    (
        "driver",
        NODE,
        {"nvidia__driver": None, "nvidia__trouble": "there is no nvidia-smi"},
        "error",
        "8 NVIDIA GPUs on the PCI bus",
        "--gpus all",
    ),
    (
        "cuda",
        NODE,
        {"trainer__cuda_driver": 11040, "trainer__torch__devices": 0},
        "error",
        "CUDA 12.8, the driver takes up to 11.4",
        "update NVIDIA's driver to 525 or newer",
    ),
    (
        "cuda",
        NODE,
        {"engine__torch": Torch("2.14.1+cu130", "13.0")},
        "error",
        "the engines' torch is built for CUDA 13.0, the driver takes up to 12.8",
        "580 or newer; on a data-centre GPU (H100, H200) NVIDIA's package cuda-compat-13-0",
    ),
    ("cuda", NODE, {"trainer__cuda_driver": 11040}, "warning", "the driver takes up to 11.4", "update"),  # a compatibility package
    ("cuda", NODE, {"trainer__cuda_driver": 12040}, "warning", "the driver takes up to 12.4", "update"),
    ("cuda", NODE, {"trainer__cuda_driver": 13000}, "ok", "up to CUDA 13.0", ""),
    ("cuda", NODE, {"trainer__cuda_driver": None}, "error", "libcuda.so.1", "driver"),
    ("cuda", NODE, {"engine__torch": Torch("2.9.0+cpu")}, "error", "the engines' torch 2.9.0+cpu is a build for the CPU", "GPU=1"),
    (
        "cuda",
        NODE,
        {"trainer__torch__trouble": "system not yet initialized", "trainer__torch__devices": 0},
        "error",
        "not yet init",
        "dmesg",
    ),
    ("cuda", NODE, {"engine__torch": None}, "warning", "the engines' torch cannot be imported", "engine-python"),
    ("gpus", NODE, {"nvidia__gpus": (), "nvidia__driver": None}, "error", "shows none", "driver"),
    (
        "gpus",
        NODE,
        {"nvidia__gpus": (replace(GPUS[0], compute_mode="Prohibited"), *GPUS[1:])},
        "error",
        "of GPU 0 is Prohibited",
        "-i 0 -c DEFAULT",
    ),
    ("gpus", NODE, {"nvidia__gpus": (*GPUS[:7], replace(GPUS[7], used_mib=70000))}, "warning", "up to 70000 MiB of GPU 7", "end them"),
    ("gpus", NODE, {"nvidia__gpus": (A100, *GPUS[1:])}, "warning", "of different kinds", "CUDA_VISIBLE_DEVICES"),
    (
        "gpus",
        NODE,
        {"nvidia__gpus": EXCLUSIVE, "trainer__torch__devices": 2, "run": None},
        "warning",
        "of GPUs 0, 1 is Exclusive_Process",
        "-i 0,1 -c DEFAULT",
    ),
    ("gpus", NODE, {"nvidia__gpus": EXCLUSIVE}, "ok", "2 x NVIDIA H100", ""),
    ("gpus", NODE, {"trainer__torch__devices": 2}, "ok", "8 x NVIDIA H100 80GB HBM3 of 81559 MiB, of which torch sees 2", ""),
    ("gpus", NODE, {"nvidia__gpus": (replace(GPUS[0], mig=True),)}, "ok", "MIG", ""),
    ("nvlink", NODE, {"nvidia__gpus": GPUS[:1], "nvidia__links": ()}, "not here", "fewer than two", ""),
    ("nvlink", NODE, {"nvidia__links": ()}, "warning", "does not say", "by hand"),
    ("nvlink", NODE, {"nvidia__links": (LINKS[0], ("SYS", *LINKS[1][1:]), *LINKS[2:])}, "warning", "1 of 28 pairs", "fabric manager"),
    ("nccl", NODE, {"trainer__nccl": LAPTOP.trainer.nccl}, "error", "the trainer's Python: libnccl.so.2: cannot open", "LD_LIBRARY_PATH"),
    ("nccl", NODE, {"engine__nccl": None}, "error", "the engines' Python: it cannot be opened without asyncmoe's extension", "GPU=1"),
    ("nccl", NODE, {"engine__nccl__version": 22809}, "error", "2.27.3 in the trainer's Python, 2.28.9 in the engines'", "make setup GPU=1"),
    ("nccl", NODE, {"engine": None}, "ok", "2.27.3", ""),
    ("infiniband", NODE, {"fabric__ports": (DOWN,)}, "warning", "0 of 1 ports are up", "NCCL_IB_DISABLE=1"),
    ("infiniband", NODE, {"fabric__ports": (*NODE.fabric.ports, DOWN)}, "warning", "mlx5_1:1 is DOWN", "NCCL_IB_HCA=mlx5_0:1"),
    ("infiniband", NODE, {"fabric__peer_memory": False}, "warning", "nvidia_peermem", "modprobe"),
    ("interfaces", NODE, {"network__chosen": {"NCCL_SOCKET_IFNAME": "bond"}}, "error", "NCCL_SOCKET_IFNAME=bond", "unset NCCL"),
    ("interfaces", NODE, {"network__chosen": {"NCCL_SOCKET_IFNAME": "ib,bond"}}, "ok", "ib,bond", ""),
    ("interfaces", NODE, {"network__chosen": {"NCCL_SOCKET_IFNAME": "=ib"}}, "error", "=ib", "unset"),
    ("interfaces", NODE, {"network__chosen": {"NCCL_SOCKET_IFNAME": "^docker"}}, "ok", "^docker", ""),
    ("interfaces", NODE, {"network__chosen": {"GLOO_SOCKET_IFNAME": "eth"}}, "error", "GLOO_SOCKET_IFNAME=eth", "unset GLOO"),
    (
        "hostname",
        LAPTOP,
        {"network__addresses": (), "network__name_trouble": "Name or service not known"},
        "warning",
        "laptop",
        "/etc/hosts",
    ),
    (
        "hostname",
        NODE,
        {"network__addresses": (), "network__name_trouble": "not known", "run__network": "hostname"},
        "error",
        "cannot be resolved",
        "/etc/hosts",
    ),
    ("hostname", NODE, {"network__addresses": ("127.0.1.1",), "run__network": "hostname"}, "error", "127.0.1.1", "cluster.network"),
    ("hostname", NODE, {"network__addresses": ("127.0.1.1",), "run__network": "ib0"}, "warning", "127.0.1.1", "cluster.network"),
    ("interfaces", NODE, {"run__network": "ib7"}, "error", "cluster.network=ib7, but there are only lo, eth0, ib0", "cluster.network"),
    ("interfaces", NODE, {"run__network": "10.1.0.0/16"}, "ok", "none is chosen", ""),
    ("interfaces", NODE, {"run__network": "ib0"}, "ok", "none is chosen", ""),
    ("hostname", NODE, {"network__addresses": ("127.0.1.1", "::1")}, "ok", "enough for one machine", ""),
    ("loopback", LAPTOP, {"network__loopback_trouble": "Network is unreachable"}, "error", "Network is unreachable", "set lo up"),
    ("clock", LAPTOP, {"clock": Clock(None, "there is no timedatectl")}, "warning", "there is no timedatectl", "chronyc"),
    ("clock", LAPTOP, {"clock": Clock(False, "adjtimex")}, "warning", "not synchronised", "set-ntp true"),
    ("clock", NODE, {"clock": Clock(False, "adjtimex"), "run__network": "hostname"}, "warning", "drift apart", "set-ntp true"),
    ("clock", NODE, {"run__disk__ahead_s": -40.0}, "warning", "40.0 s ahead of the file system", "chrony"),
    ("clock", NODE, {"run__disk__ahead_s": 40.0, "run__network": "hostname"}, "error", "40.0 s behind the file system", "chrony"),
    ("clock", NODE, {"run__disk__ahead_s": 40.0, "run__max_clock_skew_s": 60.0}, "ok", "within 0.01 s", ""),
    ("shm", LAPTOP, {"limits__shm_bytes": None}, "error", "no /dev/shm", "mount -t tmpfs"),
    ("shm", LAPTOP, {"limits__shm_bytes": 1 << 26, "limits__shm_free": 1 << 26}, "warning", "67.1 MB free of 67.1 MB", "--shm-size=1g"),
    ("shm", NODE, {"limits__shm_free": 1 << 31, "run__shm_bytes": 1 << 32}, "warning", "may take 4.29 GB", "sync.bucket_bytes"),
    ("open-files", NODE, {"limits__open_files": 1024}, "warning", "1024, of at most 1048576; 4224 may be needed", "ulimit -n 4224"),
    ("open-files", LAPTOP, {"limits__open_files": 1024, "limits__open_files_hard": 1024}, "warning", "4096", "limits.conf"),
    ("memlock", NODE, {"limits__memlock": 1 << 16}, "error", "65.5 kB: NCCL cannot register", "ulimit -l unlimited"),
    ("memlock", LAPTOP, {"limits__memlock": 1 << 16}, "ok", "65.5 kB", ""),
    ("sandbox", LAPTOP, {"sandbox": SandboxFacts(7, ("bwrap",))}, "ok", "a root of their own; besides: Landlock 7, bwrap", ""),
    ("sandbox", LAPTOP, {"sandbox": NO_SANDBOX}, "warning", "refused: no user namespace; besides: no Landlock", "python: sysctl x"),
    ("sandbox", NODE, {"sandbox": NO_SANDBOX, "run__sandbox": "namespaces"}, "error", "no user namespace", "sysctl x"),
    ("sandbox", NODE, {"sandbox": NO_SANDBOX, "run__sandbox": "http"}, "ok", "the configuration asks for http", ""),
    (
        "configuration",
        NODE,
        {"run__trouble": "run.yaml: trainer.tp: got 0, expected a number above 0"},
        "error",
        "trainer.tp: got 0",
        "named",
    ),
    ("ports", NODE, {"run__trouble": "bad"}, "not here", "not valid", "configuration"),
    (
        "ports",
        NODE,
        {"run__ports": (WantedPort("engines.port", "127.0.0.1", 30000), WantedPort("cluster.port", "", 7000, "Address already in use"))},
        "error",
        "cluster.port 7000 on any address: Address already in use",
        "another cluster.port",
    ),
    ("ports", NODE, {"run__ports": (WantedPort("engines.port", "127.0.0.1", 40000),)}, "warning", "32768 to 60999", "engines.port outside"),
    ("ports", NODE, {"run__ports": (WantedPort("engines.port", "127.0.0.1", 30000),)}, "ok", "engines.port 30000", ""),
    ("run-dir", NODE, {"run__disk": None, "run__disk_trouble": "waited 30.0 s"}, "error", "waited 30.0 s", "mounted"),
    ("run-dir", NODE, {"run__disk__trouble": "writing a file: No space left on device"}, "error", "in /share: writing a file: No", "quota"),
    ("run-dir", NODE, {"run__disk__free_bytes": 10**11}, "error", "one checkpoint takes about 1 TB", "free space"),
    ("run-dir", NODE, {"run__disk__free_bytes": 2 * 10**12}, "warning", "3 more checkpoints take about 3 TB", "keep_checkpoints"),
    ("run-dir", NODE, {"run__disk__free_bytes": 2 * 10**12, "run__disk__checkpoints": 1}, "ok", "lustre (shared), 2 TB free", ""),
    ("run-dir", NODE, {"run__disk__free_files": 12}, "warning", "only 12 more files", "delete"),
    (
        "run-dir",
        NODE,
        {"run__disk__kind": "ext4", "run__network": "hostname"},
        "warning",
        "other machines may not see it",
        "all machines",
    ),
    ("run-dir", NODE, {"run__disk": TMPFS, "run__checkpoint_bytes": None}, "warning", "tmpfs is gone", "stays"),
    ("model", NODE, {"run__model": None, "trainer__extension__trouble": "no _C"}, "error", "without asyncmoe's extension", "extension"),
    ("model", NODE, {"run__model": None, "run__model_trouble": "waited 30.0 s"}, "error", "waited 30.0 s", "mounted"),
    ("model", NODE, {"run__model__trouble": "model_type in config.json: got 'gpt2'"}, "error", "gpt2", "model.path"),
    ("model", NODE, {"run__model__to_make": True}, "ok", "will be made", ""),
    ("model", NODE, {"run__model__path": "/share/model"}, "ok", "qwen3_moe, 60 GB of weights", ""),
    ("own-code", NODE, {"run__own_trouble": "objective.loss: got SystemExit: 3"}, "error", "got SystemExit: 3", "docs/guides/objective.md"),
    ("own-code", replace(NODE, run=replace(RUN, own={})), {}, "not here", "names no functions", ""),
    ("own-code", NODE, {"run__network": "hostname"}, "ok", "objective.loss my_objective:sapo", ""),
    (
        "own-code",
        NODE,
        {"run__rollout_code": {"task.kind": "B"}},
        "ok",
        "not tried here, but by asyncmoe config validate: task.kind",
        "",
    ),
    ("own-code", NODE, {"run__rollout_trouble": "scoring.scorer: got nothere:y"}, "error", "scoring.scorer: got nothere:y", "start in"),
]


@pytest.mark.parametrize(("name", "machine", "changes", "state", "found", "hint"), CASES)
def test_a_line(name: str, machine: Machine, changes: dict[str, Any], state: str, found: str, hint: str) -> None:
    finding = line(but(machine, **changes), name)
    assert (finding.state, found in finding.found) == (state, True), finding
    assert hint in (finding.hint or ""), finding
    assert (finding.hint is None) <= (state in ("ok", "not here")), "what is wrong has a hint"
    assert failed([finding]) == (state == "error")


def test_every_line_that_can_be_wrong_was() -> None:
    assert {case[0] for case in CASES if case[3] in ("warning", "error")} == set(CHECKS)


def test_versions() -> None:
    assert versions.within("0.16.1", ">=0.16.1,<0.20")
    assert versions.within("2.13.0+cpu", ">=2.6")
    assert versions.within("0.17.0rc1", ">=0.16.1,<0.20")
    assert not versions.within("0.20.0", ">=0.16.1,<0.20")
    assert not versions.within("from a branch", ">=1")
    assert (versions.nccl(22703), versions.cuda(12080), versions.cuda(13000)) == ("2.27.3", "12.8", "13.0")
    assert (versions.cuda_number("12.8"), versions.cuda_number("13.0.1")) == (12080, 13000)


def test_a_configuration_that_is_wrong_is_a_line_among_others() -> None:
    config, run = config_probe.read(DEMO, ["run.stepz=3"])
    assert config is None
    shown = StringIO()
    machine = replace(LAPTOP, run=run)
    show(Report(machine, examine(machine)), Console(file=shown, width=40))
    lines = shown.getvalue().splitlines()
    assert [line[10:29].strip() for line in lines if line.startswith(("ok ", "warning ", "error ", "not here "))] == list(CHECKS)
    (wrong,) = [line for line in lines if line.startswith("error ")]
    assert wrong.startswith("error     configuration       ")
    assert "run.stepz: got an unknown key" in wrong
    assert lines[lines.index(wrong) + 1].strip().startswith("-> correct what is named")
    assert lines[-1] == "laptop: ok: 15, warning: 0, error: 1, not here: 16"
