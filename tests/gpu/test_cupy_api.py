"""Every function of the array module that gpu/ calls exists in cupy with the keywords it is given.

cupy imports without a driver, so this needs the package but no GPU: pip install cupy-cuda13x.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "gpu"


def calls() -> Iterator[tuple[str, str, set[str]]]:
    """(where, dotted name, keywords) of each ``xp.name(...)`` and ``self.xp.name(...)``."""
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if owner in ("xp", "self.xp", "self._xp", "self._layer.xp", "cupy", "self._cupy"):
                yield f"{path.name}:{node.lineno}", name, {keyword.arg for keyword in node.keywords if keyword.arg}


def keywords(function: Any) -> set[str] | None:
    """What a function takes by name; None where it does not say."""
    if type(function).__name__ == "ufunc":  # neither NumPy's where= nor its order=
        return {"out", "dtype", "casting"}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def test_calls_are_found() -> None:
    names = {name for _, name, _ in calls()}
    assert names >= {"matmul", "multiply", "zeros", "where", "take", "argsort"}
    of_cupy_alone = {"asnumpy", "RawModule", "get_default_memory_pool"}
    assert all(hasattr(np, name) for name in names - of_cupy_alone)


def test_cupy_has_what_is_called() -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed", exc_type=ImportError)
    wrong = []
    for where, name, given in calls():
        function = getattr(cupy, name, None)
        if function is None:
            wrong.append(f"{where}: cupy has no {name}")
            continue
        accepted = keywords(function)
        if accepted is not None and given - accepted:
            wrong.append(f"{where}: cupy.{name} takes no {', '.join(sorted(given - accepted))}")
    assert not wrong, "\n".join(wrong)
