"""A leader of a broadcast that is played by hand."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def leader(*words: dict[str, Any], interrupts: threading.Event | None = None) -> Iterator[str]:
    """Its source; it says the words, each behind an answer to the one before, the last as soon as `interrupts` is set, if that is given."""

    def lead() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as answers:
            for number, word in enumerate(words, 1):
                if interrupts is not None and number == len(words):
                    assert interrupts.wait(60)
                else:
                    assert answers.readline()
                connection.sendall(json.dumps(word).encode() + b"\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lead)
        thread.start()
        yield f"broadcast:127.0.0.1:{listener.getsockname()[1]}/secret"
        thread.join()
