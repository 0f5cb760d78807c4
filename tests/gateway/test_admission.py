"""The secret of a harness stands for its execution, and for no other."""

from __future__ import annotations

import secrets

import pytest

from gyre_hpc.gateway.admission import Admission, Over


def admitted(*executions: int) -> Admission:
    admission = Admission(lambda execution: secrets.token_urlsafe(24))
    for execution in executions:
        admission.admit(execution)
    return admission


def test_secrets_stand_for_live_executions_only() -> None:
    admission = admitted(3, 4)
    first, second = admission.secret(3), admission.secret(4)
    assert (admission.execution_of(first), admission.execution_of(second)) == (3, 4)
    swapped = f"3-{second.partition('-')[2]}"
    for wrong in (swapped, first[:-1], "3-", "3", "", "-", "²-x", "9" * 40, "é-é", "3-\udcff"):
        assert admission.execution_of(wrong) is None
    admission.end(3)
    with pytest.raises(Over, match="execution 3 is over"):
        admission.execution_of(first)
    assert admission.execution_of(swapped) is None


def test_the_secrets_of_executions_that_are_over_are_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_hpc.gateway.admission.REMEMBERED", 1)
    admission = admitted(0, 1)
    first, second = admission.secret(0), admission.secret(1)
    admission.end(0)
    admission.end(1)
    assert admission.execution_of(first) is None
    with pytest.raises(Over):
        admission.execution_of(second)


def test_one_that_was_never_admitted_lets_nobody_in_when_it_ends() -> None:
    admission = admitted()
    admission.end(7)
    assert admission.execution_of("7-") is None
