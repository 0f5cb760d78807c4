"""A sender of weights that is gone in the middle, as one that is killed."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gyre_hpc.engines.weight_stream import Weights


@contextmanager
def half_sender(version: int, weights: Weights) -> Iterator[str]:
    """Its source; it sends the first half of the bytes to one receiver."""
    head = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in weights]
    body = b"".join(tensor.reshape(-1).float().numpy().tobytes() for _, tensor in weights)
    text = json.dumps({"version": version, "tensors": head}).encode()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            assert lines.readline()
            connection.sendall(struct.pack(">Q", len(text)) + text + body[: len(body) // 2])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}/secret"
        thread.join()
