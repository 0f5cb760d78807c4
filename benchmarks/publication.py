"""New weights into engines on this machine by each `publication.path`: seconds, MB/s, and CPU seconds of the sender and of the engines.

    python -m benchmarks.publication [--engine torch|vllm] [--engines 2] [--mib 400] [--rounds 5]

One run has all paths, turn by turn, with the same engines and two sets of weights that change places; the files are written beforehand
(every path writes them), so those that are read are in the page cache. MB/s are the model's bytes times the engines over the wall seconds
from the first call to the last engine that serves again. On a machine that others use, compare CPU seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import psutil
import torch
from transformers import AutoModelForCausalLM

from gyre_hpc.engines.factory import start_engine
from gyre_hpc.engines.protocol import EngineServer, EngineSpec
from gyre_hpc.engines.weight_broadcast import Broadcaster
from gyre_hpc.engines.weight_stream import Sender, Weights
from gyre_hpc.training.actor import published
from tests.engines.models import save_random, small_config

HOST, PATIENCE = "127.0.0.1", 300.0
LAYERS = 8
Way = Callable[[int, int], None]
"""Version and which of the two sets of weights, into all engines."""


def config_of(mib: int) -> object:
    """A Qwen3 of about `mib` MiB in float32."""
    hidden = 64
    while _parameters(hidden + 64) * 4 < mib << 20:
        hidden += 64
    return small_config(hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=LAYERS, head_dim=32, num_key_value_heads=2)


def _parameters(hidden: int) -> int:
    return LAYERS * (12 * hidden * hidden + 2 * hidden * 128 + 2 * hidden * 64)


def start(kind: str, count: int, model: Path, folder: Path) -> list[EngineServer]:
    options: dict[str, object] = {"kv_gib": 1} if kind == "vllm" else {}
    specs = [EngineSpec(kind, model, 0, 4, 256, folder / f"engine-{number}.log", options=options) for number in range(count)]
    return [start_engine(spec, PATIENCE) for spec in specs]


def ways(engines: list[EngineServer], models: list[Path], weights: list[Weights], broadcaster: Broadcaster) -> dict[str, Way]:
    pool = ThreadPoolExecutor(len(engines))

    def each(action: Callable[[EngineServer], None]) -> None:
        for future in [pool.submit(action, engine) for engine in engines]:
            future.result()

    def files(version: int, which: int) -> None:
        each(lambda engine: engine.update_weights(models[which], version, PATIENCE))

    def direct(version: int, which: int) -> None:
        sender = Sender(HOST, version, weights[which])
        try:
            each(lambda engine: engine.receive_weights(sender.source, version, PATIENCE))
        finally:
            sender.close()

    def broadcast(version: int, which: int) -> None:
        source = broadcaster.offer(HOST, version, weights[which], len(engines), PATIENCE)
        each(lambda engine: engine.receive_weights(source, version, PATIENCE))
        broadcaster.withdraw()

    return {"files": files, "direct": direct, "broadcast": broadcast}


def cpu(engines: list[EngineServer]) -> tuple[float, float]:
    """CPU seconds so far: of this process, of the engines with all of theirs."""
    used = 0.0
    for engine in engines:
        server = psutil.Process(engine.pid)
        used += sum(sum(process.cpu_times()[:2]) for process in (server, *server.children(recursive=True)))
    return time.process_time(), used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [save_random(folder / f"model-{seed}", seed, config_of(options.mib)) for seed in (0, 1)]  # type: ignore[arg-type]
        weights: list[Weights] = [published(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)) for path in models]
        size = sum(tensor.nbytes for _, tensor in weights[0])
        engines = start(options.engine, options.engines, models[0], folder)
        broadcaster = Broadcaster()
        rows: dict[str, list[tuple[float, float, float]]] = {}
        try:
            version = 0
            for turn in range(options.rounds + 1):
                for way, run in ways(engines, models, weights, broadcaster).items():
                    version += 1
                    before, began = cpu(engines), time.monotonic()
                    run(version, version % 2)
                    seconds, after = time.monotonic() - began, cpu(engines)
                    if turn:  # the first forms the group, and warms up
                        rows.setdefault(way, []).append((seconds, after[0] - before[0], after[1] - before[1]))
        finally:
            broadcaster.close()
            for engine in engines:
                engine.stop()
    print(f"{options.engines} {options.engine} engines, {size / 1e6:.0f} MB each, medians of {options.rounds}")
    print("path        seconds      MB/s   sender CPU s   engines' CPU s")
    for way, found in rows.items():
        seconds, sender, used = (median(row[column] for row in found) for column in range(3))
        print(f"{way:9} {seconds:9.2f} {size * options.engines / seconds / 1e6:9.0f} {sender:14.2f} {used:16.2f}")


if __name__ == "__main__":
    main()
