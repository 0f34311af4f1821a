"""The commands the controller sends to a worker through SGLang's `/update_weights_from_tensor`."""

from __future__ import annotations

import base64
import pickle
from types import SimpleNamespace

import msgspec

from asyncmoe.errors import ProtocolError

LOADER = "asyncmoe.weights.receiver.load"
"""Name of the entry point, for `--custom-weight-loader` and for the `load_format` of a request."""
FAMILY_VARIABLE = "ASYNCMOE_FAMILY"
"""Environment variable of an engine with the user's own model family (`model.family`), the only one whose code its workers import."""


class JoinCommand(msgspec.Struct, frozen=True, tag=True):
    """Start this worker's receiver, which meets the sender as `rank` at `host`:`port`, or in a file
    (`asyncmoe.weights.receiver.hosting.place`)."""

    host: str
    port: int
    group: str
    rank: int


class CommitCommand(msgspec.Struct, frozen=True, tag=True):
    """Have the worker compute with the tensors that update number `update` staged; they must be of `version`."""

    version: int
    update: int


Command = JoinCommand | CommitCommand


def payload(command: Command) -> str:
    """Encode a command as one rank's entry of `serialized_named_tensors`.

    SGLang (0.5.23, `SafeUnpickler` in utils/common.py and `_unwrap_tensor` in model_runner_components/weight_updater.py) takes a pickled
    list of (name, tensor) and requires of a tensor only that `.to(device)` works. The command is the name; in place of the tensor is a
    `SimpleNamespace`, so that the controller needs no torch.
    """
    return base64.b64encode(pickle.dumps([(msgspec.json.encode(command).decode(), SimpleNamespace(to=str))])).decode()


def parse(text: str) -> Command:
    """Decode a command from the name that `payload` put it in.

    Raises:
        ProtocolError: the text is not a command.
    """
    try:
        command: Command = msgspec.json.decode(text, type=Command)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"invalid weight command: {error}") from error
    return command
