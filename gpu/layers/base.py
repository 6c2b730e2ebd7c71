"""What every layer is: a pure pair of functions on arrays, with its shapes, its parameters and its needs declared.

A layer never owns its inputs and outputs: the net hands it arrays. What it declares (may it write over its input, what
does its backward pass read) lets the net decide which blobs may share memory.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import numpy as np

from gpu.blob import Blob
from gpu.cuda import kernels
from profiler.errors import StallscopeError

Shape = tuple[int, ...]
Array = Any
"""An array of the backend, NumPy's or cupy's."""


class LayerError(StallscopeError):
    """A layer whose settings or inputs do not make sense; the message names the layer and its type."""


class Scratch:
    """Work space that layers share, since only one of them runs at a time.

    Layers reserve while shapes are worked out. A net gives each layer a Scratch of its own and a place in its block for
    it (:meth:`place`); without one, a buffer of the largest demand is made at the first use.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._count = 0
        self._buffer: Array | None = None

    def reserve(self, *shapes: Shape) -> None:
        """Ask for room for float32 arrays of these shapes at one time."""
        self._count = max(self._count, sum(math.prod(shape) for shape in shapes))

    @property
    def count(self) -> int:
        """Number of float32 values that were asked for at one time."""
        return self._count

    def clear(self) -> None:
        """Forget what was asked for, before shapes are worked out anew."""
        self._count, self._buffer = 0, None

    def place(self, buffer: Array) -> None:
        """Use this flat float32 array."""
        self._buffer = buffer

    def arrays(self, *shapes: Shape) -> list[Array]:
        """Views of the buffer, one after the other; their contents are whatever the last user left."""
        if self._buffer is None or self._buffer.size < self._count:
            self._buffer = self._xp.empty(self._count, np.float32)
        views, start = [], 0
        for shape in shapes:
            stop = start + math.prod(shape)
            views.append(self._buffer[start:stop].reshape(shape))
            start = stop
        return views


@dataclass
class Context:
    """What a net gives to its layers.

    ``compiled``: use the numba kernels (NumPy arrays only). ``own``: launches the CUDA kernels, None without a device.
    ``cudnn``: the library opened (:class:`gpu.cudnn.Cudnn`), or in words why not.
    ``iteration``: number of the forward pass, the counter of random masks. ``shard``: number of the virtual shard.
    ``input_shapes``: shapes the caller gave, by blob name.
    """

    phase: str
    xp: ModuleType
    compiled: bool
    seed: int
    scratch: Scratch
    iteration: int = 0
    shard: int = 0
    input_shapes: dict[str, Shape] = field(default_factory=dict)
    own: kernels.Launcher | None = None
    cudnn: Any = "no device"

    def __post_init__(self) -> None:
        self.own = None if self.compiled else kernels.own_kernels(self.xp)


@dataclass(frozen=True)
class ParamShape:
    """A parameter that a layer wants: its shape and its ``FillerParameter``."""

    shape: Shape
    filler: Any


class Layer(ABC):
    """Base of all layers.

    Class attributes
    ----------------
    n_bottoms, n_tops: fewest and most blobs read and written.
    in_place: the layer may be written with its top named like its bottom; forward and backward then also have to work
        when the two arrays are one.
    loss: the first top counts as a loss with weight 1 unless told otherwise.
    differentiable: has a backward pass.
    learned: its parameters have gradients (statistics have none).
    varies: the sizes of its tops depend on values; see ``choose``.
    takes_empty: may be called with inputs or outputs without rows, where a layer before it chose none. Others are not
        called then: their tops, and the gradients that they would give, are 0.
    """

    n_bottoms: ClassVar[tuple[int, float]] = (1, 1)
    n_tops: ClassVar[tuple[int, float]] = (1, 1)
    in_place: ClassVar[bool] = False
    loss: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True
    learned: ClassVar[bool] = True
    varies: ClassVar[bool] = False
    takes_empty: ClassVar[bool] = False

    def __init__(self, spec: Any, context: Context) -> None:
        self.spec = spec
        self.name: str = spec.name
        self.type: str = spec.type
        self.context = context
        self.xp = context.xp
        self.param_shapes: list[ParamShape] = []
        self.blobs: list[Blob] = []
        self._kept: dict[str, Array] = {}
        self.setup()

    def setup(self) -> None:  # noqa: B027 - most layers have nothing to do here
        """Read and check the settings; raise LayerError."""

    @abstractmethod
    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        """Shapes of the tops; sets ``param_shapes``, reserves scratch. Raise LayerError for inputs that do not fit."""

    def allocate(self) -> None:  # noqa: B027 - most layers keep nothing
        """Make the arrays of the layer's own that live from forward to backward; shapes are known.

        Called again after every change of shapes: take the arrays from :meth:`keep`, which makes new ones only where
        they grow.
        """

    def keep(self, name: str, shape: Shape, dtype: Any = np.float32) -> Array:
        """A zeroed array of the layer's own, by name; its memory is used again when shapes change."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._kept.get(name)
        if memory is None or memory.size < nbytes:
            memory = self._kept[name] = self.xp.zeros(nbytes, np.uint8)
        else:
            memory[:nbytes] = 0
        return memory[:nbytes].view(dtype).reshape(shape)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the arrays from :meth:`keep`."""
        return sum(int(memory.nbytes) for memory in self._kept.values())

    @abstractmethod
    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        """Write the tops."""

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        """Write (not add to) every gradient that is not None."""
        raise self.error("has no backward pass")

    def reads_bottom(self) -> bool:
        """Whether backward reads the values of its bottoms."""
        return True

    def reads_top(self) -> bool:
        """Whether backward reads the values of its tops."""
        return False

    def choose(self, bottoms: Sequence[Array]) -> list[Shape]:
        """Where it ``varies``: the shapes of the tops for these values, none larger than :meth:`shapes` says.

        Called before each forward pass. Looks only at bottoms for which there is no gradient.
        """
        raise self.error("has tops of one size")

    def allows_gradient(self, index: int) -> bool:
        """Whether a gradient with respect to bottom ``index`` exists (labels have none)."""
        return True

    def error(self, what: str, **details: Any) -> LayerError:
        """A LayerError that begins with the layer's name and type."""
        return LayerError(f"layer {self.name!r} ({self.type}): {what}", **details)

    def axis(self, value: int, rank: int, field: str = "axis") -> int:
        """A possibly negative axis made absolute; LayerError where it is out of range."""
        if not -rank <= value < rank:
            raise self.error(f"{field} is out of range", expected=f"{-rank} to {rank - 1}", found=value)
        return value % rank


@functools.lru_cache(maxsize=256)
def count_up(xp: ModuleType, stop: int) -> Array:
    """0, 1, ... up to ``stop``, which is left out; an array to read, made once for each size."""
    return xp.arange(stop)


def as_flags(room: Array) -> Array:
    """The beginning of a contiguous float32 array as bools of its shape: masks can live in scratch, too."""
    return room.reshape(-1).view(bool)[: room.size].reshape(room.shape)


REGISTRY: dict[str, type[Layer]] = {}
"""Layer class by Caffe's type name."""

_L = TypeVar("_L", bound=type[Layer])


def register(name: str) -> Callable[[_L], _L]:
    """Enter a layer class under its type name."""

    def enter(cls: _L) -> _L:
        if name in REGISTRY:
            raise ValueError(f"layer type {name} is registered twice")
        REGISTRY[name] = cls
        return cls

    return enter
