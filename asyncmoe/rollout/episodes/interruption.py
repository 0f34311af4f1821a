"""How responses in progress are handled when a weight version lands.

    in_place      they pause for the swap and resume with their keys and values; nothing is lost or recomputed
    retract       SGLang drops their keys and values and recomputes them with the new weights. It then reports the new weights' routes
                  for old tokens, so this mode is refused if routing is recorded
    abort_resume  they end; their tokens are kept with log-probabilities, routes and versions, and sent again as a prefix
    abort_retry   they end, and restart from their prompts
    drain         they finish first; nothing new starts meanwhile

An abort is SGLang's /abort_request, repeated until every request has been answered, before weights change. SGLang's own pause in mode
"abort" is not used: it checks only once a second whether all requests have been answered (`tokenizer_manager.py`, `pause_generation`).

A long response may be sampled in pieces, by consecutive requests that are recorded one by one. Keys and values of the tokens so far come
from the engine's prefix cache; after a new version they are recomputed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncmoe.config.rollout import Interruption
from asyncmoe.engines.decode import cut
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.scheduling import UNKNOWN, ScheduledRequest
from asyncmoe.engines.types import ABORTED, Listener, Sampling, Tokens
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.episodes.recall import Recall
from asyncmoe.rollout.episodes.trajectory_builder import Turn

WITHOUT_PIECES: frozenset[Interruption] = frozenset({"abort_retry", "drain"})
"""Modes in which a response is one request: it restarts as a whole, or ends before the next version lands."""


async def respond(
    pool: Pool,
    given: tuple[int, ...],
    before: Tokens,
    sampling: Sampling,
    interruption: Interruption,
    request: ScheduledRequest = UNKNOWN,
    listener: Listener | None = None,
    answers: Recall | None = None,
    piece: int = 0,
) -> list[Turn]:
    """Generate one whole response, in as many requests as interruptions and pieces split it into.

    Args:
        given: tokens before the response that are in no earlier turn.
        before: the tokens of all earlier turns.
        request: scheduling information of the first request.
        listener: receives the tokens and may end the response; tokens after that are dropped.
        answers: answers the requests in place of the pool; None: the pool answers.
        piece: maximum number of tokens of a request; 0: no limit.

    Returns:
        The turns of the response, the first with `given`; later turns have no given tokens.

    Raises:
        TrajectoryRejected: see `Pool.generate`; "engine_error" if a request was aborted although the interruption mode aborts none.
    """
    prefix = np.asarray(before, np.int32)
    made: list[Turn] = []
    if listener is not None:
        listener.live = interruption != "abort_retry"
    front, room = given, sampling.max_new_tokens
    piece = 0 if interruption in WITHOUT_PIECES else piece
    while True:
        asked = np.concatenate((prefix, np.array(front, np.int32)))
        known = max(len(prefix) - 1, 0)  # the last token has not passed through the model
        most = min(room, piece or room)
        # Most responses need one unchanged request; copying both objects would cost more than everything else here.
        request = request if request.partial == (most < room) else replace(request, partial=most < room)
        sampled = sampling if sampling.max_new_tokens == most else replace(sampling, max_new_tokens=most)
        answer = await (answers or pool).generate(asked, sampled, known, request=request, listener=listener)
        answered = answer.generation
        if listener is not None and listener.kept is not None:
            keep = listener.kept - (sampling.max_new_tokens - room)
            pool.lost_tokens += len(answered.tokens) - keep
            return [*made, Turn(front, cut(answered, keep, len(asked) - known), answer.salt)]
        tokens = len(answered.tokens)
        aborted = answered.finish == ABORTED
        if aborted and interruption == "abort_retry":
            pool.lost_tokens += tokens
            if listener is not None:
                listener.forget()
        elif aborted and interruption != "abort_resume":
            detail = f"an engine aborted a request after {tokens} tokens; rollout.interruption = {interruption} aborts none"
            raise TrajectoryRejected("engine_error", detail)
        else:
            if tokens or not aborted:
                made.append(Turn(front, answered, answer.salt))
                prefix, front, room = np.concatenate((asked, answered.tokens)), (), room - tokens
            if not room or (not aborted and (answered.finish != "length" or tokens < most)):
                return made
            if aborted:
                pool.recomputed_tokens += len(prefix) + len(front)
        request = replace(request, continues=True, sampled=sampling.max_new_tokens - room)
