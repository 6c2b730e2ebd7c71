"""One rule for every numba kernel of the project: compiled at the first call, cached under a key that cannot go stale.

Numba's own cache looks at the file of the decorated function only, so an edit in a *callee's* file is missed and old
machine code runs on. Here the cache folder is named after a hash of all sources of the packages involved, of versions
and of the processor: any change means a fresh folder. Numba itself is imported when something has to be compiled: what
an earlier process compiled runs without it (:mod:`profiler.objectcode`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from profiler import objectcode

_LOCK = threading.RLock()  # re-entrant: compiling a kernel compiles the kernels it calls
_OLD_AFTER_S = 30 * 24 * 3600
_log = logging.getLogger(__name__)

assembled = objectcode.assembled


class Kernel:
    """A function that becomes a ``numba.njit`` dispatcher at its first call (or when another kernel calls it).

    Attributes
    ----------
    py_func: the plain Python function.
    """

    def __init__(self, py_func: Callable[..., Any], options: dict[str, Any], packages: tuple[str, ...]) -> None:
        functools.update_wrapper(self, py_func)
        self.py_func = py_func
        self._options = options
        self._packages = packages
        self._dispatcher: Any = None
        self._natives: list[Any] | None = None  # what needs no numba: see profiler.objectcode

    @property
    def dispatcher(self) -> Any:
        """The numba dispatcher, made when first asked for."""
        if self._dispatcher is None:
            with _LOCK:
                if self._dispatcher is None:
                    self._dispatcher = _compile(self.py_func, self._options, self._packages)
        return self._dispatcher

    @property
    def loaded(self) -> bool:
        """Whether a first call has already paid for loading the kernel."""
        return bool(self._natives) or self._dispatcher is not None

    @property
    def signatures(self) -> int:
        """For how many kinds of arguments this process has compiled or loaded it."""
        return len(self._natives or ()) + (0 if self._dispatcher is None else len(self._dispatcher.signatures))

    def __call__(self, *args: Any) -> Any:
        for native in self._kept() if self._natives is None else self._natives:
            result = native(args)
            if result is not objectcode.MISS:
                return result
        dispatcher = self.dispatcher
        before = len(dispatcher.overloads)
        result = dispatcher(*args)
        if len(dispatcher.overloads) > before and self._options["cache"]:
            self._keep()
        return result

    def _kept(self) -> list[Any]:
        with _LOCK:
            if self._natives is None:
                folder = _cache_folder(self.py_func, self._packages) if self._options["cache"] else None
                usable = folder is not None and objectcode.usable()
                self._natives = objectcode.load(folder, self._name) if folder is not None and usable else []
            return self._natives

    def _keep(self) -> None:
        """For other processes: this one has the dispatcher."""
        from profiler import objectcode_keep

        folder = _cache_folder(self.py_func, self._packages)
        with _LOCK:
            if folder is not None and objectcode.usable():
                for compiled in list(self._dispatcher.overloads.values())[-1:]:
                    objectcode_keep.keep(folder, self._name, compiled)

    @property
    def _name(self) -> str:
        return f"{self.py_func.__module__}.{self.py_func.__qualname__}"

    @property
    def _numba_type_(self) -> Any:
        # Numba asks a global it does not know for its type: this lets one kernel call another by its plain name.
        from numba import types

        return types.Dispatcher(self.dispatcher)


class CFunction:
    """A function of the C library that kernels call by its name: an address would keep numba from caching them.

    Parameters
    ----------
    name: of the function. result, parameters: names of numba's types.
    """

    def __init__(self, name: str, result: str, *parameters: str) -> None:
        self._name, self._result, self._parameters = name, result, parameters

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self._name} is called by kernels only")

    @property
    def _numba_type_(self) -> Any:
        from numba.core import types

        parameters = [getattr(types, name) for name in self._parameters]
        return types.ExternalFunction(self._name, getattr(types, self._result)(*parameters))


class Later:
    """Something of numba's that a file of kernels names, imported when the first of them is compiled.

    Kernels see the thing itself: it takes this object's place among the file's names before they are compiled.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = functools.cache(make)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)

    def __call__(self, *args: Any) -> Any:
        raise TypeError("this is called by kernels only")

    @classmethod
    def settle(cls, names: dict[str, Any]) -> None:
        """Put the things themselves in their places."""
        for name, value in list(names.items()):
            if type(value) is cls:
                names[name] = value._make()


class _Intrinsic(Later):
    def __init__(self, define: Callable[..., Any]) -> None:
        def make() -> Any:
            from numba.extending import intrinsic as numbas

            Later.settle(define.__globals__)
            return numbas(define)

        super().__init__(make)


def later(path: str) -> Any:
    """``numba.carray`` and the like: an attribute of a module, or a module."""
    module, _, name = path.rpartition(".")
    return Later(lambda: getattr(importlib.import_module(module), name))


def intrinsic(define: Callable[..., Any]) -> Any:
    """``numba.extending.intrinsic``, made when the first kernel that uses it is compiled."""
    return _Intrinsic(define)


@overload
def njit(function: Callable[..., Any]) -> Kernel: ...
@overload
def njit(*, packages: tuple[str, ...] = (), **options: Any) -> Callable[[Callable[..., Any]], Kernel]: ...
def njit(
    function: Callable[..., Any] | None = None, *, packages: tuple[str, ...] = (), **options: Any
) -> Kernel | Callable[[Callable[..., Any]], Kernel]:
    """``numba.njit(cache=True, nogil=True)`` without fast-math, lazily, with a cache that notices every source edit.

    Parameters
    ----------
    packages: names of further packages whose sources the kernel depends on, beside its own and ``profiler``.
    options: passed on to ``numba.njit``. ``fastmath`` is refused: results must not depend on the compiler's mood.
    """
    if options.get("fastmath"):
        raise ValueError("fastmath is not allowed: kernels must give the same bits everywhere")
    merged = {"cache": True, "nogil": True, **options}
    if function is not None:
        return Kernel(function, merged, packages)
    return lambda py_func: Kernel(py_func, merged, packages)


def cache_root() -> Path:
    """Folder for caches: ``$STALLSCOPE_CACHE``, else ``stallscope`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("STALLSCOPE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stallscope"


def _compile(py_func: Callable[..., Any], options: dict[str, Any], packages: tuple[str, ...]) -> Any:
    import numba

    for kind in (Later, _Intrinsic):  # what intrinsics name, then they
        kind.settle(py_func.__globals__)
    folder = _cache_folder(py_func, packages) if options["cache"] else None
    if folder is None:
        return numba.njit(**{**options, "cache": False})(py_func)
    # The setting is read when the dispatcher is made, so it is put back at once and no other user of numba sees it.
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        return numba.njit(**options)(py_func)
    finally:
        config.CACHE_DIR = before


def _cache_folder(py_func: Callable[..., Any], packages: tuple[str, ...]) -> Path | None:
    """The writable cache folder of a kernel, or None where there is none (then it is compiled in memory)."""
    try:
        roots = {_package_root(Path(py_func.__code__.co_filename)), Path(__file__).resolve().parent}
        for name in packages:
            module = sys.modules.get(name)
            if module is not None and module.__file__:
                roots.add(_package_root(Path(module.__file__)))
        folder = cache_root() / "numba" / _key(tuple(sorted(roots)))
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            _remove_old(folder)
        os.utime(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} is not writable")
    except (OSError, RuntimeError) as error:
        _log.warning("compiled kernels are not kept, every process compiles anew: %s", error)
        return None
    return folder


def _package_root(file: Path) -> Path:
    """The folder of the outermost package that holds a source file, or the file itself outside any package."""
    file = file.resolve()
    root = file
    while (root.parent / "__init__.py").is_file():
        root = root.parent
    return root


def _key(roots: tuple[Path, ...]) -> str:
    digest = hashlib.sha256(objectcode.environment().encode())
    for root in roots:
        digest.update(_source_digest(root))
    return digest.hexdigest()[:24]


@functools.cache
def _source_digest(root: Path) -> bytes:
    digest = hashlib.sha256(str(root).encode())
    for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        digest.update(str(file.relative_to(root.parent)).encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()


def _remove_old(folder: Path) -> None:
    """Every edit leaves a folder behind; those not used for a month go."""
    limit = time.time() - _OLD_AFTER_S
    for other in folder.parent.iterdir():
        if other != folder and other.stat().st_mtime < limit:
            shutil.rmtree(other, ignore_errors=True)
