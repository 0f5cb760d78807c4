"""`python -m gyre_hpc.training.prebuild`: one optimizer step of a toy model, so that a run's first step finds nothing left to compile.

On a CPU DeepSpeed compiles nothing (training/engine.py); what is paid here is Python's byte code. On an accelerator its one-time builds
happen now. Invariant: idempotent and quick when all is there. Exit 0 and one line when ready; exit 1 with the remedy otherwise.
"""

from __future__ import annotations

import socket
import sys
import time

from gyre_hpc.config import Config
from gyre_hpc.errors import GyreError


def prebuild() -> float:
    """Step once. Returns seconds; raises GyreError."""
    started = time.monotonic()
    import torch

    from gyre_hpc.training.engine import Zero

    model = torch.nn.Linear(4, 4)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    parameters = list(model.to(device).parameters())
    try:
        zero = Zero(model, parameters, Config(), 0, 1, f"127.0.0.1:{_free_port()}", device)
        zero.step([torch.ones_like(p) for p in parameters], 1e-3)
        zero.close()
    except (RuntimeError, OSError, ImportError) as error:
        raise GyreError(f"DeepSpeed can't step: {str(error).splitlines()[0]}", "`ds_report` tells what it misses") from error
    return time.monotonic() - started


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main() -> int:
    """Command line."""
    print("DeepSpeed: a first step, with what it builds once (seconds on a CPU, minutes on a GPU) ...", flush=True)
    try:
        seconds = prebuild()
    except GyreError as error:
        print(error.line, file=sys.stderr)
        return int(error.exit_code)
    print(f"DeepSpeed: ready after {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
