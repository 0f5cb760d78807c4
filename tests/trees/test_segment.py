import json
import subprocess

import h5py

from tests.trees.forests import begin, finish, one_call
from trees.records import Role
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
