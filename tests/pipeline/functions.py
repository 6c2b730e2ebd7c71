"""Transform functions and worker bodies that tests hand to other processes by name."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

from pipeline import per_batch
from pipeline.process import Process
from pipeline.ring import Blocked, Ring, RingAddress


def slow(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    time.sleep(0.001)
    return image, label


def noise(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    image += rng.integers(0, 50, image.shape, dtype=np.uint8)
    return image, int(rng.integers(100))


def breaks_on_label_7(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    if label == 7:
        raise ArithmeticError("seven is right out")
    return image, label


def leaves(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    sys.exit("enough")


def halves(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    return image[:, ::2, ::2], label


def returns_nothing(image: np.ndarray, label: Any, rng: np.random.Generator) -> None:
    return None


def fill_ring(address: RingAddress, row: int, pause_s: float) -> None:
    """A worker without records: every byte of the payload of step s is s mod 251."""
    trainer, ring = Process(address.pid), Ring.attach(address)
    ring.enter(row)
    while True:
        claim = ring.claim(row)
        if claim in (Blocked.DONE, Blocked.STOP) or not trainer.alive:
            return
        if isinstance(claim, Blocked):
            ring.wait_free(trainer)
            continue
        payload = ring.payload(claim.slot)
        payload[: payload.size // 2] = claim.step % 251
        if pause_s:
            time.sleep(pause_s)
        payload[payload.size // 2 :] = claim.step % 251
        ring.ready(row, claim, items=1, epoch=0, hashes={"fill": claim.step})


def hold_lock(address: RingAddress) -> None:
    """Take the ring's lock and never give it back."""
    ring = Ring.attach(address)
    with ring.lock:
        time.sleep(600)
        os._exit(3)


_calls = 0


def slow_at_first(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """The first record of the first batch takes a second. (Before it the feed looks at one record.)"""
    global _calls
    _calls += 1
    if _calls == 2:
        time.sleep(1.0)
    return image, label


def exits(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """Ends the worker; the consumer, which looks at the first record too, lives."""
    if multiprocessing.parent_process() is not None:
        os._exit(3)
    return image, label


def burns_5_ms(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """Pure Python, 5 ms of this process's CPU time: sleeping would prove nothing about the interpreter's lock."""
    until = time.process_time() + 0.005
    while time.process_time() < until:
        sum(range(500))
    return image, label


def same(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    return image, label


def hogs(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """Takes memory until the kernel ends the worker; the consumer, which looks at the first record too, lives."""
    if multiprocessing.parent_process() is not None:
        blocks = []
        while True:
            blocks.append(np.ones(8 << 20, np.uint8))
    return image, label


DEATHS = (signal.SIGBUS, signal.SIGSEGV, signal.SIGKILL)


def dies_thrice(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """The first three worker processes that meet label 4 die of one signal after the other."""
    if multiprocessing.parent_process() is not None and label == 4:
        for number, how in enumerate(DEATHS):
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(os.environ["STALLSCOPE_TEST_DEATHS"], str(number)))
                time.sleep(0.3)  # so that the consumer has seen it alive
                os.kill(os.getpid(), how)
    return image, label


_slow: bool | None = None


def _is_slow() -> bool | None:
    """Whether this is the first worker process that came here; None in the process of the consumer."""
    global _slow
    driver = os.environ.get("STALLSCOPE_TEST_DRIVER", str(os.getpid()))  # of Ray's: its workers are no children
    if multiprocessing.parent_process() is None and driver == str(os.getpid()):
        return None
    if _slow is None:
        try:
            os.close(os.open(os.environ["STALLSCOPE_TEST_UNEVEN"], os.O_CREAT | os.O_EXCL))
            _slow = True
        except FileExistsError:
            _slow = False
    return _slow


def uneven(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """15 ms a record in the first worker process that comes here, 1 ms in the others."""
    time.sleep({None: 0, True: 0.015, False: 0.001}[_is_slow()])
    return image, label


@per_batch
def uneven_batches(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """0.3 s a batch in the first worker process that comes here, 0.02 s in the others."""
    time.sleep({None: 0, True: 0.3, False: 0.02}[_is_slow()])
    return images, labels


gate, someone_at_the_gate = threading.Event(), threading.Event()


def waits_at_the_gate(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """The feed's first thread makes nothing until the gate is open; the others begin when it has got there."""
    if threading.current_thread().name == "stallscope-feed-1":
        someone_at_the_gate.set()
        assert gate.wait(60)
    elif threading.current_thread() is not threading.main_thread():
        assert someone_at_the_gate.wait(60)
    return image, label


def without_cupy(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """Fails in a process that has imported cupy, or that Ray has given a device."""
    assert "cupy" not in sys.modules
    if "ray" in sys.modules:
        import ray

        assert not ray.is_initialized() or not ray.get_gpu_ids()
    return image, label


@per_batch
def mixes(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Mixup: floats, and labels of two numbers."""
    share = np.float32(rng.random())
    other = rng.permutation(len(images))
    mixed = share * images.astype(np.float32) + (1 - share) * images[other].astype(np.float32)
    return mixed, np.stack([labels, labels[other]], axis=1).astype(np.float32)


@per_batch
def scrambles(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Writes where it was given, and returns a view that is none of a whole array."""
    images ^= rng.integers(0, 256, images.shape, dtype=np.uint8)
    labels += 1000
    return images[:, :, ::-1], labels


@per_batch
def wrongs(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Any:
    """What label 1 to 9 of the second record say is done wrong: the first batch, of one record, is sound."""
    if len(labels) == 1:
        return images, labels
    floats = images.astype(np.float32)
    floats[1, 0, 2, 1] = np.nan
    return {
        1: lambda: images[:-1], 2: lambda: (images[:-1], labels), 3: lambda: (images.astype(np.float64), labels),
        4: lambda: (floats, labels), 5: lambda: (images, labels[:-1]), 6: lambda: (images, labels.astype(np.float64)),
        7: lambda: (images, labels.astype(np.int64) + 2**31), 8: lambda: 1 / 0,
        9: lambda: (images, np.zeros((len(labels), 2), np.float32)),
    }.get(int(labels[1]), lambda: (images, labels))()  # fmt: skip


def returns_nan(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    return np.full(image.shape, np.nan, np.float32), label


@per_batch
def fails_at_last(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sound until a file of that name is there."""
    if os.path.exists(os.environ.get("STALLSCOPE_TEST_FAIL", "")):
        raise ArithmeticError("enough")
    return images, labels
