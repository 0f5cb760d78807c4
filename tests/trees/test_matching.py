import pytest
from hypothesis import given
from hypothesis import strategies as st

from trees.matching import Match, MessageIndex, chain

messages = st.lists(st.sampled_from([b"a", b"b", b"", b"ab"]), max_size=6)


def test_the_deepest_recorded_boundary_is_found():
    index = MessageIndex()
    start = index.match(0, b"head", [b"u1"])
    assert start == Match(0, -1, chain(b"", b"head"))
    prompt = index.add(0, start, [b"u1"], node=10)
    answer = index.add(0, prompt, [b"a1"], node=11)
    assert answer.depth == 2
    assert index.match(0, b"head", [b"u1", b"a1", b"t1", b"u2"]) == answer
    assert index.match(0, b"head", [b"u1", b"other"]) == prompt
    assert index.match(0, b"head", []) == start
    assert index.match(0, b"Head", [b"u1", b"a1"]).node == -1


def test_a_boundary_can_lie_behind_several_messages_of_one_node():
    index = MessageIndex()
    index.add(0, index.match(0, b"h", []), [b"u1", b"a1", b"u2"], node=3)
    assert index.match(0, b"h", [b"u1", b"a1"]).node == -1
    assert index.match(0, b"h", [b"u1", b"a1", b"u2", b"a2"]).depth == 3


def test_the_boundary_recorded_last_wins():
    index = MessageIndex()
    start = index.match(0, b"h", [])
    index.add(0, start, [b"u", b"a"], node=5)
    index.add(0, start, [b"u", b"a"], node=9)
    assert index.match(0, b"h", [b"u", b"a", b"next"]).node == 9


def test_a_dropped_boundary_is_found_no_more_unless_another_one_took_its_place():
    index = MessageIndex()
    start = index.match(0, b"h", [])
    first = index.add(0, start, [b"u"], node=5)
    index.drop(1, first)
    assert index.match(0, b"h", [b"u"]) == first
    index.drop(0, first)
    index.drop(0, first)
    assert index.match(0, b"h", [b"u"]).node == -1
    second = index.add(0, start, [b"u"], node=9)
    index.drop(0, first)
    assert index.match(0, b"h", [b"u"]) == second


def test_executions_see_their_own_and_shared_boundaries_only():
    index = MessageIndex()
    head = index.add(0, index.match(0, b"h", []), [], node=0, shared=True)
    assert index.match(1, b"h", [b"u"]) == head
    own = index.add(0, head, [b"u"], node=1)
    assert index.match(1, b"h", [b"u"]) == head
    assert index.match(0, b"h", [b"u"]) == own
    index.add(1, head, [], node=7)
    assert index.match(1, b"h", []).node == 7
    index.forget(0)
    assert index.match(0, b"h", [b"u"]) == head
    assert len(index) == 2


def test_a_boundary_needs_a_node():
    index = MessageIndex()
    with pytest.raises(ValueError, match="needs a node"):
        index.add(0, index.match(0, b"h", []), [b"u"], node=-1)


@given(messages, messages, messages)
def test_a_match_is_a_prefix_and_nothing_deeper_is_recorded(first, second, request):
    index = MessageIndex()
    for node, history in enumerate((first, second)):
        index.add(0, index.match(0, b"h", []), history, node)
    found = index.match(0, b"h", request)
    recorded = {tuple(first): 0, tuple(second): 1}
    prefixes = [tuple(request[:n]) for n in range(len(request) + 1) if tuple(request[:n]) in recorded]
    assert (found.depth, found.node) == ((len(prefixes[-1]), recorded[prefixes[-1]]) if prefixes else (0, -1))
