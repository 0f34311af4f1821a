"""What the bundle carries and what it takes for granted. Only the standard library is imported here: it is read on a bare machine too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PYTHON = "3.12"
LIMIT_BYTES = 60 << 20
"""Of a call's whole folder."""
ARCHITECTURE = 90
"""The only one that libraries of `SLIMMED` keep code for: sm_90, Hopper."""

ASSUMED = frozenset(
    ("torch", "numpy", "triton", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy")
)  # fmt: skip
"""Import names of what a machine with torch has: torch, what it asks for, and NumPy. Never carried: they belong to that machine's CUDA."""

OPTIONAL = frozenset(("transformer_engine", "apex", "torchvision", "sgl_kernel", "flashinfer", "mpi4py", "ray"))
"""Import names of what is used where it is, and done without where it is not."""

_BASE = (
    *("hypothesis", "iniconfig", "msgspec", "packaging", "pluggy", "pybind11", "pygments", "pytest", "setuptools", "sortedcontainers"),
    *("annotated-types", "pydantic", "pydantic-core", "typing-extensions", "typing-inspection", "pyyaml", "pyzmq"),
    *("annotated-doc", "click", "markdown-it-py", "mdurl", "prometheus-client", "psutil", "rich", "shellingham", "typer"),
)
"""asyncmoe, its extension and its tests."""
_TRAINER = (
    *("megatron-core", "aiohttp", "safetensors", "tenacity"),
    *("aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "idna", "multidict", "propcache", "yarl"),
    *("tokenizers", "transformers", "huggingface-hub", "regex", "tqdm", "anyio", "certifi", "h11", "httpcore", "httpx"),
)
"""The trainer and the controller."""
_SERVER = (
    *("sglang", "xgrammar", "apache-tvm-ffi", "cffi", "charset-normalizer", "compressed-tensors", "dill", "distro", "einops", "fastapi"),
    *("gguf", "ipython", "jiter", "jsonschema", "jsonschema-specifications", "loguru", "openai", "opentelemetry-api", "orjson"),
    *("partial-json-parser", "pillow", "pybase64", "pycparser", "python-multipart", "referencing", "requests", "rpds-py"),
    *("sentencepiece", "setproctitle", "sniffio", "soundfile", "starlette", "traitlets", "urllib3", "uvicorn", "uvloop"),
)
"""The SGLang server."""

_ENGINE = ("transformer-engine", "transformer-engine-cu13", "einops", "onnxscript", "onnx", "onnx-ir", "ml-dtypes", "protobuf")
"""Transformer Engine and what it imports."""

CARRIED: Mapping[str, tuple[str, ...]] = {
    "two-processes": (*_BASE, "nvidia-nccl-cu13"),
    "updates": (*_BASE, *_TRAINER),
    "slice": (*_BASE, *_TRAINER),
    "transformer-engine": (*_BASE, *_TRAINER, *_ENGINE),
    "memory-saver": (*_BASE, *_TRAINER, *_SERVER, "torch-memory-saver"),
}
"""Call (`parts.CALLS`) -> distributions; `pins` has their versions."""

BUILT: Mapping[str, tuple[str, ...]] = {"transformer-engine": ("transformer-engine-torch",)}
"""Call -> distributions that no registry has a wheel of; the folder of `make.py --built` has."""

SLIMMED: Mapping[str, str] = {
    "nvidia-nccl-cu13": r"nvidia/nccl/lib/libnccl\.so\.2$",
    "transformer-engine-cu13": r"/libtransformer_engine\.so$",
}
"""Distribution -> regular expression of the libraries in its wheel from which code for other cards is taken (`slim.py`)."""

WITHOUT: Mapping[str, tuple[str, ...]] = {
    "sglang": (
        r"sglang/multimodal_gen/", r"sglang/test/", r"sglang/benchmark/", r"sglang/kernels/jit/benchmark/",
        r"sglang/srt/rust_extensions/_", r"sglang/srt/mem_cache/rust_tree_core/.*\.so$",
    ),
    "transformers": (
        r"transformers/models/(?!auto/|llama/|mixtral/|qwen3_moe/)[^/]+/(modular|convert|modeling|image_processing|video_processing)_",
        r"transformers/(exporters|pipelines)/",
    ),
    "nvidia-nccl-cu13": (r"nvidia/nccl/(include|lib/libnccl_ep|lib/.*\.a$)",),
    "transformer-engine": (r"transformer_engine/(jax|common/CuTeDSL)/",),
    "onnx": (r"onnx/backend/test/", r"onnx/.*\.(cc|h)$"),
    "transformer-engine-cu13": (r"transformer_engine/wheel_lib/(lib)?nccl_ep",),
    "torch-memory-saver": (r"torch_memory_saver_hook_mode_(torch|preload(_cu12|\.abi3))",),
    "pillow": (r"PIL/_avif", r"pillow\.libs/lib(avif|harfbuzz|freetype)", r"PIL/_imagingft"),
}  # fmt: skip
"""Distribution -> regular expressions of files in its wheel that nothing here imports, left out for their size."""

IMPORTED_AS: Mapping[str, str] = {
    "megatron": "megatron-core", "zmq": "pyzmq", "yaml": "pyyaml", "markdown_it": "markdown-it-py",
    "pydantic_core": "pydantic-core", "prometheus_client": "prometheus-client", "huggingface_hub": "huggingface-hub",
    "typing_extensions": "typing-extensions",
}  # fmt: skip
"""Import name -> distribution, where they differ."""

_REQUIREMENTS = ("engine-cpu", "engine-cpu-nodeps", "train", "dev", "gpu", "resolved/engine-gpu-cp312", "resolved/trainer-gpu-cp312")
"""Files of requirements/, the first that has a name decides: one folder serves trainer and engine, and SGLang pins the narrower."""


def pins(root: Path) -> dict[str, str]:
    """Normalised name -> version of every distribution in `CARRIED`, from the requirements that everything is tested with.

    Raises:
        KeyError: a distribution that no file of requirements pins.
    """
    found: dict[str, str] = {}
    for file in _REQUIREMENTS:
        for line in (root / "requirements" / f"{file}.txt").read_text().splitlines():
            if match := re.match(r"([\w.-]+)==([^\s;]+)", line):
                found.setdefault(normal(match[1]), match[2])
    return {name: found[name] for name in sorted({name for names in CARRIED.values() for name in names})}


def normal(name: str) -> str:
    """A distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def unfit(call: str, capability: str | None) -> str:
    """Why a call's libraries have no code for a card, in a line, or nothing.

    Args:
        capability: the card's, such as "9.0"; None: there is none.
    """
    slimmed = [name for name in (*CARRIED[call], *BUILT.get(call, ())) if name in SLIMMED]
    if not slimmed or capability is None or capability.replace(".", "") == str(ARCHITECTURE):
        return ""
    got, way = f"got a card of {capability}", "set ARCHITECTURE in tests/gpu/bundle/manifest.py to this card's and make the bundle again"
    return f"{call}: {got}, expected sm_{ARCHITECTURE}, the only code that {' and '.join(slimmed)} have here; {way}"


def distribution(module: str) -> str:
    """The distribution that a top-level import name comes from."""
    return IMPORTED_AS.get(module, normal(module))


def kept(distribution_name: str, file: str) -> bool:
    """Whether a file of a distribution's wheel is carried."""
    return not any(re.match(pattern, file) for pattern in WITHOUT.get(distribution_name, ()))
