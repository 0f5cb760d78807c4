"""What vLLM streams, read: one server-sent event is one chunk; and the same as frames, which the guard makes of it in vLLM's own process.

vLLM tells each token with 80 bytes of JSON. Reading that where it is made costs each server a little, where the gateway would read the
answers of all of them on one core.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from gyre_hpc.engines import frames
from gyre_hpc.engines.protocol import EngineFault, TokenChunk, merged
from gyre_hpc.engines.streaming import Lines, ids_of, logprobs_of, sound


def parse_line(line: bytes, version: int) -> TokenChunk | None:
    """One line of an answer: an event, or nothing. Raises EngineFault."""
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return None
    return parse_chunk(orjson.loads(line[6:]), version)


def parse_chunk(item: dict[str, Any], version: int) -> TokenChunk:
    """One server-sent event as a chunk. Raises EngineFault for errors, aborts, and weights that changed under the call."""
    if "choices" not in item:
        raise EngineFault(f"vLLM: {str(item.get('error', item))[:300]}")
    choice = item["choices"][0]
    finish = choice["finish_reason"]
    if finish not in (None, "stop", "length"):
        raise EngineFault(f"vLLM ended the call: {finish}")
    tokens = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    if len(content) != len(tokens):
        raise EngineFault(f"vLLM sent {len(tokens)} tokens with {len(content)} log-probs")
    spans = {span["version"] for span in choice["weight_versions"] or []}
    if spans - {str(version)}:
        raise EngineFault(f"vLLM sampled under versions {sorted(spans)}, expected {version}")
    logprobs = logprobs_of([entry["logprob"] for entry in content])
    return TokenChunk(ids_of(tokens), logprobs, np.full(len(tokens), version, np.int32), finish)


class Translator:
    """Events of an answer, sampled by weights `version`, into frames. Behind a `finish` or a fault nothing more comes."""

    def __init__(self, version: int) -> None:
        self._lines = Lines(lambda line: parse_line(line, version))
        self._over = False

    def feed(self, data: bytes) -> bytes:
        """The frames of what is whole after these bytes."""
        made: list[bytes] = []
        try:
            for item in () if self._over else merged(self._lines.feed(data)):
                if isinstance(item, BaseException):
                    raise item
                made.append(frames.frame(sound(item)))
                if item.finish is not None:
                    self._over = True
                    break
        except EngineFault as fault:
            made.append(frames.fault(str(fault)))
            self._over = True
        return b"".join(made)
