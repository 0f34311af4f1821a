"""A run over hosts with a network between them: network namespaces of this machine, each with a /dev/shm of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.runs import REPOSITORY, SMALL, logs, metrics, provide
from tests.system.test_nodes import ROOM

pytestmark = pytest.mark.system
NETWORK = shutil.which("net-cluster")
SCRIPT = """
mount -t tmpfs tmpfs /dev/shm || exit 9
engine() { exec "$PYTHON" -m asyncmoe engine $SETTINGS --name engine.a --node "$1"; }
case $HOST_INDEX in
1) engine 0 ;;
2) engine 1 ;;
esac
"$PYTHON" -m asyncmoe rollout $SETTINGS & controller=$!
"$PYTHON" -m torch.distributed.run --nnodes=1 --nproc-per-node=2 --master-addr="$HOST_0" --master-port=29500 -m asyncmoe.trainer $SETTINGS
trained=$?
wait $controller && exit $trained
"""
"""What a host runs: the first the controller and the trainer, the others a node of the engine each."""


@pytest.mark.skipif(NETWORK is None, reason="no net-cluster on the PATH, which makes hosts of network namespaces")
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_a_run_whose_engine_is_spread_over_two_hosts(tmp_path: Path) -> None:
    """With every version checked on both."""
    assert NETWORK is not None
    run = tmp_path / "run"
    places = (f"run.dir={run}", f"model.path={provide(tmp_path / 'model')}")
    options = ("engines.join=true", "engines.tp=2", "engines.nodes=2", "sync.verify_every=1", "cluster.network=10.77.0.0/16")
    patient = ("engines.start_timeout_s=600", "trainer.timeout_s=600", "engines.hang_timeout_s=300", ROOM)
    settings = " ".join(("examples/demo.yaml", *places, *SMALL, *options, *patient))
    environment = {**os.environ, "PYTHON": sys.executable, "SETTINGS": settings, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [NETWORK, "3", "--rate", "1gbit", "--", "sh", "-c", SCRIPT]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    said = done.stdout[-6000:] + done.stderr[-2000:] + logs(run)
    assert done.returncode == 0, said
    assert [record["step"] for record in metrics(run)] == list(range(1, 8)), said
    heads = [(run / "logs" / f"engine-a{node}.log").read_text() for node in ("", "-node1")]
    assert [set(re.findall(r" TP(\d)\] Load weight end", head)) for head in heads] == [{"0"}, {"1"}]
    met = {re.search(r"'dist_init_addr': '([^']*)'", head) for head in heads}
    assert {found[1].rpartition(":")[0] for found in met if found} == {"10.77.0.2"}
    # An engine is fenced unless the checksums of as many ranks as it has, of both hosts, are the trainer's (`checksums.compare`).
    assert {5, 6} <= {record["step"] for record in metrics(run) if record.get("pause_ms")}, "versions that were published"
    told = [json.loads(line) for line in (run / "rollout.jsonl").read_text().splitlines()]
    assert told[-1]["version"] >= 6
    assert not any(record["engines_lost"] for record in told)
