"""The policy of merging, without files: how many there are, and how often a byte is written."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trees.catalogue import BASE, FAN, MERGE_TOKENS, Entry, tier, to_merge


def entry(number, size, tokens):
    return Entry(number, size, "", tokens, (number, number), (0, 0), (0, 0))


class Shop:
    """What a writer does with the policy, on paper. A merged file is as large as its parts."""

    def __init__(self):
        self.entries = []
        self.number = self.written = self.most = 0

    def add(self, size, tokens):
        self.number += 1
        self.written += size
        return entry(self.number, size, tokens)

    def seal(self, size, tokens):
        self.entries.append(self.add(size, tokens))
        chosen = to_merge(self.entries)
        if chosen:
            at = self.entries.index(chosen[-1])
            new = self.add(sum(e.bytes for e in chosen), sum(e.tokens for e in chosen))
            self.entries = [e for e in [*self.entries[: at + 1], new, *self.entries[at + 1 :]] if e not in chosen]
        self.most = max(self.most, len(self.entries))
        return chosen


def test_a_hundred_thousand_seals_leave_a_logarithm_of_files():
    shop, size = Shop(), 20_000
    for _ in range(100_000):
        shop.seal(size, 100)
    tiers = 1 + tier(100_000 * size)
    assert tiers == 1 + math.floor(math.log(100_000 * size / BASE, 8))
    # The lowest tier begins below BASE; a seal adds one file before it merges.
    assert shop.most <= (FAN - 1) * tiers + 1
    assert shop.written <= 100_000 * size * (tiers + 2)
    assert sum(e.tokens for e in shop.entries) == 100_000 * 100


@given(st.lists(st.tuples(st.integers(1, 10**8), st.integers(0, MERGE_TOKENS)), max_size=60))
@settings(deadline=None)
def test_what_is_merged_is_small_fits_and_ends_in_few_files(seals):
    shop = Shop()
    for size, tokens in seals:
        chosen = shop.seal(size, tokens)
        assert len(chosen) != 1
        assert all(e.tokens <= MERGE_TOKENS // 2 for e in chosen)
        assert sum(e.tokens for e in chosen) <= MERGE_TOKENS
        small = [e for e in shop.entries if e.tokens <= MERGE_TOKENS // 2]
        for level in {tier(e.bytes) for e in small}:
            assert sum(tier(e.bytes) == level for e in small) < 2 * FAN
    assert sum(e.tokens for e in shop.entries) == sum(tokens for _, tokens in seals)


def test_full_tiers_are_merged_in_one_step():
    entries = [entry(n, BASE * FAN, 10) for n in range(FAN - 1)] + [entry(10 + n, BASE, 10) for n in range(FAN)]
    assert to_merge(entries) == entries
    assert to_merge(entries[1:]) == entries[FAN - 1 :]
    assert to_merge(entries[:-1]) == []


@pytest.mark.parametrize("broken", [{"number": "x"}, {"digest": 3}, {"nodes": [1]}, {"nodes": "ab"}, {"more": 1}])
def test_an_entry_survives_json_and_a_broken_one_is_refused(broken):
    good = entry(3, 7, 9)
    fields = {**good.as_dict(), "nodes": list(good.nodes)}
    assert Entry.of(fields) == good
    with pytest.raises((TypeError, ValueError)):
        Entry.of({**fields, **broken})
