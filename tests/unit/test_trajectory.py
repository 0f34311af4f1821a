"""The trajectory's wire format: round trips, and refusal of frames that contradict themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import kept_trajectory
import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kept_trajectory import distinct

from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.plan import disk
from asyncmoe.trajectory import (
    NOT_SAMPLED,
    TOP,
    EncodedMasks,
    Recording,
    Routes,
    Routing,
    Trajectory,
    codec,
    decode,
    decode_routes,
    encode,
    encode_masks,
    encode_routes,
    frames_in,
    part,
    validate,
)
from asyncmoe.trajectory.native import crc32c
from asyncmoe.trajectory.trajectory import ARRAYS, OPTIONAL

DTYPES = {"tokens": "i4", "loss_mask": "?", "logprobs": "f4", "versions": "i4"}
INT32 = np.iinfo(np.int32)
NONE = np.nan
"""No step ends here."""


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 60))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    loss_mask = random.random(length) < 0.5
    return Trajectory(
        key=draw(st.text(max_size=30)),
        group=draw(st.integers(0, 2**63 - 1)),
        episode=draw(st.integers(0, 2**31)),
        tokens=random.integers(INT32.min, INT32.max, length, dtype=np.int32, endpoint=True),
        loss_mask=loss_mask,
        logprobs=random.standard_normal(length).astype(np.float32),
        versions=random.integers(-1, 9, length, dtype=np.int32),
        reward=draw(st.floats(allow_nan=False)),
        finish=draw(st.sampled_from(["stop", "length"])),
        prefix_version=draw(st.integers(-1, 9)),
        agent=draw(st.integers(0, 3)),
        attempt=draw(st.integers(0, 3)),
        seconds=draw(st.dictionaries(st.text(max_size=5), st.floats(0, 9), max_size=3)),
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3)),
        routes=record_routes(random, length - 1) if draw(st.booleans()) else None,
        masks=record_masks(random, length) if draw(st.booleans()) else None,
        top=top_of(*-random.random((loss_mask.sum(), 3))) if draw(st.booleans()) and loss_mask.any() else None,
        rewards=step_rewards(random, length) if draw(st.booleans()) else None,
        teacher=random.standard_normal(length).astype(np.float32) if draw(st.booleans()) else None,
    )


def top_of(*rows: Any) -> np.ndarray:
    """Of tokens with these log-probabilities of the ids 7, 8, ..."""
    return np.array([[(value, id) for id, value in enumerate(row, 7)] for row in rows], TOP)


def step_rewards(random: np.random.Generator, length: int) -> np.ndarray:
    return np.where(random.random(length) < 0.3, random.standard_normal(length), np.nan).astype(np.float32)


ROUTING = Routing(all_layers=3, layers=(1, 2), top_k=2, experts=5)


def record_routes(random: np.random.Generator, rows: int) -> Routes:
    return encode_routes(distinct(random, rows, 3, 2, 5), ROUTING, "t")


def record_masks(random: np.random.Generator, rows: int) -> EncodedMasks:
    return masks_of([sorted(random.choice(9, n, replace=False).tolist()) for n in random.integers(0, 4, rows)])


def make(**changes: Any) -> Trajectory:
    return dataclasses.replace(kept_trajectory.sampled([5, 6, 7, 8], np.array([0, 0, 1, 1], bool), -0.5), **changes)


def masks_of(rows: list[list[int]], vocabulary: int = 9) -> EncodedMasks:
    return encode_masks(kept_trajectory.masks_of(rows, vocabulary), "t")


def routes_of(rows: int, routing: Routing = ROUTING) -> Routes:
    return encode_routes(distinct(np.random.default_rng(0), rows, routing.all_layers, routing.top_k, routing.experts), routing, "t")


def same(a: Trajectory, b: Trajectory) -> bool:
    pairs = ((getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Trajectory))
    return all(x.tobytes() == y.tobytes() and x.dtype == y.dtype if isinstance(x, np.ndarray) else x == y for x, y in pairs)


@settings(deadline=None)
@given(trajectories())
def test_a_plan_knows_the_bytes_of_a_token(t: Trajectory) -> None:
    kept = {"rewards": t.rewards is not None, "teacher": t.teacher is not None, "top": 0 if t.top is None else 3}
    asked = Recording(None if t.routes is None else ROUTING, t.masks is not None, 9, **kept)
    nbytes, most = sum(memoryview(frame).nbytes for frame in encode(t)[1:]), disk.token_bytes(asked, 3)
    assert nbytes <= len(t) * most + 16
    if t.top is None and t.masks is None:
        assert nbytes > len(t) * (most - 1) - 4


@settings(deadline=None)
@given(trajectories())
def test_round_trip(trajectory: Trajectory) -> None:
    frames = encode(trajectory)
    assert len(frames) == frames_in(1)
    back = decode([bytes(f) for f in frames])
    assert same(trajectory, back)
    assert not back.tokens.flags.writeable


@settings(deadline=None)
@given(trajectories(), st.integers(1, frames_in(1) - 1), st.data())
def test_any_changed_array_byte_is_refused(trajectory: Trajectory, which: int, data: st.DataObject) -> None:
    frames = [bytearray(f) for f in encode(trajectory)]
    assume(frames[which])
    at = data.draw(st.integers(0, len(frames[which]) - 1))
    frames[which][at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError):
        decode(frames)


@settings(deadline=None)
@given(trajectories(), st.integers(0, frames_in(1) - 1), st.integers(-3, 3).filter(bool))
def test_any_changed_frame_length_is_refused(trajectory: Trajectory, which: int, by: int) -> None:
    frames = [bytes(f) for f in encode(trajectory)]
    assume(by > 0 or frames[which])
    frames[which] = frames[which][:by] if by < 0 else frames[which] + b"\0" * by
    with pytest.raises(ProtocolError):
        decode(frames)


@settings(deadline=None)
@given(trajectories(), st.data())
def test_a_changed_header_is_refused_or_still_a_trajectory(trajectory: Trajectory, data: st.DataObject) -> None:
    frames = [bytearray(f) for f in encode(trajectory)]
    for _ in range(data.draw(st.integers(1, 5))):
        frames[0][data.draw(st.integers(0, len(frames[0]) - 1))] = data.draw(st.integers(0, 255))
    try:
        back = decode(frames)
    except ProtocolError:
        return
    optional = [len(x) for x in (back.rewards, back.teacher) if x is not None]
    assert len({len(back.tokens), len(back.loss_mask), len(back.logprobs), len(back.versions), *optional}) == 1


def lie(change: dict[str, Any], **arrays: dict[str, Any]) -> list[Any]:
    """Frames of a good trajectory with a changed header."""
    frames = encode(whole())
    header = msgspec.msgpack.decode(frames[0])
    header |= change
    for spec in header["arrays"]:
        spec |= arrays.get(spec["name"], {})
    return [msgspec.msgpack.encode(header), *frames[1:]]


def whole() -> Trajectory:
    return make(rewards=np.array([NONE, NONE, NONE, 1], np.float32), teacher=np.array([0, 0, -1, -2], np.float32))


def unnamed(name: str) -> list[Any]:
    """Frames of a good trajectory whose header omits an array, with a corrected digest."""
    return rewritten(whole(), lambda arrays: [spec for spec in arrays if spec["name"] != name], without=name)


def named_without_bytes() -> list[Any]:
    """The header of a good one with a teacher before the frames of one without."""
    return [encode(make(teacher=np.zeros(4, np.float32)))[0], *encode(make())[1:]]


def rewritten(
    trajectory: Trajectory, change: Callable[[list[Any]], list[Any]], without: str = "", replaced: dict[int, bytes] | None = None
) -> list[Any]:
    """Frames with other arrays in the header and other contents, and the right digest."""
    frames: list[Any] = encode(trajectory)
    for number, content in (replaced or {}).items():
        frames[number] = content
    header, *others = frames
    digest = 0
    for name, frame in zip((*ARRAYS, *OPTIONAL), others, strict=False):
        digest = digest if name == without else crc32c(frame, digest)
    values = msgspec.msgpack.decode(header)
    return [msgspec.msgpack.encode(values | {"arrays": change(values["arrays"]), "digest": digest}), *others]


LIES = [
    lie({"digest": 1}),
    lie({"arrays": []}),
    lie({"more": 1}),
    lie({"group": "0"}),
    lie({}, tokens={"dtype": ">i4"}),
    lie({}, tokens={"shape": [3]}),
    lie({}, **{name: {"shape": [1 << 40]} for name in (*ARRAYS, *OPTIONAL)}),
    lie({}, tokens={"shape": [4, 1]}),
    lie({}, tokens={"shape": [0]}),
    lie({}, rewards={"dtype": "<f8"}),
    lie({}, teacher={"shape": [5]}),
    unnamed("rewards"),
    unnamed("teacher"),
    named_without_bytes(),
    encode(make())[:-1],
    [*encode(make()), b""],
    [b"", *encode(make())[1:]],
    [b"\x91" * 60_000, *encode(make())[1:]],
    [bytes(encode(make())[0]).replace(b"g0.e0", b"g0\xff\xfe0"), *encode(make())[1:]],
]


@pytest.mark.parametrize("frames", LIES)
def test_a_header_that_lies_is_refused(frames: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="trajectory"):
        decode(frames)


@pytest.mark.parametrize(("bound", "least"), [("MAX_TOKENS", 4), ("MAX_HEADER_BYTES", len(encode(make())[0]))])
def test_bounds_are_inclusive(bound: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, bound, least)
    assert same(decode(encode(make())), make())
    monkeypatch.setattr(codec, bound, least - 1)
    with pytest.raises(ProtocolError):
        decode(encode(make()))


def shorter(arrays: list[Any]) -> list[Any]:
    return [{**spec, "shape": [3]} if spec["name"] == "logprobs" else spec for spec in arrays]


@pytest.mark.parametrize(
    ("frame", "content", "change"),
    [(3, np.zeros(3, np.float32).tobytes(), shorter), (2, bytes([0, 0, 2, 1]), list)],
    ids=["arrays of different lengths", "truth values other than 0 and 1"],
)
def test_what_is_wrong_although_the_digest_is_right_is_refused(frame: int, content: bytes, change: Any) -> None:
    with pytest.raises(ProtocolError, match=r"equal ones|bool"):
        decode(rewritten(make(), change, replaced={frame: content}))


def sampled(values: list[Any], dtype: str) -> np.ndarray:
    return np.array(values, dtype)


PLANES = bytes(routes_of(3).planes)
FLIPPED = dataclasses.replace(routes_of(3), planes=PLANES[:-1] + bytes([PLANES[-1] ^ 1]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": sampled([5, 6, 7], "i4")}, "length_mismatch"),
        ({name: sampled([[1], [1]], dtype) for name, dtype in DTYPES.items()}, "length_mismatch"),
        ({"logprobs": sampled([0, 0, -1, -1], "f8")}, "bad_dtype"),
        ({"loss_mask": sampled([0, 0, 0, 0], "?"), "versions": sampled([-1] * 4, "i4")}, "empty_response"),
        ({"tokens": sampled([5, 6, 7, 9], "i4")}, "token_out_of_vocabulary"),
        ({"tokens": sampled([5, -1, 7, 8], "i4")}, "token_out_of_vocabulary"),
        ({"logprobs": sampled([0, 0, np.nan, -1], "f4")}, "bad_logprob"),
        ({"logprobs": sampled([0, 0, 0.5, -1], "f4")}, "bad_logprob"),
        ({"reward": float("nan")}, "bad_reward"),
        ({"rewards": sampled([NONE, NONE, 1], "f4")}, "length_mismatch"),
        ({"rewards": sampled([NONE, NONE, np.inf, 2], "f4")}, "bad_reward"),
        ({"rewards": sampled([NONE, 0, 1, 2], "f4")}, "bad_reward"),
        ({"teacher": sampled([0, 0, -1, -1], "f8")}, "bad_dtype"),
        ({"teacher": sampled([0, 0, -1, 0.01], "f4")}, "bad_teacher"),
        ({"teacher": sampled([0, 0, np.nan, -1], "f4")}, "bad_teacher"),
        ({"teacher": sampled([-1, 0, -1, -1], "f4")}, "bad_teacher"),
        ({"versions": sampled([3, -1, 3, 3], "i4")}, "bad_version"),
        ({"versions": sampled([-1, -1, 3, -1], "i4")}, "bad_version"),
        ({"routes": routes_of(4)}, "length_mismatch"),
        ({"routes": routes_of(2)}, "length_mismatch"),
        ({"routes": routes_of(3, dataclasses.replace(ROUTING, layers=(0, 1, 2)))}, "routes_wrong_layers"),
        ({"routes": routes_of(3, dataclasses.replace(ROUTING, layers=(0, 2)))}, "routes_wrong_layers"),
        ({"routes": routes_of(3, dataclasses.replace(ROUTING, experts=6))}, "routes_wrong_layers"),
        ({"routes": FLIPPED}, "damaged_record"),
        ({"masks": masks_of([[], [], [7]])}, "length_mismatch"),
        ({"masks": masks_of([[], [], [7], [8]], vocabulary=10)}, "bad_mask"),
        ({"masks": masks_of([[], [6], [7], [8]])}, "bad_mask"),
        ({"masks": masks_of([[], [], [7], [1, 2]])}, "mask_without_token"),
        ({"masks": dataclasses.replace(masks_of([[], [], [7], [8]]), ids=3)}, "damaged_record"),
        ({"top": top_of([-1.0])}, "length_mismatch"),
        ({"top": top_of([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0])}, "bad_top"),
        *(({"top": top_of([-1.0], [wrong])}, "bad_top") for wrong in (0.5, np.nan)),
        ({"versions": sampled([-1, -1, 3, 4], "i4")}, "version_from_future"),
    ],
)
def test_validate_names_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TrajectoryRejected, match=r"g0\.e0") as caught:
        validate(make(**{"routes": routes_of(3)} | changes), Recording(ROUTING, vocabulary=9), newest_version=3)
    assert caught.value.reason == reason


DEMONSTRATION: dict[str, Any] = {"versions": np.full(4, NOT_SAMPLED, np.int32), "logprobs": np.zeros(4, np.float32)}


def test_validate_takes_a_good_one_and_a_demonstration() -> None:
    zero = make(rewards=sampled([NONE, NONE, 0, -2], "f4"), teacher=sampled([0, 0, 0, 5e-5], "f4"))
    for good in (make(), whole(), zero, make(**DEMONSTRATION)):
        validate(good, Recording(vocabulary=9))
    right = make(routes=routes_of(3), masks=masks_of([[], [], [], [1, 8]]))
    validate(right, Recording(ROUTING, vocabulary=9), newest_version=3)
    validate(right)
    assert make(**DEMONSTRATION).oldest_version == NOT_SAMPLED
    assert not make(**DEMONSTRATION).is_pure
    with pytest.raises(TrajectoryRejected, match="token_out_of_vocabulary"):
        validate(make(tokens=sampled([5, -1, 7, 8], "i4")))


def test_oldest_version_and_purity() -> None:
    mixed = make(versions=sampled([-1, -1, 3, 2], "i4"), prefix_version=3)
    assert (mixed.oldest_version, mixed.is_pure) == (2, False)
    assert make(prefix_version=3).is_pure
    assert not make(prefix_version=2).is_pure
    assert not make().is_pure


TOPS = top_of([-0.5, -2.0], [-0.1, -np.inf])
KEPT = {"top": TOPS, "routes": routes_of(3), "masks": masks_of([[], [], [7], [8]]), "rewards": whole().rewards, "teacher": whole().teacher}
RECORDED = Recording(ROUTING, masks=True, vocabulary=9, top=2)


@pytest.mark.parametrize(
    ("needs", "changes", "reason"),
    [
        (RECORDED, {"routes": None}, "no_routes"),
        (RECORDED, {"masks": None}, "no_mask"),
        (RECORDED, {"masks": masks_of([[], [], [7], []])}, "no_mask"),
        (RECORDED, {"top": None}, "no_top"),
        (RECORDED, {"top": TOPS[:, :1]}, "length_mismatch"),
        (Recording(rewards=True), {"rewards": None}, "no_step_rewards"),
        (Recording(rewards=True), {"rewards": sampled([NONE] * 4, "f4")}, "no_step_rewards"),
        (Recording(teacher=True), {"teacher": None}, "no_teacher"),
    ],
)
def test_what_is_needed_is_demanded_of_what_was_sampled(needs: Recording, changes: dict[str, Any], reason: str) -> None:
    validate(make(**KEPT), needs)
    validate(make(**KEPT | changes))
    validate(make(**DEMONSTRATION), needs)
    with pytest.raises(TrajectoryRejected, match=r"g0\.e0") as caught:
        validate(make(**KEPT | changes), needs)
    assert caught.value.reason == reason


def test_a_part_of_what_was_recorded_travels_alone() -> None:
    routing = Routing(all_layers=5, layers=(0, 1, 3, 4), top_k=2, experts=5)
    random = distinct(np.random.default_rng(0), 3, 5, 2, 5)
    whole = make(routes=encode_routes(random, routing, "t"), masks=masks_of([[], [], [7], [8]]), top=TOPS)
    frames = encode(whole)
    for layers in ((), (0,), (1, 3), (0, 4), (0, 1, 3, 4)):
        got = decode(part(frames, layers, masks=False))
        assert got.masks is got.top is None
        assert got.routes.layers == layers
        np.testing.assert_array_equal(decode_routes(got.routes, "t"), random[:, list(layers)].transpose(1, 0, 2))
        np.testing.assert_array_equal(got.tokens, whole.tokens)
    assert sum(memoryview(f).nbytes for f in part(frames, (3, 4))[8:9]) * 2 == sum(memoryview(f).nbytes for f in frames[8:9])
    again = decode(part(frames))
    assert again.routes is not None
    assert again.masks is not None
    assert again.top.tobytes() == TOPS.tobytes()
    assert decode(part(encode(make()), (0,))).routes is None
    for wrong in ((2,), (1, 0), (1, 1)):
        with pytest.raises(ProtocolError, match="to send, expected some of"):
            part(frames, wrong)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        *(("routes", change) for change in ({"rows": 2}, {"layers": [1, 3]}, {"digests": [1, 2]}, {"experts": 2**62}, {"more": 1})),
        *(("top", change) for change in ({"rows": 1}, {"width": 1}, {"rows": -2, "width": -2}, {"digest": -1})),
        *(("masks", change) for change in ({"rows": 3}, {"ids": 3}, {"vocabulary": 8}, {"digest": -1})),
    ],
)
def test_a_header_that_lies_about_a_record_is_refused(part: str, change: dict[str, Any]) -> None:
    """All that may be wrong: test_record_routes.py, test_record_masks.py."""
    frames = encode(make(routes=routes_of(3), masks=masks_of([[], [], [7], [8]]), top=TOPS))
    header = msgspec.msgpack.decode(frames[0])
    header[part] |= change
    with pytest.raises(ProtocolError, match=r"g0\.e0|header"):
        decode([msgspec.msgpack.encode(header), *frames[1:]])


LONGER = {name: np.append(getattr(make(), name), getattr(make(), name)[-1:]) for name in ARRAYS}


@pytest.mark.parametrize(
    ("longer", "part", "frame"),
    [(make(**LONGER, routes=routes_of(4)), "routes", 8), (make(**LONGER, masks=masks_of([[]] * 5)), "masks", 9)],
)
def test_a_whole_record_of_another_trajectory_is_refused(longer: Trajectory, part: str, frame: int) -> None:
    frames, others = encode(make()), encode(longer)
    header = msgspec.msgpack.decode(frames[0]) | {part: msgspec.msgpack.decode(others[0])[part]}
    frames[0], frames[frame] = msgspec.msgpack.encode(header), others[frame]
    with pytest.raises(ProtocolError, match=f"got {part} of"):
        decode(frames)
