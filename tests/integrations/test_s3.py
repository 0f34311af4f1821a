"""Copies of checkpoints through s3fs, against moto's server of S3's protocol in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("s3fs") is None or find_spec("moto") is None:
    pytest.skip("run: make test-integrations ONLY=s3", allow_module_level=True)

from asyncmoe import checkpoints
from asyncmoe.checkpoints import copier, copies, directories, intact
from asyncmoe.checkpoints.copier import Copier
from asyncmoe.config import Config
from asyncmoe.errors import UserError
from asyncmoe.launch.torchrun import free_port
from tests.configs import minimal
from tests.integrations.servers import serving

URL = "s3://backups/asyncmoe"
BIG = os.urandom(12 << 20)
"""More than one part of a multipart upload takes."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    port = free_port("127.0.0.1")
    at = f"http://127.0.0.1:{port}"
    given = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": at}
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    with pytest.MonkeyPatch.context() as patch, serving(command, f"{at}/moto-api/", 60):
        for name, value in given.items():
            patch.setenv(name, value)
        bucket().create_bucket(Bucket="backups")
        yield at


def bucket() -> Any:
    """A client that knows nothing of fsspec."""
    import botocore.session

    return botocore.session.get_session().create_client("s3")


def objects(run: str) -> dict[str, bytes]:
    client = bucket()
    found = client.list_objects_v2(Bucket="backups", Prefix=f"asyncmoe/{run}/").get("Contents", [])
    return {
        one["Key"].removeprefix(f"asyncmoe/{run}/"): client.get_object(Bucket="backups", Key=one["Key"])["Body"].read() for one in found
    }


def saved(run: Path, step: int, keep: int = 2) -> Path:
    checkpoints.start(run, step)
    written = checkpoints.temporary(run, step)
    (written / "__0_0.distcp").write_bytes(BIG)
    (written / "empty").write_bytes(b"")
    (written / ".metadata").write_bytes(b"m" * step)
    return checkpoints.finish(run, step, {"step": step}, checkpoints.Retention(keep))


def config(run: Path, **more: Any) -> Config:
    return minimal(run, steps=9, trainer={"checkpoint_copy": URL, "keep_checkpoints": 2, **more})


@pytest.mark.usefixtures("server")
def test_a_run_copies_its_checkpoints_and_one_comes_back(tmp_path: Path) -> None:
    run = tmp_path / "run ä"
    copier.check(config(run))
    for step in (3, 4, 5):
        with Copier(config(run)):
            path = saved(run, step)
    wanted = {f"{one.parent.name}/{one.name}": one.read_bytes() for one in (run / "checkpoints").rglob("*") if one.is_file()}
    assert objects(run.name) == wanted
    assert {name.partition("/")[0] for name in wanted} == {"step-00000004", "step-00000005"}
    copier.check(config(run))
    (run / "checkpoints").rename(tmp_path / "lost")
    with pytest.raises(UserError, match="with a copy of step 5, expected no copies"):
        copier.check(config(run))
    assert copies.restore(URL, run) == path
    assert intact.fault(path) is None
    assert copies.restore(URL, run, 4) == directories.directory(run, 4)


@pytest.mark.usefixtures("server")
def test_a_bucket_that_is_not_there_is_refused_before_the_run(tmp_path: Path) -> None:
    """S3 answers a list of a bucket that is not there with NoSuchBucket, which s3fs takes for an empty folder: only a write fails."""
    asked = config(tmp_path / "run", checkpoint_copy="s3://nowhere/x")
    copier.check(asked)
    with pytest.raises(UserError, match=r"^trainer\.checkpoint_copy: got s3://nowhere/x/run: .*, expected a writable place$"):
        copier.try_to_write(asked)
    assert [one["Name"] for one in bucket().list_buckets()["Buckets"]] == ["backups"], "nothing makes a bucket of a mistyped name"
    copier.try_to_write(config(tmp_path / "run"))
    assert objects("run") == {}
