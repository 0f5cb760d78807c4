"""A disk that fills up while the run works: it stops with one line and resumes when there is room again."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job.jobs import make

pytestmark = [pytest.mark.job, pytest.mark.timeout(600)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """24 MiB of tmpfs."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_stops_the_run_and_it_resumes(small_disk: Path) -> None:
    # checkpoints and published weights of the built-in model fill it up within a few steps once a filler takes the rest
    job = make(small_disk, run={"steps": 4}, cells={"count": 2})
    log = small_disk.parent / "out.log"
    process = job.start(log)
    job.wait_for_steps(process, 1, log)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
        while True:
            f.write(bytes(1 << 12))
    assert process.wait(120) == 75, log.read_text()
    last = log.read_text().strip().splitlines()[-1]
    assert "disk" in last or "space" in last, last
    assert not job.processes()
    filler.unlink()
    done = job.steps()
    assert job.start(log).wait(300) == 0, log.read_text()
    assert job.steps() == [1, 2, 3, 4]
    assert job.steps()[: len(done)] == done
