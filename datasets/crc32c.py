"""CRC-32C, the checksum of LevelDB, as a kernel: by the processor's own instruction where it has one."""
# mypy: disallow_untyped_defs=False

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiler.jit import CFunction, njit

_POLYNOMIAL = np.uint32(0x82F63B78)
_MASK = 0xA282EAD8
_ONES = np.uint32(0xFFFF_FFFF)
_BYTE, _EIGHT = np.uint32(0xFF), np.uint32(8)


def _has_instruction() -> bool:
    try:
        return platform.machine() == "x86_64" and "sse4_2" in Path("/proc/cpuinfo").read_text(errors="replace").split()
    except OSError:
        return False


def _make_table() -> NDArray[np.uint32]:
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ _POLYNOMIAL, crc >> 1).astype(np.uint32)
    return crc


TABLE = _make_table()
# A call of a function with such a name is an instruction, once LLVM has compiled it.
_of_word = CFunction("llvm.x86.sse42.crc32.64.64", "uint64", "uint64", "uint64")
_of_byte = CFunction("llvm.x86.sse42.crc32.32.8", "uint32", "uint32", "uint8")


@njit
def by_table(data):
    """As :func:`crc32c`, with a table: for processors that have nothing else."""
    crc = _ONES
    for byte in data:
        crc = TABLE[(crc ^ byte) & _BYTE] ^ (crc >> _EIGHT)
    return crc ^ _ONES


@njit
def by_instruction(data):
    """As :func:`crc32c`; ends the process where the processor lacks the instruction."""
    whole = len(data) // 8 * 8
    words = data[:whole].view(np.uint64)
    wide = np.uint64(_ONES)
    for i in range(len(words)):
        wide = _of_word(wide, words[i])
    crc = np.uint32(wide)
    for i in range(whole, len(data)):
        crc = _of_byte(crc, data[i])
    return crc ^ _ONES


crc32c = by_instruction if _has_instruction() else by_table
"""The CRC-32C of bytes, uint8[n], as uint32: RFC 3720, appendix B.4."""


def masked(crc: int) -> int:
    """A checksum as LevelDB stores it: it masks them, since checksums of checksums are weak."""
    crc = int(crc)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFF_FFFF
