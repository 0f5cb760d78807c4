"""The torch engine's process, `python -m gyre_hpc.engines.torch_main`: imports first, and without the collector, then the server."""

from __future__ import annotations

from gyre_hpc.importing import uncollected

if __name__ == "__main__":
    with uncollected():
        from gyre_hpc.engines.torch_server import main
    main()
