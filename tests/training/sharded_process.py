"""Cells whose ranks hold a shard of the model each, as a program: `python -m tests.training.sharded_process FOLDER`, which prints a line
for each case that passed. Ranks are forked, so that the imports (seconds) are paid once, and do what they are asked over pipes.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from cells.pump import Pump
from cells.watchdog import Watchdog
from gyre_hpc.checkpoint import CoreState
from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.errors import ConfigError
from gyre_hpc.training import head, published
from gyre_hpc.training.actor import Core, Satellite
from gyre_hpc.training.loss import Sums
from gyre_hpc.training.world import Seat, is_lost
from tests.ports import free_port
from tests.training.conftest import TRAINING, VOCABULARY, make_rows

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.2,
}
MODELS: dict[str, PretrainedConfig] = {
    "plain": Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "tied": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    # four experts: cut along another dimension by three ranks
    "mixture": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
}
EXECUTIONS = 6
ROWS = make_rows(EXECUTIONS, 11)
SMALL_FILES = 8_000
Flat = NDArray[np.float32]


def config(dtype: str, stage: int, **training: Any) -> Config:
    zero = {"deepspeed": {"zero_optimization": {"stage": stage}}}
    return check({"training": {**TRAINING, **zero, **training}, "model": {"dtype": dtype}}, "test")


# -- ranks ------------------------------------------------------------------------------------------------------------------------
class Rank:
    """What one process does when it is asked."""

    def __init__(self, model: Path, dtype: str, rank: int, ranks: int, port: int, training: dict[str, Any]) -> None:
        self.rank, self.ranks = rank, ranks
        self.inherited = storages()
        if training.pop("satellite", False):
            seat = Seat(rank, ranks, f"127.0.0.1:{port}")
            self.core: Any = Satellite(model, config(dtype, 3, **training), seat=seat)
        else:
            self.core = Core(model, config(dtype, 3, **training), rank, ranks, f"127.0.0.1:{port}")

    def table(self) -> list[tuple[str, int, int, int]]:
        return list(self.core.state().table)

    def accumulate(self, rows: list[int]) -> NDArray[np.float64]:
        return self.core.accumulate([ROWS[i] for i in rows[self.rank :: self.ranks]]).array()

    def accumulate_alone(self, rows: list[int]) -> str:
        """What is heard of another rank that is gone."""
        try:
            self.core.accumulate([ROWS[i] for i in rows])
        except RuntimeError as error:
            return str(error) if is_lost(error) else ""
        return ""

    def accumulate_watched(self, rows: list[int], seconds: float) -> None:
        """As a cell's rank does it (controller/learner.py): whoever waits too long ends by itself."""
        with Watchdog(lambda name, _seconds: os._exit(75), print).watch("the cell's ranks", seconds):
            self.core.accumulate([ROWS[i] for i in rows])

    def stand_still(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def move(self) -> None:
        """Off the device and back: to other memory each time, as with a GPU, for on a CPU `to` alone leaves all where it is."""
        model = self.core._held.model
        model.to = lambda _device: model._apply(torch.clone)
        self.core._held.zero()
        before = [part.data_ptr() for part in self.core._held.parts()]
        self.core._held.to(torch.device("cpu"))
        assert all(part.data_ptr() != was for part, was in zip(self.core._held.parts(), before, strict=True) if part.numel())
        self.core._held.to(self.core.device)
        del model.to

    def turns(self, rows: list[int]) -> int:
        """How often the thread that serves MPI has its turn while this rank computes, and waits for one that sleeps."""
        seen: list[None] = []
        with Pump(lambda: seen.append(None), pause=0.01).working():
            self.core.accumulate([ROWS[i] for i in rows])
        return len(seen)

    def late(self, rows: list[int], seconds: float) -> None:
        time.sleep(seconds)
        self.core.accumulate([ROWS[i] for i in rows])

    def pull(self, snapshots: list[Flat]) -> None:
        self.core.pull(snapshots[self.rank])

    def gradient(self) -> Flat:
        return self.core.gradient()

    def zero(self) -> None:
        self.core.zero()

    def snapshot(self) -> Flat:
        return self.core.snapshot()

    def step(self, gradient: list[Flat]) -> float:
        return self.core.step(gradient[self.rank], EXECUTIONS).grad_norm

    def state(self) -> CoreState:
        state = self.core.state()
        return CoreState(**{**vars(state), "arrays": {name: values.copy() for name, values in state.arrays.items()}})

    def load(self, states: list[CoreState]) -> None:
        self.core.load_state(states[self.rank])

    def refused(self, states: list[CoreState]) -> str:
        try:
            self.core.load_state(states[self.rank])
        except ConfigError as error:
            return error.line
        return ""

    def export(self, folder: Path) -> None:
        published.FILE_BYTES = SMALL_FILES
        self.core.export(folder)

    def weights(self) -> list[tuple[str, Flat]]:
        return [(name, tensor.float().numpy()) for name, tensor in self.core.weights()]

    def logprobs(self, tokens: list[int]) -> list[float]:
        return self.core.logprobs(tokens)

    def live(self) -> int:
        """Bytes of all tensors that this process has made."""
        return sum(size for pointer, size in storages().items() if pointer not in self.inherited)

    def others(self) -> int:
        """Bytes of what is no parameter."""
        return sum(b.nbytes for b in self.core.model.buffers())


def storages() -> dict[int, int]:
    """Where the tensors of this process lie, and how many bytes."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            for tensor in (thing, getattr(thing, "_local_tensor", None)):
                if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def serve(pipe: Connection, *arguments: Any) -> None:
    rank = Rank(*arguments)
    while (asked := pipe.recv()) is not None:
        pipe.send(getattr(rank, asked[0])(*asked[1:]))
    rank.core.close()


class Cell:
    """Ranks that are asked all at once."""

    def __init__(self, pipes: list[Connection], processes: list[Any]) -> None:
        self._pipes, self.processes = pipes, processes

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> list[Any]:
            for pipe in self._pipes:
                pipe.send((name, *arguments))
            return [pipe.recv() for pipe in self._pipes]

        return ask

    def tell(self, rank: int, *asked: Any) -> Connection:
        """One rank alone; what it says comes out of there."""
        self._pipes[rank].send(asked)
        return self._pipes[rank]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


@contextmanager
def dying(model: Path) -> Iterator[Cell]:
    """Two ranks of which no end is expected."""
    made = started(model, "float32", 2)
    try:
        made.table()
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.join()


@contextmanager
def cell(model: Path, dtype: str, ranks: int, **training: Any) -> Iterator[Cell]:
    made = started(model, dtype, ranks, **training)
    yield made
    made.end()
    for process in made.processes:
        process.join(60)
    assert [process.exitcode for process in made.processes] == [0] * ranks


def started(model: Path, dtype: str, ranks: int, **training: Any) -> Cell:
    context, port = multiprocessing.get_context("fork"), free_port()
    ends = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=serve, args=(ends[rank][1], model, dtype, rank, ranks, port, training), daemon=True) for rank in range(ranks)
    ]
    for process, (_, theirs) in zip(processes, ends, strict=True):
        process.start()
        theirs.close()  # that of a rank which dies ends with it
    return Cell([ours for ours, _ in ends], processes)


def joined(flats: list[Flat], table: list[tuple[str, int, int, int]]) -> Flat:
    """The flat vector of a whole model from the shards."""
    together = np.concatenate(flats)
    pieces: dict[str, list[Flat]] = {}
    for name, _, offset, length in table:
        pieces.setdefault(name, []).append(together[offset : offset + length])
    return np.concatenate([part for parts in pieces.values() for part in parts])


# -- what is to hold --------------------------------------------------------------------------------------------------------------
def any_split_gives_the_sum(made: Cell, table: list[tuple[str, int, int, int]], whole: Flat, sums: Sums, examples: int) -> None:
    """Rows in any order, in micro-steps of any size, to one to three cells: the same ranks play them one after the other."""

    @settings(max_examples=examples, deadline=None, database=None)
    @given(data=st.data())
    def check_it(data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(ROWS))))
        cuts = sorted(data.draw(st.sets(st.integers(1, len(ROWS) - 1), max_size=4)))
        microsteps = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(ROWS)], strict=True)]
        owners = [data.draw(st.integers(0, 2)) for _ in microsteps]
        total, told = np.zeros_like(whole), Sums()
        for owner in set(owners):
            made.zero()
            for rows, its in zip(microsteps, owners, strict=True):
                if its == owner:
                    told += sum((Sums.of(array) for array in made.accumulate(rows)), Sums())
            total += joined(made.gradient(), table)
        assert np.abs(total - whole).max() < 1e-5 * np.abs(whole).max()
        assert np.allclose(told.array(), sums.array(), rtol=1e-4, atol=1e-5)

    check_it()


def steps_are_those_of_the_whole(made: Cell, table: list[tuple[str, int, int, int]], model: Path) -> None:
    """Two steps beside plain AdamW with clipping; then back to the first by a state, and the same again bit for bit."""
    plain = Satellite(model, config("float32", 1))
    optimizer = torch.optim.AdamW(plain.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    seen: list[list[Flat]] = []
    states = None
    for step, lr in enumerate((5e-3, 1e-2)):
        made.zero()
        made.accumulate(list(range(len(ROWS))))
        plain.zero()
        plain.accumulate(ROWS)
        norms = made.step(made.gradient())
        for p, part in zip(plain.model.parameters(), plain._held.views(torch.from_numpy(plain.gradient() / EXECUTIONS)), strict=True):
            p.grad = part.clone()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        assert np.allclose(norms, norm, rtol=1e-4), (norms, norm)
        seen.append(made.snapshot())
        # Adam divides tiny gradients by tiny moments, so rounding grows; a lost or doubled half of the rows would be 100 times this
        assert np.abs(joined(seen[-1], table) - plain.snapshot()).max() < 1e-4
        states = states if step else made.state()
    made.load(states)
    assert all(np.array_equal(a, b) for a, b in zip(made.snapshot(), seen[0], strict=True))
    made.zero()
    made.accumulate(list(range(len(ROWS))))
    made.step(made.gradient())
    assert all(np.array_equal(a, b) for a, b in zip(made.snapshot(), seen[1], strict=True))
    other = [CoreState(**{**vars(state), "table": [(n, g, o + 1, k) for n, g, o, k in state.table]}) for state in states or ()]
    assert all("cut otherwise" in line for line in made.refused(other))


def satellites_follow(made: Cell, table: list[tuple[str, int, int, int]], model: Path, ranks: int) -> None:
    """Ranks that take shards of other weights, slot by slot, compute what one with the whole of them does."""
    others = [flat * np.float32(1.001) for flat in made.snapshot()]
    plain = Satellite(model, config("float32", 1))
    plain.pull(joined(others, table))
    plain.accumulate(ROWS)
    with cell(model, "float32", ranks, satellite=True) as other:
        other.pull(others)
        other.accumulate(list(range(len(ROWS))))
        assert np.abs(joined(other.gradient(), table) - plain.gradient()).max() < 1e-5 * np.abs(plain.gradient()).max()


def memory_is_a_share(made: Cell, ranks: int, parameters: int, entries: int) -> None:
    """With sums of gradients, masters and moments: 16 bytes a parameter over the ranks, and nothing that is gathered or was loaded.

    `entries`: numbers in one entry of every parameter, of which a rank may have one more than another.
    """
    made.accumulate(list(range(len(ROWS))))
    live, others = made.live(), made.others()
    for bytes_, beside in zip(live, others, strict=True):
        assert bytes_ <= 1.05 * 16 * parameters / ranks + 16 * entries + 2 * beside + 4096, (live, parameters, ranks)
    assert sum(live) >= 16 * parameters


def files_are_those_of_the_whole(made: Cell, table: list[tuple[str, int, int, int]], model: Path, folder: Path, dtype: str) -> None:
    plain = Satellite(model, config(dtype, 1))
    plain.pull(joined(made.snapshot(), table))
    made.export(folder)
    plain.model.save_pretrained(folder.with_name(folder.name + "-plain"))
    expected = load_file(folder.with_name(folder.name + "-plain") / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 1
    assert files == sorted(path.name for path in folder.glob("*.safetensors"))
    written = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert {name: index["weight_map"][name] for name in written} == index["weight_map"]
    assert sorted(written) == sorted(expected)
    assert all(torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype for name, tensor in expected.items())
    again = Satellite(folder, config(dtype, 1))
    assert np.array_equal(again.snapshot(), plain.snapshot())
    sent, *empty = made.weights()
    assert all(not weights for weights in empty)
    assert sorted(name for name, _ in sent) == sorted(expected)
    assert all(np.array_equal(values, expected[name].float().numpy()) for name, values in sent)
    tokens = list(range(2, 40))
    for logprobs in made.logprobs(tokens):
        assert np.allclose(logprobs, plain.logprobs(tokens), atol=1e-5 if dtype == "float32" else 0.1)


def case(root: Path, name: str, ranks: int, dtype: str, examples: int, **training: Any) -> None:
    model = root / name
    plain = Satellite(model, config(dtype, 1))
    sums = plain.accumulate(ROWS)
    whole = plain.gradient()
    head.HEAD_BYTES = 4 * VOCABULARY * 5 if training else 256 << 20  # several chunks, or one
    with cell(model, dtype, ranks, **training) as made:
        table = made.table()[0]
        made.move()
        assert np.array_equal(joined(made.snapshot(), table), plain.snapshot())
        if dtype == "float32":
            any_split_gives_the_sum(made, table, whole, sums, examples)
            if training:
                satellites_follow(made, table, model, ranks)
            steps_are_those_of_the_whole(made, table, model)
        else:
            made.accumulate(list(range(len(ROWS))))
            gradient = made.gradient()
            total = joined(gradient, table)
            cosine = float(total @ whole / np.linalg.norm(total) / np.linalg.norm(whole))
            assert cosine > 0.999, cosine
            made.step(gradient)
        made.move()
        memory_is_a_share(made, ranks, plain.size, sum(p.numel() // p.shape[0] for p in plain.model.parameters()))
        files_are_those_of_the_whole(made, table, model, root / f"{name}-{ranks}-{dtype}-{len(training)}", dtype)
    print("passed", name, ranks, dtype, *training, flush=True)


def mpi_is_served(root: Path) -> None:
    """A rank that waits for another in a collective does not keep its own other thread from MPI."""
    with dying(root / "plain") as made:
        made.tell(1, "late", [2], 1.0)
        waiting = made.tell(0, "turns", [0, 1])
        assert waiting.poll(60)
        assert int(waiting.recv()) > 20
    print("passed served", flush=True)


def gone(root: Path) -> None:
    """One rank is killed, then one stands still, while another waits for it in a pass."""
    for name in ("killed", "still"):
        with dying(root / "plain") as made:
            first, second = made.processes
            if name == "killed":
                second.kill()
                heard = made.tell(0, "accumulate_alone", [0, 1])
                assert heard.poll(30), "it waits for a rank that is dead"
                assert heard.recv()
            else:
                made.tell(1, "stand_still")
                made.tell(0, "accumulate_watched", [0, 1], 1.0)
                first.join(30)
                assert first.exitcode == 75
        print("passed", name, flush=True)


CASES: list[tuple[str, int, str, int, dict[str, Any]]] = [
    ("plain", 1, "float32", 3, {}),
    ("plain", 2, "float32", 8, {"activation_checkpointing": True}),
    ("plain", 3, "float32", 3, {}),
    ("tied", 2, "float32", 3, {}),
    ("tied", 3, "bfloat16", 0, {}),
    ("mixture", 2, "float32", 3, {}),
    ("mixture", 3, "float32", 8, {"activation_checkpointing": True}),
    ("mixture", 2, "bfloat16", 0, {}),
]


def main(root: Path, wanted: list[str]) -> None:
    torch.set_num_threads(1)
    for late in ("gyre_hpc.training.sharded", "gyre_hpc.training.adam", "transformers.core_model_loading"):
        importlib.import_module(late)
    for name, described in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(described).save_pretrained(root / name)
    for name, ranks, dtype, examples, training in CASES:
        if not wanted or f"{name}-{ranks}-{dtype}" in wanted:
            case(root, name, ranks, dtype, examples, **training)
    if not wanted or "gone" in wanted:
        mpi_is_served(root)
        gone(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
