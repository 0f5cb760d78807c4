"""The collector is off for imports alone, and comes back as it was."""

from __future__ import annotations

import gc

import pytest

from gyre_hpc.importing import uncollected


def test_the_collector_is_off_within_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled(), "it was off"
    assert gc.isenabled()


def test_an_import_that_fails_brings_it_back() -> None:
    with pytest.raises(ModuleNotFoundError), uncollected():
        import gyre_hpc.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
