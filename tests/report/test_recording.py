"""What `gyre gateway` shows."""

from __future__ import annotations

import asyncio
import contextlib
import io

from rich.console import Console

from gyre_hpc.report.recording import Rate, Screen, describe

COUNTS = {"live": 3, "finished": 12, "in_flight": 2, "held": 1, "tokens": 900, "version": 7, "paused": True}


def test_a_line_tells_what_is_recorded_now() -> None:
    assert describe(COUNTS, 12.4) == "3 live, 12 finished; 2 calls in flight, 1 held, paused; 900 tokens, 12/s; weights 7"


def test_the_rate_is_that_of_the_last_looks() -> None:
    rate = Rate(looks=2)
    assert rate.of(0, 0.0) == 0.0
    assert rate.of(100, 1.0) == 100.0
    assert rate.of(100, 2.0) == 50.0
    assert rate.of(100, 3.0) == 0.0


async def test_lines_stay_and_markup_means_nothing() -> None:
    written = io.StringIO()
    with Screen(True, Console(file=written, force_terminal=True, width=200)) as screen:
        follower = asyncio.create_task(screen.follow(lambda: COUNTS))
        await asyncio.sleep(0.05)
        screen.say("gateway at [bold]http://x[/bold] with a line that is much longer than the terminal is wide " + "x" * 200)
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower
    assert "[bold]http://x[/bold]" in written.getvalue()
    assert "3 live" in written.getvalue()
