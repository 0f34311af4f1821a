"""Validity of trajectories for training; checked once, when a trajectory enters the queue."""

from __future__ import annotations

import numpy as np

from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.trajectory.masks import EncodedMasks, decode_masks, token_outside
from asyncmoe.trajectory.routes import Routes, Routing, check_routes
from asyncmoe.trajectory.trajectory import ARRAYS, NOT_SAMPLED, NOTHING, OPTIONAL, TOP, Recording, Trajectory


def validate(trajectory: Trajectory, recording: Recording = NOTHING, *, newest_version: int | None = None) -> None:
    """Reject a trajectory that is unfit for training.

    Args:
        recording: data the trajectory must carry, unless it is a demonstration; other data that is present is checked too.
        newest_version: upper bound of the tokens' versions; None: not checked.

    Raises:
        TrajectoryRejected: an array has a wrong dtype; lengths disagree; no token was sampled; a token is outside the vocabulary; a
            log-probability, the teacher's included, is not finite or is positive; a reward is not finite; a token that was not sampled has
            a step reward, a teacher's log-probability or a version; only some sampled tokens have versions (a demonstration has none at
            all), or a version is from the future; required routes, masks, step rewards or teacher's log-probabilities are missing; routes
            are of other layers; a token that another path trains counts as sampled; a token is not among the ids from which it was
            sampled; routes or masks are corrupted; most probable ids are missing, of another number, or not ids with log-probabilities.
    """
    t = trajectory
    _validate_arrays(t)
    low, high = int(t.tokens.min()), int(t.tokens.max())
    if low < 0 or (recording.vocabulary is not None and high >= recording.vocabulary):
        detail = f"got tokens {low} to {high}, expected ids of the vocabulary of {recording.vocabulary}"
        raise TrajectoryRejected("token_out_of_vocabulary", f"{t.key}: {detail}")
    _validate_versions(t, newest_version)
    _validate_record(t, recording)


def _validate_arrays(t: Trajectory) -> None:
    arrays = {name: getattr(t, name) for name in (*ARRAYS, *OPTIONAL) if name in ARRAYS or getattr(t, name) is not None}
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) != 1 or len(shapes["tokens"]) != 1:
        raise TrajectoryRejected("length_mismatch", f"{t.key}: got shapes {shapes}, expected one length for all")
    expected = {name: (ARRAYS | OPTIONAL)[name] for name in arrays}
    if any(array.dtype != expected[name] for name, array in arrays.items()):
        got = {name: array.dtype for name, array in arrays.items()}
        raise TrajectoryRejected("bad_dtype", f"{t.key}: got {got}, expected {expected}")
    if not t.loss_mask.any():
        raise TrajectoryRejected("empty_response", f"{t.key}: no sampled token")
    if not (0 <= t.forked < len(t) and 0 <= t.parent <= t.branch) or t.loss_mask[: t.forked].any():
        detail = f"path {t.branch} of {len(t)} tokens shares its first {t.forked} with path {t.parent}"
        raise TrajectoryRejected("bad_fork", f"{t.key}: {detail}, expected an earlier path, and fewer shared tokens, none sampled here")
    if not np.isfinite(t.logprobs).all() or (t.logprobs > 1e-4).any():
        raise TrajectoryRejected("bad_logprob", f"{t.key}: log-probabilities must be finite and <= 0")
    if not np.isfinite(t.reward):
        raise TrajectoryRejected("bad_reward", f"{t.key}: got reward {t.reward}, expected a finite number")
    if t.rewards is not None:
        _validate_rewards(t, t.rewards)
    if t.teacher is not None:
        _validate_teacher(t, t.teacher)


def _validate_rewards(t: Trajectory, rewards: np.ndarray) -> None:
    wrong = np.isinf(rewards) | (~np.isnan(rewards) & ~t.loss_mask)
    if wrong.any():
        at = int(np.argmax(wrong))
        detail = f"step reward {rewards[at]} at token {at}, expected a finite one at a sampled token, NaN where no step ends"
        raise TrajectoryRejected("bad_reward", f"{t.key}: {detail}")


def _validate_teacher(t: Trajectory, teacher: np.ndarray) -> None:
    wrong = ~np.isfinite(teacher) | (teacher > 1e-4) | ((teacher != 0) & ~t.loss_mask)
    if wrong.any():
        at = int(np.argmax(wrong))
        detail = f"teacher's log-probability {teacher[at]} at token {at}, expected a finite one <= 0, 0 where no token was sampled"
        raise TrajectoryRejected("bad_teacher", f"{t.key}: {detail}")


def _validate_record(t: Trajectory, recording: Recording) -> None:
    if t.oldest_version != NOT_SAMPLED:
        if t.routes is None and recording.routing is not None:
            raise TrajectoryRejected("no_routes", f"{t.key}: routing is recorded, but the trajectory has no routes")
        if t.masks is None and recording.masks:
            raise TrajectoryRejected("no_mask", f"{t.key}: sampling masks are recorded, but the trajectory has none")
        if t.top is None and recording.top:
            raise TrajectoryRejected("no_top", f"{t.key}: the {recording.top} most probable ids are recorded, but the trajectory has none")
        if recording.rewards and (t.rewards is None or (np.isnan(t.rewards).all() and not t.forked)):
            raise TrajectoryRejected("no_step_rewards", f"{t.key}: objective.process needs rewards of steps, but the trajectory has none")
        if recording.teacher and t.teacher is None:
            raise TrajectoryRejected(
                "no_teacher", f"{t.key}: objective.distill needs teacher log-probabilities, but the trajectory has none"
            )
    if t.top is not None:
        _validate_top(t, t.top, recording)
    try:
        if t.routes is not None:
            _validate_routes(t, t.routes, recording.routing)
        if t.masks is not None:
            _validate_masks(t, t.masks, recording)
    except ProtocolError as error:
        raise TrajectoryRejected("damaged_record", str(error)) from error


def _validate_versions(t: Trajectory, newest_version: int | None) -> None:
    if (t.versions[~t.loss_mask] != NOT_SAMPLED).any():
        raise TrajectoryRejected("bad_version", f"{t.key}: a token that was not sampled carries a version")
    sampled = t.versions[t.loss_mask]
    if sampled.min() < 0 and (sampled != NOT_SAMPLED).any():
        detail = f"sampled tokens have versions {sampled.min()} to {sampled.max()}"
        raise TrajectoryRejected("bad_version", f"{t.key}: {detail}, expected none below 0, or {NOT_SAMPLED} for all")
    if newest_version is not None and sampled.max() > newest_version:
        at = int(np.argmax(t.versions > newest_version))
        raise TrajectoryRejected(
            "version_from_future", f"{t.key}: token {at} is of version {t.versions[at]}, the newest is {newest_version}"
        )


def _validate_routes(t: Trajectory, routes: Routes, routing: Routing | None) -> None:
    if routes.rows != len(t) - 1:
        raise TrajectoryRejected("length_mismatch", f"{t.key}: got routes of {routes.rows} tokens, expected {len(t) - 1}")
    got = (routes.layers, routes.top_k, routes.experts)
    if routing is not None and got != (routing.layers, routing.top_k, routing.experts):
        detail = f"got routes of {len(routes.layers)} layers, top {routes.top_k} of {routes.experts} experts, expected {routing}"
        raise TrajectoryRejected("routes_wrong_layers", f"{t.key}: {detail}")
    check_routes(routes, t.key)


def _validate_top(t: Trajectory, top: np.ndarray, recording: Recording) -> None:
    expected = (int(t.loss_mask.sum()), recording.top or top.shape[-1])
    if top.dtype != TOP or top.shape != expected:
        raise TrajectoryRejected("length_mismatch", f"{t.key}: got top {top.dtype}{top.shape}, expected {expected}")
    ids = top["id"]
    if (ids < 0).any() or (recording.vocabulary is not None and (ids >= recording.vocabulary).any()) or not (top["logprob"] <= 1e-4).all():
        raise TrajectoryRejected("bad_top", f"{t.key}: expected ids of the vocabulary of {recording.vocabulary}, log-probabilities <= 0")


def _validate_masks(t: Trajectory, encoded: EncodedMasks, recording: Recording) -> None:
    if encoded.rows != len(t):
        raise TrajectoryRejected("length_mismatch", f"{t.key}: got masks of {encoded.rows} tokens, expected {len(t)}")
    if recording.vocabulary is not None and encoded.vocabulary != recording.vocabulary:
        detail = f"got masks of a vocabulary of {encoded.vocabulary}, expected {recording.vocabulary}"
        raise TrajectoryRejected("bad_mask", f"{t.key}: {detail}")
    masks = decode_masks(encoded, t.key)
    given = ~t.loss_mask & (masks.counts > 0)
    if given.any():
        raise TrajectoryRejected("bad_mask", f"{t.key}: token {int(np.argmax(given))} was not sampled but has a mask")
    bare = t.loss_mask & (masks.counts == 0)
    if recording.masks and bare.any():
        raise TrajectoryRejected("no_mask", f"{t.key}: token {int(np.argmax(bare))} was sampled but has no mask")
    missing = token_outside(masks, t.tokens)
    if missing is not None:
        detail = f"token {missing}: id {t.tokens[missing]} is not among the {masks.counts[missing]} ids from which it was sampled"
        raise TrajectoryRejected("mask_without_token", f"{t.key}: {detail}")
