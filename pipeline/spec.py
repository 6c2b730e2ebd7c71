"""What a feed does, as plain frozen values: they cross process borders, handles never do."""

from __future__ import annotations

import json
import numbers
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pipeline.emission import Ranges, checked
from pipeline.philox import PHASES
from profiler.errors import UsageError

if TYPE_CHECKING:
    from pipeline.config import Config
    from profiler.recorder import Recorder

Phase = Literal["TRAIN", "TEST"]
Color = Literal["color", "gray"] | None


@dataclass(frozen=True)
class ResizedCropSpec:
    """A random part of each image, resized: :mod:`pipeline.resized_crop`.

    Attributes
    ----------
    size: side of the square that it becomes, in pixels.
    scale: least and largest share of the image's area. ratio: least and largest ratio of width to height.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class TransformSpec:
    """What happens to an image between decoding and the blob: python, crop, mirror, mean, scale.

    Attributes
    ----------
    crop: side of the square crop in pixels, 0 for none. Random in TRAIN, central in TEST.
    mirror: mirror at random.
    mean_value: one number for all channels or one per channel; excludes ``mean_file``.
    mean_file: path of a BlobProto with the mean image, of the size of the uncropped image.
    scale: factor applied after the mean.
    color: ``"color"`` (three channels, BGR), ``"gray"`` (one channel) or None (as stored).
    python: ``module:function``, called as ``f(image, label, rng)`` before the crop; one that is marked with
        ``pipeline.per_batch``, as ``f(images, labels, rng)`` after crop and mirror.
    resize: (height, width) that each image is brought to when it is decoded, bilinear as in OpenCV; None: as it is.
    resized_crop: in the crop's place (which is 0 then).
    decode: how much of an image file is decoded for a crop: docs/images.md.
    """

    crop: int = 0
    mirror: bool = False
    mean_value: tuple[float, ...] = ()
    mean_file: str | None = None
    scale: float = 1.0
    color: Color = None
    python: str | None = None
    resize: tuple[int, int] | None = None
    resized_crop: ResizedCropSpec | None = None
    decode: Literal["full", "region", "scaled"] = "full"

    def __post_init__(self) -> None:
        check_decode("transform", self.decode, self.crop, self.resized_crop is not None, self.resize is not None)
        if not isinstance(self.crop, int) or isinstance(self.crop, bool) or self.crop < 0:
            raise UsageError("crop is out of range", expected="an integer, 0 or more (pixels)", found=repr(self.crop))
        if self.color not in ("color", "gray", None):
            raise UsageError("unknown color", expected="color, gray or None (as stored)", found=repr(self.color))


def check_decode(name: str, decode: str, crop: int, resized: bool, resize: bool) -> None:
    """Raise :class:`UsageError` where less than a whole picture cannot be decoded. name: of the transform."""
    if decode not in ("full", "region", "scaled"):
        raise UsageError(f"unknown {name}.decode", expected="full, region or scaled", found=repr(decode))
    if decode == "full" or resized:
        return
    if not crop or resize:
        raise UsageError(
            f"{name}.decode: {decode} needs {name}.crop or {name}.random_resized_crop" + ", and no resize" * resize,
            expected="decode: full, or one of the two",
            hint="resizing takes all pixels of the picture" if resize else "without it the whole picture is asked for",
        )
    if decode == "scaled":
        raise UsageError(
            f"{name}.decode: scaled cannot go with {name}.crop",
            expected="decode: full or region, or random_resized_crop",
            hint="a crop takes pixels of the picture as they are; a picture decoded in fewer pixels has others",
        )


_CHOICES: dict[str, tuple[str, ...]] = {
    "tail": ("wrap", "partial", "drop"),
    "shuffle": ("none", "block", "full"),
    "phase": tuple(PHASES),
    "on_bad_record": ("stop", "skip", "zero"),
    "engine": ("ray", "inline"),
    "detail": ("off", "steps", "full"),
    "fingerprints": ("off", "step", "layer"),
    "pixels": ("float32", "uint8"),
    "topology": ("fused", "split"),
    "emit": ("strict", "arrival"),
}
_LEAST = {
    "batch": 1, "depth": 1, "seed": 0, "start_step": 0, "stop_step": 0, "cycle": 1, "origin": 0, "max_restarts": 0,
}  # fmt: skip


@dataclass(frozen=True)
class FeedSpec:
    """A feed. The first group decides the bytes of every batch, the second how and where they are made.

    Attributes
    ----------
    source, backend, db: the data set, as :func:`datasets.open_source` takes them; several sources are read one after
        the other.
    labels: a second source with the same keys, which holds the labels.
    root: where the paths of a list begin. tops: names of data sets in HDF5 files. param: param_str of a Python layer.
    on_bad_record, bad_record_cap: docs/design.md, section 2.1.
    max_pixels: larger image files are records that cannot be used; None: the limit of :mod:`datasets.image_file`.
    seed, shuffle, tail, batch: the stream (docs/design.md, section 2.1).
    readahead: whether the system reads ahead in an LMDB; None: where records are read in order.
    lock: whether each process that reads takes a reader slot of the LMDB.
    identity: of the data set as the trainer's process found it: whoever opens it for this feed refuses another.
    cycle: step s stands for step s mod cycle (the test iterations of a TEST feed); None: no cycle.
    origin: the step whose batch is the first of the stream; before it nothing was read (a state of Caffe's).
    start_step, stop_step: first step, and first step that is not made (None: endless).
    emit: ``"strict"``: batches come in the order of steps; ``"arrival"``: as they become ready, an epoch after the
        other (docs/design.md, section 2.1). One maker (``engine: inline`` without threads) makes them in order anyway.
    given: (first, last) of steps beyond ``start_step`` that an earlier part of the run gave out: nobody makes them.
    workers: processes that make batches; ``"auto"``: see :mod:`pipeline.adaptive`.
    depth: batches in the ring; ``"auto"``: see there.
    threads: of this process that make batches ahead with the inline engine; 0: the consumer's makes each when asked.
    topology: ``"fused"``: each worker reads for itself; ``"split"``: one process of the node reads for all of them.
    remote_workers: processes on other nodes of the cluster that make batches, too, and send them as Ray objects.
    worker_cpus: CPUs reserved with Ray for each worker.
    max_restarts: how many lost workers are replaced before the feed gives up.
    stall_timeout_s: a worker that shows no sign of life for so long is killed and replaced.
    start_timeout_s: workers must have started by then.
    fingerprints: anything but ``"off"``: hash ids, stored bytes and slot of every batch.
    recorder_folder, detail: where and how finely workers record; None: they do not.
    first_actor: number of the first worker in the recorded run.
    pixels: what lies in the slots: samples as the net takes them, float32, or the pixels that they are made of, uint8,
        a quarter of the bytes: cropped and mirrored, mean and scale left to whoever takes them.
    poison: fill freed slots with 0xFF, so that a reader of a stale slot shows.
    """

    source: str | tuple[str, ...]
    batch: int
    backend: str | None = None
    db: str | None = None
    labels: str | None = None
    root: str | None = None
    tops: tuple[str, ...] = ()
    param: str | None = None
    tail: Literal["wrap", "partial", "drop"] = "wrap"
    seed: int = 0
    shuffle: Literal["none", "block", "full"] = "none"
    phase: Phase = "TRAIN"
    transform: TransformSpec = TransformSpec()
    cycle: int | None = None
    origin: int = 0
    on_bad_record: Literal["stop", "skip", "zero"] = "stop"
    bad_record_cap: float = 0.001
    max_pixels: int | None = None

    engine: Literal["ray", "inline"] = "inline"
    workers: int | Literal["auto"] = "auto"
    depth: int | Literal["auto"] = 8
    threads: int | Literal["auto"] = 0
    topology: Literal["fused", "split"] = "fused"
    remote_workers: int = 0
    emit: Literal["strict", "arrival"] = "strict"
    start_step: int = 0
    stop_step: int | None = None
    given: Ranges = ()
    max_restarts: int = 3
    stall_timeout_s: float = 60.0
    start_timeout_s: float = 60.0
    worker_cpus: float = 0.75
    recorder_folder: str | None = None
    detail: Literal["off", "steps", "full"] = "off"
    fingerprints: Literal["off", "step", "layer"] = "off"
    first_actor: int = 1
    pixels: Literal["float32", "uint8"] = "float32"
    poison: bool = False
    readahead: bool | None = None
    lock: bool = False
    identity: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                words = ", ".join(map(str, allowed))
                raise UsageError(f"unknown {name} of a feed", expected=f"one of {words}", found=getattr(self, name))
        if not 0 <= self.bad_record_cap <= 1:
            raise UsageError("bad_record_cap is out of range", expected="0 to 1", found=self.bad_record_cap)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if (value is None and name in ("cycle", "stop_step")) or (name == "depth" and value == "auto"):
                continue
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
                raise UsageError(
                    f"{name} of a feed is out of range", expected=f"an integer, {least} or more", found=repr(value)
                )
        if self.pixels == "uint8" and self.transform.mean_file and (self.transform.crop or self.transform.mirror):
            raise UsageError(
                "feed.pixels: uint8 cannot go with a mean image where samples are cropped or mirrored",
                expected="mean_value, or feed.pixels: float32",
                found=self.transform.mean_file,
                hint="the mean of a pixel depends on where it was before the crop, which a slot does not say",
            )
        if self.pixels == "uint8" and self.on_bad_record == "zero":
            raise UsageError(
                "feed.pixels: uint8 cannot go with on_bad_record: zero",
                expected="on_bad_record: stop or skip, or feed.pixels: float32",
                hint="a sample of zeros is one after mean and scale, which a slot of pixels comes before",
            )
        if self.emit == "arrival" and (self.phase == "TEST" or self.cycle):
            raise UsageError(
                "emit: arrival is for training batches alone", expected="emit: strict",
                found=f"phase {self.phase}, cycle {self.cycle}",
                hint="a test takes the same batches in the same order every time",
            )  # fmt: skip
        checked(self.start_step, self.given)
        if self.remote_workers and self.engine == "inline":
            raise UsageError(
                "feed.remote_workers needs feed.engine: ray", expected="feed.engine: ray, or no remote workers",
                found=f"{self.remote_workers} with feed.engine: inline",
            )  # fmt: skip
        if self.topology == "split" and self.engine == "inline":
            raise UsageError(
                "feed.topology: split has nothing to split with feed.engine: inline",
                expected="feed.engine: ray, or feed.topology: fused",
            )
        if self.workers != "auto" and not (isinstance(self.workers, int) and 1 <= self.workers <= 256):
            raise UsageError("feed.workers is out of range", expected="auto or 1 to 256", found=repr(self.workers))
        if self.threads != "auto" and not (isinstance(self.threads, int) and 0 <= self.threads <= 64):
            raise UsageError("feed.threads is out of range", expected="auto or 0 to 64", found=repr(self.threads))
        if self.threads and self.engine == "ray":
            raise UsageError(
                "feed.threads goes with feed.engine: inline",
                expected="feed.threads: 0 with feed.engine: ray",
                found=self.threads,
                hint="feed.workers says how many processes make batches; one thread each is the fastest",
            )

    @property
    def phase_number(self) -> int:
        return PHASES[self.phase]

    @property
    def reads_ahead(self) -> bool:
        """Whether the system should read ahead: a shuffled feed would have it read pages that nobody wants."""
        return self.shuffle == "none" if self.readahead is None else self.readahead

    def place(self, step: int) -> int:
        """Which batch of the stream a step gets."""
        return step % self.cycle if self.cycle else step - self.origin

    def starting_at(self, step: int, given: Ranges = ()) -> FeedSpec:
        """The same feed from another step on, without those given out before."""
        return replace(self, start_step=step, given=given)


def feed_spec(
    config: Config,
    phase: Phase = "TRAIN",
    start_step: int = 0,
    stop_step: int | None = None,
    recorder: Recorder | None = None,
    cycle: int | None = None,
    origin: int = 0,
) -> FeedSpec:
    """The feed that a job's configuration asks for.

    A batch of TRAIN holds all that a step consumes, ``iter_size`` batches of the net's one after the other.
    A TEST feed reads in order ``none`` through a small ring of its own, filled by one worker that shares a CPU.
    Raises :class:`UsageError` where the phase has no data set or batch size.
    """
    data, feed, test = config.source(phase), config.feed, phase == "TEST"
    section = f"data.{phase.lower()}"
    for key in ("source", "batch"):
        if getattr(data, key) is None:
            raise UsageError(
                f"{section}.{key} is not set",
                hint=f"set it in the YAML, as --{section}.{key}, or in a data layer of the net",
            )
    transform = config.transform(phase)
    part = transform.random_resized_crop
    recording = recorder is not None and recorder.enabled
    return FeedSpec(
        source=data.source or "",
        batch=int(data.batch or 0) * (1 if test else config.iter_size),
        backend=None if data.backend in ("memory", "python") else data.backend,
        db=data.db,
        labels=data.labels,
        root=data.root,
        tops=data.tops,
        param=json.dumps(data.param) if isinstance(data.param, dict) else data.param,
        tail=data.tail,
        seed=config.order_seed,
        shuffle="none" if test else config.data.order.shuffle,
        phase=phase,
        transform=TransformSpec(
            crop=transform.crop if part is None else 0,
            mirror=transform.mirror,
            mean_value=tuple(transform.mean_value),
            mean_file=transform.mean_file,
            scale=transform.scale,
            color="color" if transform.force_color else "gray" if transform.force_gray else None,
            python=transform.python,
            resize=None if transform.resize is None else (transform.resize[0], transform.resize[1]),
            resized_crop=None
            if part is None
            else ResizedCropSpec(
                part.size or transform.crop,
                (part.scale[0], part.scale[1]),
                (part.ratio[0], part.ratio[1]),
            ),
            decode=transform.decode,
        ),
        cycle=cycle,
        origin=origin,
        on_bad_record=config.data.on_bad_record,
        bad_record_cap=config.data.bad_record_cap,
        max_pixels=config.data.max_pixels,
        lock=data.lock,
        readahead={"auto": None, "on": True, "off": False}[config.data.readahead],
        engine=feed.engine,
        workers=1 if test else feed.workers,
        depth=feed.depth if not test else 4 if feed.depth == "auto" else min(4, max(2, feed.depth)),
        topology="fused" if test else feed.topology,
        remote_workers=0 if test else feed.remote_workers,
        threads=min(1, feed.threads) if test and feed.threads != "auto" else 1 if test else feed.threads,
        emit="strict" if test else config.data.order.emit,
        start_step=start_step,
        stop_step=stop_step,
        max_restarts=feed.max_restarts,
        pixels="float32" if test else feed.pixels,
        poison=feed.poison,
        stall_timeout_s=feed.stall_timeout_s,
        worker_cpus=0.1 if test else 0.75,
        recorder_folder=str(recorder.folder) if recording and recorder is not None else None,
        detail=config.profile.detail if recording else "off",
        fingerprints=config.profile.fingerprints,
        first_actor=501 if test else 1,
    )
