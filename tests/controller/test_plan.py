"""From a group's trees to micro-steps, over a real store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gyre_hpc.controller.plan import Outcome, Planner
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.store import StoreReader, StoreWriter


def record(store: StoreWriter, group: int, index: int, score: float, sampled: int) -> int:
    """One execution of one call with `sampled` sampled tokens."""
    execution = store.allocate_execution()
    store.append(Execution(execution, group, index, 0))
    call = store.allocate_call()
    prompt = store.context_node(-1, np.arange(5, dtype=np.int32), execution, call, Role.MAIN)
    store.append(Intent(call, execution, prompt, Role.MAIN, bytes(16)))
    node = store.allocate_node()
    tokens = np.arange(sampled, dtype=np.int32)
    store.append(
        Node(node, prompt, execution, call, NodeKind.SAMPLED, Role.MAIN, tokens, np.zeros(sampled, np.float32), np.zeros(sampled, np.int32))
    )
    store.append(CallEnd(call, execution, node, Fate.DELIVERED, "stop", "clean"))
    store.append(ExecutionEnd(execution, "finished", score, True, 1, sampled, 1.0))
    return execution


def test_rows_are_named_once_and_the_baseline_is_the_valid_ones(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append(Group(0, "task", 4, 0, 0))
        executions = [record(store, 0, index, score, 3) for index, score in enumerate((1.0, 0.0, 0.5, 0.9))]
        store.commit()
        planner = Planner(StoreReader(tmp_path), jmax=5, seed=1, tokens_per_microstep=16)
        outcomes = [
            Outcome(execution, score, index < 3)
            for index, (execution, score) in enumerate(zip(executions, (1.0, 0.0, 0.5, 0.9), strict=True))
        ]
        plan = planner.plan(outcomes)
        rows = [row for item in plan.work.items for row in item]
        # the execution at the mean (advantage 0) and the invalid one have no rows
        assert [(row.execution, np.sign(row.advantage)) for row in rows] == [(executions[0], 1), (executions[1], -1)]
        assert (plan.executions, plan.score_sum, plan.targets, plan.skipped) == (3, 1.5, 9, 0)
        assert planner.next_item == len(plan.work.items)
        again = planner.plan(outcomes)
        assert again.work.first == len(plan.work.items)


def test_a_shuffled_step_has_the_same_rows_mixed_over_its_groups(tmp_path: Path) -> None:
    scores = (1.0, 0.0)
    with StoreWriter(tmp_path) as store:
        groups = []
        for group in range(4):
            store.append(Group(group, "task", 2, 0, 0))
            groups.append([Outcome(record(store, group, index, score, 3), score, True) for index, score in enumerate(scores)])
        store.commit()
        apart = [planner(tmp_path).plan(outcomes) for outcomes in groups]
        plans = planner(tmp_path).together(groups, step=1)
        assert [(p.executions, p.score_sum, p.targets, p.skipped) for p in plans] == [
            (p.executions, p.score_sum, p.targets, p.skipped) for p in apart
        ]
        assert [len(plan.work.items) for plan in plans[:-1]] == [0, 0, 0]
        items = plans[-1].work.items
        rows = [row for item in items for row in item]
        assert sorted(rows, key=str) == sorted((row for plan in apart for item in plan.work.items for row in item), key=str)
        assert [len(item) for item in sorted(items, key=len)] == [2, 3, 3], "fuller than a group alone makes them"
        of = {outcome.execution: number for number, outcomes in enumerate(groups) for outcome in outcomes}
        assert any(len({of[row.execution] for row in item}) > 1 for item in items), "groups meet in a micro-step"
        assert planner(tmp_path).together(groups, step=1)[-1].work == plans[-1].work, "every attempt draws the same"
        assert planner(tmp_path).together(groups, step=2)[-1].work != plans[-1].work


def test_a_row_longer_than_a_micro_step_goes_alone_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with StoreWriter(tmp_path) as store:
        store.append(Group(0, "task", 2, 0, 0))
        outcomes = [Outcome(record(store, 0, index, score, 3), score, True) for index, score in enumerate((1.0, 0.0))]
        store.commit()
        short = Planner(StoreReader(tmp_path), jmax=5, seed=1, tokens_per_microstep=7)
        for _ in range(2):
            assert [len(item) for item in short.plan(outcomes).work.items] == [1, 1]
        planner(tmp_path).plan(outcomes)
    assert [record.message for record in caplog.records if "a row of" in record.message] == [
        "a row of 8 tokens: those longer than training.tokens_per_microstep = 7 are computed alone, each on one rank"
    ]


def planner(folder: Path) -> Planner:
    """Three rows of eight tokens a micro-step."""
    return Planner(StoreReader(folder), jmax=5, seed=1, tokens_per_microstep=24)
