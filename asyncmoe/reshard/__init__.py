"""Moving tensors between two shardings: layouts, plans, and the exchange that carries a plan out. Needs only NumPy."""

from asyncmoe.reshard.bucket import Bucket, buckets
from asyncmoe.reshard.exchange import LocalTransport, Transport, exchange
from asyncmoe.reshard.layout import PADDING, Box, LayoutBuilder, Piece, RankLayout, Storage
from asyncmoe.reshard.memory import digest
from asyncmoe.reshard.plan import Plan, Transfer, plan, plan_each
from asyncmoe.reshard.relay import relay

__all__ = [
    "PADDING",
    "Box",
    "Bucket",
    "LayoutBuilder",
    "LocalTransport",
    "Piece",
    "Plan",
    "RankLayout",
    "Storage",
    "Transfer",
    "Transport",
    "buckets",
    "digest",
    "exchange",
    "plan",
    "plan_each",
    "relay",
]
