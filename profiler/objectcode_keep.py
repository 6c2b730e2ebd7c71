"""Keeps what numba has compiled for processes without it: see :mod:`profiler.objectcode`."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from profiler.objectcode import (
    DATA,
    DESCR,
    ENDING,
    FLAGS,
    KIND,
    MAGIC,
    NDIM,
    NUMBERS,
    ORDER,
    RESULTS,
    SHAPE,
    STRIDES,
)  # fmt: skip

C, F, ALIGNED, WRITEABLE = 1, 2, 0x100, 0x400
OTHER_KIND = 1 << 20  # the entry's answer; numba's own are small
_log = logging.getLogger(__name__)

# What kernels take from numba's runtime. Arrays that a kernel makes for itself live in blocks of this kind
# (NRT_MemInfo: references, destructor and what it is told, data, size, allocator); those of an entry's caller have
# none, and are never counted or freed. A new shape is given to arrays in C's order alone; the kernel raises where the
# answer is 0.
_RUNTIME = """
declare ptr @malloc(i64)
declare void @free(ptr)
define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %wide = zext i32 %align to i64
  %more = add i64 %wide, 64
  %whole = add i64 %size, %more
  %block = call ptr @malloc(i64 %whole)
  %none = icmp eq ptr %block, null
  br i1 %none, label %out, label %in
in:
  %number = ptrtoint ptr %block to i64
  %end = add i64 %number, %more
  %over = urem i64 %end, %wide
  %begin = sub i64 %end, %over
  %data = inttoptr i64 %begin to ptr
  store i64 1, ptr %block
  %dtor = getelementptr i8, ptr %block, i64 8
  store ptr null, ptr %dtor
  %told = getelementptr i8, ptr %block, i64 16
  store ptr null, ptr %told
  %place = getelementptr i8, ptr %block, i64 24
  store ptr %data, ptr %place
  %length = getelementptr i8, ptr %block, i64 32
  store i64 %size, ptr %length
  %other = getelementptr i8, ptr %block, i64 40
  store ptr null, ptr %other
  br label %out
out:
  ret ptr %block
}
define void @NRT_MemInfo_call_dtor(ptr %block) {
  call void @free(ptr %block)
  ret void
}
define i32 @numba_attempt_nocopy_reshape(i64 %nd, ptr %dims, ptr %strides, i64 %newnd, ptr %newdims, ptr %newstrides,
                                         i64 %itemsize, i32 %fortran) {
  %c = icmp eq i32 %fortran, 0
  br i1 %c, label %old, label %no
old:
  %i = phi i64 [ %nd, %0 ], [ %i.next, %old.next ]
  %due = phi i64 [ %itemsize, %0 ], [ %due.next, %old.next ]
  %over = icmp eq i64 %i, 0
  br i1 %over, label %new, label %old.one
old.one:
  %i.next = sub i64 %i, 1
  %dim.at = getelementptr i64, ptr %dims, i64 %i.next
  %dim = load i64, ptr %dim.at
  %stride.at = getelementptr i64, ptr %strides, i64 %i.next
  %stride = load i64, ptr %stride.at
  %is = icmp eq i64 %stride, %due
  %single = icmp eq i64 %dim, 1
  %fits = or i1 %is, %single
  br i1 %fits, label %old.next, label %no
old.next:
  %due.next = mul i64 %due, %dim
  br label %old
new:
  %j = phi i64 [ %newnd, %old ], [ %j.next, %new.one ]
  %step = phi i64 [ %itemsize, %old ], [ %step.next, %new.one ]
  %end = icmp eq i64 %j, 0
  br i1 %end, label %yes, label %new.one
new.one:
  %j.next = sub i64 %j, 1
  %newdim.at = getelementptr i64, ptr %newdims, i64 %j.next
  %newdim = load i64, ptr %newdim.at
  %newstride.at = getelementptr i64, ptr %newstrides, i64 %j.next
  store i64 %step, ptr %newstride.at
  %step.next = mul i64 %step, %newdim
  br label %new
yes:
  ret i32 1
no:
  ret i32 0
}
"""


class _Unfit(Exception):
    """Something about a kernel that only numba can do."""


def keep(folder: Path, name: str, compiled: Any) -> None:
    """Keep what numba has just compiled (an overload of a dispatcher). What is unfit is not kept; nothing is raised."""
    try:
        content, digest = _made(name, compiled)
        path = folder / f"{name}-{digest}{ENDING}"
        temporary = folder / f".{name}-{digest}.{os.getpid()}-{threading.get_ident()}"
        temporary.write_bytes(content)
        temporary.replace(path)
    except _Unfit as reason:
        _log.debug("%s stays with numba: %s", name, reason)
    except Exception as error:  # what of numba's is used here may be another in another version: then it does it all
        _log.info("%s stays with numba: %s: %s", name, type(error).__name__, error)


def _made(name: str, compiled: Any) -> tuple[bytes, str]:
    from llvmlite import binding as ll

    described, library = compiled.fndesc, compiled.library
    if library._disable_inspection:
        raise _Unfit("it was not compiled by this process")
    digest = hashlib.sha256(described.llvm_func_name.encode()).hexdigest()[:16]
    entry = f"stallscope_{digest}"
    module = ll.parse_assembly(library.get_llvm_str())
    function = module.get_function(described.llvm_func_name)
    wanted = [str(argument.type) for argument in function.arguments]
    code, parameters, result = _entry_of(entry, described, wanted)
    for text in (_RUNTIME, code):
        module.link_in(ll.parse_assembly(text))
    _leave_only(module, entry)
    for declared in module.functions:
        if declared.is_declaration and not declared.name.startswith("llvm.") and not _in_process(declared.name):
            raise _Unfit(f"it needs {declared.name}")
    for variable in module.global_variables:
        if variable.name.startswith("_ZN08NumbaEnv"):
            raise _Unfit("it needs its environment")
    machine = library.codegen._tm
    module.verify()
    head = json.dumps({"entry": entry, "parameters": parameters, "result": result}).encode()
    rest = head + b"\n" + machine.emit_object(module)
    return MAGIC + hashlib.sha256(rest).digest() + rest, digest


def _leave_only(module: Any, entry: str) -> None:
    """Take away what the entry does not lead to: numba's wrappers for Python, which need all of numba."""
    from llvmlite import binding as ll

    for one in (*module.functions, *module.global_variables):
        if not one.is_declaration and one.name != entry:
            one.linkage = "internal"
    passes = ll.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    builder = ll.create_pass_builder(
        ll.Target.from_default_triple().create_target_machine(), ll.create_pipeline_tuning_options(0)
    )
    passes.run(module, builder)


def _in_process(symbol: str) -> bool:
    """Whether every Python process has this function: the C library's and the mathematical library's."""
    return hasattr(ctypes.CDLL(None), symbol) and not symbol.startswith(("Py", "_Py", "NRT_", "numba_"))


def _entry_of(entry: str, described: Any, wanted: list[str]) -> tuple[str, list[str | list[str]], list[str]]:
    """The entry's code, the kinds of its parameters and of its results.

    It takes each parameter (an array is the address of the Python object) and where the result goes, and answers 0,
    or another number where the caller has to turn to numba.
    """
    from numba.core import types

    lines: list[str] = []
    parameters: list[str | list[str]] = []
    heads: list[str] = []
    passed = ["ptr %result", "ptr %raised"]
    for place, kind in enumerate(described.argtypes):
        several = isinstance(kind, types.UniTuple | types.Tuple)
        names = []
        for item, one in enumerate(kind.types if several else (kind,)):  # a tuple travels as its items do
            given = f"%a{place}.{item}"
            if isinstance(one, types.Array):
                names.append("array")
                heads.append(f"ptr {given}")
                _array(given, one, lines, passed)
                continue
            names.append(_number_name(one))
            if names[-1] not in NUMBERS:
                raise _Unfit(f"a parameter is {kind}")
            sort = NUMBERS[names[-1]][2]
            heads.append(f"{sort} {given}")
            if len(passed) >= len(wanted):
                raise _Unfit("its parameters are others")
            if wanted[len(passed)] != sort:  # a truth value
                lines.append(f"  {given}.as = trunc i64 {given} to {wanted[len(passed)]}")
                given += ".as"
            passed.append(f"{wanted[len(passed)]} {given}")
        parameters.append(names if several else names[0])
    if [one.split(" ")[0] for one in passed] != wanted:
        raise _Unfit("its parameters are others")
    call = f"  %answer = call i32 @{_quoted(described.llvm_func_name)}({', '.join(passed)})"
    code = [
        f"declare i32 @{_quoted(described.llvm_func_name)}({', '.join(wanted)})",
        f"define i32 @{entry}({', '.join(['ptr %array', *heads, 'ptr %into'])}) {{",
        "  %raised = alloca ptr",
        "  %empty = alloca [8 x i64]",
        "  %nowhere = icmp eq ptr %into, null",
        "  %result = select i1 %nowhere, ptr %empty, ptr %into",
        *lines, call, "  ret i32 %answer", "other:", f"  ret i32 {OTHER_KIND}", "}",
    ]  # fmt: skip
    return "\n".join(code), parameters, _result_of(described.restype)


def _array(a: str, kind: Any, lines: list[str], passed: list[str]) -> None:
    """Compare an array with what was compiled, then take it apart as numba passes it."""
    from numba.np.numpy_support import as_dtype

    dtype = as_dtype(kind.dtype)
    if dtype.kind not in "biuf" or not dtype.isnative or not kind.aligned:
        raise _Unfit(f"a parameter is {kind}")

    def field(name: str, offset: int, sort: str, base: str = a) -> str:
        lines.append(f"  {a}.{name}.at = getelementptr i8, ptr {base}, i64 {offset}")
        lines.append(f"  {a}.{name} = load {sort}, ptr {a}.{name}.at")
        return f"{a}.{name}"

    def must(name: str, condition: str) -> None:
        lines.append(f"  {a}.{name}.ok = {condition}")
        lines.append(f"  br i1 {a}.{name}.ok, label {a}.{name}.next, label %other")
        lines.append(f"{a[1:]}.{name}.next:")

    must("type", f"icmp eq ptr {field('type', 8, 'ptr')}, %array")
    must("ndim", f"icmp eq i32 {field('ndim', NDIM, 'i32')}, {kind.ndim}")
    descr = field("descr", DESCR, "ptr")
    must("kind", f"icmp eq i32 {field('kind', KIND, 'i32', descr)}, {dtype.num}")
    order = field("order", ORDER, "i8", descr)
    lines.append(f"  {a}.order.none = icmp eq i8 {order}, {ord('|')}")
    lines.append(f"  {a}.order.own = icmp eq i8 {order}, {ord('=')}")
    must("order", f"or i1 {a}.order.none, {a}.order.own")
    # As numba sorts arrays: in C's order where they are, else in Fortran's, else in none.
    asked = {"C": C, "F": C | F, "A": C | F}[kind.layout] | ALIGNED | WRITEABLE
    found = {"C": C, "F": F, "A": 0}[kind.layout] | ALIGNED | (WRITEABLE if kind.mutable else 0)
    lines.append(f"  {a}.masked = and i32 {field('flags', FLAGS, 'i32')}, {asked}")
    must("layout", f"icmp eq i32 {a}.masked, {found}")
    data, shape, strides = field("data", DATA, "ptr"), field("shape", SHAPE, "ptr"), field("strides", STRIDES, "ptr")
    sizes = [field(f"size{axis}", 8 * axis, "i64", shape) for axis in range(kind.ndim)]
    steps = [field(f"step{axis}", 8 * axis, "i64", strides) for axis in range(kind.ndim)]
    items = "1"
    for axis, size in enumerate(sizes):
        lines.append(f"  {a}.items{axis} = mul i64 {items}, {size}")
        items = f"{a}.items{axis}"
    passed += ["ptr null", "ptr null", f"i64 {items}", f"i64 {dtype.itemsize}", f"ptr {data}"]
    passed += [f"i64 {one}" for one in (*sizes, *steps)]


def _number_name(kind: Any) -> str:
    return {"boolean": "bool"}.get(str(kind), str(kind))


def _result_of(kind: Any) -> list[str]:
    from numba.core import types

    if kind == types.none:
        return []
    parts = [kind]
    if isinstance(kind, types.UniTuple):
        parts = [kind.dtype] * kind.count
        if kind.count < 2 or kind.dtype == types.boolean:
            raise _Unfit(f"its result is {kind}")
    names = [_number_name(part) for part in parts]
    if names[0] not in RESULTS:
        raise _Unfit(f"its result is {kind}")
    return names


def _quoted(symbol: str) -> str:
    return json.dumps(symbol)
