"""Files that are cut while they are mapped: real signals, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from datasets.guarded_map import MOST_MAPS, GuardedMap

PAGE = os.sysconf("SC_PAGE_SIZE")
_HEAD = """
import ctypes, faulthandler, mmap, os, signal, sys, threading
from pathlib import Path
from datasets.guarded_map import GuardedMap
path, PAGE = Path(sys.argv[1]), os.sysconf("SC_PAGE_SIZE")
file = os.open(path, os.O_RDONLY)

def bytes_of(mapped, start, size):
    return ctypes.string_at(mapped.address + start, size)

"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([number]) * PAGE for number in range(1, 9)))
    return path


def run(file: Path, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _HEAD + textwrap.dedent(text), str(file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def check(file: Path, text: str) -> None:
    done = run(file, text)
    assert done.returncode == 0, done.stderr


def test_it_reads_what_the_file_holds_and_gives_the_map_back(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    mapped = GuardedMap.of(fd, 8 * PAGE)
    os.close(fd)  # the map does not need it
    assert mapped is not None
    assert mapped.guarded()
    assert mapped.nbytes == 8 * PAGE
    import ctypes

    assert ctypes.string_at(mapped.address, mapped.nbytes) == file.read_bytes()
    assert str(file) in Path("/proc/self/maps").read_text(encoding="utf-8")
    mapped.close()
    mapped.close()
    assert str(file) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_map_that_nobody_has_any_more_is_given_back(file: Path) -> None:
    with file.open("rb") as opened:
        mapped = GuardedMap.of(opened.fileno(), PAGE)
    assert mapped is not None
    del mapped
    assert str(file) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_there_are_no_more_than_the_handler_looks_at(file: Path) -> None:
    with file.open("rb") as opened:
        held = [GuardedMap.of(opened.fileno(), PAGE) for _ in range(MOST_MAPS + 1)]
        assert None in held
        for mapped in held:
            if mapped is not None:
                mapped.close()
        again = GuardedMap.of(opened.fileno(), PAGE)
        assert again is not None
        again.close()


def test_what_cannot_be_mapped_is_none(tmp_path: Path, file: Path) -> None:
    with file.open("rb") as opened:
        assert GuardedMap.of(opened.fileno(), 0) is None
        assert GuardedMap.of(opened.fileno(), 9 * PAGE) is None, "longer than the file"
        assert GuardedMap.of(opened.fileno(), 1 << 50) is None
    read, write = os.pipe()
    assert GuardedMap.of(read, PAGE) is None
    os.close(read)
    os.close(write)
    assert GuardedMap.of(read, PAGE) is None, "closed"


def test_what_is_cut_off_reads_as_zeros_and_is_told(file: Path) -> None:
    check(
        file,
        """
        mapped = GuardedMap.of(file, 8 * PAGE)
        assert bytes_of(mapped, 0, 8 * PAGE) == path.read_bytes()
        os.truncate(path, 3 * PAGE + 100)
        assert mapped.sound and mapped.guarded()
        assert bytes_of(mapped, 2 * PAGE, PAGE) == bytes([3]) * PAGE
        assert mapped.sound, "that is still there"
        assert bytes_of(mapped, 4 * PAGE - 8, 16) == bytes(16)
        assert not mapped.sound and not mapped.guarded()
        assert bytes_of(mapped, 4 * PAGE, 4 * PAGE) == bytes(4 * PAGE)
        later = GuardedMap.of(file, 3 * PAGE)
        assert later.sound, "what comes after counts anew"
    """,
    )


def test_threads_that_read_while_it_is_cut_live_on(file: Path) -> None:
    check(
        file,
        """
        mapped, ends = GuardedMap.of(file, 8 * PAGE), []
        def read():
            while mapped.sound:
                bytes_of(mapped, 0, 8 * PAGE)
            ends.append(1)
        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers: reader.start()
        for pages in (7, 5, 1, 0):
            os.truncate(path, pages * PAGE)
        for reader in readers: reader.join(30)
        assert len(ends) == 4
    """,
    )


def test_a_forked_process_is_guarded_too(file: Path) -> None:
    check(
        file,
        """
        mapped = GuardedMap.of(file, 8 * PAGE)
        os.truncate(path, PAGE)
        pid = os.fork()
        if not pid:
            assert bytes_of(mapped, 2 * PAGE, 4) == bytes(4)
            os._exit(0 if not mapped.sound else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert mapped.sound, "this process has read nothing yet"
    """,
    )


def test_a_handler_that_came_later_is_put_behind_ours(file: Path) -> None:
    check(
        file,
        """
        mapped = GuardedMap.of(file, 8 * PAGE)
        faulthandler.enable()
        assert mapped.guarded()
        os.truncate(path, PAGE)
        assert bytes_of(mapped, 2 * PAGE, 4) == bytes(4)
        assert not mapped.sound
    """,
    )


@pytest.mark.parametrize("handler", ["", "faulthandler.enable()"])
@pytest.mark.parametrize("cause", ["other[2 * PAGE]", "os.kill(os.getpid(), signal.SIGBUS)"])
def test_any_other_bus_error_ends_the_process_as_ever(file: Path, handler: str, cause: str) -> None:
    done = run(
        file,
        f"""
        {handler}
        other = mmap.mmap(file, 8 * PAGE, prot=mmap.PROT_READ)
        mapped = GuardedMap.of(file, 8 * PAGE)
        os.truncate(path, PAGE)
        bytes_of(mapped, 2 * PAGE, 4)
        {cause}
    """,
    )
    assert done.returncode == -signal.SIGBUS
    assert ("Bus error" in done.stderr) == bool(handler)


def test_a_python_handler_is_called_for_a_signal_that_was_sent(file: Path) -> None:
    check(
        file,
        """
        called = []
        signal.signal(signal.SIGBUS, lambda *_: called.append(1))
        mapped = GuardedMap.of(file, 8 * PAGE)
        os.kill(os.getpid(), signal.SIGBUS)
        assert called == [1]
        os.truncate(path, PAGE)
        assert mapped.guarded()
        assert bytes_of(mapped, 2 * PAGE, 4) == bytes(4)
        assert called == [1]
    """,
    )
