import json
import subprocess
import sys

import h5py

from tests.trees.forests import begin, finish, one_call
from trees.records import Execution, ExecutionEnd, Group, Role
from trees.segment import DESCRIPTIONS
from trees.store import StoreWriter


def test_a_segment_explains_itself_to_plain_tools(tmp_path):
    with StoreWriter(tmp_path, {"revision": "abc"}) as writer:
        begin(writer)
        one_call(writer, 0, writer.context_node(-1, [1, 2, 3], 0, -1, Role.MAIN))
        finish(writer, 0)
        (segment,) = writer.seal()
    header = subprocess.run(["h5dump", "-H", segment], capture_output=True, text=True, check=True).stdout
    for word in ("COMMENT", "behaviour log-probability in nats", "SAMPLED", "SUPERSEDED", "rows_nodes", "provenance"):
        assert word in header
    values = subprocess.run(["h5dump", "-d", "/tokens", segment], capture_output=True, text=True, check=True).stdout
    assert "(0): 1, 2, 3, 1, 2" in values
    with h5py.File(segment) as file:
        assert json.loads(file.attrs["provenance"]) == {"revision": "abc"}
        assert file.attrs["rows_tokens"] == 5
        datasets = []
        file.visititems(lambda name, item: datasets.append(item) if isinstance(item, h5py.Dataset) else None)
        for dataset in datasets:
            assert dataset.fletcher32
            assert dataset.shuffle
            assert dataset.compression == "gzip"
            assert dataset.chunks
            assert dataset.attrs["description"]


def test_a_small_segment_is_small_and_has_no_bytes_without_a_checksum(tmp_path):
    with StoreWriter(tmp_path, {"revision": "abc"}) as writer:
        begin(writer)
        one_call(writer, 0, writer.context_node(-1, [1, 2, 3], 0, -1, Role.MAIN))
        finish(writer, 0)
        (segment,) = writer.seal()
    assert segment.stat().st_size < 25_000
    with h5py.File(segment) as file:
        objects = [file["/"]]
        file.visititems(lambda name, item: objects.append(item))
        for item in objects:
            for name in item.attrs:
                kind = h5py.check_string_dtype(item.attrs.get_id(name).dtype)
                assert kind is None or kind.length  # strings of variable length lie in heaps without checksums
        assert len(objects) == 1 + 4 + len(DESCRIPTIONS)
    version = segment.read_bytes()[8]
    assert version == 3  # of the superblock: HDF5 1.10 and later


def test_wide_texts_lie_in_chunks_of_few_rows_and_columns_in_one(tmp_path):
    with StoreWriter(tmp_path) as writer:
        writer.append(Group(0, "t", 400, 0, 0))
        for index in range(400):
            execution = writer.allocate_execution()
            writer.append(Execution(execution, 0, index, 0))
            writer.append(ExecutionEnd(execution, "done", 1.0, True, 0, 0, 0.0, "x" * 1000))
        (segment,) = writer.seal()
    with h5py.File(segment) as file:
        assert file["executions/detail"].chunks == (262,)
        assert file["executions/id"].chunks == (400,)
        assert file["calls/id"].shape == (0,)
        assert len({bytes(text) for text in file["executions/detail"][:]}) == 1


def test_plain_tools_read_while_the_writer_writes(tmp_path):
    """h5ls, h5dump and h5py, processes of their own, on every segment between two commits: a journal open, an execution at work."""
    look = "import h5py, sys; f = h5py.File(sys.argv[1]); print(len(f['tokens']), f.attrs['rows_tokens'], len(f['tokens'][:]))"
    with StoreWriter(tmp_path) as writer:
        begin(writer, 0, 0)
        for n in range(1, 4):
            begin(writer, n, n)
            prompt = writer.context_node(-1, [1, 2, n], n, -1, Role.MAIN)
            writer.commit()
            one_call(writer, n - 1, writer.context_node(-1, [1, 2, n - 1], n - 1, -1, Role.MAIN))
            finish(writer, n - 1)
            writer.seal()
            one_call(writer, n, prompt)
            writer.commit()
            segments = sorted(tmp_path.glob("*.h5"))
            assert len(segments) == n
            for segment in segments:
                listed = subprocess.run(["h5ls", segment], capture_output=True, text=True, check=True).stdout
                assert listed.count("Dataset") == sum("/" not in name for name in DESCRIPTIONS)
                subprocess.run(["h5dump", segment], stdout=subprocess.DEVNULL, check=True)
                seen = subprocess.run([sys.executable, "-c", look, segment], capture_output=True, text=True, check=True).stdout
                assert len(set(seen.split())) == 1
