"""Megatron's use of Transformer Engine fits the release that requirements/gpu.txt pins, as far as sources tell.

Megatron-core 0.16.1 itself asks for Transformer Engine below 2.12, which torch 2.14 and CUDA 13 cannot have. Nothing is imported: the
release is read from its wheel, which installs nowhere without a GPU's libraries, and Megatron must not enter pytest's process.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.source_calls import Report, check
from tests.unit.source_names import Found, Function, Sources

ROOT = Path(__file__).parents[2]
ENGINE = "transformer_engine"
LAYERS = "megatron.core.extensions.transformer_engine"
MISSING = {
    (LAYERS, f"{ENGINE}.pytorch.attention", "_SplitAlongDim"): "torch.split parts queries, keys and values instead",
    (LAYERS, f"{ENGINE}.pytorch.module.base", "get_workspace"): "torch multiplies by the router's matrix in float32 instead",
}
"""Names that this release lacks, and what Megatron does without them."""
OPAQUE = {
    (LAYERS, "checkpoint(**kwargs)"): "a layer's own arguments, which Transformer Engine hands back to it",
    (LAYERS, "super().forward(**_fa_kwargs)"): "fields of PackedSeqParams: a test of its own",
    ("megatron.core.transformer.cuda_graphs", "make_graphed_callables(**kwargs)"): "no switch here records CUDA graphs",
}
NEEDED = {
    "attention.rope": {"apply_rotary_pos_emb"},
    "module.rmsnorm": {"RMSNorm"},
    "optimizers.fused_adam": {"FusedAdam"},
    "optimizers.multi_tensor_apply": {"MultiTensorApply"},
    "permutation": {"moe_permute_with_probs", "moe_unpermute", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"},
    "router": {"fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"},
    **{f"module.{name}": {"__init__", "forward"} for name in ("linear", "layernorm_linear", "grouped_linear")},
    "attention.dot_product_attention.dot_product_attention": {"__init__", "forward"},
}
"""What asyncmoe.trainer.model.switches turns on, by modules of `transformer_engine.pytorch`."""
OURS = {
    "Linear": {"weight", "fuse_wgrad_accumulation"},
    "LayerNormLinear": {"weight", "layer_norm_weight", "eps", "fuse_wgrad_accumulation"},
    "GroupedLinear": {"weight", "fuse_wgrad_accumulation"},
    "RMSNorm": {"weight"},
}
"""Attributes of its layers that asyncmoe.models, trainer.layers and trainer.lora name."""


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def version() -> str:
    found = re.search(r"^transformer-engine==(\S+)$", (ROOT / "requirements/gpu.txt").read_text(), re.MULTILINE)
    assert found
    return found[1]


@pytest.fixture(scope="module")
def engine(version: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=1", f"--dest={folder}"]
    command += ["--no-deps", "--only-binary=:all:", f"transformer-engine=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"no wheel of transformer-engine {version} from the package registry within 30 s")
    if done.returncode:
        pytest.skip(f"no wheel of transformer-engine {version} from the package registry: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return {name: wheel.read(name).decode() for name in wheel.namelist() if name.startswith(ENGINE) and name.endswith(".py")}


@pytest.fixture(scope="module")
def users() -> Mapping[str, str]:
    """Files of Megatron and of this package that name Transformer Engine."""
    megatron = _package("megatron")
    files = {file: file.relative_to(megatron.parent) for file in (megatron / "core").rglob("*.py")}
    files |= {file: file.relative_to(ROOT) for file in (ROOT / "asyncmoe").rglob("*.py")}
    texts = {str(path): file.read_text() for file, path in files.items()}
    return {path: text for path, text in texts.items() if ENGINE in text}


@pytest.fixture(scope="module")
def bases() -> Mapping[str, str]:
    """What layers derive from, without the rest of torch."""
    module = (_package("torch") / "nn/modules/module.py").read_text()
    return {"torch/__init__.py": "", "torch/nn.py": module, "abc.py": "class ABC: ..."}


def _modules(paths: Mapping[str, str]) -> list[str]:
    return [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]


@pytest.fixture(scope="module")
def report(engine: Mapping[str, str], users: Mapping[str, str], bases: Mapping[str, str], version: str) -> Report:
    return check(Sources({**engine, **users, **bases}), _modules(users), ENGINE, version)


def test_what_megatron_imports_and_calls_is_in_the_release(report: Report) -> None:
    assert report.wrong == []
    assert report.guarded == set(MISSING)
    assert report.opaque == set(OPAQUE)


def test_calls_that_the_switches_turn_on_were_held_against_it(report: Report) -> None:
    assert {f"{ENGINE}.pytorch.{module}.{name}" for module, names in NEEDED.items() for name in names} <= report.checked


def test_attention_takes_what_describes_packed_rows(engine: Mapping[str, str]) -> None:
    tree = ast.parse((_package("megatron") / "core/packed_seq_params.py").read_text())
    fields = {one.target.id for one in ast.walk(tree) if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    sources = Sources(engine)
    [attention] = sources.named(f"{ENGINE}.pytorch", "DotProductAttention")
    [forward] = sources.attribute(attention, "forward")
    assert isinstance(forward.node, Function)
    assert len(fields) > 5
    # Megatron's TEDotProductAttention takes these two out.
    assert fields - {"cp_group", "local_cp_size"} <= {one.arg for one in forward.node.args.args}


def test_layers_have_what_this_package_names(engine: Mapping[str, str], bases: Mapping[str, str]) -> None:
    sources = Sources({**engine, **bases})
    for layer, names in OURS.items():
        [found] = sources.named(f"{ENGINE}.pytorch", layer)
        made = Found(found.module, found.node, instance=True)
        assert [name for name in {*names, "no_such_name"} if not sources.attribute(made, name)] == ["no_such_name"], layer
    grouped = engine[f"{ENGINE}/pytorch/module/grouped_linear.py"]
    assert 'f"weight{i}"' in grouped, "experts' matrices are named weight0, weight1 ... in checkpoints and weight transfers"
    assert "single_grouped_weight: bool = False" in grouped


CHANGES = (
    ("permutation.py", "def moe_sort_chunks_by_index(", "def other(", "'moe_sort_chunks_by_index'"),
    ("router.py", "    score_function: str,\n    expert_bias", "    expert_bias", "there is no argument score_function"),
    ("cross_entropy.py", "    is_cg_capturable: bool = False,\n", "", "got 7 arguments by place, expected 6 at most"),
    ("module/__init__.py", "from .rmsnorm import RMSNorm\n", "", "there is no te.pytorch.RMSNorm"),
    ("module/grouped_linear.py", "        rng_tracker_name: Optional[str] = None,\n", "", "there is no argument rng_tracker_name"),
    ("module/layernorm_linear.py", "        eps: float = 1e-5,\n", "        eps: float, more: int,\n", "argument more is not given"),
    ("module/linear.py", "        is_first_microbatch:", "        first:", "there is no argument is_first_microbatch"),
    ("attention/rope.py", "    interleaved: bool = False,\n", "", "there is no argument interleaved"),
    ("module/base.py", "    def backward_dw(", "    def other(", "the classes that TELinear derives from have no backward_dw"),
    ("quantization.py", "def is_fp8_enabled(", "def other(", "there is no FP8GlobalStateManager.is_fp8_enabled"),
)


def test_a_release_that_differs_is_reported(
    engine: Mapping[str, str], users: Mapping[str, str], bases: Mapping[str, str], version: str
) -> None:
    changed = dict(engine)
    for name, old, new, _ in CHANGES:
        path = f"{ENGINE}/pytorch/{name}"
        assert old in changed[path], name
        changed[path] = changed[path].replace(old, new)
    report = check(Sources({**changed, **users, **bases}), [LAYERS, "megatron.core.transformer.moe.moe_utils"], ENGINE, version)
    found = "\n".join([*report.wrong, *map(str, report.guarded - set(MISSING))])
    assert [complaint for *_, complaint in CHANGES if complaint not in found] == [], found


LIBRARY = """
class Base:
    def run(self, rows, *, scale=1): self.scale = scale
def old(x): ...
"""
USER = """
import library as lib
def more():
    given = {"a": 1}
    given["b"] = 2
    return given
class Mine(lib.Base):
    def run(self, rows):
        super().run(rows, %s)
        return self.%s
if is_te_min_version("3.0"):
    from library import new
else:
    lib.old(%s)
try:
    from library import lost
except ImportError:
    lost = None
"""


@pytest.mark.parametrize(
    ("version", "filled", "wrong"),
    [
        ("2.0", ("scale=2", "scale", "1"), []),
        (
            "2.0",
            ("**more()", "scale", "1"),
            ["user:9: library.parts.run: there is no argument a", "user:9: library.parts.run: there is no argument b"],
        ),
        ("2.0", ("rows=3", "scale", "1"), ["user:9: library.parts.run: argument rows is given twice"]),
        ("2.0", ("scale=2", "size", "1"), ["user:10: there is no self.size"]),
        ("2.0", ("scale=2", "scale", ""), ["user:14: library.parts.old: argument x is not given"]),
        ("3.0", ("scale=2", "scale", ""), ["user:12: library has no new"]),
    ],
)
def test_names_guards_and_dictionaries_are_followed(version: str, filled: tuple[str, ...], wrong: list[str]) -> None:
    report = check(
        Sources({"library/__init__.py": "from .parts import *", "library/parts.py": LIBRARY, "user.py": USER % filled}),
        ["user"],
        "library",
        version,
    )
    assert report.wrong == wrong
    assert report.guarded == {("user", "library", "lost")}
