"""The summary of an event log: pure, so events are written out by hand here."""

from __future__ import annotations

from typing import Any

from gyre_hpc.report.summary import Span, summarise


def log(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"seq": i, **event} for i, event in enumerate(events)]


def transfer(t: float, cell: int, to: str, seconds: float, live: int = 3) -> dict[str, Any]:
    source = "rollout" if to == "training" else "training"
    return {
        "t": t,
        "kind": "transfer",
        "cell": cell,
        "from": source,
        "to": to,
        "seconds": seconds,
        "live": live,
        "phases": {"agree": seconds},
    }


def test_roles_become_spans_that_cover_the_run_without_overlap() -> None:
    summary = summarise(
        log(
            {"t": 100.0, "kind": "run.start", "cells": 2},
            transfer(110.0, 0, "training", 2.0),
            transfer(115.0, 0, "rollout", 1.0),
            {"t": 120.0, "kind": "run.end", "status": "done"},
        )
    )
    assert [span for span in summary.spans if span.cell == 0] == [
        Span(0, "rollout", 0.0, 8.0),
        Span(0, "transfer", 8.0, 10.0),
        Span(0, "training", 10.0, 14.0),
        Span(0, "transfer", 14.0, 15.0),
        Span(0, "rollout", 15.0, 20.0),
    ]
    assert [span for span in summary.spans if span.cell == 1] == [Span(1, "rollout", 0.0, 20.0)]
    assert summary.live_transfers == 2
    assert summary.ended == "done"


def test_a_new_attempt_cuts_the_roles_of_the_last_and_a_repeated_step_counts_once() -> None:
    step = {"kind": "step.end", "step": 1, "loss": 0.0, "staleness_mean": 0.0}
    summary = summarise(
        log(
            {"t": 0.0, "kind": "run.start", "cells": 1},
            transfer(4.0, 0, "training", 1.0),
            {"t": 6.0, **step, "score_mean": 0.2},
            {"t": 30.0, "kind": "run.start", "cells": 1},
            {"t": 31.0, **step, "score_mean": 0.3},
            {"t": 32.0, "kind": "execution.end", "reason": "finished", "score": 0.5, "valid": True, "tokens": 7, "calls": 2},
            {"t": 33.0, "kind": "execution.lost", "reason": "node lost"},
        )
    )
    assert summary.spans[-2:] == (Span(0, "training", 4.0, 6.0), Span(0, "rollout", 30.0, 33.0))
    assert [float(s["score_mean"]) for s in summary.steps] == [0.3]
    assert summary.attempts == (0.0, 30.0)
    assert (summary.tokens, summary.calls, dict(summary.endings), dict(summary.lost)) == (7, 2, {"finished": 1}, {"node lost": 1})
    assert summary.ended == ""


def test_an_end_that_the_next_attempt_tells_does_not_say_that_its_engines_are_up() -> None:
    """The gateway tells what the last one had recorded only, before any engine is there."""
    end = {"kind": "execution.end", "reason": "finished", "score": 1.0}
    told = [{"t": 0.0, "kind": "run.start", "cells": [["a"]]}, {"t": 10.0, "kind": "engines"}, {"t": 20.0, **end}]
    again = [{"t": 30.0, "kind": "run.start", "cells": [["a"]]}, {"t": 32.0, **end}, {"t": 40.0, "kind": "engines"}, {"t": 50.0, **end}]
    spans = summarise(log(*told, *again)).spans
    assert spans == (
        Span(0, "starting", 0.0, 10.0),
        Span(0, "rollout", 10.0, 20.0),
        Span(0, "starting", 30.0, 40.0),
        Span(0, "rollout", 40.0, 50.0),
    )


def test_what_is_written_between_attempts_takes_no_time() -> None:
    """A configuration that was changed a day later, and an attempt a week later: the run took 25 s."""
    change = {"kind": "config.change", "changes": {"run.steps": [1, 2]}}
    first = [{"t": 10.0, "kind": "run.start", "cells": 1}, {"t": 30.0, "kind": "run.end", "status": "done"}]
    summary = summarise(log({"t": 0.0, **change}, *first, {"t": 9000.0, **change}))
    assert (summary.zero, summary.seconds, summary.ran, summary.rests) == (10.0, 20.0, 20.0, ())
    again = [{"t": 60010.0, "kind": "run.start", "cells": 1}, {"t": 60015.0, "kind": "run.end", "status": "done"}]
    summary = summarise(log({"t": 0.0, **change}, *first, {"t": 9000.0, **change}, *again))
    assert (summary.seconds, summary.ran, summary.rests) == (60005.0, 25.0, ((20.0, 60000.0),))
    assert [summary.worked(at) for at in (5.0, 20.0, 30000.0, 60000.0, 60004.0)] == [5.0, 20.0, 20.0, 20.0, 24.0]


def test_a_job_that_came_to_no_attempt_takes_no_time() -> None:
    """Its failure has the number of the attempt that it would have been; that of an attempt has its own."""
    failure = {"kind": "failure", "what": "no memory"}
    first = [{"t": 10.0, "kind": "run.start", "cells": 1, "attempt": 1}, {"t": 29.0, **failure, "attempt": 1}]
    end = {"t": 30.0, "kind": "run.end", "status": "stopped"}
    again = [{"t": 9010.0, "kind": "run.start", "cells": 1, "attempt": 2}, {"t": 9015.0, "kind": "run.end", "status": "done"}]
    summary = summarise(log({"t": 0.0, **failure, "attempt": 1}, *first, end, {"t": 9000.0, **failure, "attempt": 2}, *again))
    assert (summary.zero, summary.ran, summary.rests, len(summary.failures)) == (10.0, 25.0, ((20.0, 9000.0),), 3)
    assert [span for span in summary.spans if span.cell == 0] == [Span(0, "starting", 0.0, 20.0), Span(0, "starting", 9000.0, 9005.0)]
    assert summarise(log({"t": 0.0, **failure, "attempt": 1})).ended == "failed", "it is not about to start"
    assert summarise(log(*first, end, {"t": 9000.0, **failure, "attempt": 2})).ended == "stopped"
    assert summarise(log(*first, {"t": 31.0, "kind": "failure", "what": "of an older version"})).seconds == 21.0


def test_steps_whose_weights_are_given_up_are_not_done() -> None:
    steps = [{"t": float(n), "kind": "step.end", "step": n, "score_mean": 0.5, "loss": 0.0} for n in (1, 2, 3)]
    again = [{"t": 9.0, "kind": "run.start", "attempt": 2}, {"t": 10.0, "kind": "steps.again", "step": 1, "newest": 3}]
    assert summarise(log(*steps, *again)).step == 1
    summary = summarise(log(*steps, *again, {**steps[1], "t": 11.0}))
    assert [(step["step"], step["t"]) for step in summary.steps] == [(1, 1.0), (2, 11.0)]


def test_behind_the_last_step_of_a_run_that_is_done_cells_do_nothing() -> None:
    """Their last roles stay until the processes end, half a minute on a busy machine."""
    work = [
        {"t": 0.0, "kind": "run.start", "cells": 2},
        {"t": 5.0, "kind": "engines"},
        transfer(10.0, 0, "training", 1.0),
        {"t": 20.0, "kind": "step.end", "step": 1, "score_mean": 0.5},
        {"t": 21.0, "kind": "publish", "version": 1},
    ]
    done = summarise(log(*work, {"t": 50.0, "kind": "run.end", "status": "done"})).spans
    assert [span for span in done if span.start >= 10.0 or span.cell == 1] == [
        Span(1, "starting", 0.0, 5.0),
        Span(0, "training", 10.0, 21.0),
        Span(1, "rollout", 5.0, 21.0),
        Span(0, "ending", 21.0, 50.0),
        Span(1, "ending", 21.0, 50.0),
    ]
    stopped = summarise(log(*work, {"t": 50.0, "kind": "run.end", "status": "stopped"})).spans
    assert Span(0, "training", 10.0, 50.0) in stopped
