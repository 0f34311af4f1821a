"""Arguments of the installed SGLang: each is supported, set by a key, or refused by name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from asyncmoe.config.sglang_arguments import OWNED, SUPPORTED, refusal, unknown_variables
from asyncmoe.engines.sglang import process
from asyncmoe.errors import UserError
from tests.configs import minimal

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-engine/bin/python"
_PRINT = """
import argparse, json
from asyncmoe.platform.sglang import cpu
cpu.install()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([action.option_strings for action in parser._actions]))
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="SGLang is not installed in .venv-engine")
def test_every_argument_is_supported_set_by_a_key_or_refused() -> None:
    done = subprocess.run([PYTHON, "-c", _PRINT], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    every = {name for names in json.loads(done.stdout.splitlines()[-1]) for name in names if name.startswith("--")}
    assert not every & OWNED.keys() & SUPPORTED
    assert every >= SUPPORTED
    assert OWNED.keys() <= every | {"--tp"}  # which SGLang completes
    for name in every - SUPPORTED:
        for words in ([name], [f"{name}=x"], ["--chunked-prefill-size", "-1", name, "x"]):
            why = refusal(words)
            assert why.startswith(f"engines.args: got {name}, expected ")
            assert f"set {OWNED[name]}" in why if name in OWNED else "leave it out" in why


def test_no_name_is_completed() -> None:
    for name in SUPPORTED:
        assert refusal([name, "1"]) == refusal([f"{name}=1"]) == ""
        for short in (name[:end] for end in range(3, len(name)) if name[:end] not in SUPPORTED):
            assert f"got {short}, " in refusal([short])
    assert "write --mem-fraction-static if you mean that" in refusal(["--mem-frac=0.5"])
    assert "write --mem-fraction-static if you mean that" in refusal(["--mem_fraction_static", "0.5"])


def test_a_variable_that_changes_what_is_recorded_starts_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown_variables(["SGLANG_LOG_MS", "SGLANG_CACHE_DIR", "PATH"]) == []
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    with pytest.raises(UserError, match=r"got SGLANG_RETURN_ORIGINAL_LOGPROB, expected supported .*; unset them"):
        process.environment(minimal(), 0)
    monkeypatch.delenv("SGLANG_RETURN_ORIGINAL_LOGPROB")
    assert not unknown_variables(process.environment(minimal(), 0))
