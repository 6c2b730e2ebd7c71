"""``type: "Python"`` and users' own types: finds the class, and puts it into a net as a layer like any other."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from gpu.fillers import name_key
from gpu.layers import registry
from gpu.layers.base import REGISTRY, Array, Layer, ParamShape, Shape, register
from gpu.layers.source import Source
from gpu.python_class import check_declared, find_class, import_module, line_of, where
from gpu.python_layer import Face, Parameters, PythonLayer
from profiler.errors import StallscopeError, UsageError, is_users_own

_STREAM = 3
"""Counter word 1 of a layer's own draws, as for dropout masks: the key holds the layer's name."""
_HINTS = {
    "setup": "check param_str, here {param_str!r}",
    "reshape": "set every top: top[0].reshape(*bottom[0].shape)",
    "forward": "try the layer alone, in a net with an Input layer (docs/custom_layers.md)",
    "backward": "try the layer alone, in a net with an Input layer (docs/custom_layers.md)",
}
_own: set[str] = set()
"""Type names that users registered."""


class _Memory:
    """The memory of an array. An array that stands on one is what all views of it refer to, not what lies below."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.__array_interface__ = array, array.__array_interface__


class _Adapter:
    """What the layers of this module have in common: the user's class, looked up before anything is built."""

    user_class: ClassVar[type[PythonLayer] | None] = None


@register("Python")
class Python(_Adapter, Layer):
    """A user's class run inside the net; one that makes data becomes an input (:class:`PythonData`)."""

    n_bottoms = (0, math.inf)
    n_tops = (0, math.inf)

    def __new__(cls, spec: Any, context: Any) -> Any:
        found = cls.user_class or find_class(spec)
        check_declared(spec, found)
        if found.makes_data:
            return PythonData(spec, context)
        made = super().__new__(cls)
        made._class = found
        return made

    _class: type[PythonLayer]

    def setup(self) -> None:
        cls = self._class
        self._first = True
        self._faces = Parameters()
        self._host: dict[tuple[str, int], np.ndarray] = {}
        # The net asks the instance, so a user's class can answer.
        for name, value in (
            ("in_place", cls.in_place),
            ("loss", cls.loss),
            ("differentiable", cls.backward is not PythonLayer.backward),
        ):
            setattr(self, name, bool(value))
        with self._explained("__init__"):
            user = self._user = cls()
        p = self.spec.python_param
        user.param_str, user.share_in_parallel = p.param_str, p.share_in_parallel
        user.name, user.phase = self.name, self.context.phase
        user.xp = self.xp if cls.on_device else np
        user.blobs, user._draw = self._faces, self._random

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self._bottoms = [Face(f"bottom[{i}]", shape) for i, shape in enumerate(bottoms)]
        self._tops = [Face(f"top[{i}]", None) for i in range(len(self.spec.top))]
        if self._first:
            self._call("setup", self._bottoms, self._tops)
            self._faces.closed = True
            self.param_shapes = [
                ParamShape(face.shape, filler) for face, filler in zip(self._faces, self._faces.fillers, strict=True)
            ]
            self._first = False
        self._call("reshape", self._bottoms, self._tops)
        for face in self._tops:
            if face._shape is None:
                raise self.error(f"reshape() of {where(self._class)} left {face.what} without a shape")
        return [face.shape for face in self._tops]

    def allocate(self) -> None:
        self._host.clear()

    def reads_bottom(self) -> bool:
        return bool(self._class.reads_bottom)

    def reads_top(self) -> bool:
        return bool(self._class.reads_top)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        lent: list[tuple[Face, str, weakref.ref[Array]]] = []
        for i, (face, array) in enumerate(zip(self._bottoms, bottoms, strict=True)):
            face.show(self._seen("bottom", i, array, protect=not self._class.in_place))
            self._lend(face, "bottom", self.reads_bottom(), lent)
        for i, (face, array) in enumerate(zip(self._tops, tops, strict=True)):
            # Written over its bottom, a top has the bottom's values, on the host as well.
            face.show(self._seen("top", i, array, fetch=self._class.in_place))
            self._lend(face, "top", self.reads_top(), lent)
        for i, (face, blob) in enumerate(zip(self._faces, self.blobs, strict=True)):
            face.show(self._seen("parameter", i, blob.device_data))
        self._call("forward", self._bottoms, self._tops)
        self._take_back(lent)
        for i, array in enumerate(tops):
            self._send("top", i, array)
        for i, blob in enumerate(self.blobs):
            self._send("parameter", i, blob.device_data)  # statistics that forward keeps

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        for faces, kind, arrays, reads in (
            (self._bottoms, "bottom", bottoms, self.reads_bottom()),
            (self._tops, "top", tops, self.reads_top()),
        ):
            hidden = "" if reads else f"reads_{kind} = False in {where(self._class)}"
            for i, (face, array) in enumerate(zip(faces, arrays, strict=True)):
                face.show(self._seen(kind, i, array, protect=True) if reads else None, hidden=hidden)
        for i, (face, array) in enumerate(zip(self._tops, top_diffs, strict=True)):
            face._diff = self._seen("top_diff", i, array, protect=True)
        for i, (face, diff) in enumerate(zip(self._bottoms, bottom_diffs, strict=True)):
            face._diff = None if diff is None else self._seen("bottom_diff", i, diff, fetch=self._class.in_place)
        for i, (face, blob, diff) in enumerate(zip(self._faces, self.blobs, param_diffs, strict=True)):
            if diff is not None:
                diff[...] = 0  # the net adds them up: writing and adding then mean the same here
                diff = self._seen("param_diff", i, diff)
            face.show(self._seen("parameter", i, blob.device_data, protect=True), diff)
        self._call("backward", self._tops, [diff is not None for diff in bottom_diffs], self._bottoms)
        for kind, arrays in (("bottom_diff", bottom_diffs), ("param_diff", param_diffs)):
            for i, diff in enumerate(arrays):
                if diff is not None:
                    self._send(kind, i, diff)

    def _lend(self, face: Face, kind: str, reads: bool, lent: list[tuple[Face, str, weakref.ref[Array]]]) -> None:
        """Values that are not kept for backward: as an array of their own, so that it shows who keeps them anyway."""
        array = face.data
        if reads or not isinstance(array, np.ndarray) or not array.size:
            return
        array = np.asarray(_Memory(array))
        face.show(array)
        lent.append((face, kind, weakref.ref(array)))

    def _take_back(self, lent: list[tuple[Face, str, weakref.ref[Array]]]) -> None:
        for face, _, _ in lent:
            face.forget()
        if any(array() is not None for _, _, array in lent):
            gc.collect()  # it may be no more than a cycle that nobody has any longer
        for face, kind, array in lent:
            if array() is not None:
                raise self.error(
                    f"forward() of {where(self._class)} keeps the values of {face.what}, whose memory others get",
                    found=f"reads_{kind} = False in {where(self._class)}",
                    hint=f"keep a copy ({kind}[0].data.copy()), or leave reads_{kind} out: then the net keeps them",
                )

    def _seen(self, kind: str, index: int, array: Array, *, protect: bool = False, fetch: bool = True) -> Array:
        """The array as the user's code gets it: the live one, or for a device its copy on the host."""
        if self._class.on_device:
            return array
        if not isinstance(array, np.ndarray):
            host = self._host.get((kind, index))
            if host is None or host.shape != array.shape:
                host = self._host[kind, index] = np.zeros(array.shape, np.float32)
            if fetch:
                self.xp.asnumpy(array, out=host)
            array = host
        if protect:
            array = array.view()
            array.flags.writeable = False
        return array

    def _send(self, kind: str, index: int, array: Array) -> None:
        """Bring what was written on the host back to its device."""
        if not self._class.on_device and not isinstance(array, np.ndarray):
            array[...] = self.xp.asarray(self._host[kind, index])

    def _random(self) -> np.random.Generator:
        context = self.context
        key = np.array([context.seed % 2**64, name_key(self.name)], np.uint64)
        counter = np.array([0, _STREAM, context.iteration, context.shard], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def _call(self, method: str, *arguments: Any) -> None:
        with self._explained(method):
            getattr(self._user, method)(*arguments)

    @contextmanager
    def _explained(self, method: str) -> Iterator[None]:
        """Whatever the user's code raises becomes a LayerError that names layer, class, file and line."""
        try:
            yield
        except StallscopeError as error:
            raise self.error(
                f"{method}() of {where(self._class)}: {error.what}",
                expected=error.expected,
                found=error.found,
                hint=error.hint,
            ) from error
        except BaseException as error:
            if not is_users_own(error):
                raise
            hint = _HINTS.get(method, "the class is made without arguments").format(
                param_str=self.spec.python_param.param_str
            )
            if isinstance(error, ValueError) and "read-only" in str(error):
                hint = "write tops in forward and bottom diffs in backward; a class with in_place = True may do more"
            raise self.error(
                f"{method}() of {where(self._class)} raised {type(error).__name__}: {error}",
                found=line_of(error, self._class),
                hint=hint,
            ) from error


class PythonData(Source):
    """The tops of a Python data layer: inputs, whose values come from the feed's side. It never runs the class."""

    n_tops = (1, math.inf)

    def default_shapes(self) -> list[Shape]:
        names, asked = list(self.spec.top), self.context.input_shapes
        if names[0] in asked:
            return [asked[names[0]], *[asked[names[0]][:1]] * (len(names) - 1)]
        raise self.error(
            f"the shape of {names[0]!r} is known only to the class, which the feed's side runs",
            hint=f"input_shapes={{{names[0]!r}: (batch, ...)}}",
        )


def enter_type(name: str, cls: Any) -> None:
    """:func:`gpu.register_layer`."""
    if name in registry() and name not in _own:
        raise UsageError(f"layer type {name!r} is built in", expected="a name of your own", found=name)
    if not isinstance(cls, type) or not issubclass(cls, PythonLayer | Layer):
        raise UsageError(
            f"layer type {name!r}: no layer class", expected="a class derived from gpu.PythonLayer", found=repr(cls)
        )
    if issubclass(cls, PythonLayer):
        cls = type(name, (Python,), {"user_class": cls, "__doc__": cls.__doc__})
    REGISTRY[name] = cls
    _own.add(name)


def import_types(net: Any) -> None:
    """Import the modules that layers of unknown type name in ``python_param``: they may register that type."""
    known = registry()
    for spec in net.layer:
        if spec.type not in known and spec.python_param.module:
            import_module(spec)
