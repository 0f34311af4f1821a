"""Several rollout workers and one ledger: whichever worker is lost, nothing is trained twice, and the counts add up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncmoe.config import parse
from asyncmoe.errors import AsyncmoeError, ConfigError, ProtocolError, TrajectoryRejected
from asyncmoe.log import turns
from asyncmoe.log.turns import EpisodeId, Turns
from asyncmoe.rollout.demonstrations import Demonstrations
from asyncmoe.rollout.run_log import WorkerLog
from asyncmoe.rollout.sampled_episodes import SampledEpisode, from_bytes, to_bytes
from asyncmoe.rollout.tasks import Prompt, types
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.rpc.messages import FindWorker
from asyncmoe.rpc.worker_messages import WorkerJoin, WorkerRan, WorkerRun
from asyncmoe.telemetry.samples import records
from asyncmoe.telemetry.samples.choice import choice_of
from asyncmoe.trajectory import Trajectory, decode
from tests.unit.asynchronous import asynchronous, until
from tests.unit.log_lives import Home
from tests.unit.test_producer import respond
from tests.unit.worker_fleet import BATCH, Cluster, Numbers, clustered


def check(cluster: Cluster, steps: int) -> None:
    """Check the invariants after `steps` steps."""
    keys = [one.key for made in cluster.trained.values() for one in made]
    assert len(keys) == len(set(keys)) == steps * BATCH
    groups = [one.group for made in cluster.trained.values() for one in made]
    assert all(groups.count(number) == groups.count(groups[0]) for number in set(groups))
    for step, made in cluster.trained.items():
        for one in made:
            assert tuple(one.tokens[: (~one.loss_mask).sum()]) == cluster.parts.training.prompt(one.group).tokens
            assert step - 1 <= one.oldest_version <= int(one.versions.max()) <= step
    ledger = cluster.queue.ledger
    assert ledger.trained == steps * BATCH
    done = ledger.trained + ledger.dropped + ledger.rejected + ledger.requeued
    assert ledger.started == done + ledger.running + ledger.queued + ledger.leased


@clustered(workers=2, engines=4, seed=1)
async def test_a_group_is_held_by_its_worker_and_fetched_from_there(cluster: Cluster) -> None:
    holders, steps = set(), 0
    while holders != {1, 2} and steps < 40:  # the first batches may all come from one
        leased = await cluster.train(steps)
        holders |= {item.place.writer for item in leased.items if item.place is not None}
        steps += 1
    assert holders == {1, 2}
    check(cluster, steps)
    # Trained trajectories are no longer held.
    await asyncio.sleep(0.1)
    trained = {one.key for made in cluster.trained.values() for one in made}
    for lent in cluster.lent.values():
        assert not trained & set(lent.worker._worker._frames)


def test_columns_that_json_can_hold_reach_a_worker() -> None:
    columns = {"id": 2**70, "level": np.float64(0.5), "name": np.str_("x"), "2": -(2**63) - 1}
    asked = Prompt("q", (1, 2), "a", columns, ({"role": "user", "content": "q"},), "row 3")
    assert types.from_bytes(types.to_bytes(asked)) == asked
    with pytest.raises(ProtocolError, match="malformed prompt"):
        types.from_bytes(b"{}")


@clustered(workers=2, engines=4, seed=2)
async def test_what_a_lost_worker_held_comes_from_the_log(cluster: Cluster) -> None:
    leased = await cluster.queue.lease(0, "rl", BATCH, 0, 20.0)
    lost = leased.items[0].place.writer
    before = {number: dict(lent.worker._worker._frames) for number, lent in cluster.lent.items()}
    held = {key: [bytes(one) for one in frames] for own in before.values() for key, frames in own.items()}
    await cluster.lose(lost)
    await cluster.lost(lost)
    assert (await cluster.fleet.find(FindWorker(lost, 0.0))).rendezvous is None
    again = asyncio.create_task(cluster.start(lost))
    keys = tuple(item.key for item in leased.items)
    frames = await asyncio.to_thread(cluster.fetched, leased)
    assert [bytes(one) for one in frames] == [one for key in keys for one in held[key]]
    await again
    for step in range(3):
        await cluster.train(step)
    check(cluster, 3)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 16), staleness=st.integers(0, 1))
def test_workers_that_come_and_go_change_nothing(seed: int, staleness: int) -> None:
    async def chaos(cluster: Cluster, over: asyncio.Event) -> None:
        while not over.is_set():
            await asyncio.sleep(cluster.draw.random() * 0.3)
            number = cluster.draw.choice(sorted(cluster.lent))
            await cluster.lose(number)
            await asyncio.sleep(cluster.draw.random() * 0.2)
            await cluster.lost(number)
            await cluster.start(number)

    async def run(folder: Path) -> None:
        async with Cluster(folder, workers=3, engines=4, seed=seed, staleness=staleness) as cluster:
            over = asyncio.Event()
            breaking = asyncio.create_task(chaos(cluster, over))
            try:
                for step in range(5):
                    await cluster.train(step)
            finally:
                over.set()
                await breaking
            check(cluster, 5)

    with TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


@clustered(workers=1, engines=1, seed=3)
async def test_a_worker_that_does_not_belong_is_refused(cluster: Cluster) -> None:
    there = cluster.fleet._workers[1].joined.rendezvous
    with pytest.raises(ConfigError):
        await cluster.fleet.join(WorkerJoin(1, there, "other"))
    with pytest.raises(ProtocolError, match="joined already"):
        await cluster.fleet.join(WorkerJoin(1, there, cluster.config.digest))


@clustered(workers=1, engines=1, seed=5)
async def test_an_episode_of_a_lost_worker_is_rejected(cluster: Cluster) -> None:
    (worker,) = cluster.fleet._workers.values()
    await cluster.lose(1)
    await cluster.lost(1)
    with pytest.raises(TrajectoryRejected, match="worker_lost"):
        await worker.do(WorkerRun(EpisodeId(99, 0, 0), b""), WorkerRan, 1.0)
    assert (cluster.fleet.times_lost, len(cluster.fleet.lost())) == (1, 1)


@clustered(workers=2, engines=2, seed=6)
async def test_what_is_kept_of_an_episode_travels_unchanged(cluster: Cluster) -> None:
    left: dict[EpisodeId, SampledEpisode] = {}
    cluster.fleet.sampled = left.__setitem__
    for step in range(3):
        await cluster.train(step)
    choice = choice_of(cluster.config)
    trained = [one for made in cluster.trained.values() for one in made if choice.takes(one.group)]
    assert trained
    for one in trained:
        told = left[EpisodeId(one.group, one.episode, one.attempt)]
        (path,) = told
        assert [*path.prompt, *path.member.rest.tokens] == one.tokens.tolist()
        assert path.member.logprobs == records.rounded(one.logprobs[one.loss_mask])
        assert path.member.digest == records.digest_of(one.tokens, one.logprobs)
        assert to_bytes(from_bytes(to_bytes(told))) == to_bytes(told)
    with pytest.raises(ProtocolError, match="sampled episode"):
        from_bytes(b"\xc1")


@asynchronous
async def test_an_error_of_the_users_code_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with mock.patch("asyncmoe.rollout.workers.worker.episode.run", side_effect=MemoryError("no room \ud800")):
        async with Cluster(tmp_path, workers=1, engines=1, seed=9) as cluster:
            await until(lambda: cluster.failure)
    assert "MemoryError: no room ?" in str(cluster.failure[0])


@clustered(workers=2, engines=2, seed=10)
async def test_a_worker_that_does_not_come_again_ends_the_run(cluster: Cluster) -> None:
    cluster.fleet._config = parse(cluster.config.model_dump() | {"engines": {"count": 4, "start_timeout_s": 1.0}})
    following = asyncio.create_task(cluster.fleet.run())
    await cluster.lose(2)
    with pytest.raises(AsyncmoeError, match=r"rollout worker 2 is missing for .* s \(engines.start_timeout_s\): .*connection was lost"):
        await following


@pytest.mark.parametrize("untried", [True, False])
@asynchronous
async def test_what_the_first_worker_cannot_load_ends_the_run_unless_another_controller_could(tmp_path: Path, untried: bool) -> None:
    async with Cluster(tmp_path, workers=1, engines=1, seed=11) as cluster:
        await cluster.lose(1)
        await cluster.lost(1)
        cluster.fleet._untried = untried
        cluster.parts = ConfigError("scoring.scorer", got="nothing", expected="a scorer")  # type: ignore[assignment]
        with pytest.raises(ConfigError, match=r"^scoring\.scorer: got nothing"):
            await cluster.start(1)
        await asyncio.sleep(0.2)
        assert [str(one) for one in cluster.failure] == (["scoring.scorer: got nothing, expected a scorer"] if untried else [])


@clustered(workers=1, engines=1, seed=12)
async def test_demonstrations_outlive_the_worker_that_has_made_them(cluster: Cluster) -> None:
    cluster.lent[1].worker._worker._shown = Demonstrations(Numbers(), None, 8, 64)
    shown = await cluster.fleet.show(3, 2)
    await cluster.lose(1)
    await cluster.lost(1)
    await cluster.start(1)
    assert [[item.key for item in group.items] for group in shown] == [["d3.a0"], ["d4.a0"]]
    for group in shown:
        assert group.place is not None
        frames = await cluster.lent[1].worker._worker.fetch({group.items[0].key: group.place})
        assert decode(frames).key == group.items[0].key


@clustered(workers=2, engines=1, seed=13)
async def test_an_evaluation_runs_on_the_workers_and_nothing_is_kept_of_it(cluster: Cluster) -> None:
    place = EpisodeId(0, 0, 0)
    (made,) = await cluster.fleet.evaluate("", Numbers().prompt(0), place)
    assert (made.agent, made.oldest, made.newest) == (0, 0, 0)
    assert 1 <= made.sampled <= 5
    for step in range(2):  # training has an episode of the same name
        await cluster.train(step)
    check(cluster, 2)


# ---------------------------------------------------------------- one worker, without its process


PLACES = [EpisodeId(3, member, 0) for member in range(2)]


@asynchronous
async def test_an_episode_that_was_forgotten_is_ended_and_not_packed() -> None:
    goes_on, ended = asyncio.Event(), list[EpisodeId]()

    async def play(prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
        try:
            await goes_on.wait()
        except asyncio.CancelledError:  # and goes on, as a user's code may
            ended.append(place)
        return (respond(prompt, place),)

    worker = Worker(play, 2)
    late = [asyncio.create_task(worker.episode(Numbers().prompt(3), place)) for place in PLACES]
    await asyncio.sleep(0)
    worker.forget([], PLACES[:1])
    again = asyncio.create_task(worker.episode(Numbers().prompt(3), PLACES[0]))  # the next attempt may have one of the same name
    await asyncio.sleep(0)
    worker.forget([], PLACES[:1])
    goes_on.set()
    await asyncio.gather(*late, again)
    assert ended == [PLACES[0]] * 2
    with pytest.raises(ProtocolError, match=r"got g3\.e0\.a0\.t0, expected only episodes that have ended here"):
        await worker.pack(PLACES, 1)


@asynchronous
async def test_a_payload_that_no_record_names_stays_as_long_as_its_group_is_held(tmp_path: Path) -> None:
    async def play(prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
        return (respond(prompt, place),)

    kept = WorkerLog(Home().log(tmp_path, "1"), Turns(Home().log(tmp_path, turns.writer(1)), {}))
    worker = Worker(play, 2, kept=kept)
    for place in PLACES:
        await worker.episode(Numbers().prompt(3), place)
    group = await worker.pack(PLACES, 1)
    with mock.patch.object(kept.payloads, "forget") as forget:
        await worker.retain({})
        worker.forget([3])
        await worker.retain({})
        await worker.retain({1: group.place.position})
    at = group.place.position
    assert [call.args for call in forget.call_args_list] == [(at,), (kept.payloads.end,), (at,)]
    assert at < kept.payloads.end
    kept.close()
