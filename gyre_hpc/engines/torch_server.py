"""What the torch engine's process does (torch_main.py starts it): HTTP in the main thread, the model loop in another, one process per cell.

Protocol (all below `/<secret>`): `POST /generate` {request_id, prompt, position, sampling} answers binary frames (frames.py) to who accepts
them, and else, for people, NDJSON lines {t, l, v, f} (tokens, log-probs, [version, tokens] spans, finish), a blank line now and then while
there is nothing to say, or {error}; closing the connection cancels.
`POST /pause | /resume | /release`, `POST /update_weights | /restore` {model, version}, `POST /receive` {source, version, seconds} (answers
{failed: why} where nothing changed), `POST /score` {tokens} (also while paused),
`GET /health | /digest`. 400: never; 503: not now.
Invariants: the batch belongs to the model thread alone (commands run between steps); chunks reach the HTTP thread once per step, all
together, since waking it per token costs more than a token; a failure in the model loop ends the process, loudly.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import itertools
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import torch
from aiohttp import web

from gyre_hpc.engines import control, frames
from gyre_hpc.engines.protocol import GenerateRequest, NotReceived, Sampling, TokenChunk
from gyre_hpc.engines.torch_batch import Batch, Limits
from gyre_hpc.engines.torch_model import Loader, SlotModel, UnsupportedModel, from_files, from_memory
from gyre_hpc.engines.weight_groups import Collector
from gyre_hpc.engines.weight_member import SCHEME, attend
from gyre_hpc.engines.weight_stream import receive

log = logging.getLogger(__name__)
T = TypeVar("T")

_HEARTBEAT = 5.0
_BROKEN = 70

Stream = asyncio.Queue[TokenChunk | str | None]
"""What one HTTP response still has to write: a chunk, the text of a fault, or None for a sign of life."""


class ModelLoop(threading.Thread):
    """Steps the batch while there is work; runs commands between steps."""

    def __init__(self, batch: Batch, deliver: Callable[[list[tuple[str, TokenChunk]]], None]) -> None:
        super().__init__(name="model", daemon=True)
        self.batch = batch
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False

    def submit(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` in the model thread before its next step."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:  # the asker gets it
                future.set_exception(error)

        self._commands.put(run)
        return future

    def stop(self) -> None:
        """End after the current step."""
        self.submit(lambda: setattr(self, "_stopping", True)).result()
        self.join()

    def run(self) -> None:
        try:
            while not self._stopping:
                if not self.batch.ready:
                    self._commands.get()()
                while not self._commands.empty():
                    self._commands.get()()
                if self.batch.ready and (ready := self.batch.step()):
                    self._deliver(ready)
        except BaseException:
            log.exception("the model loop broke; the engine ends")
            logging.shutdown()
            os._exit(_BROKEN)


class Server:
    """The HTTP side."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, Stream] = {}
        self._paused = False
        self._collector = Collector()
        self._name = f"engine {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"
        name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(name)
        limits = Limits(options.rows, options.window, options.flush, options.prefill, options.prefix_mb << 20)
        self._model = ModelLoop(Batch(self._load(options.model), options.version, limits), self._deliver)
        self._model.start()
        self._heart = asyncio.create_task(self._heartbeat())

    def _load(self, path: Path, load: Loader = from_files) -> SlotModel:
        began = time.monotonic()
        model = SlotModel(path, self._options.dtype, self._options.window, self._device, load)
        log.info("loaded %s in %.3f s", path, time.monotonic() - began)
        return model

    def application(self, secret: str) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        routes: dict[str, Callable[[web.Request], Any]] = {
            "generate": self.generate,
            "pause": self.pause,
            "resume": self.resume,
            "release": self.release,
            "update_weights": self.update_weights,
            "restore": self.update_weights,
            "receive": self.receive,
            "score": self.score,
        }
        app.add_routes([web.post(f"/{secret}/{name}", handler) for name, handler in routes.items()])
        app.add_routes([web.get(f"/{secret}/health", self.health), web.get(f"/{secret}/digest", self.digest)])
        app.on_cleanup.append(self._stop)
        return app

    async def _stop(self, app: web.Application) -> None:
        self._heart.cancel()
        await asyncio.to_thread(self._model.stop)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        sampling = body["sampling"]
        sampling["stop"] = tuple(sampling["stop"])
        # ids must be unique here whatever the callers do: a cancelled call may come back while its first life is being ended
        inner = f"{body['request_id']}/{secrets.token_hex(4)}"
        request = GenerateRequest(inner, body["prompt"], Sampling(**sampling), body["position"])
        if reason := self._model.batch.refusal(request):
            return web.json_response({"error": reason}, status=400)
        if self._paused or self._model.batch.model is None:
            return web.json_response({"error": "paused"}, status=503)
        stream: Stream = asyncio.Queue()
        self._streams[inner] = stream
        self._model.submit(lambda: self._model.batch.add(request))
        finished = False
        media, write = (frames.MEDIA, _frame) if frames.MEDIA in http.headers.get("Accept", "") else ("application/x-ndjson", _line)
        response = web.StreamResponse(headers={"Content-Type": media})
        try:
            await response.prepare(http)
            while not finished:
                items = [await stream.get()]
                while not stream.empty():
                    items.append(stream.get_nowait())
                finished = isinstance(items[-1], str) or (items[-1] is not None and items[-1].finish is not None)
                await response.write(b"".join(map(write, items)))
            await response.write_eof()
        except ConnectionResetError:
            log.debug("%s: the caller left", inner)
        finally:
            del self._streams[inner]
            if not finished:
                self._model.submit(lambda: self._model.batch.cancel(inner))
        return response

    def _deliver(self, ready: list[tuple[str, TokenChunk]]) -> None:
        """From the model thread."""
        self._loop.call_soon_threadsafe(self._hand_out, ready)

    def _hand_out(self, ready: list[tuple[str, TokenChunk]]) -> None:
        for request_id, chunk in ready:
            if stream := self._streams.get(request_id):
                stream.put_nowait(chunk)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT)
            for stream in self._streams.values():
                if stream.empty():
                    stream.put_nowait(None)

    async def _command(self, command: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._model.submit(command))

    async def _fault_all(self, reason: str) -> None:
        for request_id in await self._command(self._model.batch.drop_all):
            if stream := self._streams.get(request_id):
                stream.put_nowait(reason)

    async def pause(self, http: web.Request) -> web.Response:
        self._paused = True
        await self._fault_all("paused")
        return await self.health(http)

    async def resume(self, http: web.Request) -> web.Response:
        self._paused = False
        return await self.health(http)

    async def release(self, http: web.Request) -> web.Response:
        await self._fault_all("released")
        await self._command(lambda: self._model.batch.replace(None, self._model.batch.version))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.info("released, left: %s", orjson.dumps(self._model.batch.counts).decode())
        return await self.health(http)

    async def update_weights(self, http: web.Request) -> web.Response:
        body = await http.json()
        try:
            model = await self._command(lambda: self._load(Path(body["model"])))
        except (OSError, ValueError, RuntimeError, UnsupportedModel) as error:
            log.exception("could not load %s", body["model"])
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)
        await self._command(lambda: self._model.batch.replace(model, body["version"]))
        return await self.health(http)

    async def receive(self, http: web.Request) -> web.Response:
        """Weights from a sender, into a model of their own: that which serves is replaced when they are there, whole and proven."""
        body = await http.json()
        try:
            weights = await asyncio.to_thread(self._received, body["source"], body["version"], body["seconds"])
            model = await self._command(lambda: self._with(weights))
        except (NotReceived, OSError, ValueError, RuntimeError, UnsupportedModel) as error:
            log.exception("version %d was not received", body["version"])
            return web.json_response({"failed": f"{type(error).__name__}: {error}"})
        await self._command(lambda: self._model.batch.replace(model, body["version"]))
        return await self.health(http)

    def _received(self, source: str, version: int, seconds: float) -> dict[str, torch.Tensor]:
        """Everything, in the host's memory. Raises NotReceived."""
        if not source.startswith(SCHEME):
            return receive(source, version, seconds)
        attend(source, version, seconds, self._name, self._collector)
        return self._collector.take()

    def _with(self, weights: dict[str, torch.Tensor]) -> SlotModel:
        """The model that is served, with other weights."""
        serving = self._model.batch.model
        if serving is None:
            raise NotReceived("the engine is released: it loads from files")
        return self._load(self._options.model, from_memory(type(serving.model), weights))

    async def health(self, http: web.Request) -> web.Response:
        batch = self._model.batch
        state = {"version": batch.version, "paused": self._paused, "released": batch.model is None, "pid": os.getpid()}
        return web.json_response({**state, **batch.counts})

    async def score(self, http: web.Request) -> web.Response:
        """{version, logprobs}: nats of tokens[1:], each after those before it."""
        tokens = [int(token) for token in (await http.json())["tokens"]]

        def weigh() -> dict[str, object] | None:
            model = self._model.batch.model
            return None if model is None else {"version": self._model.batch.version, "logprobs": model.logprobs(tokens)}

        found = await self._command(weigh)
        return web.json_response({"error": "released"}, status=503) if found is None else web.json_response(found)

    async def digest(self, http: web.Request) -> web.Response:
        """{version, digest}: BLAKE2b-128 of all parameters as float32, in the model's order, to compare with a trainer's."""

        def weigh() -> dict[str, object]:
            model = self._model.batch.model
            found = hashlib.blake2b(digest_size=16)
            for parameter in model.model.parameters() if model is not None else ():
                found.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
            return {"version": self._model.batch.version, "digest": found.hexdigest()}

        return web.json_response(await self._command(weigh))


def _frame(item: TokenChunk | str | None) -> bytes:
    if item is None:
        return frames.ALIVE
    return frames.fault(item) if isinstance(item, str) else frames.frame(item)


def _line(item: TokenChunk | str | None) -> bytes:
    if item is None:
        return b"\n"
    if isinstance(item, str):
        return orjson.dumps({"error": item}) + b"\n"
    starts = [0, *(np.flatnonzero(np.diff(item.versions)) + 1).tolist(), len(item)]
    spans = [[int(item.versions[at]), end - at] for at, end in itertools.pairwise(starts) if end > at]
    fields = {"t": item.tokens, "l": item.logprobs, "v": spans, "f": item.finish}
    return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of one engine."""
    parser = argparse.ArgumentParser(description="The torch engine of one cell.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--ready-fd", type=int, help="gets one line with our URL when we listen")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", required=True)
    for name in ("version", "window", "threads", "rows", "flush", "prefill", "prefix-mb"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args(arguments)


async def listen(options: argparse.Namespace) -> tuple[web.AppRunner, str]:
    """Load the model and listen on a free port; returns what to clean up, and the URL."""
    secret = secrets.token_urlsafe(16)
    runner = web.AppRunner(Server(options).application(secret), access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, options.host, 0, backlog=1024).start()
    port = runner.addresses[0][1]
    log.info("listening on %s:%d", options.host, port)
    return runner, f"http://{options.host}:{port}/{secret}"


async def _serve(options: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    runner, url = await listen(options)
    with os.fdopen(options.ready_fd, "w") as ready:
        ready.write(url + "\n")
    await stopped.wait()
    await runner.cleanup()


def main() -> None:
    options = parse(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(options.threads)
    sys.setswitchinterval(0.0005)  # two threads that each work in bursts of a fraction of a millisecond
    # Slurm signals every process of a step; only our owner ends us
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # what was imported stays: a collection then looks at what came after only, 3 ms instead of 200 in every release
    gc.freeze()
    try:
        asyncio.run(_serve(options))
    except UnsupportedModel as error:
        print(error, file=sys.stderr, flush=True)  # the log's last line is what the user reads
        sys.exit(control.UNSUPPORTED)
    logging.shutdown()
    os._exit(0)  # taking torch apart costs up to a second, and there is nothing left to save
