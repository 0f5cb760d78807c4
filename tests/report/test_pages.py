"""Status lines and the report of a run that is written out by hand: they read files only, at any moment of a run."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from gyre_hpc.config import Config
from gyre_hpc.configfile import dump
from gyre_hpc.controller.live import LiveFile
from gyre_hpc.events import EventLog
from gyre_hpc.paths import RunPaths
from gyre_hpc.report import html, progress, status, svg
from tests.trees.forests import begin, finish, one_call
from trees.records import Role
from trees.store import StoreWriter

STEP = {"loss": 0.5, "staleness_mean": 0.5, "target_tokens": 10, "seconds": 1.0, "executions": 8, "cells": 2}


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run directory with nothing but its configuration."""
    paths = RunPaths(tmp_path)
    dump(Config.model_validate({"run": {"name": "<b>mine", "steps": 2}}), paths.config)
    return paths


def work(paths: RunPaths) -> EventLog:
    log = EventLog(paths.events)
    log.emit("run.start", attempt=1, cells=[["n1"], ["n2", "n<3>"]], standalone=["n4"], topology="tree", switches=[["s0"], ["s0", "s1"]])
    engine = {"cell": 0, "engine": 0, "capacity": 8, "holds": 3, "kv_tokens": 300}
    log.emit("engines", capacity=[8, 8], standalone=[4], over=1, window=100, measured=False, engines=[engine])
    log.emit("execution.end", execution=0, group=0, reason="finished", score=0.5, valid=True, tokens=9, calls=2)
    log.emit("transfer", cell=0, **{"from": "rollout"}, to="training", seconds=0.0, phases={"agree": 0.0}, live=3, moved=1)
    log.emit("step.end", step=1, score_mean=0.25, **STEP)
    LiveFile(paths.live).write(
        {
            "steps": 2,
            "roles": ["training", "rollout"],
            "tokens_per_second": 12.0,
            "executions": {"live": 3, "queued": 1, "finished": 4},
            "calls": {"held": 0},
        }
    )
    return log


def test_status_before_anything_happened(run: RunPaths) -> None:
    found = status.collect(run)
    assert (found["state"], found["step"], found["steps"]) == ("starting", 0, 2)
    assert "step 0 of 2" in status.render(found)


def test_an_attempt_is_starting_while_its_driver_holds_the_run_and_has_shown_nothing(run: RunPaths) -> None:
    log = work(run)
    old = time.time() - 100
    run.live.write_text(json.dumps({"t": old}))  # of the attempt before
    assert status.collect(run)["state"] == "no sign of life"
    log.emit("run.start", attempt=2, cells=[["n1"], ["n2"]])
    assert status.collect(run)["state"] == "no sign of life"  # and no lock: it died at its start
    run.lock.touch()
    assert status.collect(run)["state"] == "starting"
    os.utime(run.lock, (old, old))
    assert status.collect(run)["state"] == "no sign of life"
    run.lock.touch()
    LiveFile(run.live).write({"roles": []})
    assert status.collect(run)["state"] == "running"


def test_status_of_a_run_at_work_and_of_one_that_failed(run: RunPaths) -> None:
    log = work(run)
    text = status.render(status.collect(run))
    for part in ("running", "step 1 of 2", "0:training 1:rollout", "3 live, 1 queued", "1 finished"):
        assert part in text, text
    assert "nodes of the cells: 0 n1 below s0 (8 executions), 1 n2+n<3> below s0+s1 (8 executions); 1 of 2 cells straddle switches" in text
    assert "standalone nodes: n4, holding 4 executions" in text
    assert "cell 0 3 of 8 (300 tokens of KV, window 100)" in text
    assert "n&lt;3&gt;" in html.render(run, html.summarise(html.read_events(run.events)))
    assert "warnings" not in text
    log.emit("warning.fork", execution=0, call=1, difference="drift", messages=4)
    assert "warnings: 1 forks of histories that nothing explains" in status.render(status.collect(run))
    (run.checkpoints / "step-000003.damaged").mkdir(parents=True)
    assert "checkpoints that could not be used and are kept: step-000003.damaged" in status.render(status.collect(run))
    assert "warnings: forks" in html.render(run, html.summarise(html.read_events(run.events)))
    log.emit("failure", what="the gateway was killed", remedy="the same command resumes")
    log.emit("run.end", status="stopped", exit_code=75)
    found = status.collect(run)
    assert (found["state"], found["live"]) == ("stopped", None)
    assert "last failure: the gateway was killed; the same command resumes" in status.render(found)


def test_the_report_escapes_names_and_holds_every_section(run: RunPaths) -> None:
    html.write(run)
    assert "nothing to show yet" in run.report.read_text()
    work(run)
    html.write(run)
    page = run.report.read_text()
    assert "&lt;b&gt;mine" in page
    assert "<b>mine" not in page
    assert "prefers-color-scheme:dark" in page
    assert len(re.findall(r"<section", page)) == 9


def test_the_report_tells_starts_from_rollout_and_shows_standalone_nodes(run: RunPaths) -> None:
    events = [
        {"t": 50.0, "kind": "run.start", "cells": [["a"], ["b"]], "standalone": ["c", "d"]},
        {"t": 60.0, "kind": "engines", "capacity": [1, 1], "standalone": [1, 1]},
        {"t": 65.0, "kind": "execution.end", "reason": "finished", "score": 1.5},
        {"t": 75.0, "kind": "execution.end", "reason": "finished", "score": 0.5},
        {"t": 85.0, "kind": "step.end", "step": 1, "score_mean": 1.0, **STEP},
        {"t": 90.0, "kind": "run.end", "status": "done"},
    ]
    page = html.render(run, html.summarise(events))
    assert page.count("starting: 0.0 to 10.0 s") == 3  # two cells and the pool
    assert page.count("rollout: 10.0 to 35.0 s") == 2
    assert page.count("ending: 35.0 to 40.0 s") == 3
    assert "starting 25%, rollout 62%, training 0%, transfer 0%, ending 12%" in page
    assert "pool ×2" in page
    assert "2 standalone nodes: rollout" in page
    assert "single executions: 0.5 at 0.5" in page  # half of the time from the first execution's end to the step's
    assert "mean score, first → last step<" in page
    assert "1 of 2" in page


def test_the_report_draws_no_more_cells_than_a_page_holds(run: RunPaths) -> None:
    events = [{"t": 0.0, "kind": "run.start", "cells": [["n"]] * 200}, {"t": 1.0, "kind": "run.end", "status": "done"}]
    page = html.render(run, html.summarise(events))
    assert "The first 128 of 200 cells" in page
    assert ">all cells<" in page
    assert "cell 127<" in page
    assert "cell 128<" not in page


def test_the_live_display_shows_the_run_and_ends_with_it(run: RunPaths) -> None:
    work(run).emit("run.end", status="done", exit_code=0)
    out = io.StringIO()
    stop = threading.Event()
    progress.PERIOD = 0.01
    progress.watch(run, stop, Console(file=out, width=100, force_terminal=True))
    text = out.getvalue()
    for part in ("1/2", "0 training", "1 rollout", "12 tokens/s", "done"):
        assert part in text


def test_many_cells_are_a_square_each_and_counted(run: RunPaths) -> None:
    work(run)
    live = {"steps": 2, "roles": ["training"] * 20 + ["rollout"] * 80, "tokens_per_second": 1.0, "calls": {"held": 0}}
    LiveFile(run.live).write({**live, "executions": {"live": 3, "queued": 1, "finished": 4}})
    view = progress.View(run)
    view.refresh()
    out = Console(file=io.StringIO(), width=100, record=True)
    out.print(view.render())
    text = out.export_text()
    assert "80 rollout" in text
    assert "20 training" in text
    assert text.count("■") == 102
    assert max(map(len, text.splitlines())) <= 96
    assert "cells 0-19:training 20-99:rollout; 3 live" in status.render(status.collect(run))


def test_steps_whose_weights_are_given_up_leave_the_live_view(run: RunPaths) -> None:
    log = EventLog(run.events)
    for step in (1, 2, 3):
        log.emit("step.end", step=step, score_mean=step / 4, **STEP)
    log.emit("steps.again", step=1, newest=3)
    view = progress.View(run)
    view.refresh()
    out = Console(file=io.StringIO(), width=100, record=True)
    out.print(view.render())
    assert "0.25 → 0.25" in out.export_text()


def test_a_deep_tree_is_drawn_without_recursion() -> None:
    nodes = [svg.TreeNode(i - 1, 3, "grey", f"node {i}") for i in range(5000)]
    assert svg.tree(nodes).count("<rect") == 5000


@pytest.mark.parametrize(("steps", "few"), [(1, 1), (2, 1), (3, 1), (5, 2), (9, 4), (11, 5), (40, 5)])
def test_first_and_last_steps_do_not_overlap(run: RunPaths, steps: int, few: int) -> None:
    log = EventLog(run.events)
    for step in range(1, steps + 1):
        log.emit("step.end", step=step, score_mean=0.25, **STEP)
    page = html.render(run, html.summarise(html.read_events(run.events)))
    assert (f"mean score, first {few} → last {few} steps" if few > 1 else "mean score, first → last step<") in page
    chart = page.split("<h2>Score per step</h2>")[1].split("</section>")[0]
    assert ">1.5<" not in chart, "an axis of steps has no half ones"


def test_a_report_that_finds_no_room_leaves_the_last_one_alone(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    html.write(run)
    before = {path.name: path.read_bytes() for path in run.root.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"No space.*/report\.html"):
        html.write(run)
    assert {path.name: path.read_bytes() for path in run.root.iterdir()} == before


def test_a_gateway_alone_has_a_report_without_steps_and_cells(run: RunPaths) -> None:
    dump(Config.model_validate({"run": {"name": "recorded"}, "upstream": {"urls": ["http://h:1/v1"]}}), run.config)
    log = EventLog(run.events)
    log.emit("run.start", attempt=1, launcher="gateway", job=None, nodes=[], cells=[])
    log.emit("execution.end", execution=0, group=0, reason="finished", score=0.5, valid=True, tokens=9, calls=2)
    html.write(run)
    page = run.report.read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == ["Scores", "How executions ended", "One trajectory tree"]
    assert "optimizer steps" not in page
    assert "transfers while" not in page
    assert "scores: 0.5 at" in page
    out = Console(file=io.StringIO(), width=100, record=True)
    out.print(progress.View(run).render())
    assert [word in (text := out.export_text(clear=False)) for word in ("steps", "cells", "transfers")] == [False] * 3
    assert "endings" in text


def forest(paths: RunPaths) -> list[Path]:
    """Two segments, of an execution each."""
    made = []
    with StoreWriter(paths.trees) as writer:
        for execution in range(2):
            begin(writer, execution, execution)
            one_call(writer, execution, writer.context_node(-1, [1, 2, 3 + execution], execution, -1, Role.MAIN))
            finish(writer, execution)
            made += writer.seal()
    return made


def test_a_report_shows_what_is_whole_of_damaged_trees(run: RunPaths) -> None:
    work(run)
    first, _ = forest(run)
    assert html.write(run) == ()
    whole = run.report.read_text()
    assert "stored / expanded tokens" in whole
    first.write_bytes(first.read_bytes()[:-100])
    told, named = html.write(run)
    page = run.report.read_text()
    assert f"{first} has " in told
    assert named == "1 of 2 executions can't be read: 0"
    for part in ("Not all trees can be read", "trees that can be read", "mean score of the step", "Execution 1 of group 1"):
        assert part in page
    assert "stored / expanded tokens" not in page


def test_a_report_of_trees_that_nobody_can_read_has_everything_else(run: RunPaths) -> None:
    work(run)
    forest(run)
    (journal,) = run.trees.glob("journal-*.log")
    journal.unlink()
    (told,) = html.write(run)
    assert "holds segments and no journal; restore the newest" in told
    page = run.report.read_text()
    assert "mean score of the step" in page
    assert "no tree yet" not in page
