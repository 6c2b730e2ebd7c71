"""Which records make step n: a pure function of (seed, epoch, number of records), in O(1) memory.

The orders are part of the determinism contract (docs/design.md, section 2.1): changing a constant in this file changes
every training run, so ``tests/datasets/test_order.py`` pins some orders as literal numbers.

The permutation is a Feistel network over pairs (l, r) with l < a, r < b and a·b only a little larger than the number of
records, where a round adds a keyed hash of one half to the other, modulo its size. A result outside of the range is put
through again until it falls inside ("cycle walking"), which keeps it a permutation. Both halves have at least eight
values, so that short orders mix well too. (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.errors import UsageError
from profiler.jit import njit

Shuffle = Literal["none", "block", "full"]
Tail = Literal["wrap", "partial", "drop"]
Words = NDArray[np.uint64]

BLOCK = 32
"""Neighbouring records that ``shuffle="block"`` keeps together: they are read with few page faults or seeks."""
WINDOW = 1024
"""Places over which ``shuffle="block"`` mixes the records of different blocks."""

_ROUNDS = 8
_SMALLEST_HALF = 8

# Purposes of a key, so that the permutations of one epoch have nothing to do with one another.
_FULL, _BLOCKS, _WINDOW, _SHORT, _REPLACEMENT = 0, 1, 2, 3, 4

# The finaliser of SplitMix64 (Steele, Lea, Flood 2014): each input bit flips each output bit in about half the cases.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def _mix(words: Words) -> Words:
    """uint64[n] -> uint64[n], a bijection. Arrays only: NumPy warns when a scalar overflows."""
    x = words + _GOLDEN
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


def _key(*words: int | Words) -> Words:
    """One key from several words, each a number or uint64[n]; their order matters. Returns uint64[1 or n]."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = _mix(state ^ (np.uint64(word) if isinstance(word, int) else word))
    return state


def _permute(places: Words, size: int, keys: Words) -> Words:
    """Image of each place under the permutation of ``range(size)`` that its key chooses.

    places: uint64[n], all below ``size``. keys: uint64[n] or uint64[1]. Returns uint64[n].
    """
    if size == 1:
        return places.copy()
    sizes = _sizes_of(size)
    if _rounds_compiled.loaded:
        result = np.empty_like(places)
        _rounds_compiled(places, sizes, keys, result)
        return result
    return _rounds_numpy(places, sizes, keys)


@functools.lru_cache(maxsize=64)
def _sizes_of(size: int) -> Words:
    """The two halves of the network and the number of records."""
    a = max(math.isqrt(size - 1) + 1, _SMALLEST_HALF)
    b = max(-(-size // a), _SMALLEST_HALF)
    return np.array([a, b, size], np.uint64)


def _rounds_numpy(places: Words, sizes: Words, keys: Words) -> Words:
    """The Feistel network; sizes: a, b and the number of records."""
    left_size, right_size, limit = sizes
    rounds = [_mix(keys ^ np.uint64(number + 1)) for number in range(_ROUNDS)]
    result = places.copy()
    todo = np.arange(len(places))
    while len(todo):
        left, right = np.divmod(result[todo], right_size)
        for number, round_keys in enumerate(rounds):
            key = round_keys if len(round_keys) == 1 else round_keys[todo]
            if number % 2:
                right = (right + _mix(left ^ key) % right_size) % right_size
            else:
                left = (left + _mix(right ^ key) % left_size) % left_size
        values = left * right_size + right
        result[todo] = values
        todo = todo[values >= limit]
    return result


@njit
def _mix_one(word: Any) -> Any:
    x = word + _GOLDEN
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


@njit
def _rounds_compiled(places: Words, sizes: Words, keys: Words, out: Words) -> None:
    """As :func:`_rounds_numpy`, many times faster; it takes part of a second to load."""
    left_size, right_size, limit = sizes[0], sizes[1], sizes[2]
    rounds = np.empty(_ROUNDS, np.uint64)
    for i in range(len(places)):
        if i < len(keys):
            for number in range(_ROUNDS):
                rounds[number] = _mix_one(keys[i] ^ np.uint64(number + 1))
        value = places[i]
        while True:
            left = value // right_size
            right = value - left * right_size
            for number in range(0, _ROUNDS, 2):
                left = (left + _mix_one(right ^ rounds[number]) % left_size) % left_size
                right = (right + _mix_one(left ^ rounds[number + 1]) % right_size) % right_size
            value = left * right_size + right
            if value < limit:
                break
        out[i] = value


def warm_up() -> None:
    """Load the compiled permutation, which is worth it for those who ask for many steps."""
    one = np.zeros(1, np.uint64)
    _rounds_compiled(one, np.full(3, 8, np.uint64), one, one.copy())


class Order:
    """The order of every epoch of a data set.

    Parameters
    ----------
    records: number of records N, at least 1.
    seed: 0 to 2^64 − 1.
    shuffle: ``none`` keeps the database's order; ``full`` is a permutation of all records; ``block`` permutes blocks of
        ``block`` neighbouring records and then mixes the result within windows of ``window`` places, so that reading
        stays local: a good choice for a database that is larger than memory.

    Raises :class:`UsageError` for a value out of range.
    """

    def __init__(
        self, records: int, seed: int = 0, shuffle: Shuffle = "full", *, block: int = BLOCK, window: int = WINDOW
    ) -> None:
        if records < 1:
            raise UsageError("an order needs at least one record", expected="records >= 1", found=records)
        if not 0 <= seed < 2**64:
            raise UsageError("the seed of an order is out of range", expected="0 to 2^64 - 1", found=seed)
        if shuffle not in ("none", "block", "full"):
            raise UsageError("unknown kind of shuffling", expected="none, block or full", found=shuffle)
        if block < 1 or window < 1:
            raise UsageError("block and window must be at least 1", found=f"block {block}, window {window}")
        self.count = records
        self.seed = seed
        self.shuffle = shuffle
        self.block = block
        self.window = window
        self._last: tuple[int, Words, Words] = -1, np.empty(0, np.uint64), np.empty(0, np.uint64)

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"Order({self.count}, seed={self.seed}, shuffle={self.shuffle!r})"

    def records(self, epochs: ArrayLike, places: ArrayLike) -> NDArray[np.int64]:
        """Record numbers at the given places of the given epochs.

        epochs, places: integers that broadcast to one shape [n]; 0 <= place < N, 0 <= epoch. Returns int64[n].
        Raises :class:`UsageError` for a place or an epoch out of range.
        """
        epoch, place = np.atleast_1d(np.asarray(epochs, np.int64)), np.asarray(places, np.int64)
        if epoch.shape != place.shape:
            epoch, place = (array.ravel() for array in np.broadcast_arrays(epoch, place))
        if len(place) == 0:
            return np.empty(0, np.int64)
        if place.min() < 0 or place.max() >= self.count:
            raise UsageError(
                "a place lies outside of the epoch",
                expected=f"0 to {self.count - 1}",
                found=f"{place.min()} to {place.max()}",
            )
        if epoch.min() < 0:
            raise UsageError("an epoch is negative", expected="0 or more", found=int(epoch.min()))
        if self.shuffle == "none":
            return place.copy()
        key, words = self._epoch_key(epoch), place.astype(np.uint64)
        if self.shuffle == "full":
            return _permute(words, self.count, _mix(key ^ np.uint64(_FULL))).astype(np.int64)
        return self._unblock(self._mix_windows(words, key), key).astype(np.int64)

    def run(self, epoch: int, start: int, count: int) -> NDArray[np.int64]:
        """:meth:`records` at ``count`` consecutive places of one epoch that are known to lie in it: int64[count]."""
        places = np.arange(start, start + count, dtype=np.uint64)
        if self.shuffle == "none" or count == 0:
            return places.view(np.int64)
        key, full = self._key_of(epoch)
        if self.shuffle == "full":
            return _permute(places, self.count, full).view(np.int64)
        return self._unblock(self._mix_windows(places, key), key).astype(np.int64)

    def replacements(
        self, epochs: NDArray[np.int64], places: NDArray[np.int64], attempt: int
    ) -> NDArray[np.int64]:  # fmt: skip
        """Records that stand in for unusable ones at these places; ``attempt`` 0, 1, ... gives others each time.

        epochs, places: int64[n] as :meth:`records` takes them. Returns int64[n]: a permutation of each epoch's places
        for each attempt, whatever ``shuffle`` is, so that two places of an epoch never share a stand-in.
        """
        key = _mix(self._epoch_key(epochs) ^ np.uint64(_REPLACEMENT))
        return _permute(places.astype(np.uint64), self.count, _mix(key ^ np.uint64(attempt))).astype(np.int64)

    def _epoch_key(self, epochs: NDArray[np.int64]) -> Words:
        # Nearly always all items are of one epoch: then keys have one element and broadcast.
        if (epochs != epochs[0]).any():
            return _key(self.seed, epochs.astype(np.uint64), self.count)
        return self._key_of(int(epochs[0]))[0]

    def _key_of(self, epoch: int) -> tuple[Words, Words]:
        """The key of an epoch, and of its full permutation."""
        last = self._last
        if last[0] != epoch:
            key = _key(self.seed, epoch, self.count)
            last = self._last = epoch, key, _mix(key ^ np.uint64(_FULL))
        return last[1], last[2]

    def _mix_windows(self, places: Words, key: Words) -> Words:
        """Permute the places inside each window of consecutive places; the last window may be shorter."""
        window = min(self.window, self.count)
        size = np.uint64(window)
        number, inside = np.divmod(places, size)
        keys = _mix(np.broadcast_to(_mix(key ^ np.uint64(_WINDOW)), places.shape) ^ number)
        whole = number < np.uint64(self.count // window)
        mixed = np.empty_like(places)
        mixed[whole] = _permute(inside[whole], window, keys[whole])
        if not whole.all():
            mixed[~whole] = _permute(inside[~whole], self.count % window, keys[~whole])
        return number * size + mixed

    def _unblock(self, places: Words, key: Words) -> Words:
        """Record at a place of the sequence of permuted blocks.

        The short block (the end of the data set, if N is no multiple of ``block``) is put at a slot of its own choosing
        and the whole blocks are permuted over the other slots: so no inverse and no table is needed.
        """
        whole, short = divmod(self.count, self.block)
        if whole == 0:
            return places
        size = np.uint64(self.block)
        keys = _mix(key ^ np.uint64(_BLOCKS))
        if short == 0:
            slot, inside = np.divmod(places, size)
            return _permute(slot, whole, keys) * size + inside
        start = np.broadcast_to(_mix(key ^ np.uint64(_SHORT)) % np.uint64(whole + 1) * size, places.shape)
        length = np.uint64(short)
        in_short = (places >= start) & (places < start + length)
        # Take the short block out: what comes after it moves up, and every slot is `block` places wide.
        slot, inside = np.divmod(places - np.where(places >= start + length, length, np.uint64(0)), size)
        slot[in_short] = 0
        records = _permute(slot, whole, keys) * size + inside
        return np.where(in_short, places - start + np.uint64(whole) * size, records)


@dataclass(frozen=True, eq=False)
class Items:
    """What one step is made of: item i is record ``records[i]``, at ``places[i]`` of the order of ``epochs[i]``."""

    step: int
    epochs: NDArray[np.int64]
    """int64[B]"""
    places: NDArray[np.int64]
    """int64[B]"""
    records: NDArray[np.int64]
    """int64[B]"""

    def __len__(self) -> int:
        return len(self.records)

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, Items)
            and self.step == other.step
            and np.array_equal(self.epochs, other.epochs)
            and np.array_equal(self.records, other.records)
        )


class Stream:
    """An order cut into batches. ``at(step)`` finds any step directly; nothing is carried from one to the next.

    Parameters
    ----------
    order: the order of each epoch.
    batch: global batch size B, at least 1; it may exceed the number of records with ``wrap`` (several epochs a batch)
        and with ``partial`` (every step is a whole epoch).
    tail: ``wrap`` lets a batch run on into the next epoch, ``partial`` ends an epoch with a short batch, ``drop``
        leaves the rest of an epoch out.

    Raises :class:`UsageError` for a value out of range, and for ``drop`` with a batch larger than the data set.
    """

    def __init__(self, order: Order, batch: int, tail: Tail = "wrap") -> None:
        if batch < 1:
            raise UsageError("a batch needs at least one record", expected="batch >= 1", found=batch)
        if tail not in ("wrap", "partial", "drop"):
            raise UsageError("unknown way to end an epoch", expected="wrap, partial or drop", found=tail)
        if tail == "drop" and batch > len(order):
            raise UsageError(
                "tail 'drop' leaves no batch at all: the batch is larger than the data set",
                expected=f"batch <= {len(order)}",
                found=batch,
                hint="a smaller batch, or tail: wrap",
            )
        self.order = order
        self.batch = batch
        self.tail = tail

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch: N // B for ``drop``, else ceil(N / B). With ``wrap`` the last of them may be shared."""
        records = len(self.order)
        return records // self.batch if self.tail == "drop" else -(-records // self.batch)

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to: that of its first item."""
        if self.tail == "wrap":
            return step * self.batch // len(self.order)
        return step // self.steps_per_epoch

    def first_step(self, epoch: int) -> int:
        """The first step that belongs to an epoch, or to a later one where a batch is longer than an epoch."""
        if self.tail == "wrap":
            return -(-epoch * len(self.order) // self.batch)
        return epoch * self.steps_per_epoch

    def at(self, step: int) -> Items:
        """The items of a step. Raises :class:`UsageError` if the step is negative."""
        if step < 0:
            raise UsageError("a step is negative", expected="0 or more", found=step)
        records = len(self.order)
        if self.tail == "wrap":
            first_epoch, first_place = divmod(step * self.batch, records)
            if first_place + self.batch <= records:
                return self._run(step, first_epoch, first_place, self.batch)
            beyond, places = np.divmod(first_place + np.arange(self.batch, dtype=np.int64), records)
            epochs = first_epoch + beyond
            return Items(step, epochs, places, self.order.records(epochs, places))
        epoch, number = divmod(step, self.steps_per_epoch)
        start = number * self.batch
        return self._run(step, epoch, start, min(self.batch, records - start))

    def _run(self, step: int, epoch: int, start: int, count: int) -> Items:
        """A batch of one epoch, as nearly all are."""
        places = np.arange(start, start + count, dtype=np.int64)
        return Items(step, np.full(count, epoch, np.int64), places, self.order.run(epoch, start, count))
