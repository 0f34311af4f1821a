"""Move tensors between two shardings: layouts, plans, and the exchange that executes a plan. Needs only NumPy."""

from asyncmoe.reshard.bucket import Bucket, buckets
from asyncmoe.reshard.delta_decoder import DeltaDecoder
from asyncmoe.reshard.delta_encoder import DeltaEncoder, DeltaSize
from asyncmoe.reshard.exchange import Exchanger, exchange
from asyncmoe.reshard.layout import PADDING, Box, LayoutBuilder, Piece, RankLayout, Storage
from asyncmoe.reshard.memory import digest
from asyncmoe.reshard.moved import Moved
from asyncmoe.reshard.plan import Plan, Transfer, plan, plan_each
from asyncmoe.reshard.transport import LocalTransport, SharedTransport, Transport

__all__ = [
    "PADDING",
    "Box",
    "Bucket",
    "DeltaDecoder",
    "DeltaEncoder",
    "DeltaSize",
    "Exchanger",
    "LayoutBuilder",
    "LocalTransport",
    "Moved",
    "Piece",
    "Plan",
    "RankLayout",
    "SharedTransport",
    "Storage",
    "Transfer",
    "Transport",
    "buckets",
    "digest",
    "exchange",
    "plan",
    "plan_each",
]
