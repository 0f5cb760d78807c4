"""Fakes for the outer edges: an engine that speaks prepared answers, a ledger of secrets; and a tiny tokenizer with a template."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gyre_hpc.engines.protocol import EngineFault, GenerateRequest, TokenChunk
from gyre_hpc.gateway.app import HarnessApi, build_app
from gyre_hpc.gateway.recorder import Recorder, RecorderSettings
from gyre_hpc.gateway.text.template import TurnRenderer
from trees.records import Execution, Group
from trees.store import StoreReader, StoreWriter
from trees.tree import Tree

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CHATML = """
{%- if messages[0].role == 'system' or tools -%}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are helpful.') -}}
{%- if tools -%}{{- '\\n# Tools' -}}{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def tiny_model(directory: Path, template: str = CHATML) -> Path:
    """A directory with a byte-level tokenizer (265 tokens) and a chat template; no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    (directory / "config.json").write_text("{}")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return directory


def tool_call(name: str, **arguments: object) -> str:
    """What a policy writes to call a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class ScriptedEngine:
    """Fake of the router: says prepared texts, `step` tokens at a time, with made-up log-probs and versions.

    `replies`: a text, "cut:" + a text that max_tokens cuts there, or an exception to raise after three tokens. `gate`: closed, every
    call waits at its third token. `seen` keeps the requests, `cancelled` counts calls that were closed before their end.
    """

    def __init__(self, renderer: TurnRenderer, step: int = 3) -> None:
        self.renderer = renderer
        self.replies: list[str | Exception] = []
        self.seen: list[GenerateRequest] = []
        self.said: list[list[int]] = []
        self.step = step
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request: GenerateRequest, execution: int) -> AsyncGenerator[TokenChunk, None]:
        self.seen.append(request)
        reply = self.replies.pop(0) if self.replies else "done"
        ended = False
        try:
            if isinstance(reply, Exception):
                yield self._chunk([65, 66, 67])
                raise reply
            tokens, finish = self._tokens(reply)
            tokens, finish = (
                (tokens, finish) if len(tokens) <= request.sampling.max_tokens else (tokens[: request.sampling.max_tokens], "length")
            )
            self.said.append(tokens)
            for at in range(0, len(tokens), self.step):
                last = at + self.step >= len(tokens)
                ended = last
                yield self._chunk(tokens[at : at + self.step], finish if last else None)
                await self.gate.wait()
        except EngineFault:
            ended = True
            raise
        finally:
            self.cancelled += not ended

    def _tokens(self, reply: str) -> tuple[list[int], str]:
        cut = reply.startswith("cut:")
        ids = self.renderer.tokenizer.encode(reply.removeprefix("cut:"), add_special_tokens=False).ids
        return (ids, "length") if cut else ([*ids, self.renderer.turn_end], "stop")

    def _chunk(self, tokens: list[int], finish: str | None = None) -> TokenChunk:
        return TokenChunk(tokens, [-(token % 7) / 8 for token in tokens], [3] * len(tokens), finish)


class Secrets:
    """Fake of the ledger: secret -> execution."""

    def __init__(self, **known: int) -> None:
        self.known = known

    def execution_of(self, secret: str) -> int | None:
        return self.known.get(secret)


@dataclass
class Bench:
    """A recorder over a real store, with a scripted engine behind it; `executions` 0..2 of one group are known."""

    directory: Path
    renderer: TurnRenderer
    engine: ScriptedEngine
    store: StoreWriter
    recorder: Recorder
    fatal: list[Exception]
    answers: Counter[str] = field(default_factory=Counter)
    """What was answered while it was `serving`."""

    def tree(self, execution: int = 0) -> Tree:
        """What a reader finds on the disk now."""
        return StoreReader(self.directory).tree(execution)


@asynccontextmanager
async def bench(directory: Path, renderer: TurnRenderer, settings: RecorderSettings | None = None) -> AsyncIterator[Bench]:
    """Set up and taken down in the running loop."""
    store = StoreWriter(directory)
    store.append(Group(0, "task", 3, 0, 0))
    for index in range(3):
        store.append(Execution(store.allocate_execution(), 0, index, 0))
    store.commit()
    fatal: list[Exception] = []
    engine = ScriptedEngine(renderer)
    recorder = Recorder(store, renderer, engine, settings or RecorderSettings(seed=1, window=4096), fatal.append)
    try:
        yield Bench(directory, renderer, engine, store, recorder, fatal)
    finally:
        engine.gate.set()
        await recorder.close()
        store.close()


@asynccontextmanager
async def serving(made: Bench, ping: float = 5.0, more: Callable[[], list[web.RouteDef]] = list) -> AsyncIterator[str]:
    """The harness API of a bench (counting into its `answers`) on a port of its own; yields the URL of the host."""
    api = HarnessApi(made.recorder, Secrets(s0=0, s1=1, s2=2), "policy", ping)
    api.answers = made.answers
    app = build_app(api, more())
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
