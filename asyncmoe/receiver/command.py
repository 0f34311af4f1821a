"""What the controller tells a worker through SGLang's `/update_weights_from_tensor`."""

from __future__ import annotations

import base64
import pickle
from types import SimpleNamespace

import msgspec

from asyncmoe.errors import ProtocolError

LOADER = "asyncmoe.receiver.load"
"""Name of the entry point, for `--custom-weight-loader` and as the `load_format` of a call."""


class JoinCommand(msgspec.Struct, frozen=True, tag=True):
    """Start the receiver of this worker; it meets the sender at `host`:`port` as `rank`."""

    host: str
    port: int
    group: str
    rank: int


class CommitCommand(msgspec.Struct, frozen=True, tag=True):
    """Make what update number `update` has staged the parameters, if it is `version`."""

    version: int
    update: int


Command = JoinCommand | CommitCommand


def payload(command: Command) -> str:
    """A command as one rank's entry of `serialized_named_tensors`.

    SGLang (0.5.23, `SafeUnpickler` in utils/common.py and `_unwrap_tensor` in model_runner_components/weight_updater.py) takes a pickled
    list of (name, tensor) and asks of a tensor only that `.to(device)` works. The command is the name; in the tensor's place
    is a namespace of the standard library, so that the controller needs no torch.
    """
    return base64.b64encode(pickle.dumps([(msgspec.json.encode(command).decode(), SimpleNamespace(to=str))])).decode()


def parse(text: str) -> Command:
    """The inverse, of the name.

    Raises:
        ProtocolError: not a command.
    """
    try:
        command: Command = msgspec.json.decode(text, type=Command)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a weight command: {error}") from error
    return command
