"""Bytes that nobody wrote: readers say so or read what was written, and never crash, hang or believe another value."""

import contextlib
import itertools
import json
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trees.forests import Play, Turn, begin, one_call
from tests.trees.test_merging import content, seal_one
from trees.codec import Header, decode, encode
from trees.errors import StoreError
from trees.journal import frame
from trees.records import Fate, Role
from trees.repair import repair
from trees.store import StoreReader, StoreWriter
from trees.verify import verify

EXAMPLES = int(os.environ.get("GYRE_TEST_FUZZ", "60"))
often = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def damages(draw, size):
    """A function from bytes to other bytes: flips, a cut, a block moved, blanked or made of noise, or something added."""
    kind = draw(st.sampled_from(["flip", "flip", "flips", "cut", "move", "blank", "noise", "more", "all"]))
    at, to, length = draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1)), draw(st.integers(1, 4096))
    rng = random.Random(draw(st.integers(0, 1 << 30)))

    def apply(data: bytes) -> bytes:
        out = bytearray(data)
        match kind:
            case "flip":
                out[at] ^= 1 << rng.randrange(8)
            case "flips":
                for _ in range(rng.randrange(2, 20)):
                    out[rng.randrange(size)] ^= 1 << rng.randrange(8)
            case "cut":
                del out[at:]
            case "move":
                piece = data[at : at + length]
                out[to : to + len(piece)] = piece
            case "blank":
                out[at : at + length] = bytes(len(out[at : at + length]))
            case "noise":
                out[at : at + length] = rng.randbytes(len(out[at : at + length]))
            case "more":
                out[at:at] = rng.randbytes(length)
            case "all":
                out = bytearray(rng.randbytes(size))
        return bytes(out)

    return apply


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A sealed execution, and a journal of several commits with an execution that lives; closed in order."""
    directory = tmp_path_factory.mktemp("store")
    with StoreWriter(directory, {"run": "x"}) as writer:
        seal_one(writer, 0)
        begin(writer, 1, 1)
        at = -1
        for turn in range(6):
            at = one_call(writer, 1, writer.context_node(at, [turn, 5], 1, -1, Role.MAIN), (turn, 8))
            writer.commit()
    return directory


def read(directory):
    with StoreReader(directory) as reader:
        trees = {e: content(reader, e) for e in reader.executions()}
        return trees, dict(reader.groups()), list(reader.heads()), [reader.incomplete(e) for e in trees]


SEGMENT, JOURNAL = "segment-000001.h5", "journal-000002.log"


class Damaged:
    """One file of the store with other bytes, for the time of a `with`."""

    def __init__(self, path, data):
        self.path, self.data, self.good = path, data, path.read_bytes()

    def __enter__(self):
        self.path.write_bytes(self.data)

    def __exit__(self, *_):
        self.path.write_bytes(self.good)


@given(st.data())
@often
def test_a_segment_of_other_bytes_reads_as_it_was_written_or_not_at_all(store, data):
    path = store / SEGMENT
    good, want = path.read_bytes(), read(store)
    damaged = data.draw(damages(len(good)))(good)
    with Damaged(path, damaged):
        try:
            got = read(store)
        except StoreError:
            got = None
        assert got in (None, want)
        assert bool(verify(store)) == (damaged != good)


def problems_of(directory):
    try:
        return verify(directory)
    except StoreError as error:
        return [error.what]


def test_verify_finds_a_flip_in_every_region_of_both_files(store):
    assert verify(store) == []
    rng = random.Random(int(os.environ.get("GYRE_TEST_SEED", "0")))
    # The last frame of a journal that was closed is empty: it says that those before it are whole.
    for name, used in ((SEGMENT, None), (JOURNAL, -len(frame(0, b"")))):
        good = (store / name).read_bytes()
        step = max(1, len(good) // EXAMPLES)
        for first in range(0, len(good[:used]), step):
            at = min(first + rng.randrange(step), len(good[:used]) - 1)
            flipped = good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :]
            with Damaged(store / name, flipped):
                assert problems_of(store), f"{name}: a flip of byte {at} was not found"


@given(st.data())
@often
def test_a_journal_of_other_bytes_is_read_up_to_the_damage(store, data):
    path = store / JOURNAL
    good, (want, *_) = path.read_bytes(), read(store)
    damaged = data.draw(damages(len(good)))(good)
    with Damaged(path, damaged):
        try:
            got, *_ = read(store)
        except StoreError:
            return
        verify(store)
        assert got.keys() <= want.keys()
        for execution, (begun, end, nodes, calls, columns) in got.items():
            whole = want[execution]
            assert (begun, end) == whole[:2]
            assert nodes == whole[2][: len(nodes)]
            assert [(call.call, call.prompt) for call in calls] == [(call.call, call.prompt) for call in whole[3]][: len(calls)]
            assert all(part == all_of_it[: len(part)] for part, all_of_it in zip(columns, whole[4], strict=True))


@given(st.data())
@settings(max_examples=max(10, EXAMPLES // 4), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_was_done_to_a_store_repair_makes_it_whole_and_true(tmp_path_factory, store, data):
    directory = tmp_path_factory.mktemp("damaged")
    want, *_ = read(store)
    for name in (SEGMENT, JOURNAL):
        good = (store / name).read_bytes()
        (directory / name).write_bytes(data.draw(damages(len(good)))(good) if data.draw(st.booleans()) else good)
    report = repair(directory)
    assert verify(directory) == []
    got, *_ = read(directory)
    assert got.keys() <= want.keys()
    if 0 in got and 0 not in report.heads:
        assert got[0] == want[0]
    nodes = {node.node: node for node in want.get(1, want[0])[2]}
    for node in got[1][2] if 1 in got else ():
        assert (node.parent, node.length, node.kind) == (nodes[node.node].parent, nodes[node.node].length, nodes[node.node].kind)
    with StoreWriter(directory) as writer:
        assert writer.allocate_execution() not in got


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_a_payload_that_means_nothing_is_refused(payload):
    for refusing in (lambda: list(decode(payload)), lambda: Header.decode(payload)):
        with contextlib.suppress(StoreError):
            refusing()


@given(forest=st.data(), seed=st.integers(0, 99))
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_a_record_with_other_bytes_is_another_record_or_refused(tmp_path_factory, forest, seed):
    play = Play(tmp_path_factory.mktemp("store"), seed)
    play.play([Turn(0, 0, 3, 4, Role.MAIN, Fate.DELIVERED, "end"), Turn(1, 0, 3, 4, Role.MAIN, Fate.BROKEN, "")])
    records = list(itertools.islice(play.writer.forest.of_executions([0, 1]), 20))
    play.writer.close()
    payload = b"".join(map(encode, records))
    damaged = forest.draw(damages(len(payload)))(payload)
    try:
        for record in decode(damaged):
            encode(record)
    except StoreError:
        pass


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*Header(0).__dict__, "more"]), ANY_JSON, max_size=4), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_a_header_with_other_fields_is_refused_in_one_line(changes, schema):
    fields = {**json.loads(Header(3).encode()), **changes, "schema": schema}
    refusal, header = "", Header(0)
    try:
        header = Header.decode(json.dumps(fields).encode())
    except StoreError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert isinstance(header.segments, tuple)
