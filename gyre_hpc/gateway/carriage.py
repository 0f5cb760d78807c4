"""How a call outlives engines: it is carried from one to the next until it is finished or has had enough of them.

Invariant: a call's tokens are kept here as they arrive, whoever reads them and however slowly; whatever ends a stream (a route that closes,
an engine that dies), the call continues with prompt + tokens so far, so no token is lost, none comes twice, and max_tokens is exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace

from gyre_hpc.engines.protocol import EngineFault, EngineUnreachable, GenerateRequest, RequestRefused, TokenChunk, merged
from gyre_hpc.gateway.floor import Floor
from gyre_hpc.gateway.route import Call, Route

log = logging.getLogger(__name__)


class Carriage:
    """Carries calls over the engines of one floor."""

    def __init__(self, floor: Floor, faults: int) -> None:
        """`faults`: engine faults that one call survives in a row, without a token in between."""
        self._floor, self._faults = floor, faults
        self._arrived = 0

    async def generate(self, request: GenerateRequest, execution: int) -> AsyncGenerator[TokenChunk, None]:
        """The tokens of one call, from whatever engines it takes; the last chunk has `finish`. Closing the iterator cancels the call.

        Raises RequestRefused at once, EngineFault after more than `faults` faults in a row.
        """
        if request.sampling.max_tokens < 1:
            raise RequestRefused(f"max_tokens = {request.sampling.max_tokens}")
        call = Call(request, execution, self._arrived)
        self._arrived += 1
        known = self._floor.conversations.begin(execution, request.prompt)
        call.origin = self._floor.routes.get(known) if known is not None else None
        pump = asyncio.create_task(self._carry(call))
        try:
            while True:
                items = [await call.output.get()]
                while not call.output.empty():  # what has come meanwhile goes on in one piece: each costs its reader as much as 200 tokens
                    items.append(call.output.get_nowait())
                for item in merged(items):
                    if isinstance(item, BaseException):
                        raise item
                    yield item
                    if item.finish is not None:
                        return
        finally:
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pump

    async def _carry(self, call: Call) -> None:
        """Run attempts until the call is finished or given up; the outcome always reaches the reader."""
        try:
            while True:
                route = await self._floor.place(call)
                if not route.open:  # it closed between the grant and now
                    self._floor.left(call, route)
                    call.moving = True
                    continue
                call.attempt = asyncio.create_task(self._attempt(call, route))
                try:
                    await asyncio.wait([call.attempt])
                finally:
                    if not call.attempt.done():
                        call.attempt.cancel()
                        await asyncio.wait([call.attempt])
                    self._floor.left(call, route)
                if call.attempt.cancelled():
                    call.moving = True
                    continue
                fault = call.attempt.exception()
                if fault is None:
                    return
                if not isinstance(fault, EngineFault) or isinstance(fault, RequestRefused):
                    raise fault
                if route.open and self._floor.routes.get(route.seat) is route:
                    self._blame(route, call, fault)
                call.moving = True
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            call.output.put_nowait(error)
        finally:
            call.settled.set()
            origin = call.origin
            if origin is not None and origin.link is not None and (origin.open or origin.draining):
                self._floor.conversations.end(call.execution, origin.seat, call.path())

    async def _attempt(self, call: Call, route: Route) -> None:
        """Stream from one engine until the call is finished. Cancelled when the route closes. Raises EngineFault."""
        base, done = call.request, call.sampled
        rest = replace(base.sampling, max_tokens=base.sampling.max_tokens - done)
        prompt = call.path()
        request = replace(base, prompt=prompt, sampling=rest, position=base.position + done)
        departure = call.origin.departure if call.origin is not None and call.origin is not route else None
        stream = route.client.generate(request) if departure is None else departure.stream(route.client, route.link, request)
        try:
            async for chunk in stream:
                call.origin = route
                call.settled.set()
                if count := len(chunk):
                    route.faults = call.faults = 0
                    route.tokens += count
                    self._floor.tokens += count
                if self._accept(call, chunk):
                    return
            raise EngineFault("the engine's stream ended without a finish")
        finally:
            await stream.aclose()

    @staticmethod
    def _accept(call: Call, chunk: TokenChunk) -> bool:
        """Keep a chunk and pass it on; True when the call is finished, whether or not the engine was still able to say so."""
        limit, stop = call.request.sampling.max_tokens, call.request.sampling.stop
        if call.sampled + len(chunk) > limit:
            raise EngineFault(f"the engine sent more than the {limit} tokens it was asked for")
        call.parts.append(chunk.tokens)
        call.sampled += len(chunk)
        finish = chunk.finish
        if finish is None and len(chunk):
            finish = "stop" if int(chunk.tokens[-1]) in stop else "length" if call.sampled == limit else None
        call.output.put_nowait(chunk if finish == chunk.finish else replace(chunk, finish=finish))
        return finish is not None

    def _blame(self, route: Route, call: Call, fault: EngineFault) -> None:
        """Count a fault of an open route; raises it when the call has had enough.

        A call does not pay for an engine that is gone: another one comes to this cell, and the call's execution has its own deadline.
        """
        call.faults += not isinstance(fault, EngineUnreachable)
        self._floor.cool(route)
        log.warning("cell %d, call %s, fault %d of %d: %s", route.cell, call.request.request_id, call.faults, self._faults, fault)
        if call.faults > self._faults:
            raise fault
