"""The trajectory's wire form: what goes in comes out, and nothing that lies comes in."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kept_trajectory import distinct

from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.trajectory import (
    ARRAYS,
    NOT_SAMPLED,
    OPTIONAL,
    EncodedMasks,
    Limits,
    Masks,
    Recording,
    Routes,
    Routing,
    Trajectory,
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

INT32 = np.iinfo(np.int32)
NONE = np.nan
"""No step ends here."""


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 60))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Trajectory(
        key=draw(st.text(max_size=30)),
        group=draw(st.integers(0, 2**63 - 1)),
        episode=draw(st.integers(0, 2**31)),
        tokens=random.integers(INT32.min, INT32.max, length, dtype=np.int32, endpoint=True),
        loss_mask=random.random(length) < 0.5,
        logprobs=random.standard_normal(length).astype(np.float32),
        versions=random.integers(-1, 9, length, dtype=np.int32),
        reward=draw(st.floats(allow_nan=False)),
        finish=draw(st.sampled_from(["stop", "length"])),
        prefix_version=draw(st.integers(-1, 9)),
        agent=draw(st.integers(0, 3)),
        attempt=draw(st.integers(0, 3)),
        seconds=draw(st.dictionaries(st.text(max_size=5), st.floats(0, 9), max_size=3)),
        routes=record_routes(random, length - 1) if draw(st.booleans()) else None,
        masks=record_masks(random, length) if draw(st.booleans()) else None,
        rewards=step_rewards(random, length) if draw(st.booleans()) else None,
        teacher=random.standard_normal(length).astype(np.float32) if draw(st.booleans()) else None,
    )


def step_rewards(random: np.random.Generator, length: int) -> np.ndarray:
    return np.where(random.random(length) < 0.3, random.standard_normal(length), np.nan).astype(np.float32)


ROUTING = Routing(all_layers=3, layers=(1, 2), top_k=2, experts=5)


def record_routes(random: np.random.Generator, rows: int) -> Routes:
    return encode_routes(distinct(random, rows, 3, 2, 5), ROUTING, "t")


def record_masks(random: np.random.Generator, rows: int) -> EncodedMasks:
    counts = random.integers(0, 4, rows)
    ids = [np.sort(random.choice(9, n, replace=False)) for n in counts]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return encode_masks(Masks(offsets, np.concatenate(ids).astype(np.int32), 9), "t")


def make(**changes: Any) -> Trajectory:
    mask = np.array([0, 0, 1, 1], bool)
    values: dict[str, Any] = {
        "key": "g0.e0",
        "group": 0,
        "episode": 0,
        "tokens": np.array([5, 6, 7, 8], np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, -0.5, 0).astype(np.float32),
        "versions": np.where(mask, 3, NOT_SAMPLED).astype(np.int32),
        "reward": 1.0,
        "finish": "stop",
    }
    return Trajectory(**(values | changes))


def same(a: Trajectory, b: Trajectory) -> bool:
    pairs = ((getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Trajectory))
    return all(x.tobytes() == y.tobytes() and x.dtype == y.dtype if isinstance(x, np.ndarray) else x == y for x, y in pairs)


@settings(deadline=None)
@given(trajectories())
def test_round_trip(trajectory: Trajectory) -> None:
    frames = encode(trajectory)
    assert len(frames) == frames_in(1)
    back = decode([bytes(f) for f in frames])
    assert same(trajectory, back)
    assert not back.tokens.flags.writeable


def test_contiguous_arrays_are_not_copied_and_others_are() -> None:
    whole = make()
    assert np.shares_memory(np.frombuffer(encode(whole)[1], np.int32), whole.tokens)
    strided = make(tokens=np.array([5, 0, 6, 0, 7, 0, 8, 0], np.int32)[::2])
    assert same(decode(encode(strided)), whole)


def test_writable_frames_give_read_only_arrays() -> None:
    assert not decode([bytearray(f) for f in encode(make())]).logprobs.flags.writeable


@settings(deadline=None)
@given(trajectories(), st.integers(1, 8), st.data())
def test_any_changed_array_byte_is_refused(trajectory: Trajectory, which: int, data: st.DataObject) -> None:
    frames = [bytearray(f) for f in encode(trajectory)]
    assume(frames[which])
    at = data.draw(st.integers(0, len(frames[which]) - 1))
    frames[which][at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError):
        decode(frames)


@settings(deadline=None)
@given(trajectories(), st.integers(0, 8), st.integers(-3, 3).filter(bool))
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


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=9, max_size=9))
def test_noise_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 10])
def test_frame_count(count: int) -> None:
    frames = (encode(make()) * 2)[:count]
    with pytest.raises(ProtocolError, match=f"got {count} frames, expected 9"):
        decode(frames)


def lie(change: dict[str, Any], **arrays: dict[str, Any]) -> list[Any]:
    """Frames of a good trajectory whose header says something else."""
    frames = encode(whole())
    header = msgspec.msgpack.decode(frames[0])
    header |= change
    for spec in header["arrays"]:
        spec |= arrays.get(spec["name"], {})
    return [msgspec.msgpack.encode(header), *frames[1:]]


def whole() -> Trajectory:
    return make(rewards=np.array([NONE, NONE, NONE, 1], np.float32), teacher=np.array([0, 0, -1, -2], np.float32))


def unnamed(name: str) -> list[Any]:
    """Frames of a good trajectory whose header keeps quiet about an array, its digest put right."""
    return rewritten(whole(), lambda arrays: [spec for spec in arrays if spec["name"] != name], without=name)


def twice(name: str) -> list[Any]:
    return rewritten(whole(), lambda arrays: [*arrays, arrays[[spec["name"] for spec in arrays].index(name)]])


def named_without_bytes() -> list[Any]:
    """The header of a good one with a teacher before the frames of one without."""
    return [encode(make(teacher=np.zeros(4, np.float32)))[0], *encode(make())[1:]]


def rewritten(trajectory: Trajectory, change: Callable[[list[Any]], list[Any]], without: str = "") -> list[Any]:
    header, *frames = encode(trajectory)
    digest = 0
    for name, frame in zip((*ARRAYS, *OPTIONAL), frames, strict=False):
        digest = digest if name == without else crc32c(frame, digest)
    values = msgspec.msgpack.decode(header)
    return [msgspec.msgpack.encode(values | {"arrays": change(values["arrays"]), "digest": digest}), *frames]


@pytest.mark.parametrize(
    "frames",
    [
        lie({"digest": 1}),
        lie({"arrays": []}),
        lie({"more": 1}),
        lie({"group": "0"}),
        lie({"reward": "1"}),
        lie({"key": None}),
        lie({}, tokens={"dtype": ">i4"}),
        lie({}, tokens={"dtype": "|O"}),
        lie({}, tokens={"name": "logprobs"}),
        lie({}, tokens={"shape": [3]}),
        lie({}, tokens={"shape": [4, 1]}),
        lie({}, tokens={"shape": [True]}),
        lie({}, tokens={"shape": [2**64 - 1]}),
        lie({}, tokens={"shape": [0]}),
        lie({}, rewards={"name": "teacher"}),
        lie({}, rewards={"dtype": "<f8"}),
        lie({}, teacher={"shape": [5]}),
        unnamed("rewards"),
        unnamed("teacher"),
        twice("teacher"),
        named_without_bytes(),
        [encode(make())[0][:-3], *encode(make())[1:]],
        [b"", *encode(make())[1:]],
        [b"\x91" * 60_000, *encode(make())[1:]],
        [b"\xdd\xff\xff\xff\xff", *encode(make())[1:]],
        [bytes(encode(make())[0]).replace(b"g0.e0", b"g0\xff\xfe0"), *encode(make())[1:]],
    ],
)
def test_a_header_that_lies_is_refused(frames: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="trajectory"):
        decode(frames)


def test_huge_counts_are_refused_before_anything_is_allocated() -> None:
    wide = {name: {"shape": [1 << 40]} for name in (*ARRAYS, *OPTIONAL)}
    hostile = [lie({}, **wide), [b"\x91\xdd\xff\xff\xff\xff", *encode(make())[1:]], [b"\0" * (1 << 17), *encode(make())[1:]]]
    tracemalloc.start()
    try:
        for frames in hostile:
            with pytest.raises(ProtocolError):
                decode(frames)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_limits_are_enforced() -> None:
    with pytest.raises(ProtocolError, match="T <= 3"):
        decode(encode(make()), Limits(max_tokens=3))
    with pytest.raises(ProtocolError, match="expected at most 10"):
        decode(encode(make()), Limits(max_header_bytes=10))


def test_arrays_of_different_lengths_are_refused_even_when_the_digest_is_right() -> None:
    frames = encode(make())
    header = msgspec.msgpack.decode(frames[0])
    header["arrays"][2]["shape"] = [3]
    frames[3] = frames[3][:12]
    digest = 0
    for frame in frames[1:]:
        digest = crc32c(frame, digest)
    with pytest.raises(ProtocolError, match="expected one length"):
        decode([msgspec.msgpack.encode(header | {"digest": digest}), *frames[1:]])


def test_truth_values_other_than_0_and_1_are_refused() -> None:
    frames = encode(make())
    frames[2] = bytes([0, 0, 2, 1])
    digest = 0
    for frame in frames[1:]:
        digest = crc32c(frame, digest)
    header = msgspec.msgpack.decode(frames[0]) | {"digest": digest}
    with pytest.raises(ProtocolError, match="invalid bool bytes"):
        decode([msgspec.msgpack.encode(header), *frames[1:]])


@pytest.mark.parametrize(
    "bad",
    [
        make(tokens=np.array([5, 6, 7, 2**40])),
        make(tokens=np.array([5, 6, 7], np.int32)),
        make(tokens=np.array([[5, 6], [7, 8]], np.int32)),
        make(loss_mask=np.array([0, 0, 1, 1])),
        make(logprobs=np.zeros(4)),
        make(rewards=np.zeros(4)),
        make(rewards=np.zeros(3, np.float32)),
        make(teacher=np.zeros(5, np.float32)),
        make(teacher=np.zeros(4, np.int32)),
        make(**{n: np.zeros(0, d) for n, d in (("tokens", "i4"), ("loss_mask", "?"), ("logprobs", "f4"), ("versions", "i4"))}),
    ],
)
def test_encode_refuses_what_no_decoder_would_take_rather_than_cast(bad: Trajectory) -> None:
    with pytest.raises(ProtocolError, match=r"trajectory g0\.e0"):
        encode(bad)


def sampled(values: list[Any], dtype: str) -> np.ndarray:
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": sampled([5, 6, 7], "i4")}, "length_mismatch"),
        (
            {n: sampled([[1], [1]], d) for n, d in (("tokens", "i4"), ("loss_mask", "?"), ("logprobs", "f4"), ("versions", "i4"))},
            "length_mismatch",
        ),
        ({"tokens": sampled([5, 6, 7, 8], "i8")}, "bad_dtype"),
        ({"loss_mask": sampled([0, 0, 1, 1], "i4")}, "bad_dtype"),
        ({"logprobs": sampled([0, 0, -1, -1], "f8")}, "bad_dtype"),
        ({"loss_mask": sampled([0, 0, 0, 0], "?"), "versions": sampled([-1] * 4, "i4")}, "empty_response"),
        ({"tokens": sampled([5, 6, 7, 9], "i4")}, "token_out_of_vocabulary"),
        ({"tokens": sampled([5, -1, 7, 8], "i4")}, "token_out_of_vocabulary"),
        ({"logprobs": sampled([0, 0, np.nan, -1], "f4")}, "bad_logprob"),
        ({"logprobs": sampled([0, 0, 0.5, -1], "f4")}, "bad_logprob"),
        ({"reward": float("nan")}, "bad_reward"),
        ({"rewards": sampled([NONE, NONE, 1], "f4")}, "length_mismatch"),
        ({"rewards": sampled([[NONE], [NONE], [1], [2]], "f4")}, "length_mismatch"),
        ({"rewards": sampled([NONE, NONE, 1, 2], "f8")}, "bad_dtype"),
        ({"rewards": sampled([NONE, NONE, np.inf, 2], "f4")}, "bad_reward"),
        ({"rewards": sampled([NONE, 0, 1, 2], "f4")}, "bad_reward"),
        ({"teacher": sampled([0, 0, -1], "f4")}, "length_mismatch"),
        ({"teacher": sampled([0, 0, -1, -1], "f8")}, "bad_dtype"),
        ({"teacher": sampled([0, 0, -1, 0.01], "f4")}, "bad_teacher"),
        ({"teacher": sampled([0, 0, np.nan, -1], "f4")}, "bad_teacher"),
        ({"teacher": sampled([-1, 0, -1, -1], "f4")}, "bad_teacher"),
        ({"versions": sampled([3, -1, 3, 3], "i4")}, "bad_version"),
        ({"versions": sampled([-1, -1, 3, -1], "i4")}, "bad_version"),
    ],
)
def test_validate_names_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TrajectoryRejected) as caught:
        validate(make(**changes), Recording(vocabulary=9))
    assert caught.value.reason == reason
    assert "g0.e0" in str(caught.value)


def test_validate_takes_a_good_one_and_a_demonstration() -> None:
    validate(make(), Recording(vocabulary=9))
    validate(whole(), Recording(vocabulary=9))
    validate(make(rewards=sampled([NONE, NONE, 0, -2], "f4"), teacher=sampled([0, 0, 0, 5e-5], "f4")))
    demonstration = make(versions=np.full(4, NOT_SAMPLED, np.int32), logprobs=np.zeros(4, np.float32))
    validate(demonstration, Recording(vocabulary=9))
    assert demonstration.oldest_version == NOT_SAMPLED
    assert not demonstration.is_pure


def test_a_negative_token_is_refused_without_a_vocabulary() -> None:
    with pytest.raises(TrajectoryRejected, match="token_out_of_vocabulary"):
        validate(make(tokens=sampled([5, -1, 7, 8], "i4")))


def test_oldest_version_and_purity() -> None:
    mixed = make(versions=sampled([-1, -1, 3, 2], "i4"), prefix_version=3)
    assert (mixed.oldest_version, mixed.is_pure) == (2, False)
    assert make(prefix_version=3).is_pure
    assert not make(prefix_version=2).is_pure
    assert not make().is_pure


def masks_of(rows: list[list[int]], vocabulary: int = 9) -> EncodedMasks:
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return encode_masks(Masks(offsets, np.array([i for row in rows for i in row], np.int32), vocabulary), "t")


def routes_of(rows: int, routing: Routing = ROUTING) -> Routes:
    return encode_routes(distinct(np.random.default_rng(0), rows, routing.all_layers, routing.top_k, routing.experts), routing, "t")


PLANES = bytes(routes_of(3).planes)
FLIPPED = dataclasses.replace(routes_of(3), planes=PLANES[:-1] + bytes([PLANES[-1] ^ 1]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"routes": routes_of(4)}, "length_mismatch"),
        ({"routes": routes_of(3, dataclasses.replace(ROUTING, layers=(0, 1, 2)))}, "routes_wrong_layers"),
        ({"routes": routes_of(3, dataclasses.replace(ROUTING, layers=(0, 2)))}, "routes_wrong_layers"),
        ({"routes": routes_of(3, dataclasses.replace(ROUTING, experts=6))}, "routes_wrong_layers"),
        ({"routes": FLIPPED}, "damaged_record"),
        ({"masks": masks_of([[], [], [7]])}, "length_mismatch"),
        ({"masks": masks_of([[], [], [7], [8]], vocabulary=10)}, "bad_mask"),
        ({"masks": masks_of([[], [6], [7], [8]])}, "bad_mask"),
        ({"masks": masks_of([[], [], [7], [1, 2]])}, "mask_without_token"),
        ({"masks": dataclasses.replace(masks_of([[], [], [7], [8]]), ids=3)}, "damaged_record"),
        ({"versions": sampled([-1, -1, 3, 4], "i4")}, "version_from_future"),
    ],
)
def test_validate_refuses_a_wrong_record_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TrajectoryRejected, match=r"g0\.e0") as caught:
        validate(make(**{"routes": routes_of(3)} | changes), Recording(ROUTING, vocabulary=9), newest_version=3)
    assert caught.value.reason == reason


def test_what_is_to_be_recorded_is_demanded_of_what_was_sampled() -> None:
    routes, masks = routes_of(3), masks_of([[], [], [7], [8]])
    kept = Recording(ROUTING, masks=True, vocabulary=9)
    validate(make(routes=routes, masks=masks), kept)
    for changes, reason in (
        ({"masks": masks}, "no_routes"),
        ({"routes": routes}, "no_mask"),
        ({"routes": routes, "masks": masks_of([[], [], [7], []])}, "no_mask"),
    ):
        with pytest.raises(TrajectoryRejected, match=r"g0\.e0") as caught:
            validate(make(**changes), kept)
        assert caught.value.reason == reason
    validate(make(versions=np.full(4, NOT_SAMPLED, np.int32), logprobs=np.zeros(4, np.float32)), kept)  # a demonstration


@pytest.mark.parametrize(
    ("needs", "changes", "reason"),
    [
        (Recording(rewards=True), {"rewards": None}, "no_step_rewards"),
        (Recording(rewards=True), {"rewards": sampled([NONE] * 4, "f4")}, "no_step_rewards"),
        (Recording(teacher=True), {"teacher": None}, "no_teacher"),
    ],
)
def test_what_the_objective_needs_is_demanded_of_what_was_sampled(needs: Recording, changes: dict[str, Any], reason: str) -> None:
    validate(whole(), needs)
    for nothing in (Recording(), Recording(rewards=reason != "no_step_rewards", teacher=reason != "no_teacher")):
        validate(dataclasses.replace(whole(), **changes), nothing)
    with pytest.raises(TrajectoryRejected, match=r"g0\.e0.*objective\.") as caught:
        validate(dataclasses.replace(whole(), **changes), needs)
    assert caught.value.reason == reason
    validate(make(versions=np.full(4, NOT_SAMPLED, np.int32), logprobs=np.zeros(4, np.float32)), needs)  # a demonstration


def test_a_part_of_what_was_recorded_travels_alone() -> None:
    routing = Routing(all_layers=5, layers=(0, 1, 3, 4), top_k=2, experts=5)
    random = distinct(np.random.default_rng(0), 3, 5, 2, 5)
    whole = make(routes=encode_routes(random, routing, "t"), masks=masks_of([[], [], [7], [8]]))
    frames = encode(whole)
    for layers in ((), (0,), (1, 3), (0, 4), (0, 1, 3, 4)):
        got = decode(part(frames, layers, masks=False))
        assert got.routes is not None
        assert got.masks is None
        assert got.routes.layers == layers
        np.testing.assert_array_equal(decode_routes(got.routes, "t"), random[:, list(layers)].transpose(1, 0, 2))
        np.testing.assert_array_equal(got.tokens, whole.tokens)
    assert sum(memoryview(f).nbytes for f in part(frames, (3, 4))[7:8]) * 2 == sum(memoryview(f).nbytes for f in frames[7:8])
    again = decode(part(frames))
    assert again.routes is not None
    assert again.masks is not None
    assert decode(part(encode(make()), (0,))).routes is None
    for wrong in ((2,), (1, 0), (1, 1)):
        with pytest.raises(ProtocolError, match="to send, expected some of"):
            part(frames, wrong)


def test_validate_takes_a_right_record() -> None:
    whole = make(routes=routes_of(3), masks=masks_of([[], [], [], [1, 8]]))
    validate(whole, Recording(ROUTING, vocabulary=9), newest_version=3)
    validate(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 2},
        {"rows": -1},
        {"rows": 2**62},
        {"layers": [2, 1]},
        {"layers": [1, 3]},
        {"layers": [1]},
        {"layers": [-1, 2]},
        {"layers": [1, 2**40]},
        {"top_k": 0},
        {"top_k": 6},
        {"top_k": 2**62},
        {"experts": 0},
        {"experts": 7},
        {"experts": 2**62},
        {"digests": []},
        {"digests": [1, 2]},
        {"digests": [-1, -1]},
        {"more": 1},
    ],
)
def test_a_header_that_lies_about_routes_is_refused(change: dict[str, Any]) -> None:
    lying(encode(make(routes=routes_of(3))), "routes", change)


@pytest.mark.parametrize(
    "change", [{"rows": 3}, {"rows": 2**62}, {"ids": 3}, {"ids": -1}, {"vocabulary": 8}, {"vocabulary": 0}, {"digest": -1}]
)
def test_a_header_that_lies_about_masks_is_refused(change: dict[str, Any]) -> None:
    lying(encode(make(masks=masks_of([[], [], [7], [8]]))), "masks", change)


def lying(frames: list[Any], part: str, change: dict[str, Any]) -> None:
    header = msgspec.msgpack.decode(frames[0])
    header[part] |= change
    with pytest.raises(ProtocolError, match=r"g0\.e0|header"):
        decode([msgspec.msgpack.encode(header), *frames[1:]])


@pytest.mark.parametrize("frame", [5, 6, 7, 8])
def test_bytes_of_a_record_that_the_header_does_not_name_are_refused(frame: int) -> None:
    frames = encode(make())
    frames[frame] = b"x"
    with pytest.raises(ProtocolError, match="expected none"):
        decode(frames)


@pytest.mark.parametrize("bad", [make(routes=routes_of(4)), make(masks=masks_of([[7]]))])
def test_a_record_of_other_tokens_is_not_encoded(bad: Trajectory) -> None:
    with pytest.raises(ProtocolError, match=r"trajectory g0\.e0 (routes|masks): got \d rows"):
        encode(bad)


@pytest.mark.parametrize(
    ("longer", "part", "frame"),
    [
        (make(**{n: np.append(getattr(make(), n), getattr(make(), n)[-1:]) for n in ARRAYS}, routes=routes_of(4)), "routes", 7),
        (make(**{n: np.append(getattr(make(), n), getattr(make(), n)[-1:]) for n in ARRAYS}, masks=masks_of([[]] * 5)), "masks", 8),
    ],
)
def test_a_whole_record_of_another_trajectory_is_refused(longer: Trajectory, part: str, frame: int) -> None:
    frames, others = encode(make()), encode(longer)
    header = msgspec.msgpack.decode(frames[0]) | {part: msgspec.msgpack.decode(others[0])[part]}
    frames[0], frames[frame] = msgspec.msgpack.encode(header), others[frame]
    with pytest.raises(ProtocolError, match=f"got {part} of"):
        decode(frames)
