"""The child of an attempt that makes the built-in model, so that the driver keeps listening meanwhile.

Invariant: as every process of a run it leaves the driver one line that says why it could not (failure.py); a traceback only where the
mistake is ours.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from gyre_hpc.driver.children import MARK
from gyre_hpc.errors import GyreError
from gyre_hpc.failure import as_failure, record_failure


def main() -> int:
    """Make it unless it is cached; the exit code. Its lines go to standard output, which is model.log."""
    from gyre_hpc.policy.recipe import ensure

    try:
        ensure(lambda line: print(line, flush=True))
    except Exception as error:
        if not isinstance(error, GyreError):
            traceback.print_exc()
        failure = as_failure("model", error)
        record_failure(Path(os.environ[MARK]), failure)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
