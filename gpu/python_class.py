"""A user's layer class, found by the module and the name that a prototxt gives, and where its code went wrong."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from typing import Any

from gpu.layers.base import LayerError
from gpu.python_layer import PythonLayer
from profiler.errors import is_users_own


def find_class(spec: Any) -> type[PythonLayer]:
    """The class that a ``type: "Python"`` layer names; nothing is run. Raises LayerError."""
    p = spec.python_param
    if not p.module or not p.layer:
        raise LayerError(
            f"layer {spec.name!r} ({spec.type}): python_param needs a module and a layer",
            expected='python_param { module: "my_layers" layer: "MyLayer" }',
            found=f"module {p.module!r}, layer {p.layer!r}",
        )
    module = import_module(spec)
    found = getattr(module, p.layer, None)
    if isinstance(found, type) and issubclass(found, PythonLayer):
        return found
    choice = [
        name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, PythonLayer)
    ]
    choice = [name for name in choice if vars(module)[name].__module__ == module.__name__]
    near = difflib.get_close_matches(p.layer, choice, n=1)
    raise LayerError(
        f"layer {spec.name!r} ({spec.type}): module {p.module!r} has no layer class {p.layer!r}",
        expected=f"one of {', '.join(choice)}" if choice else "a class derived from gpu.PythonLayer",
        found="nothing of that name" if found is None else repr(found),
        hint=f"did you mean {near[0]!r}?" if near else None if found is None else "derive it from gpu.PythonLayer",
    )


def check_declared(spec: Any, cls: type[PythonLayer]) -> None:
    """Raise LayerError for a class that is used without bottoms and does not say whether it makes data."""
    if cls.makes_data is None and not spec.bottom:
        raise LayerError(
            f"layer {spec.name!r} ({spec.type}): {where(cls)} has no bottoms and does not say what it is",
            expected="a data layer, which the feed's side runs: class ...(gpu.PythonDataLayer)",
            found=f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})",
            hint="makes_data = False in the class if it shall run inside the net",
        )


def find_data_class(spec: Any) -> type[PythonLayer] | None:
    """The class of a layer that makes data, None for one that runs in the net. Raises LayerError."""
    if spec.type == "Python":
        cls: Any = find_class(spec)
    else:
        from gpu.layers import registry

        import_module(spec)
        cls = getattr(registry().get(spec.type), "user_class", None)
    if cls is not None:
        check_declared(spec, cls)
    return cls if cls is not None and cls.makes_data else None


def import_module(spec: Any) -> Any:
    """The module of a layer: from the working folder, or installed."""
    name = spec.python_param.module
    begin = f"layer {spec.name!r} ({spec.type}): module {name!r}"
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise LayerError(
                f"{begin} is not there",
                expected=f"{name.replace('.', '/')}.py in {folder}, or an installed module",
                hint="start in the folder that holds it, or put that folder on PYTHONPATH",
            ) from error
        hint = f"install {missing!r}"
        if missing == "caffe":
            hint = "from gpu import PythonLayer in place of caffe.Layer (docs/custom_layers.md)"
        raise LayerError(f"{begin} needs the module {missing!r}, which is not there", hint=hint) from error
    except BaseException as error:
        if not is_users_own(error):
            raise
        raise LayerError(
            f"{begin} cannot be imported: {type(error).__name__}: {error}",
            found=line_of(error, None),
            hint=f'python -c "import {name}" shows the whole traceback',
        ) from error
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


def where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def line_of(error: BaseException, cls: type | None) -> str | None:
    """File and line where it went wrong: the deepest frame in the class's own file, else the deepest of all."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return None
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) if cls else None
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f"{frame.filename}, line {frame.lineno}: {frame.line}"
