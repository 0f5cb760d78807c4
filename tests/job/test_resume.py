"""A run that is killed between two checkpoints: what the weights after the last one sampled is trained on, as stale as it is."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.job.jobs import Job, gyre_json, make, until
from tests.job.test_kills import victim
from trees.reader import StoreReader

pytestmark = [pytest.mark.job, pytest.mark.timeout(400)]
EVERY, STEPS, BOUND = 3, 8, 2


def versions(job: Job) -> dict[int, int]:
    """Of each group, at which version it was dispatched."""
    return {number: group.version for number, group in StoreReader(job.paths.trees).groups().items()}


def test_a_resume_between_checkpoints_counts_no_distance_below_zero_and_keeps_the_bound(tmp_path: Path) -> None:
    job = make(
        tmp_path,
        run={"steps": STEPS},
        cells={"count": 2},
        checkpoint={"every": EVERY},
        harness={"tool_delay": 0.3},
        schedule={"groups_per_step": 2, "group_size": 4, "phi": 1.0, "staleness_bound": BOUND},
    )
    log = tmp_path / "out.log"
    process = job.start(log)
    job.wait_for_steps(process, EVERY + 1, log)

    def sampled_by_what_will_be_lost() -> bool:
        assert process.poll() is None, log.read_text()
        known = versions(job)
        return any(known.get(event["group"], 0) > EVERY for event in job.events("execution.end"))

    until("an execution of weights without a checkpoint", sampled_by_what_will_be_lost, 120)
    victim(job, "controller").send_signal(signal.SIGKILL)
    assert process.wait(60) == 75, log.read_text()
    newest = max(job.steps())
    assert EVERY < newest < 2 * EVERY, "killed between two checkpoints"
    before = versions(job)
    assert job.start(log).wait(300) == 0, log.read_text()

    (again,) = job.events("steps.again")
    assert (again["step"], again["newest"]) == (EVERY, newest)
    assert again["first_group"] == max(before) + 1
    assert job.steps() == [*range(1, newest + 1), *range(EVERY + 1, STEPS + 1)]
    last = {event["step"]: event for event in job.events("step.end")}
    ends = {(event["group"], event["index"]): event["execution"] for event in job.events("execution.end")}
    for step, event in last.items():
        assert event["token_staleness"] >= 0.0
        found = [
            distance(step - 1, group, version, again, ends) for group, version in zip(event["groups"], event["group_versions"], strict=True)
        ]
        assert all(0 <= apart <= BOUND for apart in found), (step, found)
        assert event["staleness_mean"] == pytest.approx(sum(found) / len(found))
    trained = [group for event in last.values() for group in event["groups"]]
    dropped = [event["group"] for event in job.events("group.dropped")]
    assert len({*trained, *dropped}) == len(trained) + len(dropped), "no group twice"
    assert any(before.get(group, 0) > EVERY for group in (*trained, *dropped)), "what the lost weights sampled was met with"
    assert gyre_json("trees", "verify", str(job.paths.root))["problems"] == []


def test_a_stop_between_checkpoints_saves_the_newest_step_and_none_is_done_again(tmp_path: Path) -> None:
    """SIGTERM comes to every rank, as from a scheduler that preempts; the driver hears of it from them."""
    job = make(tmp_path, run={"steps": 4}, cells={"count": 2}, checkpoint={"every": 100}, deadlines={"stop": 30})
    log = tmp_path / "out.log"
    process = job.start(log)
    job.wait_for_steps(process, 2, log)
    for name in ("satellite", "core", "controller"):
        victim(job, name).send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, log.read_text()
    assert log.read_text().splitlines()[-1] == "stopped by SIGTERM; the same command resumes"
    newest = max(job.steps())
    (saved,) = job.events("checkpoint")
    assert (saved["step"], saved["stop"]) == (newest, True)
    assert job.start(log).wait(300) == 0, log.read_text()
    assert job.steps() == [1, 2, 3, 4]
    assert job.events("steps.again") == []
    assert [event["step"] for event in job.events("resume")] == [newest]


def distance(now: int, group: int, version: int, again: dict[str, int], ends: dict[tuple[int, int], int]) -> int:
    """Updates between a group's weights and those of step `now`, the long way: as the list of weights that each of the two had."""
    fork, attempt = again["step"], 1 if group < again["first_group"] else 2
    resampled = all(execution >= again["first_execution"] for (of, _), execution in ends.items() if of == group)
    if attempt == 1 and version > fork and resampled:
        version = fork
    theirs = [(1 if step <= fork else attempt, step) for step in range(version + 1)]
    ours = [(1 if step <= fork else 2, step) for step in range(now + 1)]
    common = sum(a == b for a, b in zip(theirs, ours, strict=False))
    return len(theirs) - common + len(ours) - common
