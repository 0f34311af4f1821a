"""The record of one agent's conversation in an episode: its type, wire format and validity, and the encoded routes and masks in it.

Depends only on `asyncmoe.errors`, NumPy and msgspec; csrc/trajectory packs routes and masks.
"""

from asyncmoe.trajectory.codec import decode, encode, frames_in, part
from asyncmoe.trajectory.masks import EncodedMasks, Masks, decode_masks, encode_masks
from asyncmoe.trajectory.native import Buffer
from asyncmoe.trajectory.routes import Routes, Routing, decode_routes, encode_routes, expect_valid
from asyncmoe.trajectory.trajectory import NOT_SAMPLED, NOTHING, TOP, Recording, Trajectory
from asyncmoe.trajectory.validation import validate

__all__ = [
    "NOTHING",
    "NOT_SAMPLED",
    "TOP",
    "Buffer",
    "EncodedMasks",
    "Masks",
    "Recording",
    "Routes",
    "Routing",
    "Trajectory",
    "decode",
    "decode_masks",
    "decode_routes",
    "encode",
    "encode_masks",
    "encode_routes",
    "expect_valid",
    "frames_in",
    "part",
    "validate",
]
