"""What becomes of responses under way when a weight version lands.

    in_place      they stand still for the swap and go on with their keys and values; nothing is lost or computed again
    retract       SGLang gives up their keys and values and computes them again with the new weights. It then reports routes of the new
                  weights for old tokens, so it is refused where routing is kept
    abort_resume  they end; what they have is kept with its log-probabilities, routes and versions, and sent again as a prefix
    abort_retry   they end, and start again from their prompts
    drain         they finish first; nothing new starts meanwhile

An abort is SGLang's /abort_request, repeated until every request has been answered, and then a pause in place: its own pause in mode
"abort" looks only once a second whether all have (`tokenizer_manager.py`, `pause_generation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncmoe.config.generation import Interruption
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.engines.engine_client import ABORTED, Sampling
from asyncmoe.rollout.engines.pool import Pool
from asyncmoe.rollout.engines.scheduling import UNKNOWN, ScheduledRequest
from asyncmoe.rollout.episodes.trajectory_builder import Turn, held


async def respond(
    pool: Pool,
    given: tuple[int, ...],
    before: Sequence[Turn],
    sampling: Sampling,
    interruption: Interruption,
    request: ScheduledRequest = UNKNOWN,
) -> list[Turn]:
    """One whole response, over as many requests as interruptions make of it.

    Args:
        given: tokens in front of it that no turn before has.
        before: the turns so far.
        request: what scheduling knows of the first request.

    Returns:
        The turns it took, the first with `given`; those after it have nothing given.

    Raises:
        TrajectoryRejected: see `Pool.generate`; "engine_error": a request was aborted that nobody asked to abort.
    """
    prefix = [token for turn in before for token in (*turn.given, *turn.generation.tokens)]
    made: list[Turn] = []
    front, room = given, sampling.max_new_tokens
    while True:
        sampled = [token for turn in made for token in (*turn.given, *turn.generation.tokens)]
        asked, known = (*prefix, *sampled, *front), held([*before, *made])
        answer = await pool.generate(asked, replace(sampling, max_new_tokens=room), known, request=request)
        tokens = len(answer.generation.tokens)
        if answer.generation.finish != ABORTED:
            return [*made, Turn(front, answer.generation, answer.salt)]
        if interruption == "abort_retry":
            pool.lost_tokens += tokens
        elif interruption == "abort_resume":
            if tokens:
                made.append(Turn(front, answer.generation, answer.salt))
                front, room = (), room - tokens
            if not room:
                return made
            pool.recomputed_tokens += len(prefix) + sum(map(len, made)) + len(front)
        else:
            raise TrajectoryRejected("engine_error", f"a request was aborted after {tokens} tokens; rollout.interruption is {interruption}")
        request = replace(request, continues=True, sampled=sampling.max_new_tokens - room)
