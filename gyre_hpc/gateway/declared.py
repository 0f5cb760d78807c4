"""What a gateway that runs alone must know again after a restart: the key of its secrets, and the weight version of the servers.

Invariants: the file has mode 0600 and is the only place where the key stands; every secret is derived from it (HMAC-SHA256), so a restart
gives the same ones and no list of them exists; a version that was declared is on the disk before the declaration is answered.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from pathlib import Path

from gyre_hpc.errors import GyreError
from gyre_hpc.runtime import write_private

_KEY_BYTES = 32


class Declared:
    """The state in `path`, made if it is not there."""

    def __init__(self, path: Path) -> None:
        """Raises GyreError for a file that is not ours."""
        self._path = path
        self._key = b""
        self._version = 0
        self._seen: dict[int, int] = {}
        try:
            fields = json.loads(path.read_text())
            self._key, self._version = bytes.fromhex(fields["key"]), int(fields["version"])
        except FileNotFoundError:
            self._key = secrets.token_bytes(_KEY_BYTES)
            self._write()
        except (ValueError, TypeError, KeyError) as error:
            raise GyreError(f"{path} can't be read ({error})", "restore it from a copy, or set run.dir to a new folder") from None

    @property
    def version(self) -> int:
        """The weight version that was declared last, or that the slowest server told."""
        return min(self._seen.values(), default=self._version)

    def version_of(self, server: int) -> int:
        """The version that a server has, as far as is known."""
        return self._seen.get(server, self._version)

    def declare(self, version: int) -> None:
        """All servers have this version from now on; durable when this returns."""
        self._seen.clear()
        if version != self._version:
            self._version = version
            self._write()

    def told(self, server: int, version: int) -> None:
        """A server says which version it has."""
        self._seen[server] = version

    def secret(self, purpose: str) -> str:
        """The secret for this purpose: 32 letters, the same after every restart."""
        digest = hmac.digest(self._key, purpose.encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest[:24]).decode()

    def _write(self) -> None:
        write_private(self._path, {"key": self._key.hex(), "version": self._version})
