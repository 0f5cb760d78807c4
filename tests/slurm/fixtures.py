"""One virtual cluster for all tests that need Slurm; started by the first of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import REMEDY, Cluster, Spec, cluster, missing


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Four idle nodes n1..n4. A short path: it holds a unix socket."""
    lacking = missing()
    if lacking:
        pytest.skip(f"{', '.join(lacking)} not found: {REMEDY}")
    directory = Path(tempfile.mkdtemp(prefix="gyre-slurm-"))
    with cluster(directory, Spec(nodes=4)) as made:
        yield made
    shutil.rmtree(directory)


@pytest.fixture
def inside(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, with this process's environment pointing at it."""
    for key, value in slurm.environment.items():
        monkeypatch.setenv(key, value)
    return slurm
