"""Records every call token-exactly, before anybody can act on it.

The life of a call: match its history to the deepest recorded turn and render what is new (prompts.py) -> context nodes and intent
(entries.py), durable -> tokens from the router -> sampled node and end of the call, durable -> the rest is released to the harness.
Invariants:
- *durable before visible*: a tool call, and the end of every answer, reach the harness only after the fsync that covers them. Text before
  the first tool call streams as it comes: nothing can be done with it before the end;
- an intent gets exactly one end, whatever happens (delivered, broken, cancelled), except when the process or the disk dies;
- retries are byte-identical: while the first is in flight they share it, afterwards they get the recorded answer again; but for an answer
  that said nothing (no text, no call): who asks again after that wants another one, so that one is sampled and the first superseded.
Ordering key: the call id. Commits are grouped: calls that finish while an fsync runs share the next one. One event loop runs all of it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from blake3 import blake3

from gyre_hpc.engines.protocol import EngineFault, GenerateRequest, Sampling, TokenChunk
from gyre_hpc.gateway.calls import BadRequest, CallFailed, CallStream, Event, PromptTooLong, Spent, Started
from gyre_hpc.gateway.committer import Committer
from gyre_hpc.gateway.dialects.bodies import Memory
from gyre_hpc.gateway.dialects.canonical import Conversation, Message
from gyre_hpc.gateway.entries import Entries
from gyre_hpc.gateway.live import Live, Texts
from gyre_hpc.gateway.prompts import Prompts, Start
from gyre_hpc.gateway.request import CallRequest
from gyre_hpc.gateway.resume import read_past
from gyre_hpc.gateway.text.parsers import OURS, Parsers
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.gateway.turn import Turn
from trees.ids import Ids
from trees.matching import MessageIndex
from trees.records import CallEnd, Fate
from trees.store import StoreError, StoreWriter
from trees.tree import Call

log = logging.getLogger(__name__)
STOP_DEADLINE = 10.0
"""Seconds in which a cancelled call must be recorded."""
KEPT = 4
"""Finished calls of an execution whose events are kept for a retry; those of older ones are made from their tokens again."""


class Engine(Protocol):
    """What the recorder needs of the router."""

    def generate(self, request: GenerateRequest, execution: int) -> AsyncGenerator[TokenChunk, None]: ...


@dataclass(frozen=True)
class RecorderSettings:
    """How calls are sampled (the run's configuration rules, never the harness) and what an execution may spend."""

    seed: int
    window: int
    """Tokens of context, prompt and output together."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_calls: int = 1000
    max_tokens: int = 0
    """Tokens that an execution may sample; 0: no limit."""


class Recorder:
    """The calls of all live executions.

    `on_fatal` hears of a store that can't be written; afterwards every call fails. `on_fork` hears of forks that nothing explains.
    """

    def __init__(
        self,
        store: StoreWriter,
        renderer: TurnRenderer,
        engine: Engine,
        settings: RecorderSettings,
        on_fatal: Callable[[Exception], None],
        on_fork: Callable[[dict[str, Any]], None] = lambda fields: None,
        parsers: Parsers = OURS,
    ) -> None:
        self._store = store
        self._renderer = renderer
        self._engine = engine
        self._settings = settings
        self._tell = on_fatal
        self._parsers = parsers
        self._index = MessageIndex()
        self._prompts = Prompts(renderer, self._index)
        self._entries = Entries(store, self._index, on_fork)
        self._texts = Texts()
        self._live: dict[int, Live] = {}
        self._over = Ids()
        self._closing = False
        self._fatal: Exception | None = None
        self.committer = Committer(store, self._on_fatal)

    @property
    def in_flight(self) -> int:
        """Calls that are not over yet."""
        return sum(len(live.tasks) for live in self._live.values())

    def usage(self, execution: int) -> tuple[int, int]:
        """(calls accepted, tokens sampled) of a live execution."""
        live = self._live.get(execution)
        return (live.calls, live.tokens) if live else (0, 0)

    def faulted(self, execution: int) -> bool:
        """Whether the last call of a live execution broke on our side, and none was answered after it."""
        live = self._live.get(execution)
        return live is not None and live.faulted

    def open(self, execution: int, request: CallRequest) -> CallStream:
        """The stream of a call: a new one, or that of a byte-identical call in flight or finished. The caller must `follow` and `leave`."""
        if self._fatal is not None:
            raise CallFailed(f"the record can't be written: {self._fatal}")
        if self._closing:
            raise CallFailed("the gateway is stopping")
        if execution in self._over:
            raise CallFailed("the execution is over")
        live = self._live.setdefault(execution, Live(execution))
        stream = live.streams.get(request.digest)
        silent = request.digest in live.silent
        if stream is not None and stream.error is None and not stream.abandoned and not (silent and stream.done):
            return stream
        if request.digest in live.delivered and not silent:
            return self._replayed(live, request, live.delivered[request.digest])
        stream = live.streams[request.digest] = CallStream()
        task = asyncio.create_task(self._run(live, request, stream), name=f"call of execution {execution}")
        live.tasks.add(task)
        task.add_done_callback(live.tasks.discard)
        return stream

    def memory(self, execution: int) -> Memory:
        """What is known of the bodies of its requests."""
        live = self._live.get(execution)
        return live.memory if live else Memory()

    def resume(self, execution: int) -> int:
        """Go on with what an earlier process recorded of an execution; returns how many of its calls were lost with that process."""
        past = read_past(self._store.forest, execution)
        live = self._live[execution] = Live(execution, past.calls, past.tokens, history=past.history)
        live.nodes, live.delivered, live.silent = past.nodes, past.delivered, past.silent
        for place in past.places:
            self._index.restore(execution, place)
        return past.lost

    async def count(self, execution: int, conversation: Conversation) -> int:
        """Tokens of the prompt that this conversation would have now. Raises BadRequest."""
        live = self._live.get(execution) or Live(execution)
        return len((await self._prompts.of(live, conversation, "")).ids)

    async def finish(self, execution: int) -> tuple[int, int]:
        """The execution is over: what is in flight is cancelled and recorded. Returns its (calls, tokens); forgets it."""
        if execution in self._store.forest.executions:  # else it is sealed, or a number that may be given to one later
            self._over.add(execution)
        live = self._live.get(execution)
        if live is None:
            return (0, 0)
        await self._stop(live, "the execution is over")
        self._live.pop(execution, None)
        self._index.forget(execution)
        return live.calls, live.tokens

    async def close(self) -> None:
        """Cancel and record everything in flight (their harnesses see a broken connection), then commit."""
        self._closing = True
        await asyncio.gather(*(self._stop(live, "the gateway is stopping") for live in self._live.values()))
        if self._fatal is None:
            await self.committer.commit()
        self.committer.close()

    async def _stop(self, live: Live, why: str) -> None:
        for stream in list(live.streams.values()):
            if not stream.done:
                stream.abandon()
                stream.fail(CallFailed(why))
        if not live.tasks:
            return
        _, late = await asyncio.wait(set(live.tasks), timeout=STOP_DEADLINE)
        if late:
            log.error("execution %d: %d calls were not recorded within %.0f s of their end", live.execution, len(late), STOP_DEADLINE)

    def _on_fatal(self, error: Exception) -> None:
        if self._fatal is None:
            self._fatal = error
            for live in self._live.values():
                for stream in live.streams.values():
                    stream.fail(CallFailed(f"the record can't be written: {error}"))
            self._tell(error)

    def _replayed(self, live: Live, request: CallRequest, call: Call) -> CallStream:
        """The recorded answer once more, made from its tokens."""
        stream = CallStream()
        stream.push(Started(call.call, len(live.prompt(call.prompt))))
        turn = self._turn(request, call.call, call.prompt, stream)
        tokens = live.nodes[call.sampled][1]
        turn.take(TokenChunk(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), call.finish))
        stream.push(*turn.complete()[0])
        return stream

    def _turn(self, request: CallRequest, call: int, node: int, stream: CallStream) -> Turn:
        parser = self._parsers.start(f"toolu_{call:08x}", request.conversation.head.tools, self._renderer.opens_thought)
        return Turn(call, node, self._renderer, stream, parser)

    # -- one call -----------------------------------------------------------------------------------------------------------------
    async def _run(self, live: Live, request: CallRequest, stream: CallStream) -> None:
        try:
            await self._call(live, request, stream)
        except (BadRequest, CallFailed) as error:
            stream.fail(error)
        except (OSError, StoreError) as error:
            self._on_fatal(error)
            stream.fail(CallFailed(f"the record can't be written: {error}"))
        except Exception as error:
            log.exception("call of execution %d", live.execution)
            stream.fail(CallFailed(f"{type(error).__name__}: {error}"))
        finally:
            if stream.error is not None and live.streams.get(request.digest) is stream:
                del live.streams[request.digest]  # a retry is a new call

    async def _call(self, live: Live, request: CallRequest, stream: CallStream) -> None:
        if not self._settings.max_tokens:
            await self._admitted(live, request, stream, sys.maxsize)
            return
        wanted = min(max(1, request.max_tokens), self._settings.window)
        granted = await live.reserved.take(wanted, lambda: self._left(live))
        try:
            if stream.abandoned:
                raise CallFailed("nobody waits for this call any more")
            await self._admitted(live, request, stream, granted)
        finally:
            live.reserved.give_back(granted)

    async def _admitted(self, live: Live, request: CallRequest, stream: CallStream, most: int) -> None:
        """A call that may sample `most` tokens."""
        prompt = await self._prompts.of(live, request.conversation, request.agent)
        self._left(live)
        room = self._settings.window - len(prompt.ids)
        if room < 1:
            raise PromptTooLong(len(prompt.ids), self._settings.window - 1)
        ordinal, live.calls = live.calls, live.calls + 1
        live.history.note(prompt.asked)
        call, node = self._entries.begin(live, request, prompt)
        await self.committer.commit()
        stream.push(Started(call, len(prompt.ids)))
        turn = self._turn(request, call, node, stream)
        if not stream.abandoned:
            sampling = self._sampling(live.execution, ordinal, min(max(1, request.max_tokens), room, most))
            self._texts.used(live, len(prompt.ids), self._live)
            await self._generate(live, GenerateRequest(f"call-{call}", prompt.ids, sampling), turn)
        await self._end(live, request, prompt, turn)

    def _left(self, live: Live) -> int:
        """Tokens that this execution may still sample. Raises Spent."""
        settings = self._settings
        if live.calls >= settings.max_calls:
            raise Spent(f"this execution made {live.calls} calls, which is all it may make")
        if settings.max_tokens and live.tokens >= settings.max_tokens:
            raise Spent(f"this execution sampled {live.tokens} tokens, which is all it may sample")
        return settings.max_tokens - live.tokens if settings.max_tokens else sys.maxsize

    def _sampling(self, execution: int, ordinal: int, max_tokens: int) -> Sampling:
        s = self._settings
        digest = blake3(f"{s.seed}/{execution}/{ordinal}".encode()).digest(8)
        return Sampling(max_tokens, s.temperature, s.top_p, s.top_k, int.from_bytes(digest, "little") >> 1, self._renderer.stop_ids)

    async def _generate(self, live: Live, request: GenerateRequest, turn: Turn) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a call runs as a task")
        turn.stream.on_abandon = task.cancel
        try:
            async with aclosing(self._engine.generate(request, live.execution)) as chunks:
                async for chunk in chunks:
                    turn.take(chunk)
        except asyncio.CancelledError:
            if not turn.stream.abandoned:
                raise
            task.uncancel()
            turn.finish = "cancelled"
        except EngineFault as error:
            log.warning("call %d of execution %d broke after %d tokens: %s", turn.call, live.execution, turn.count, error)
            turn.finish, turn.fault = "fault", error
        except Exception as error:
            log.exception("call %d of execution %d", turn.call, live.execution)
            turn.finish, turn.fault = "fault", error
        finally:
            turn.stream.settle()

    async def _end(self, live: Live, request: CallRequest, prompt: Start, turn: Turn) -> None:
        said = await self._read(request, turn)
        fate = {"fault": Fate.BROKEN, "cancelled": Fate.CANCELLED}.get(turn.finish, Fate.DELIVERED)
        verdict = prompt.asked.verdict
        sampled = self._entries.sampled(live, turn, verdict.role) if turn.count else -1
        end = CallEnd(turn.call, live.execution, sampled, fate, turn.finish, verdict.difference)
        self._store.append(end)
        answer = self._entries.answer(live, request, prompt, turn, sampled, said[1]) if said is not None and sampled >= 0 else None
        await self.committer.commit()
        live.faulted = fate is Fate.BROKEN or (live.faulted and fate is Fate.CANCELLED)
        live.tokens += turn.count
        if said is None:
            raise CallFailed(f"the engine failed: {turn.fault}" if turn.fault else "the call was cancelled")
        if answer is not None:
            answered, place = answer
            self._index.restore(live.execution, place)
            live.history.delivered(answered)
            if place.digest == prompt.asked.prompt:
                live.silent[request.digest] = end
            self._keep(
                live, request.digest, Call(turn.call, live.execution, turn.node, verdict.role, request.digest, sampled, fate, turn.finish)
            )
        elif live.streams.get(request.digest) is turn.stream:
            del live.streams[request.digest]  # not one token was sampled: a retry is a new call, as it is after a restart
        turn.stream.push(*said[0])

    async def _read(self, request: CallRequest, turn: Turn) -> tuple[list[Event], Message] | None:
        """What is left to release, and the answer as it comes back; None: there is no answer. Before the end of the call is written, for
        an answer that can't be read was not delivered."""
        if turn.finish in ("fault", "cancelled"):
            return None
        try:
            if self._parsers.slow:
                await asyncio.to_thread(turn.read)
            rest, sent = turn.complete()
            reply = request.delivered(sent)
            _ = reply.key  # made now: what has no canonical form can't be recorded as an answer
            return rest, reply
        except Exception as error:
            log.exception("the answer of call %d can't be read", turn.call)
            turn.finish, turn.fault = "fault", error
            return None

    @staticmethod
    def _keep(live: Live, digest: bytes, call: Call) -> None:
        """Retries get this answer again; the events of the oldest go."""
        live.delivered[digest] = call
        over = [digest for digest in live.streams if digest in live.delivered]
        for old in over[:-KEPT]:
            del live.streams[old]
