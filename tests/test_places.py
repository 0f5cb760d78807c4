"""Every test has a place, and slow files come first as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.places import PLACES, GroupScheduling, group, longest_first, longest_groups_first, may_have, place

HERE = Path(__file__).parent


def item(file: str, name: str, *marks: str, fixtures: tuple[str, ...] = ()) -> Any:
    """Fake of pytest's item: where it is, how it is marked and what it uses."""
    return SimpleNamespace(path=HERE / file, name=name, get_closest_marker=lambda mark: mark in marks or None, fixturenames=fixtures)


def test_whole_jobs_and_servers_of_vllm_are_paired_and_soaks_alone() -> None:
    assert place(item("job/test_run.py", "a", "job")) == "paired"
    assert place(item("engines/test_vllm_engine.py", "a", "vllm", fixtures=("tmp_path", "server"))) == "paired"
    assert place(item("gateway/text/test_library.py", "a", "vllm", fixtures=("made",))) == "beside"
    assert place(item("gateway/test_app.py", "a", fixtures=("server",))) == "beside"
    assert place(item("engines/test_vllm_engine.py", "b")) == "beside"
    assert place(item("slurm/test_jobs.py", "a", "slurm")) == "beside"
    assert place(item("job/test_soak.py", "a", "job", "vllm")) == "alone"


def test_the_longest_come_first_and_files_stay_whole() -> None:
    items = [
        item("a.py", "quick"),
        item("b.py", "quick"),
        item("b.py", "whole job", "job"),
        item("c.py", "client", "harness"),
        item("d.py", "cluster", "slurm"),
        item("d.py", "quick"),
    ]
    ordered = [(found.path.name, found.name) for found in longest_first(items)]
    assert ordered == [
        ("d.py", "cluster"),
        ("d.py", "quick"),
        ("b.py", "quick"),
        ("b.py", "whole job"),
        ("c.py", "client"),
        ("a.py", "quick"),
    ]


def test_a_file_is_left_out_of_a_place_where_it_has_no_test() -> None:
    def places(file: str) -> list[str]:
        return [wanted for wanted in PLACES if may_have(HERE / file, wanted)]

    assert places("job/test_run.py") == ["paired"]
    assert places("engines/test_vllm_engine.py") == ["beside", "paired"]
    assert places("test_layout.py") == ["beside"]
    assert places("job/test_soak.py") == ["alone"]


def test_one_worker_has_all_that_start_vllm_and_has_them_first() -> None:
    files = ["job/test_disk.py", "job/test_handover.py", "job/test_slurm.py", "engines/test_handover_nixl.py"]
    ordered = longest_groups_first([item(file, name) for file in files for name in "ab"])
    assert [found.path.name for found in ordered[::2]] == ["test_handover.py", "test_handover_nixl.py", "test_slurm.py", "test_disk.py"]
    assert [group(found.path) for found in ordered[::2]] == ["vllm", "vllm", "test_slurm.py", "test_disk.py"]
    assert [GroupScheduling._split_scope(item, f"tests/{file}::a[b::c]") for file in files] == [group(HERE / file) for file in files]
