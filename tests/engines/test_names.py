"""Lookups of names: what is found, what is not, and that none holds up an end."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading

import pytest
from aiohttp import web

from gyre_hpc.engines.names import Names, connector
from gyre_hpc.engines.streaming import session


async def test_a_server_is_reached_by_its_name() -> None:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with session(4.0) as opened, opened.get(f"http://localhost:{runner.addresses[0][1]}/") as answer:
            assert await answer.text() == "hello"
    finally:
        await runner.cleanup()


async def test_what_is_found_is_what_the_system_finds_and_a_failure_is_one() -> None:
    found = await Names().resolve("localhost", 80)
    assert [(one["host"], one["port"], one["hostname"]) for one in found] == [("127.0.0.1", 80, "localhost")] * len(found)
    assert found
    with pytest.raises(socket.gaierror):
        await Names().resolve("no such name", 80)
    for none in ("a..b", "a" * 64):
        with pytest.raises(socket.gaierror, match="no name of a host"):
            await asyncio.wait_for(Names().resolve(none, 80), 60.0)


_STUCK = """
import asyncio, socket, sys, threading, time
import uvloop
from gyre_hpc.engines.names import connector
import aiohttp
asked = threading.Event()
def silent(*_, **__):
    asked.set()
    time.sleep(1000.0)
socket.getaddrinfo = silent
async def ask():
    async with aiohttp.ClientSession(connector=connector()) as session:
        task = asyncio.create_task(session.get("http://name.of.a.silent.server/"))
        await asyncio.to_thread(asked.wait)
        task.cancel()
        await asyncio.wait([task])
        print("given up", task.cancelled())
uvloop.run(ask())
"""


def test_a_lookup_that_never_ends_holds_up_neither_the_loop_nor_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", _STUCK], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "given up True\n"), done.stderr


async def test_an_answer_that_nobody_waits_for_any_more_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, began, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    real = socket.getaddrinfo

    def slow(*given: object, **named: object) -> object:
        loop.call_soon_threadsafe(began.set)
        go.wait(60.0)
        return real(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    task = asyncio.create_task(Names().resolve("localhost", 80))
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
    go.set()
    monkeypatch.undo()
    assert await Names().resolve("localhost", 80)
    assert failures == []
    await connector().close()
