"""What recurrent layers over (timesteps, streams, ...) share, and the plain one of them, RNN.

Caffe builds a net of T steps inside the layer; here it is a loop over the same sums with the same parameters, in the
same order and shapes, so weights files fit. The input's product with its weights is one matrix product over all steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from gpu.layers.base import Array, Layer, ParamShape, Shape, register

_ONE = np.float32(1)


class Recurrent(Layer):
    """What both kinds share: inputs, states, and the way of the input into the first sum of each step.

    Bottoms: x (T, N, ...), cont (T, N): 0 where a stream begins a new sequence, which forgets its state; then a static
    input (N, ...) if there is one more; then with ``expose_hidden`` the states before the first step (1, N, D).
    Tops: the outputs (T, N, D), then with ``expose_hidden`` the states after the last step. Without it they carry over
    to the next forward pass. No gradient goes through states from pass to pass, exposed or not (as in Caffe).
    """

    n_bottoms = (2, 5)
    n_tops = (1, 3)
    n_states: ClassVar[int]
    gates: ClassVar[int]
    """Rows of the input's weights, in units of ``num_output``."""

    def setup(self) -> None:
        p = self._param = self.spec.recurrent_param
        if not p.num_output:
            raise self.error("num_output is missing or 0", expected=">= 1")
        self._exposed = self.n_states if p.expose_hidden else 0
        bottoms, tops = len(self.spec.bottom), len(self.spec.top)
        if bottoms - self._exposed not in (2, 3) or tops != 1 + self._exposed:
            least = 2 + self._exposed
            raise self.error(
                f"wrong number of blobs with expose_hidden: {str(bool(p.expose_hidden)).lower()}",
                expected=f"{least} or {least + 1} bottoms and {1 + self._exposed} top(s)",
                found=f"{bottoms} and {tops}",
            )
        self._static = bottoms - self._exposed == 3
        self._states: list[Array] = []

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p, x, cont = self._param, *bottoms[:2]
        if len(x) < 3:
            raise self.error("needs an input of (timesteps, streams, ...)", expected="3 axes or more", found=x)
        if cont != x[:2]:
            raise self.error("the sequence indicators do not fit the input", expected=x[:2], found=cont)
        self._steps, self._streams, self._inputs = x[0], x[1], math.prod(x[2:])
        size, rows = p.num_output, self.gates * p.num_output
        self.param_shapes = [
            ParamShape((rows, self._inputs), p.weight_filler),
            ParamShape((rows,), p.bias_filler),
        ]
        if self._static:
            static = bottoms[2]
            if len(static) < 2 or static[0] != x[1]:
                raise self.error("the static input does not fit", expected=f"({x[1]}, ...)", found=static)
            self._static_inputs = math.prod(static[1:])
            self.param_shapes.append(ParamShape((rows, self._static_inputs), p.weight_filler))
        self._hidden_weight = len(self.param_shapes)
        self.param_shapes.append(ParamShape((rows, size), p.weight_filler))
        state = (1, x[1], size)
        for given in bottoms[len(bottoms) - self._exposed :]:
            if given != state:
                raise self.error("a state does not have the shape of one step", expected=state, found=given)
        self._space = self._scratch(x[0], x[1], size)
        self.context.scratch.reserve(*self._space)
        return [(x[0], x[1], size)] + [state] * self._exposed

    @abstractmethod
    def _scratch(self, steps: int, streams: int, size: int) -> list[Shape]:
        """Work space of one pass; the first one is (T, N, rows)."""

    def allocate(self) -> None:
        steps, streams, size = self._steps, self._streams, self._param.num_output
        self._pre = self.keep("pre", (steps, streams, self.gates * size))
        # The state before each step, where cont lets it through.
        self._carried = self.keep("carried", (steps, streams, size))
        if not self._states or self._states[0].shape != (steps + 1, streams, size):
            self._states = [self.keep(f"state{i}", (steps + 1, streams, size)) for i in range(self.n_states)]

    def allows_gradient(self, index: int) -> bool:
        return index == 0 or (index == 2 and self._static)

    def reset(self) -> None:
        """Forget the states: the next pass starts from 0."""
        for state in self._states:
            state[...] = 0

    def _begin(self, bottoms: Sequence[Array]) -> None:
        """States before the first step, and for all steps W x + b (+ W_static x_static)."""
        given = bottoms[len(bottoms) - self._exposed :]
        for i, state in enumerate(self._states):
            state[0] = given[i][0] if self._exposed else state[-1]
        pre = self._pre.reshape(-1, self._pre.shape[-1])
        self.xp.matmul(bottoms[0].reshape(-1, self._inputs), self._weight(0).T, out=pre)
        pre += self._weight(1)
        if self._static:
            part = self.context.scratch.arrays(*self._space)[0][0]
            self.xp.matmul(bottoms[2].reshape(-1, self._static_inputs), self._weight(2).T, out=part)
            self._pre += part

    def _recur(self, step: int, cont: Array, part: Array) -> Array:
        """Add the hidden state's share to the sum of one step; returns that sum (N, rows)."""
        self.xp.multiply(self._states[0][step], cont[step][:, None], out=self._carried[step])
        self.xp.matmul(self._carried[step], self._weight(self._hidden_weight).T, out=part)
        total = self._pre[step]
        total += part
        return total

    def _end(self, tops: Sequence[Array]) -> None:
        for top, state in zip(tops[1:], self._states, strict=False):
            top[0] = state[-1]

    def _recur_back(self, step: int, cont: Array, d_pre: Array, d_hidden: Array) -> None:
        """Gradient of the hidden state before ``step`` from that of the step's sum."""
        self.xp.matmul(d_pre[step], self._weight(self._hidden_weight), out=d_hidden)
        d_hidden *= cont[step][:, None]

    def _begin_back(
        self,
        bottoms: Sequence[Array],
        d_pre: Array,
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        """Gradients of inputs and of the parameters up to the hidden weights; uses up ``d_pre``."""
        matmul, flat = self.xp.matmul, d_pre.reshape(-1, d_pre.shape[-1])
        dw, db, d_hidden = param_diffs[0], param_diffs[1], param_diffs[self._hidden_weight]
        if dw is not None:
            matmul(flat.T, bottoms[0].reshape(-1, self._inputs), out=dw)
        if db is not None:
            self.xp.sum(flat, axis=0, out=db)
        if d_hidden is not None:
            matmul(flat.T, self._carried.reshape(len(flat), -1), out=d_hidden)
        if bottom_diffs[0] is not None:
            matmul(flat, self._weight(0), out=bottom_diffs[0].reshape(-1, self._inputs))
        if self._static:
            total = d_pre[0]
            for step in range(1, self._steps):
                total += d_pre[step]
            if param_diffs[2] is not None:
                matmul(total.T, bottoms[2].reshape(-1, self._static_inputs), out=param_diffs[2])
            if bottom_diffs[2] is not None:
                matmul(total, self._weight(2), out=bottom_diffs[2].reshape(-1, self._static_inputs))

    def _weight(self, index: int) -> Array:
        return self.blobs[index].device_data


@register("RNN")
class RNN(Recurrent):
    """h_t = tanh(W_hh h_(t-1) + W_xh x_t + b_h), o_t = tanh(W_ho h_t + b_o).

    Parameters: W_xh (D, inputs), b_h, W_xh_static if there is a static input, W_hh (D, D), W_ho (D, D), b_o.
    """

    n_states = 1
    gates = 1

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        tops, p = super().shapes(bottoms), self._param
        self.param_shapes.append(ParamShape((p.num_output, p.num_output), p.weight_filler))
        self.param_shapes.append(ParamShape((p.num_output,), p.bias_filler))
        return tops

    def _scratch(self, steps: int, streams: int, size: int) -> list[Shape]:
        return [(steps, streams, size)] * 3 + [(streams, size)]

    def reads_top(self) -> bool:
        return True

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self._begin(bottoms)
        xp, (hidden,) = self.xp, self._states
        part = self.context.scratch.arrays(*self._space)[0][0]
        for t in range(self._steps):
            xp.tanh(self._recur(t, bottoms[1], part), out=hidden[t + 1])
        size = self._param.num_output
        y = tops[0].reshape(-1, size)
        xp.matmul(hidden[1:].reshape(-1, size), self._weight(-2).T, out=y)
        y += self._weight(-1)
        xp.tanh(y, out=y)
        self._end(tops)

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        xp, hidden, size = self.xp, self._states[0][1:], self._param.num_output
        d_pre, d_out, slope, back = self.context.scratch.arrays(*self._space)
        xp.multiply(tops[0], tops[0], out=slope)
        xp.subtract(_ONE, slope, out=slope)
        xp.multiply(top_diffs[0], slope, out=d_out)
        flat = d_out.reshape(-1, size)
        if param_diffs[-2] is not None:
            xp.matmul(flat.T, hidden.reshape(-1, size), out=param_diffs[-2])
        if param_diffs[-1] is not None:
            xp.sum(flat, axis=0, out=param_diffs[-1])
        xp.matmul(flat, self._weight(-2), out=d_pre.reshape(-1, size))
        xp.multiply(hidden, hidden, out=slope)
        xp.subtract(_ONE, slope, out=slope)
        back[...] = 0
        for t in reversed(range(self._steps)):
            gradient = d_pre[t]
            gradient += back
            gradient *= slope[t]
            self._recur_back(t, bottoms[1], d_pre, back)
        self._begin_back(bottoms, d_pre, bottom_diffs, param_diffs)
