"""Bare servers on a card that is not there: `python -m tests.gpu.bundle.pretended [SERVER...]`, with Triton and without a GPU.

Each serves the same requests on the tiny model; what they answer is compared with the first one's. Not a part of the bundle: a card says
more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.gpu.bundle import servers

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [1] * 17, list(range(40))]
SAMPLED, LIMIT_S = 8, 300.0
CLOSE = 0.1
"""Nats, of a log-probability: bfloat16 has 8 bits, of numbers near 4. One token in ten may be further off: where two experts nearly tie,
another attention's rounding takes the other."""
_CODE = "from tests.gpu.bundle import pretended_card; pretended_card.install(); from tests.gpu.bundle import pretended; pretended.serve()"

Answers = list[tuple[list[int], list[float]]]
"""Of every prompt, sampled tokens and their log-probabilities."""


def main() -> None:
    names = sys.argv[1:] or [server.name for server in (servers.PLAIN, servers.EXPERTS, servers.EAGER, servers.GRAPHS)]
    with tempfile.TemporaryDirectory() as folder:
        found = {name: ask(name, Path(folder)) for name in names}
    for name, answers in found.items():
        differences = compared(found[names[0]], answers)
        far = sum(difference > CLOSE for difference in differences)
        said = f"{len(differences)} of {len(PROMPTS) * SAMPLED} tokens as of {names[0]}, {far} of them further than {CLOSE} nats"
        print(f"{servers.KNOWN[name].says}: {said}; largest {max(differences, default=0):.4f}", flush=True)
        if len(differences) < len(PROMPTS) * SAMPLED // 2 or far > len(differences) // 10:
            sys.exit(f"{name}: got {said}, expected half of the tokens, and a tenth of them")


def compared(first: Answers, second: Answers) -> list[float]:
    """Differences of the log-probabilities of all prompts' tokens up to the first other one."""
    pairs = []
    for (ids, logprobs), (others, theirs) in zip(first, second, strict=True):
        same = next((at for at, (one, two) in enumerate(zip(ids, others, strict=True)) if one != two), len(ids))
        pairs += [abs(one - two) for one, two in zip(logprobs[:same], theirs[:same], strict=True)]
    return pairs


def ask(name: str, folder: Path) -> Answers:
    """Start a server, and return what it answers; its log is printed where it does not."""
    environment = {**os.environ, servers.MODE: name, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PRETENDED": str(folder)}
    done = subprocess.run([sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    answers = folder / f"{name}.json"
    if not answers.exists():
        sys.exit(f"{done.stdout}\n{done.stderr}\n{name}: got no answer")
    print(f"{name}: {[line for line in done.stdout.splitlines() if 'pretended card' in line]}", flush=True)
    found: Answers = json.loads(answers.read_text())
    return found


def serve() -> None:
    """The server of this process's environment; it ends when it has answered."""
    from asyncmoe.config.model import MadeModel
    from asyncmoe.launch.torchrun import free_port
    from asyncmoe.models.make import make_model
    from asyncmoe.platform.sglang import cpu

    folder, port = Path(os.environ["PRETENDED"]), free_port("127.0.0.1")
    model = folder / "model"
    if not model.exists():
        make_model(model, MadeModel(layers=2, hidden=64, experts=8, experts_per_token=2, expert_hidden=64), seed=0)
    switches = ["--skip-tokenizer-init", "--disable-shared-experts-fusion", "--enable-return-routed-experts"]
    sys.argv = [
        "bare_server",
        "--model-path",
        str(model),
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
        "--max-running-requests",
        "16",
        *switches,
    ]
    from tests.gpu.bundle import bare_server

    threading.Thread(target=_ask, args=(port, folder / f"{os.environ[servers.MODE]}.json"), daemon=True).start()
    cpu.fork_children()  # what pretends is inherited
    bare_server.main()


def _ask(port: int, answers: Path) -> None:
    sampling = {"temperature": 0, "max_new_tokens": SAMPLED, "ignore_eos": True}
    body = json.dumps({"input_ids": PROMPTS, "sampling_params": sampling, "return_logprob": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
    while True:
        time.sleep(1.0)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
                found: list[Any] = json.loads(response.read())
                break
        except (ConnectionError, urllib.error.URLError):
            continue
    answers.write_text(json.dumps([[one["output_ids"], [x[0] for x in one["meta_info"]["output_token_logprobs"]]] for one in found]))
    os.kill(os.getpid(), 9)


if __name__ == "__main__":
    main()
