"""Every test has a place, and slow files come first as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.places import PLACES, longest_first, may_have, place

HERE = Path(__file__).parent


def item(file: str, name: str, *marks: str, fixtures: tuple[str, ...] = ()) -> Any:
    """Fake of pytest's item: where it is, how it is marked and what it uses."""
    return SimpleNamespace(path=HERE / file, name=name, get_closest_marker=lambda mark: mark in marks or None, fixturenames=fixtures)


def test_whole_jobs_and_servers_of_vllm_are_alone() -> None:
    assert place(item("job/test_run.py", "a", "job")) == "alone"
    assert place(item("engines/test_vllm_engine.py", "a", "vllm", fixtures=("tmp_path", "server"))) == "alone"
    assert place(item("gateway/text/test_library.py", "a", "vllm", fixtures=("made",))) == "beside"
    assert place(item("gateway/test_app.py", "a", fixtures=("server",))) == "beside"
    assert place(item("engines/test_vllm_engine.py", "b")) == "beside"
    assert place(item("slurm/test_jobs.py", "a", "slurm")) == "beside"


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
    assert [may_have(HERE / "job" / "test_run.py", wanted) for wanted in PLACES] == [False, True]
    assert [may_have(HERE / "engines" / "test_vllm_engine.py", wanted) for wanted in PLACES] == [True, True]
    assert [may_have(HERE / "test_layout.py", wanted) for wanted in PLACES] == [True, False]
