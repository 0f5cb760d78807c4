import pytest
from hypothesis import given
from hypothesis import strategies as st

from trees.matching import Match, MessageIndex, chain

messages = st.lists(st.sampled_from([b"a", b"b", b"", b"ab"]), max_size=6)


def boundaries(*history, head=b"h"):
    """The digests behind the head and behind each message."""
    digests = [chain(b"", head)]
    for message in history:
        digests.append(chain(digests[-1], message))
    return digests


def ending(node, *history):
    """The boundary behind a whole history."""
    return Match(len(history), node, boundaries(*history)[-1])


def test_the_deepest_recorded_boundary_is_found():
    index = MessageIndex()
    assert index.deepest(0, boundaries(b"u1")) == Match(0, -1, chain(b"", b"h"))
    prompt, answer = ending(10, b"u1"), ending(11, b"u1", b"a1")
    index.restore(0, prompt)
    index.restore(0, answer)
    assert index.deepest(0, boundaries(b"u1", b"a1", b"t1", b"u2")) == answer
    assert index.deepest(0, boundaries(b"u1", b"other")) == prompt
    assert index.deepest(0, boundaries()).node == -1
    assert index.deepest(0, boundaries(b"u1", b"a1", head=b"H")).node == -1


def test_the_boundary_behind_the_head_has_depth_nought():
    index = MessageIndex()
    index.restore(0, ending(7))
    assert index.deepest(0, boundaries(b"u")) == ending(7)


def test_a_boundary_can_lie_behind_several_messages_of_one_node():
    index = MessageIndex()
    index.restore(0, ending(3, b"u1", b"a1", b"u2"))
    assert index.deepest(0, boundaries(b"u1", b"a1")).node == -1
    assert index.deepest(0, boundaries(b"u1", b"a1", b"u2", b"a2")).depth == 3


def test_the_boundary_recorded_last_wins():
    index = MessageIndex()
    index.restore(0, ending(5, b"u", b"a"))
    index.restore(0, ending(9, b"u", b"a"))
    assert index.deepest(0, boundaries(b"u", b"a", b"next")).node == 9


def test_a_dropped_boundary_is_found_no_more_unless_another_one_took_its_place():
    index = MessageIndex()
    first, second = ending(5, b"u"), ending(9, b"u")
    index.restore(0, first)
    index.drop(1, first)
    assert index.deepest(0, boundaries(b"u")) == first
    index.drop(0, first)
    index.drop(0, first)
    assert index.deepest(0, boundaries(b"u")).node == -1
    index.restore(0, second)
    index.drop(0, first)
    assert index.deepest(0, boundaries(b"u")) == second


def test_executions_see_their_own_boundaries_only_while_they_live():
    index = MessageIndex()
    index.restore(0, ending(1, b"u"))
    assert index.deepest(1, boundaries(b"u")).node == -1
    index.restore(1, ending(7, b"u"))
    assert len(index) == 2
    index.forget(0)
    assert index.deepest(0, boundaries(b"u")).node == -1
    assert index.deepest(1, boundaries(b"u")) == ending(7, b"u")
    assert len(index) == 1


def test_a_boundary_needs_a_node_and_a_digest():
    for boundary in (ending(-1, b"u"), Match(1, 3, b"short")):
        with pytest.raises(ValueError, match="needs a node"):
            MessageIndex().restore(0, boundary)


@given(messages, messages, messages)
def test_a_match_is_a_prefix_and_nothing_deeper_is_recorded(first, second, request):
    index = MessageIndex()
    for node, history in enumerate((first, second)):
        index.restore(0, ending(node, *history))
    found = index.deepest(0, boundaries(*request))
    recorded = {tuple(first): 0, tuple(second): 1}
    prefixes = [tuple(request[:n]) for n in range(len(request) + 1) if tuple(request[:n]) in recorded]
    assert (found.depth, found.node) == ((len(prefixes[-1]), recorded[prefixes[-1]]) if prefixes else (0, -1))
