"""What a long row costs a trainer: CPU seconds and the peak of memory of one row's gradient, by what is computed again.

    python -m benchmarks.long_rows [--tokens 4096 16384] [--sizes quickstart larger] [--modes false auto true] [--heads 16384]

Every case is a process of its own, one thread. A row has a target in every second place. `--modes`: values of
`training.activation_checkpointing`; `--heads N` compares the head over all targets at once with chunks of a quarter of them, on a
vocabulary of 32,000. "peak" is what the process's memory grew by from before the row to its highest (VmHWM, Linux), the gradient
included; a short row first pays for what is built once. Weights are random: neither figure depends on them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "quickstart": {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "vocab_size": 832,
    },
    "larger": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
    },
}
VOCABULARY = 32_000


def megabytes(field: str) -> float:
    """VmHWM or VmRSS of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure(size: str, tokens: int, mode: bool | str, chunk: int | None, vocabulary: int | None) -> dict[str, Any]:
    """One case, in this process."""
    import numpy as np
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gyre_hpc.training.activations import recompute_layers, share_of_free
    from gyre_hpc.training.loss import Objective, batch_loss
    from gyre_hpc.training.rows import TrainRow, stack

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {**SIZES[size], **({"vocab_size": vocabulary} if vocabulary else {})}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=tokens, tie_word_embeddings=True)).eval()
    recompute_layers(model, mode)  # type: ignore[arg-type]
    parameters = list(model.parameters())
    rule = Objective(temperature=1.0, token_cap=5.0, clip_low=0.995, clip_high=1.005)

    def gradient(length: int) -> None:
        rng = np.random.default_rng(0)
        targets = np.arange(length) % 2 == 1
        row = TrainRow(
            rng.integers(0, shape["vocab_size"], length).astype(np.int32),
            targets,
            np.full(length, -np.log(shape["vocab_size"]), np.float32),
            np.zeros(length, np.int32),
            1.0 / targets.sum(),
            1.0,
        )
        loss, _ = batch_loss(model, stack([row], length)[0], rule, torch.device("cpu"), chunk)
        torch.autograd.grad(loss, parameters)

    gradient(256)
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
    before, began = megabytes("VmRSS"), time.process_time()
    free = share_of_free(torch.device("cpu")) / 2**20
    gradient(tokens)
    return {"seconds": time.process_time() - began, "peak": megabytes("VmHWM") - before, "budget": free}


def apart(**case: Any) -> dict[str, Any]:
    """`measure` in a process of its own, which gives memory back at once as it is freed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.long_rows", "--case", json.dumps(case)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--sizes", choices=list(SIZES), nargs="*", default=list(SIZES))
    parser.add_argument("--modes", choices=["false", "auto", "true"], nargs="+", default=["false", "auto", "true"])
    parser.add_argument("--heads", type=int, nargs="*", default=[])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(measure(**json.loads(asked.case))))
        return 0
    values: dict[str, bool | str] = {"false": False, "true": True, "auto": "auto"}
    print("| model | tokens | computed again | CPU s | peak MiB |\n|---|---|---|---|---|", flush=True)
    for size in asked.sizes:
        for tokens in asked.tokens:
            for mode in asked.modes:
                got = apart(size=size, tokens=tokens, mode=values[mode], chunk=None, vocabulary=None)
                budget = f" (may keep {got['budget']:,.0f} MiB)" if mode == "auto" else ""
                print(f"| {size} | {tokens:,} | {mode}{budget} | {got['seconds']:.1f} | {got['peak']:,.0f} |", flush=True)
    if asked.heads:
        print("\n| targets | at once | CPU s | peak MiB |\n|---|---|---|---|", flush=True)
    for tokens in asked.heads:
        for chunk in (tokens // 2, -(-tokens // 8)):
            got = apart(size="quickstart", tokens=tokens, mode=True, chunk=chunk, vocabulary=VOCABULARY)
            print(f"| {tokens // 2:,} | {chunk:,} | {got['seconds']:.1f} | {got['peak']:,.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
