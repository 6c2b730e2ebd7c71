"""Hochreiter and Schmidhuber 1997 with forget gates: the layer over a sequence, and one step as a layer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.layers.base import Array, Layer, Shape, register
from gpu.layers.recurrent import Recurrent

_HALF, _ONE = np.float32(0.5), np.float32(1)


def _activate(xp: Any, gates: Array) -> None:
    """Sigmoid of input, forget and output gate, tanh of the candidate; gates[N, 4 D], in place."""
    doors = gates[:, : gates.shape[-1] // 4 * 3]
    doors *= _HALF  # by way of tanh, which cannot overflow
    xp.tanh(gates, out=gates)
    doors += _ONE
    doors *= _HALF


def _quarters(gates: Array) -> list[Array]:
    size = gates.shape[-1] // 4
    return [gates[:, i * size : (i + 1) * size] for i in range(4)]


def _cell(xp: Any, gates: Array, keep: Array, before: Array, cell: Array, squashed: Array, hidden: Array) -> None:
    """c = keep f c_before + i g; h = o tanh(c). All are [N, D], ``keep`` [N, 1]; ``squashed`` becomes tanh(c)."""
    i, f, o, g = _quarters(gates)
    xp.multiply(f, before, out=cell)
    cell *= keep
    xp.multiply(i, g, out=squashed)
    cell += squashed
    xp.tanh(cell, out=squashed)
    xp.multiply(o, squashed, out=hidden)


def _cell_back(
    xp: Any, gates: Array, keep: Array, before: Array, squashed: Array, dh: Array, dc: Array, into: Array, part: Array
) -> None:
    """Gradient of the gates' sums ``into`` [N, 4 D]; ``dc`` goes in as that of c and comes out as that of c_before."""

    def through_sigmoid(gradient: Array, y: Array) -> None:
        gradient *= y
        xp.subtract(_ONE, y, out=part)
        gradient *= part

    def times_slope_of_tanh(gradient: Array, y: Array) -> None:
        xp.multiply(y, y, out=part)
        xp.subtract(_ONE, part, out=part)
        gradient *= part

    i, f, o, g = _quarters(gates)
    di, df, do, dg = _quarters(into)
    xp.multiply(dh, o, out=di)  # di lends its room
    times_slope_of_tanh(di, squashed)
    dc += di
    xp.multiply(dh, squashed, out=do)
    through_sigmoid(do, o)
    xp.multiply(dc, g, out=di)
    through_sigmoid(di, i)
    xp.multiply(dc, before, out=df)
    df *= keep
    through_sigmoid(df, f)
    xp.multiply(dc, i, out=dg)
    times_slope_of_tanh(dg, g)
    dc *= f
    dc *= keep


@register("LSTM")
class LSTM(Recurrent):
    """Gates in the order input, forget, output, candidate; ``cont`` closes the forget gate, too.

    Parameters: W_xc (4 D, inputs), b_c (4 D), W_xc_static if there is a static input, W_hc (4 D, D).
    """

    n_states = 2
    gates = 4

    def _scratch(self, steps: int, streams: int, size: int) -> list[Shape]:
        return [(steps, streams, 4 * size), *[(streams, size)] * 4]

    def allocate(self) -> None:
        super().allocate()
        self._squashed = self.keep("squashed", (self._steps, self._streams, self._param.num_output))

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self._begin(bottoms)
        cont, (hidden, cell) = bottoms[1], self._states
        part = self.context.scratch.arrays(*self._space)[0][0]
        for t in range(self._steps):
            gates = self._recur(t, cont, part)
            _activate(self.xp, gates)
            _cell(self.xp, gates, cont[t][:, None], cell[t], cell[t + 1], self._squashed[t], hidden[t + 1])
        tops[0][...] = hidden[1:]
        self._end(tops)

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        cont, cell = bottoms[1], self._states[1]
        d_pre, back, dh, dc, part = self.context.scratch.arrays(*self._space)
        back[...] = 0
        dc[...] = 0
        for t in reversed(range(self._steps)):
            self.xp.add(top_diffs[0][t], back, out=dh)
            keep = cont[t][:, None]
            _cell_back(self.xp, self._pre[t], keep, cell[t], self._squashed[t], dh, dc, d_pre[t], part)
            self._recur_back(t, cont, d_pre, back)
        self._begin_back(bottoms, d_pre, bottom_diffs, param_diffs)


@register("LSTMUnit")
class LSTMUnit(Layer):
    """One step of an LSTM: c_(t-1) (1, N, D), the gates' sums (1, N, 4 D) and cont (1, N) to c_t and h_t (1, N, D)."""

    n_bottoms = (3, 3)
    n_tops = (2, 2)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        before, gates, cont = bottoms
        if len(before) != 3 or before[0] != 1:
            raise self.error("the cell state must be that of one step", expected="(1, streams, size)", found=before)
        if gates != (1, before[1], 4 * before[2]):
            raise self.error("gates do not fit the cell state", expected=(1, before[1], 4 * before[2]), found=gates)
        if cont != before[:2]:
            raise self.error("the sequence indicators do not fit", expected=before[:2], found=cont)
        self._space = [before[1:], before[1:], gates[1:]]
        self.context.scratch.reserve(*self._space)
        return [before, before]

    def allocate(self) -> None:
        self._gates = self.keep("gates", self._space[2])
        self._squashed = self.keep("squashed", self._space[0])

    def allows_gradient(self, index: int) -> bool:
        return index != 2

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self._gates[...] = bottoms[1][0]
        _activate(self.xp, self._gates)
        keep = bottoms[2][0][:, None]
        _cell(self.xp, self._gates, keep, bottoms[0][0], tops[0][0], self._squashed, tops[1][0])

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        dc, part, into = self.context.scratch.arrays(*self._space)
        dc[...] = top_diffs[0][0]
        keep = bottoms[2][0][:, None]
        _cell_back(self.xp, self._gates, keep, bottoms[0][0], self._squashed, top_diffs[1][0], dc, into, part)
        if bottom_diffs[0] is not None:
            bottom_diffs[0][0] = dc
        if bottom_diffs[1] is not None:
            bottom_diffs[1][0] = into
