"""A Python data layer as a source of records: each worker process makes an instance and asks it for samples."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from datasets import caffe_pb2, datum
from datasets.paired import PairedRecord
from datasets.source import Record, Source
from profiler.errors import StallscopeError, UsageError, is_users_own

PREFIX = "python:"
_AS_INDEXED = (
    "samples are asked for by index, so that workers can share the work and a run can be resumed: "
    "def __len__(self) and def read(self, index): return array, label (docs/custom_layers.md, 'Data layers')"
)


class PythonDataError(StallscopeError):
    """A Python data layer failed, or gave something that is no sample."""


class PythonSource(Source):
    """The samples of a :class:`gpu.PythonDataLayer`, each as a Datum.

    Parameters
    ----------
    path: ``python:module:Class``. param: its ``param_str``; a mapping becomes JSON. phase: TRAIN or TEST.

    The instance belongs to one process: a pickled or forked copy makes its own. Sample 0 is read twice when it is made:
    one that comes out different depends on more than its index, and no run of it could be repeated.

    Attributes
    ----------
    blobs: empty for samples [C, H, W] with a label or a vector of labels; else the shapes of sample and label.
    batch: samples in a batch, where the class says it.

    Raises
    ------
    LayerError: the class cannot be found. UsageError: it is no data layer, or one that can only go on to the next
    batch. PythonDataError: its code failed, with file and line, or sample 0 cannot be used.
    """

    backend = "python"

    def __init__(self, path: str, param: str | dict[str, Any] | None = None, phase: str = "TRAIN") -> None:
        self.path, self.phase = path, phase
        self.param = param if isinstance(param, str) else json.dumps(param) if param else ""
        module, _, name = path.removeprefix(PREFIX).partition(":")
        if not path.startswith(PREFIX) or not module or not name:
            raise UsageError(
                "a Python data layer is named by module and class", expected="python:module:Class", found=path
            )
        self._spec = caffe_pb2.LayerParameter(name=name, type="Python")
        self._spec.python_param.module, self._spec.python_param.layer = module, name
        self._instance: Any = None
        self._pid = -1
        self._layer()

    @property
    def name(self) -> str:
        return f"Python data layer {self.path.removeprefix(PREFIX)}"

    @property
    def batch(self) -> int | None:
        return self._layer().batch

    def __len__(self) -> int:
        self._layer()
        return self._records

    def key(self, index: int) -> bytes:
        index = self._check_index(index)
        with self._explained("key", index):
            return str(self._layer().key(index)).encode("utf-8", "surrogateescape")

    def read(self, index: int) -> Record:
        key, (sample, label) = self.key(index), self._sample(int(index))
        if sample.shape != self._shape and (self.blobs or sample.ndim != 3):
            raise self._no_sample(index, f"samples of shape {self._shape}, as sample 0", f"shape {sample.shape}")
        channels, height, width = datum.three_sides(sample.shape)
        shape: dict[str, Any] = {"channels": channels, "height": height, "width": width}
        many = None if isinstance(label, int) or label is None else label.reshape(-1)
        number = label if isinstance(label, int) else None
        if sample.dtype == np.uint8:
            value = datum.serialize(**shape, data=sample.tobytes(), label=number, float_data=many, packed=True)
            return Record(int(index), key, value, self.name)
        value = datum.serialize(**shape, float_data=sample, label=number, packed=True)
        if many is None:
            return Record(int(index), key, value, self.name)
        text = datum.serialize(channels=len(many), height=1, width=1, float_data=many, packed=True)
        return PairedRecord(int(index), key, value, self.name, text, self.name)

    def identity(self) -> dict[str, Any]:
        cls = type(self._layer())
        file = inspect.getsourcefile(cls)
        return {
            "path": self.path, "backend": self.backend, "db": None, "records": len(self), "param": self.param,
            "code": hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and os.path.isfile(file) else None,
        }  # fmt: skip

    def close(self) -> None:
        instance, self._instance = self._instance, None
        if instance is not None and self._pid == os.getpid():
            with self._explained("close", cls=type(instance)):
                instance.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_instance": None}

    # -- the user's class --------------------------------------------------------------------------------------------

    def _layer(self) -> Any:
        if self._instance is None or self._pid != os.getpid():
            self._instance, self._pid = self._made(), os.getpid()
            self._settle()
        return self._instance

    def _made(self) -> Any:
        from gpu.python_class import find_class
        from gpu.python_layer import PythonDataLayer

        cls = find_class(self._spec)
        if not cls.makes_data or getattr(cls, "read", None) in (None, PythonDataLayer.read):
            steps = cls.forward is not PythonDataLayer.forward
            raise UsageError(
                f"{self.name} "
                + ("gives the next batch in forward(), and has no read()" if steps else "has no read()"),
                expected="class ...(gpu.PythonDataLayer) with __len__ and read(index)",
                found=f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})",
                hint=_AS_INDEXED,
            )
        with self._explained("__init__", cls=cls):
            instance: Any = cls()
        instance.param_str, instance.phase, instance.name = self.param, self.phase, self._spec.name
        with self._explained("setup", cls=cls):
            instance.setup()
        with self._explained("__len__", cls=cls):
            self._records = len(instance)
        return instance

    def _settle(self) -> None:
        """Learn from sample 0 what all samples look like."""
        if not self._records:
            return
        (sample, label), again = self._sample(0), self._sample(0)
        if not np.array_equal(sample, again[0], equal_nan=sample.dtype.kind == "f") or not np.array_equal(
            label, again[1]
        ):
            raise PythonDataError(
                f"read(0) of {self.name} gave two different samples",
                expected="the same sample whenever it is asked for: any worker may make it, and make it again",
                hint="chance belongs into data.transform.python, which gets a generator of its own for each sample",
            )
        self._shape = sample.shape
        inner = () if label is None or isinstance(label, int) else label.shape
        self.blobs = () if sample.ndim == 3 and len(inner) < 2 else (sample.shape, inner)

    def _sample(self, index: int) -> tuple[np.ndarray, Any]:
        with self._explained("read", index):
            result = self._layer().read(index)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._no_sample(index, "return array, label", type(result).__name__)
        sample, label = np.asarray(result[0]), result[1]
        if sample.dtype == np.float64:
            sample = sample.astype(np.float32)
        if sample.dtype not in (np.uint8, np.float32) or not sample.size:
            raise self._no_sample(index, "an array of uint8 or float32", f"{sample.dtype}{list(sample.shape)}")
        if label is not None:
            label = np.asarray(label)
            if label.ndim == 0 and label.dtype.kind in "iu":
                label = int(label)
            elif label.dtype.kind in "fiu" and label.size:
                label = np.atleast_1d(label).astype(np.float32)
            else:
                raise self._no_sample(index, "a label that is an int, or an array of numbers", repr(result[1])[:80])
        return np.ascontiguousarray(sample), label

    def _no_sample(self, index: int, expected: str, found: str) -> PythonDataError:
        return PythonDataError(f"read({index}) of {self.name} gave no sample", expected=expected, found=found)

    @contextmanager
    def _explained(self, method: str, index: int | None = None, cls: type | None = None) -> Iterator[None]:
        """Whatever the user's code raises becomes an error that names class, method, sample, file and line."""
        try:
            yield
        except BaseException as error:
            if not is_users_own(error):
                raise
            from gpu.python_class import line_of

            call = f"{method}({'' if index is None else index})"
            if isinstance(error, StallscopeError):
                raise PythonDataError(
                    f"{call} of {self.name}: {error.what}", expected=error.expected, found=error.found, hint=error.hint
                ) from error
            raise PythonDataError(
                f"{call} of {self.name} raised {type(error).__name__}: {error}",
                found=line_of(error, cls or type(self._instance)),
                hint=f"param_str is {self.param!r}"
                if index is None
                else f"call read({index}) alone, in a process of its own",
            ) from error
