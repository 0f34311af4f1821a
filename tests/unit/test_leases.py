"""An answer that is late, and reasons that must add up."""

from __future__ import annotations

import pytest

from asyncmoe.errors import InvariantBroken, ProtocolError
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.admission import Ledger
from asyncmoe.queue.leases import Leases, LeaseTerms
from asyncmoe.rpc.messages import Leased


def test_a_rank_learns_that_its_step_ended_while_it_asked() -> None:
    one = LeaseTerms("rl", 4, 1)
    leases = Leases().ask(0, one, 4)
    assert leases.answer_to(0, one) is None
    granted = leases.decide(0, Leased(0, (), 0, {}))
    with pytest.raises(ProtocolError, match="during the request"):
        granted.commit(0).answer_to(0, one)


def test_reasons_add_up_to_the_ledger() -> None:
    accounts = Accounts(Ledger().start(4)).reject(1, "score").discard(1, "equal").reject(1, "score")
    assert (accounts.rejected, accounts.dropped) == ({"score": 2}, {"equal": 1})
    with pytest.raises(InvariantBroken, match="do not add up"):
        Accounts(accounts.ledger, dropped=accounts.dropped)
