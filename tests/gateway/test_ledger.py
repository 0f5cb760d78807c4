from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.admission import Over
from gyre_hpc.gateway.changes import ChangeLog, TooFarBehind
from gyre_hpc.gateway.ledger import Conflict, Ledger
from gyre_hpc.gateway.places import FREE, LOST, NO_CALLS
from trees.records import Execution, ExecutionEnd, Group, Record
from trees.store import StoreReader, StoreWriter


class Disk:
    """A ledger on a real store, crashed and opened again at will; `events` are those that were emitted."""

    def __init__(self, directory: Path, retries: int = 2) -> None:
        self.directory, self.retries = directory, retries
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.now = 0.0
        self.open()

    def open(self) -> int:
        self.store = StoreWriter(self.directory)
        self.ledger = Ledger(self.store, lambda kind, fields: self.events.append((kind, fields)), self.retries, 7, lambda: self.now)
        with StoreReader(self.directory) as reader:
            live = self.ledger.recover(reader, [f["execution"] for kind, f in self.events if kind == "execution.end"])
        self.commit()
        return len(live)

    def commit(self) -> None:
        mark = self.ledger.changes.mark()
        self.store.commit()
        self.ledger.changes.publish(mark)

    def reopen(self) -> int:
        self.commit()
        self.store.close()
        return self.open()

    def kinds(self, after: int = 0) -> list[str]:
        return [change["kind"] for change in self.ledger.changes.after(after)]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "trees")


def group(number: int, size: int = 2, version: int = 0) -> Group:
    return Group(number, f"task-{number}", size, version, 0)


def end(disk: Disk, item: dict[str, Any], score: float = 0.5, valid: bool = True) -> bool:
    return disk.ledger.end(item["execution"], "finished", score, valid, 1.5, "", 3, 40)


def test_a_group_from_dispatch_to_complete(disk: Disk) -> None:
    disk.ledger.dispatch([group(0)])
    first, second = disk.ledger.work("n1", 5)
    assert (first["group"], first["index"], first["attempt"], first["task"], first["retries_left"]) == (0, 0, 0, "task-0", 2)
    assert first["seed"] != second["seed"]
    assert disk.ledger.changes.after(0) == []  # nothing is told before it is durable
    disk.commit()
    assert disk.kinds() == ["dispatched", "started", "started"]
    assert end(disk, second, 1.0)
    assert not end(disk, second, 0.0)
    assert end(disk, first, 0.0, valid=False)
    disk.commit()
    changes = disk.ledger.changes.after(3)
    assert [(c["seq"], c["kind"]) for c in changes] == [(4, "ended"), (5, "ended"), (6, "complete")]
    assert changes[-1] == {"seq": 6, "kind": "complete", "group": 0, "valid": 1}
    kind, fields = disk.events[0]
    assert kind == "execution.end"
    assert fields == {
        "execution": second["execution"],
        "group": 0,
        "index": 1,
        "attempt": 0,
        "reason": "finished",
        "score": 1.0,
        "valid": True,
        "tokens": 40,
        "calls": 3,
        "seconds": 1.5,
        "detail": "",
    }
    assert disk.ledger.frontier()["groups"][0]["valid"] == 1
    assert disk.ledger.counts() == {"queued": 0, "live": 0, "finished": 2, "lost": 0, "groups": 1}


def test_dispatch_is_idempotent_and_refuses_another_group_of_the_same_name(disk: Disk) -> None:
    disk.ledger.dispatch([group(0)])
    disk.ledger.dispatch([group(0), group(1)])
    assert disk.ledger.counts()["queued"] == 4
    with pytest.raises(Conflict, match="group 0 was dispatched as"):
        disk.ledger.dispatch([group(2), group(0, size=3)])
    assert disk.ledger.counts()["groups"] == 2


def test_the_oldest_group_is_handed_out_first_also_when_it_comes_back(disk: Disk) -> None:
    disk.ledger.dispatch([group(1), group(0)])
    items = disk.ledger.work("n1", 3)
    assert [(i["group"], i["index"]) for i in items] == [(0, 0), (0, 1), (1, 0)]
    disk.ledger.lost(items[1]["execution"], "sandbox")
    assert [(i["group"], i["index"], i["attempt"]) for i in disk.ledger.work("n1", 9)] == [(0, 1, 1), (1, 1, 0)]


def test_losses_are_tried_again_within_a_budget_for_each_kind(disk: Disk) -> None:
    disk.ledger.dispatch([group(0, size=1)])
    for attempt, (reason, left) in enumerate([("sandbox", 2), ("fault", 1), ("undelivered", 1), ("sandbox", 1), ("fault", 0)]):
        (item,) = disk.ledger.work("n1", 1)
        assert (item["attempt"], item["retries_left"]) == (attempt, left)
        assert disk.ledger.lost(item["execution"], reason, "why")
        assert not disk.ledger.lost(item["execution"], reason, "said twice")
    (item,) = disk.ledger.work("n1", 1)
    disk.ledger.lost(item["execution"], "sandbox", "no space")
    disk.commit()
    assert disk.ledger.work("n1", 1) == []
    assert disk.kinds()[-3:] == ["started", "ended", "complete"]
    assert disk.ledger.changes.after(0)[-1]["valid"] == 0
    assert [kind for kind, _ in disk.events] == ["execution.lost"] * 6 + ["execution.end"]
    assert [fields["given_up"] for kind, fields in disk.events if kind == "execution.lost"] == [False] * 5 + [True]
    assert disk.events[-1][1]["detail"] == "given up after 3 tries: no space"


def test_a_valid_end_without_any_call_is_a_loss(disk: Disk) -> None:
    disk.ledger.dispatch([group(0, size=1)])
    (item,) = disk.ledger.work("n1", 1)
    assert disk.ledger.end(item["execution"], "timeout", 0.0, True, 60.0, calls=0)
    disk.commit()
    assert disk.kinds()[-1] == "lost"
    assert disk.events[-1][1]["reason"] == NO_CALLS


def test_a_late_end_of_a_lost_attempt_changes_nothing(disk: Disk) -> None:
    disk.ledger.dispatch([group(0, size=1)])
    (item,) = disk.ledger.work("n1", 1)
    assert disk.ledger.on_node("n1") == [item["execution"]]
    disk.ledger.lost(item["execution"], "node")
    assert not end(disk, item)
    assert disk.ledger.counts() == {"queued": 1, "live": 0, "finished": 0, "lost": 1, "groups": 1}
    with pytest.raises(KeyError):
        disk.ledger.end(999, "finished", 0.0, True, 0.0, calls=1)


def test_a_secret_lets_in_while_its_execution_lives(disk: Disk) -> None:
    disk.ledger.dispatch([group(0)])
    first, second = disk.ledger.work("n1", 2)
    assert disk.ledger.execution_of(first["secret"]) == first["execution"]
    end(disk, first)
    with pytest.raises(Over, match="is over"):
        disk.ledger.execution_of(first["secret"])
    assert disk.ledger.execution_of(second["secret"]) == second["execution"]


def test_executions_that_outlive_the_gateway_keep_their_secrets(disk: Disk) -> None:
    disk.ledger = Ledger(disk.store, lambda kind, fields: None, token_of=lambda execution: f"token-of-{execution}")
    disk.ledger.dispatch([group(0), group(1)])
    items = disk.ledger.begin(1, "api")
    assert [item["group"] for item in items] == [1, 1]
    assert disk.ledger.begin(1, "api") == items
    assert disk.ledger.counts()["queued"] == 2
    end(disk, items[0])
    disk.commit()
    again = Ledger(disk.store, lambda kind, fields: None, token_of=lambda execution: f"token-of-{execution}")
    with StoreReader(disk.directory) as reader:
        assert again.recover(reader, [], keep=True) == [items[1]["execution"]]
    assert again.execution_of(items[1]["secret"]) == items[1]["execution"]
    assert again.begin(1, "api") == items[1:]
    assert (again.counts()["live"], again.counts()["lost"]) == (1, 0)
    with pytest.raises(KeyError, match="no group 9"):
        again.begin(9, "api")


def test_an_answer_that_was_lost_is_given_again(disk: Disk) -> None:
    disk.ledger.dispatch([group(0, size=3)])
    (kept,) = disk.ledger.work("n1", 1, [])
    (missed,) = disk.ledger.work("n1", 1, [kept["execution"]])
    again, new = disk.ledger.work("n1", 2, [kept["execution"]])
    assert again == missed
    assert new["index"] == 2
    # a supervisor that knows nothing any more (it was restarted) does not get executions again that it has had
    assert disk.ledger.work("n1", 2, [e["execution"] for e in (kept, missed, new)]) == []
    assert disk.ledger.work("n1", 2, []) == []
    assert disk.ledger.work("n2", 2, []) == []


def test_after_a_crash_what_ran_is_tried_again_and_what_was_over_stays(disk: Disk) -> None:
    disk.ledger.dispatch([group(0), group(1)])
    first, second, third = disk.ledger.work("n1", 3)
    end(disk, first)
    disk.ledger.lost(second["execution"], "fault")
    assert disk.reopen() == 1
    assert disk.kinds() == ["lost"]
    assert disk.ledger.execution_of(third["secret"]) is None
    frontier = disk.ledger.frontier()
    assert [(g["group"], g["valid"], [e["index"] for e in g["ends"]]) for g in frontier["groups"]] == [(0, None, [0]), (1, None, [])]
    assert frontier["next"] == 1
    assert frontier["groups"][1] == {
        "group": 1,
        "task": "task-1",
        "size": 2,
        "version": 0,
        "burst": 0,
        "valid": None,
        "ends": [],
        "live": [],
    }
    items = disk.ledger.work("n1", 9)
    assert [(i["group"], i["index"], i["attempt"], i["retries_left"]) for i in items] == [(0, 1, 1, 1), (1, 0, 1, 2), (1, 1, 0, 2)]
    assert not end(disk, first)
    with pytest.raises(Conflict):
        disk.ledger.dispatch([group(0, size=5)])
    assert [group["group"] for group in disk.ledger.frontier(1)["groups"]] == [1]


def test_restarts_cost_nothing(disk: Disk) -> None:
    disk.ledger.dispatch([group(0, size=1)])
    for attempt in range(5):
        (item,) = disk.ledger.work("n1", 1)
        assert item["attempt"] == attempt
        assert disk.reopen() == 1
    assert disk.ledger.counts()["queued"] == 1


def test_the_end_that_a_crash_kept_from_the_event_log_is_told_at_recovery(disk: Disk) -> None:
    disk.ledger.dispatch([group(0)])
    first, second = disk.ledger.work("n1", 2)
    end(disk, first)
    disk.commit()
    end(disk, second, 0.25)
    disk.store.commit()  # durable, and then the process dies before it tells
    disk.store.close()
    disk.open()
    told = [fields for kind, fields in disk.events if kind == "execution.end"]
    assert [fields["execution"] for fields in told] == [first["execution"], second["execution"]]
    assert told[1]["score"] == 0.25
    disk.reopen()
    assert len([kind for kind, _ in disk.events if kind == "execution.end"]) == 2


def test_a_sealed_store_recovers_alike(disk: Disk) -> None:
    disk.ledger.dispatch([group(0)])
    first, second = disk.ledger.work("n1", 2)
    end(disk, first)
    disk.ledger.lost(second["execution"], "fault")
    disk.store.seal()
    disk.reopen()
    assert disk.ledger.frontier()["groups"][0]["ends"][0]["execution"] == first["execution"]
    assert [(i["index"], i["attempt"], i["retries_left"]) for i in disk.ledger.work("n1", 2)] == [(1, 1, 1)]


def test_a_reader_too_far_behind_is_told() -> None:
    changes = ChangeLog(lambda kind, fields: None, retained=3)
    for number in range(5):
        changes.stage({"kind": "x", "number": number})
    changes.publish(changes.mark())
    assert [change["seq"] for change in changes.after(0)] == [3, 4, 5]
    assert [change["seq"] for change in changes.after(2)] == [3, 4, 5]
    assert changes.after(5) == []
    with pytest.raises(TooFarBehind, match="after 1 are asked for, kept are 3 to 5"):
        changes.after(1)


class Paper:
    """A store without a disk, for thousands of runs."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def allocate_execution(self) -> int:
        return sum(isinstance(r, Execution) for r in self.records)

    def append(self, record: Record) -> None:
        self.records.append(record)

    def groups(self) -> dict[int, Group]:
        return {r.group: r for r in self.records if isinstance(r, Group)}

    def executions(self) -> dict[int, Execution]:
        return {r.execution: r for r in self.records if isinstance(r, Execution)}

    def ends(self) -> dict[int, ExecutionEnd]:
        return {r.execution: r for r in self.records if isinstance(r, ExecutionEnd)}


ACTIONS = st.sampled_from(["work", "end", "end", "end", "invalid", "fault", "node", "undelivered", "crash"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 1000)), max_size=60), st.integers(0, 2))
def test_any_history_ends_every_index_once(actions: list[tuple[str, int]], retries: int) -> None:
    paper, events = Paper(), list[tuple[str, dict[str, Any]]]()

    def open_ledger() -> Ledger:
        ledger = Ledger(paper, lambda kind, fields: events.append((kind, fields)), retries)
        ledger.recover(paper, [fields["execution"] for kind, fields in events if kind == "execution.end"])
        return ledger

    def act(ledger: Ledger, action: str, draw: int) -> Ledger:
        live = sorted(set(paper.executions()) - set(paper.ends()))
        if action == "work":
            ledger.work("n1", draw % 4)
        elif action == "crash":
            ledger.changes.publish(ledger.changes.mark())
            return open_ledger()
        elif live:
            execution = live[draw % len(live)]
            if action in ("end", "invalid"):
                ledger.end(execution, "finished", 1.0, action == "end", 1.0, calls=1)
            else:
                ledger.lost(execution, action)
        return ledger

    ledger = open_ledger()
    ledger.dispatch([group(number, size=2) for number in range(3)])
    for action, draw in actions:
        ledger = act(ledger, action, draw)
    while ledger.work("n1", 10) or ledger.counts()["live"]:
        ledger = act(ledger, "end", 0)
    ledger.changes.publish(ledger.changes.mark())
    final = [record for record in paper.records if isinstance(record, ExecutionEnd) and not record.reason.startswith(LOST)]
    places = Counter((paper.executions()[e.execution].group, paper.executions()[e.execution].index) for e in final)
    assert places == Counter({(g, i): 1 for g in range(3) for i in range(2)})
    assert sorted(f["execution"] for kind, f in events if kind == "execution.end") == sorted(e.execution for e in final)
    for entry in ledger.frontier()["groups"]:
        assert entry["valid"] == sum(e["valid"] for e in entry["ends"])
        assert len(entry["ends"]) == 2
    charged = Counter(
        (paper.executions()[r.execution].group, paper.executions()[r.execution].index, r.reason)
        for r in paper.records
        if isinstance(r, ExecutionEnd) and r.reason.startswith(LOST) and r.reason.removeprefix(LOST) not in FREE
    )
    assert all(count <= retries for count in charged.values())
