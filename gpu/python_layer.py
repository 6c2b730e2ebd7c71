"""Layers written by users: a class with pycaffe's four methods and a declaration of what its backward pass reads.

See docs/custom_layers.md. ``type: "Python"`` in a prototxt finds such a class by module and name;
:func:`register_layer` gives it a type name of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar, TypeVar, overload

import numpy as np

from datasets import caffe_pb2
from profiler.errors import StallscopeError, UsageError


class Face:
    """A blob as a Python layer sees it: ``shape``, ``data`` and ``diff`` (float32), with pycaffe's names.

    During setup and reshape there are no values yet: ``data`` is then an array of zeros that nobody reads. ``diff`` of
    a blob that needs no gradient is one, too.
    """

    def __init__(self, what: str, shape: tuple[int, ...] | None) -> None:
        self.what = what
        self._shape = shape
        self.forget()

    def forget(self) -> None:
        """Drop all arrays."""
        self._data: Any = None
        self._diff: Any = None
        self._hidden = ""

    def show(self, data: Any, diff: Any = None, hidden: str = "") -> None:
        """Stand for these arrays; ``hidden``: why the values may not be read."""
        self._data, self._diff, self._hidden = data, diff, hidden

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        if self._shape is None:
            raise StallscopeError(f"the shape of {self.what} is read before it is set", hint="set it in reshape()")
        return self._shape

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def _axis(self, index: int) -> int:
        return self.shape[index] if index < len(self.shape) else 1

    @property
    def num(self) -> int:
        """Length of axis 0 (1 where there is none; so for the next three)."""
        return self._axis(0)

    @property
    def channels(self) -> int:
        """Length of axis 1."""
        return self._axis(1)

    @property
    def height(self) -> int:
        """Length of axis 2."""
        return self._axis(2)

    @property
    def width(self) -> int:
        """Length of axis 3."""
        return self._axis(3)

    @property
    def data(self) -> Any:
        """The values."""
        if self._hidden:
            raise StallscopeError(f"the values of {self.what} are not kept for backward", found=self._hidden)
        if self._data is None:
            self._data = np.zeros(self.shape, np.float32)
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        self.data[...] = value

    @property
    def diff(self) -> Any:
        """The gradient."""
        if self._diff is None:
            self._diff = np.zeros(self.shape, np.float32)
        return self._diff

    @diff.setter
    def diff(self, value: Any) -> None:
        self.diff[...] = value

    def reshape(self, *shape: int) -> None:
        """Set the shape of a top, in reshape(); a tuple will do, too."""
        if not self.what.startswith("top"):
            raise StallscopeError(f"{self.what} cannot be reshaped: its shape is given")
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        self._shape = tuple(int(size) for size in sizes)
        self.forget()


class Given:
    """A filler that holds the values themselves: what setup() wrote into a parameter."""

    type = "given"

    def __init__(self, face: Face) -> None:
        self._face = face

    @property
    def values(self) -> Any:
        """The values at the time the net fills its parameters."""
        return self._face.data


class Parameters(list[Face]):
    """``self.blobs`` of a Python layer: its learned parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fillers: list[Any] = []
        self.closed = False

    def add_blob(self, *shape: int, filler: str | dict[str, Any] | None = None) -> Face:
        """One more parameter, in setup(). ``filler``: a type name such as "xavier", or the fields of a FillerParameter
        (``{"type": "gaussian", "std": 0.01}``); without one, what setup() writes into ``data`` counts, 0 at first."""
        if self.closed:
            raise StallscopeError("parameters can be added in setup() only")
        face = Face(f"parameter {len(self)}", tuple(int(size) for size in shape))
        if filler is None:
            self.fillers.append(Given(face))
        else:
            fields = {"type": filler} if isinstance(filler, str) else filler
            try:
                self.fillers.append(caffe_pb2.FillerParameter(**fields))
            except (TypeError, ValueError) as error:
                raise StallscopeError(
                    f"the filler of {face.what} is none",
                    expected="a type name, or the fields of a FillerParameter",
                    found=filler,
                ) from error
        self.append(face)
        return face


class PythonLayer:
    """Base of layers written in Python. Bottoms and tops are lists of :class:`Face`.

    Declarations (class attributes)
    -------------------------------
    in_place: a text may name its top like its bottom; forward and backward then also have to work when both arrays are
        one, as they are where nobody needs the bottom's values any more. False.
    reads_bottom, reads_top: backward reads the values of its bottoms, of its tops. Both True, which is always right;
        False lets the net reuse their memory, and reading them is an error.
    loss: the first top counts as a loss with weight 1 unless the text says otherwise. False.
    on_device: arrays are the backend's own (cupy's on a GPU; compute with ``self.xp``). False: always NumPy's, copied
        to and from a device around each call.

    Set before setup(): ``param_str``, ``name``, ``phase`` ("TRAIN" or "TEST"), ``xp``, ``share_in_parallel``.
    """

    in_place: ClassVar[bool] = False
    reads_bottom: ClassVar[bool] = True
    reads_top: ClassVar[bool] = True
    loss: ClassVar[bool] = False
    on_device: ClassVar[bool] = False
    makes_data: ClassVar[bool | None] = None
    """Whether it is a data layer; has to be said by classes that are used without bottoms."""

    param_str: str = ""
    name: str = ""
    phase: str = "TEST"
    share_in_parallel: bool = False
    """As in the text. There is one trainer, so there is nobody to share with, and it changes nothing."""
    xp: ModuleType = np
    blobs: Parameters
    _draw: Callable[[], np.random.Generator]

    def setup(self, bottom: list[Face], top: list[Face]) -> None:
        """Once: read ``param_str``, check the number of blobs, add parameters (``self.blobs.add_blob``)."""

    def reshape(self, bottom: list[Face], top: list[Face]) -> None:
        """Set the shape of every top; called after setup() and whenever a bottom's shape has changed."""
        raise StallscopeError("there is no reshape()", hint="def reshape(self, bottom, top): top[0].reshape(...)")

    def forward(self, bottom: list[Face], top: list[Face]) -> None:
        """Write ``top[i].data``."""
        raise StallscopeError("there is no forward()", hint="def forward(self, bottom, top): top[0].data[...] = ...")

    def backward(self, top: list[Face], propagate_down: list[bool], bottom: list[Face]) -> None:
        """Write ``bottom[i].diff`` where ``propagate_down[i]``, and ``self.blobs[i].diff`` (0 before the call).

        A class without this method has no gradient.
        """
        raise StallscopeError("there is no backward()")

    def random(self) -> np.random.Generator:
        """A generator for this pass: a function of the seed, the layer's name and the number of the iteration."""
        return self._draw()


class PythonDataLayer(PythonLayer):
    """Base of Python layers that make samples: sources of records, which worker processes read (docs/custom_layers.md).

    A net never runs one: its tops are inputs. Before setup(), ``param_str``, ``name`` and ``phase`` are set. Workers
    make an instance each, and ask for samples in any order: a sample may depend on its index and ``param_str`` alone.
    Chance belongs into ``data.transform.python``, which gets a generator.

    ``batch``: samples in a batch, where neither configuration nor flags say it; may be set by setup().
    """

    makes_data = True
    batch: int | None = None

    def setup(self) -> None:  # type: ignore[override]  # there are no blobs
        """Once in each process: read ``param_str``, open what is needed."""

    def __len__(self) -> int:
        raise StallscopeError("there is no __len__()", hint="def __len__(self): return len(self.files)")

    def read(self, index: int) -> tuple[np.ndarray, Any]:
        """Sample ``index``, 0 .. len - 1, and its label.

        The sample: uint8 or float32[C, H, W], or float32 of another rank, which is not transformed. The label: an
        int, or float32[K]. Shapes are the same for all indices, unless a crop makes them so.
        """
        raise StallscopeError("there is no read()", hint="def read(self, index): return array, label")

    def key(self, index: int) -> str:
        """What errors and reports call the sample; its index unless told otherwise."""
        return f"{index:08d}"

    def close(self) -> None:
        """Give back what setup() opened."""


_T = TypeVar("_T", bound=type)


@overload
def register_layer(name: str) -> Callable[[_T], _T]: ...


@overload
def register_layer(name: str, cls: _T) -> _T: ...


def register_layer(name: str, cls: Any = None) -> Any:
    """Give a layer class a type name, as a decorator or with the class: ``type: "MyType"`` then stands for it.

    ``cls``: a :class:`PythonLayer`, or a ``gpu.layers.base.Layer`` as the built-in ones are. Registering a name of
    one's own again replaces it (a notebook's cell that runs twice). Raises UsageError for a built-in type's name.
    """

    def enter(cls: Any) -> Any:
        from gpu.layers.python import enter_type

        enter_type(name, cls)
        return cls

    if not isinstance(name, str) or not name:
        raise UsageError("a layer type needs a name", expected='@register_layer("MyType")', found=name)
    return enter if cls is None else enter(cls)
