"""Encoded records of how an engine sampled each token: the chosen experts (routes) and the candidate ids (masks).

Depends only on `asyncmoe.errors` and NumPy; csrc/record does the packing.
"""

from asyncmoe.record.base64 import decode_base64
from asyncmoe.record.masks import EncodedMasks, Masks, decode_masks, encode_masks, token_outside
from asyncmoe.record.recording import NOTHING, Recording
from asyncmoe.record.routes import Routes, Routing, decode_routes, encode_routes

__all__ = [
    "NOTHING",
    "EncodedMasks",
    "Masks",
    "Recording",
    "Routes",
    "Routing",
    "decode_base64",
    "decode_masks",
    "decode_routes",
    "encode_masks",
    "encode_routes",
    "token_outside",
]
