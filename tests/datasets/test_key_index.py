import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import key_index
from datasets.key_index import DenseKeys, KeyList, build


def check(index, keys):
    """Every position leads to a key at or before it, by as many records as it says."""
    assert index.records == len(keys)
    for place in range(len(keys)):
        key, steps = index.anchor(place)
        assert 0 <= steps < index.stride
        assert key == keys[place - steps]


@settings(max_examples=60, deadline=None)
@given(
    st.sets(st.binary(min_size=0, max_size=20), min_size=1, max_size=120),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 4, 32]),
    st.integers(1, 9),
)
def test_any_keys_are_found_again(keys, stride, packed, chunk):
    keys = sorted(keys)
    before, key_index._CHUNK = key_index._CHUNK, chunk  # also with chunks and thinning in every place
    try:
        index = build(iter(keys), stride, packed)
    finally:
        key_index._CHUNK = before
    check(index, keys)


def test_no_keys_at_all():
    index = build([])
    assert isinstance(index, KeyList)
    assert index.records == 0


@pytest.mark.parametrize("first", [0, 5, 99_990])
def test_dense_numbers_take_no_memory(first):
    keys = [b"%08d" % (first + number) for number in range(20_000)]
    assert build(keys) == DenseKeys(8, first, 20_000)
    check(build(keys), keys)


@pytest.mark.parametrize("change", [0, 7_000, 19_999])
def test_one_odd_key_makes_it_a_list(change):
    keys = [b"%08d" % number for number in range(20_000)]
    keys[change] += b"x"
    index = build(keys)
    assert isinstance(index, KeyList)
    check(index, keys)


def names(count):
    return [b"%08d_n%08d/img_%d.JPEG" % (i, i * 7919 % 1000, i) for i in range(count)]


def digests(count):
    return sorted(hashlib.sha256(b"%d" % i).hexdigest().encode() for i in range(count))


def long_keys(count):
    draw = random.Random(1)
    return sorted(draw.randbytes(480) for _ in range(count))


@pytest.mark.parametrize("make", [names, digests, long_keys])
@pytest.mark.parametrize(("stride", "packed"), [(8, 1), (1, 32)])
def test_an_index_takes_at_most_sixteen_bytes_a_record(make, stride, packed):
    keys = make(12_000)
    index = build(keys, stride, packed)
    assert index.nbytes <= 16 * len(keys)
    check(index, keys)


def test_names_of_files_are_all_kept_in_few_bytes_where_they_are_packed():
    index = build(names(20_000), 1, 32)
    assert index.stride == 1
    assert index.nbytes < 10 * 20_000


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 21), st.integers(1, 40), st.data())
def test_consecutive_numbers_are_told_from_all_others(width, count, data):
    first = data.draw(st.integers(0, 10**width - 1) | st.integers(max(10**width - count - 1, 0), 10**width - 1))
    keys = [b"%0*d" % (width, first + place) for place in range(count)]
    fits = first + count <= 10**width
    assert key_index._consecutive(keys, width, first) == fits
    place, other = data.draw(st.integers(0, count - 1)), data.draw(st.binary(max_size=width + 1))
    assert key_index._consecutive([*keys[:place], other, *keys[place + 1 :]], width, first) == (
        fits and other == keys[place]
    )
