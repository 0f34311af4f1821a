"""Imports without garbage collections leave the collector as it was for what comes after."""

from __future__ import annotations

import gc

import pytest

from asyncmoe.imports import uncollected


def test_nothing_is_collected_within_the_block_and_again_after_it() -> None:
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), uncollected():
        import nowhere  # noqa: F401
    assert gc.isenabled()
