"""Names of hosts, looked up by threads that nobody waits for.

getaddrinfo can't be cancelled, and a name server that is silent holds it for half a minute and more. The event loop's own threads (libuv's,
or asyncio's executor) are waited for when the loop, or the process, ends: a gateway told why it ends and was still there long after.
Invariant: a lookup that was given up costs a daemon thread until it comes back, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

Found = list[ResolveResult]


class Names(AbstractResolver):
    """Of one connector, which keeps what was found for some seconds and asks once for a name that several want."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> Found:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Found] = loop.create_future()

        def look() -> None:
            try:
                result: Found | OSError = _look(host, port, family)
            except OSError as error:
                result = error
            except UnicodeError as error:  # an empty part, or one of more than 63 letters
                result = socket.gaierror(socket.EAI_NONAME, f"no name of a host ({error})")
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(_tell, found, result)

        threading.Thread(target=look, name=f"look up {host}", daemon=True).start()
        return await found

    async def close(self) -> None:
        """Nothing is held."""


def connector(**options: Any) -> aiohttp.TCPConnector:
    """`aiohttp.TCPConnector` with such names. Needs a running loop."""
    return aiohttp.TCPConnector(resolver=Names(), **options)


def _tell(found: asyncio.Future[Found], result: Found | OSError) -> None:
    if found.cancelled():
        return
    if isinstance(result, OSError):
        found.set_exception(result)
    else:
        found.set_result(result)


def _look(host: str, port: int, family: socket.AddressFamily) -> Found:
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    found: Found = []
    for kind, _, protocol, _, address in socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG):
        # with its scope, which a link-local address of version 6 needs
        name, service = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
        found.append(ResolveResult(hostname=host, host=name, port=int(service), family=kind, proto=protocol, flags=numeric))
    return found
