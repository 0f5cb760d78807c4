"""No secret in a log line, whoever wrote the line."""

from __future__ import annotations

import asyncio
import io
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from gyre_hpc.gateway.redact import LogFile, Redacting, redacted
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.fakes import bench, serving

TOKEN = secrets.token_urlsafe(24)
SECRET = f"17-{TOKEN}"


@pytest.mark.parametrize(
    "line",
    [
        "POST /x/SECRET/v1/messages",
        "b'GET /x/SECRET/v1/models?a=b HTTP/1.1'",
        "Authorization: Bearer TOKEN",
        "{'authorization': 'bearer SECRET'}",
        "x-api-key: SECRET",
        "(b'X-Api-Key', b'TOKEN')",
        "no execution has the key SECRET.",
    ],
)
def test_every_form_of_a_secret_is_taken_out(line: str) -> None:
    line = line.replace("SECRET", SECRET).replace("TOKEN", TOKEN)
    assert TOKEN in line
    assert TOKEN not in redacted(line)
    assert "***" in redacted(line)


def test_what_is_no_secret_stays() -> None:
    line = "call 12 of execution 17-3 broke after 200 tokens: /v1/messages, journal-000012.log, bearer of news"
    assert redacted(line) == line


def test_a_full_disk_loses_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    file = LogFile(Path("/dev/full"))
    log = logging.getLogger("gyre.test.full")
    log.addHandler(file)
    log.error("lost")
    log.removeHandler(file)
    file.close()
    assert "Logging error" not in capsys.readouterr().err


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """All that is logged, as the gateway's process writes it."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(Redacting("%(name)s %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


async def test_no_request_however_broken_leaves_its_secret_in_the_log(tmp_path: Path, renderer: TurnRenderer, lines: io.StringIO) -> None:
    async with bench(tmp_path / "trees", renderer) as made, serving(made) as url:
        made.engine.replies.append(RuntimeError(f"an engine that repeats /x/{SECRET}/"))
        port = int(url.rsplit(":", 1)[1])
        for raw in (
            f"G@T /x/{SECRET}/v1/messages HTTP/1.1\r\nHost: a\r\n\r\n",
            f"POST /x/{SECRET}/v1/messages HTTP/9.9\r\nHost: a\r\n\r\n",
            f"POST /x/{SECRET}/v1/messages HTTP/1.1\r\nHost: a\r\nx-api-key: {SECRET}\r\nContent-Length: x\r\n\r\n",
            f"POST /x/{SECRET}/%ff%00 HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n{{}}{{}}",
            f"GET //[/x/{SECRET}/ HTTP/1.1\r\nHost: a\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw.encode())
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
        async with aiohttp.ClientSession() as http:
            body = {"max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
            for headers, path in (({}, f"/x/{SECRET}/v1/messages"), ({"x-api-key": SECRET}, "/v1/messages"), ({}, "/x/s0/v1/messages")):
                async with http.post(url + path, json=body, headers=headers) as answer:
                    assert answer.status in (401, 500)
    assert "an engine that repeats /x/***/" in lines.getvalue()
    assert TOKEN not in lines.getvalue()
