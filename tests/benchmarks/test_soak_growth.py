"""What a soak takes for growth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.soak_growth import Allowed, Found, Sample, grown, look, named_by

FIRST = Sample(0.0, 0, {"gateway-0": (100 << 20, 20, 4, 6)}, {"trees": (3, 1000)})


def samples(step: tuple[int, int, int, int], count: int = 16) -> list[Sample]:
    """Looks between which the gateway grows by `step`."""
    first = FIRST.processes["gateway-0"]
    grows = [tuple(a + n * b for a, b in zip(first, step, strict=True)) for n in range(count)]
    return [replace(FIRST, t=float(n), transfers=n, processes={"gateway-0": use}) for n, use in enumerate(grows)]  # type: ignore[dict-item]


def problems(seen: list[Sample]) -> list[str]:
    found = Found()
    grown(seen, Allowed(), found)
    return found.problems


def test_what_stays_is_no_growth() -> None:
    assert problems(samples((0, 0, 0, 0))) == []


@pytest.mark.parametrize("step", [(8 << 20, 0, 0, 0), (0, 5, 0, 0), (0, 0, 2, 0), (0, 0, 0, 5)])
def test_any_use_that_goes_on_growing_is_told(step: tuple[int, int, int, int]) -> None:
    (problem,) = problems(samples(step))
    assert problem.startswith("gateway-0 has grown: ")


@pytest.mark.parametrize(("lost", "told"), [(0, 0), (5 << 20, 1)])
def test_a_cache_that_fills_and_is_emptied_is_no_growth_and_hides_none(lost: int, told: int) -> None:
    seen = samples((lost, 0, 0, 0))
    for n, sample in enumerate(seen):
        memory, *others = sample.processes["gateway-0"]
        full = (60 << 20) if n >= 8 and n % 4 else 0  # in the last quarter most looks meet a full one
        seen[n] = replace(sample, processes={"gateway-0": (memory + full, *others)})  # type: ignore[dict-item]
    assert len(problems(seen)) == told


def test_files_are_counted() -> None:
    seen = [replace(sample, files={"trees": (3 + 10 * n, 1000)}) for n, sample in enumerate(samples((0, 0, 0, 0)))]
    assert problems(seen) == ["files of trees: [58.0, 138.0]"]


def test_of_a_few_looks_nothing_can_be_said() -> None:
    assert problems(samples((0, 0, 0, 0), 7)) == ["only 7 looks: nothing can be said of what grows"]


def test_a_look_sees_this_process_and_what_lies_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(b"12345")
    sample = look({"test-0": psutil.Process()}, {"folder": tmp_path, "file": tmp_path / "a" / "b" / "c", "none": tmp_path / "d"}, 3)
    memory, descriptors, threads, _ = sample.processes["test-0"]
    assert min(memory, descriptors, threads) > 0
    assert (sample.files["folder"][0], sample.files["file"], sample.files["none"]) == (3, (1, 5), (0, 0))
    assert sample.transfers == 3


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["python", "-P", "-m", "gyre_hpc.gateway.main", "--run-dir", "r"], "gateway"),
        (["python", "-m", "benchmarks.soak_kv", "rank"], "rank"),
        (["VLLM::EngineCore"], "vllm-enginecore"),
        (["bwrap", "--ro-bind"], None),
        ([], None),
    ],
)
def test_processes_are_known_by_their_command(command: list[str], kind: str | None) -> None:
    assert named_by(command) == kind
