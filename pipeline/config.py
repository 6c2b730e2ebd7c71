"""The configuration of a job: one frozen model, every key of it with its allowed range.

:func:`pipeline.settings.load` makes a :class:`Config` from a YAML file and flags; :func:`validate` makes one from a
plain mapping. Keys that belong to later versions are accepted at the value that works now and refused by name
otherwise.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo

from pipeline.spec import check_decode
from profiler.errors import UsageError

Phase = Literal["TRAIN", "TEST"]
LARGEST_SEED = 2**63 - 1
_SIMILAR = 0.65  # how alike two names must be for one to be suggested: below, short names are like everything


class _Model(BaseModel):
    # strict: `workers: true` or `batch: "64"` is a mistake to be shown, not a number to be guessed.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


def _integer(default: Any, low: int, high: int, what: str = "") -> Any:
    text = f"an integer from {low} to {high}" + (f": {what}" if what else "")
    return Field(default, ge=low, le=high, description=text)


def _number(default: Any, low: float, high: float, what: str = "") -> Any:
    text = f"a number from {low:g} to {high:g}" + (f": {what}" if what else "")
    return Field(default, ge=low, le=high, allow_inf_nan=False, description=text)


def _text(default: Any, what: str) -> Any:
    return Field(default, min_length=1, description=what)


def _choice(default: Any, what: str) -> Any:
    return Field(default, description=what)


class ResizedCropConfig(_Model):
    """A random part of the picture, brought to one size: ``random_resized_crop: true``, or a mapping of these."""

    size: int | None = _integer(None, 1, 65_535, "side of the square that it becomes, in pixels; left out: crop")
    scale: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        default=(0.08, 1.0), min_length=2, max_length=2, strict=False,
        description="a list of two numbers above 0 and up to 1: least and largest share of the picture's area",
    )  # fmt: skip
    ratio: tuple[Annotated[float, Field(ge=0.01, le=100)], ...] = Field(
        default=(3 / 4, 4 / 3), min_length=2, max_length=2, strict=False,
        description="a list of two numbers from 0.01 to 100: least and largest ratio of width to height",
    )  # fmt: skip


def _switched(value: Any) -> Any:
    """``true`` stands for a mapping in which all is left out, ``false`` for none."""
    return {} if value is True else None if value is False else value


class TransformConfig(_Model):
    """What happens to a sample between the database and the blob, in this order: resize, python, crop or
    random_resized_crop, mirror, mean, scale."""

    crop: int = _integer(0, 0, 65_535, "side of the square crop in pixels, 0 for none")
    random_resized_crop: Annotated[ResizedCropConfig | None, BeforeValidator(_switched)] = Field(
        default=None, description="true, false or a mapping: size, scale, ratio; a random part, resized"
    )
    mirror: bool = _choice(False, "true or false: mirror at random in TRAIN")
    mean_value: tuple[float, ...] = Field(
        default=(), strict=False, description="a list of numbers, one for all channels or one per channel"
    )
    mean_file: str | None = _text(None, "path of a binaryproto with the mean image")
    scale: float = Field(default=1.0, allow_inf_nan=False, description="a finite number: factor applied after the mean")
    force_color: bool = _choice(False, "true or false: decode to three channels (BGR)")
    force_gray: bool = _choice(False, "true or false: decode to one channel")
    resize: tuple[Annotated[int, Field(ge=1, le=65_535)], ...] | None = Field(
        default=None, min_length=2, max_length=2, strict=False, description="a list of two integers: height and width"
    )
    decode: Literal["full", "region", "scaled"] = _choice(
        "full", "full, region (no more than the part is decoded) or scaled (random_resized_crop: in fewer pixels, too)"
    )
    python: str | None = Field(
        default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:function, f(image, label, rng)"
    )


Sources = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, strict=False)]


class SourceConfig(_Model):
    """One data set: where it lies and how many records make a batch."""

    source: Annotated[str, Field(min_length=1)] | Sources | None = Field(
        default=None,
        description="path of an LMDB or LevelDB folder, a list of image files, an HDF5 file or a list of them, "
        "python:module:Class or memory:...; or a list of these, read one after another",
    )
    batch: int | None = _integer(None, 1, 1_000_000, "records in the global batch")
    backend: Literal["lmdb", "leveldb", "list", "hdf5", "python", "memory"] | None = _choice(
        None, "lmdb, leveldb, list, hdf5, python or memory; left out: sniffed"
    )
    root: str | None = _text(None, "folder where the paths of a list begin; left out: that of the list")
    tops: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), strict=False, description="a list of names: the data sets in HDF5 files; left out: data and label"
    )
    param: str | dict[str, Any] | None = Field(
        default=None, description="a text, or a mapping that becomes JSON: param_str of a Python data layer"
    )
    db: str | None = _text(None, "name of a sub-database of an LMDB")
    lock: bool = _choice(False, "true or false: take a reader slot of an LMDB (writes to lock.mdb beside the data)")
    labels: str | None = _text(None, "path of a second source with the same keys, which holds the labels")
    tail: Literal["wrap", "partial", "drop"] = _choice("wrap", "wrap, partial or drop")
    transform: TransformConfig | None = Field(
        default=None, description="a mapping: replaces data.transform for this phase"
    )


class OrderConfig(_Model):
    seed: int | None = _integer(None, 0, LARGEST_SEED, "seed of order and transforms; left out: run.seed")
    shuffle: Literal["none", "block", "full"] = _choice("full", "none, block or full")
    emit: Literal["strict", "arrival"] = _choice("strict", "strict or arrival")


class DataConfig(_Model):
    train: SourceConfig = Field(default=SourceConfig(), description="a mapping: the training set")
    test: SourceConfig = Field(default=SourceConfig(), description="a mapping: the test set")
    order: OrderConfig = Field(default=OrderConfig(), description="a mapping: seed, shuffle, emit")
    transform: TransformConfig = Field(default=TransformConfig(), description="a mapping: crop, mirror, ...")
    on_bad_record: Literal["stop", "skip", "zero"] = _choice("stop", "stop, skip or zero")
    readahead: Literal["auto", "on", "off"] = _choice("auto", "auto (off where records are shuffled), on or off")
    max_pixels: int | None = _integer(
        None, 1, 2**31 - 1, "larger image files are refused before they are decoded; left out: 89478485"
    )
    bad_record_cap: float = _number(0.001, 0, 1, "share of the records that may be bad; above 0, one always may")


class FeedConfig(_Model):
    engine: Literal["ray", "inline"] = _choice("ray", "ray or inline")
    workers: int | Literal["auto"] = Field(default="auto", ge=1, le=256, description="auto or an integer from 1 to 256")
    depth: int | Literal["auto"] = Field(
        default="auto", ge=1, le=1024, description="auto or an integer from 1 to 1024: batches in the ring"
    )
    threads: int | Literal["auto"] = Field(
        default=0, ge=0, le=64, description="auto or an integer from 0 to 64: with engine: inline, threads that make "
        "batches ahead; 0: each is made when it is asked for",
    )  # fmt: skip
    topology: Literal["fused", "split"] = _choice(
        "fused", "fused (each worker reads for itself) or split (one process reads for all of them)"
    )
    remote_workers: int = _integer(0, 0, 256, "workers on other nodes of the cluster, besides those on the trainer's")
    max_restarts: int = _integer(3, 0, 1000, "how many lost workers are replaced")
    stall_timeout_s: float = _number(60.0, 0.1, 86_400, "seconds without any progress before the job gives up")
    pixels: Literal["float32", "uint8"] = _choice(
        "float32", "float32 or uint8 (a quarter of the bytes to copy; mean and scale are applied on the device)"
    )
    poison: bool = _choice(False, "true or false: fill slots with 0xFF when they are free, to find a late reader")


class DeviceConfig(_Model):
    backend: Literal["auto", "numpy", "cupy", "emulated"] = _choice("auto", "auto, numpy, cupy or emulated")
    step_ms: float = _number(20.0, 0, 3_600_000, "emulated: nominal milliseconds of a step")
    h2d_gbps: float = _number(12.0, 0.001, 100_000, "emulated: copy bandwidth in GB/s")
    h2d_delay_ms: float = _number(0.0, 0, 60_000, "emulated: delay of a copy in milliseconds")
    staging: int = _integer(2, 1, 64, "buffers on the device; with n, up to n - 1 batches are copied ahead")
    deterministic: bool = _choice(True, "true or false")
    cudnn: Literal["auto", "off"] = _choice("auto", "auto or off")
    precision: Literal["fp32", "fp16"] = _choice("fp32", "fp32 or fp16 (storage; layers compute in fp32)")
    keep_fp32: tuple[str, ...] = Field(
        default=(), strict=False, description="a list of names: layers that fp16 leaves in fp32"
    )
    loss_scale: Literal["dynamic"] | Annotated[float, Field(ge=2**-16, le=2**24, allow_inf_nan=False)] = Field(
        default="dynamic", description=f"dynamic or a number from {2**-16:g} to {2**24}: fp16's factor on the loss"
    )
    loss_scale_start: float = _number(65536.0, 2**-16, 2**24, "where a dynamic loss scale starts")
    loss_scale_growth: int = _integer(2000, 1, 2**31 - 1, "good steps in a row that double a dynamic loss scale")
    blas_threads: int = _integer(1, 1, 1024, "BLAS threads of the trainer")


class RunConfig(_Model):
    folder: str = _text("runs/default", "folder of the run")
    iterations: int | None = _integer(None, 1, 2**31 - 1, "number of updates; left out: the solver's max_iter")
    seed: int = _integer(0, 0, LARGEST_SEED, "seed of everything that has none of its own")
    checkpoint_every: int = _integer(0, 0, 2**31 - 1, "updates between snapshots, 0 for one at the end only")
    if_exists: Literal["refuse", "replace", "resume"] = _choice("refuse", "refuse, replace or resume")
    start_from: str | None = _text(
        None, "path of a .solverstate or .solverstate.h5 of Caffe's: a new run goes on from it, with data at record 0"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _choice("info", "debug, info, warning or error")


class ProfileConfig(_Model):
    detail: Literal["off", "steps", "full"] = _choice("full", "off, steps or full")
    fingerprints: Literal["off", "step", "layer"] = _choice("step", "off, step or layer")
    samplers_hz: float = _number(10.0, 0, 100, "samples of host and device a second, 0 for none")


class Config(_Model):
    """A whole job. Frozen; :attr:`notes` says which values came from where when two files disagreed."""

    net: str | None = _text(None, "path of the net's prototxt")
    solver: str | None = _text(None, "path of the solver's prototxt")
    data: DataConfig = Field(default=DataConfig(), description="a mapping: train, test, order, transform")
    feed: FeedConfig = Field(default=FeedConfig(), description="a mapping: engine, workers, depth, ...")
    device: DeviceConfig = Field(default=DeviceConfig(), description="a mapping: backend, step_ms, ...")
    trainers: int = _integer(1, 1, 4096, "trainer processes")
    shards: int = _integer(1, 1, 4096, "virtual shards of the global batch")
    run: RunConfig = Field(default=RunConfig(), description="a mapping: folder, iterations, seed, ...")
    profile: ProfileConfig = Field(default=ProfileConfig(), description="a mapping: detail, fingerprints, ...")
    chaos: tuple[Any, ...] = Field(default=(), strict=False, description="a list of injected faults")
    _notes: tuple[str, ...] = PrivateAttr(default=())
    _iter_size: int = PrivateAttr(default=1)
    _tests: bool = PrivateAttr(default=False)

    def model_post_init(self, _context: Any) -> None:
        _refuse_later_values(self)
        self._notes = _order_notes(self)
        for name, transform in (
            ("data.transform", self.data.transform),
            ("data.train.transform", self.data.train.transform),
            ("data.test.transform", self.data.test.transform),
        ):
            _check_transform(name, transform)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for every value that two files gave differently, in the order they were met."""
        return self._notes

    def with_notes(self, *notes: str) -> Config:
        """The same configuration with more notes."""
        copy = self.model_copy()
        copy._notes = (*self._notes, *notes)
        return copy

    @property
    def iter_size(self) -> int:
        """Batches of a training step, whose gradients are summed: what the solver says, 1 where there is none."""
        return self._iter_size

    @property
    def tests(self) -> bool:
        """Whether the solver asks for tests: only then is the test set opened."""
        return self._tests

    def with_solver(self, iter_size: int, tests: bool) -> Config:
        """The same configuration with what a solver says: batches of a step, and whether it tests."""
        copy = self.model_copy()
        copy._iter_size, copy._tests = iter_size, tests
        return copy

    def source(self, phase: Phase) -> SourceConfig:
        """The data set of a phase."""
        return self.data.train if phase == "TRAIN" else self.data.test

    def transform(self, phase: Phase) -> TransformConfig:
        """The transform of a phase. One that TEST inherits from ``data.transform`` does not mirror."""
        own = self.source(phase).transform
        if own is not None:
            return own
        shared = self.data.transform
        return shared if phase == "TRAIN" else shared.model_copy(update={"mirror": False})

    @property
    def order_seed(self) -> int:
        """The seed of order and transforms."""
        return self.run.seed if self.data.order.seed is None else self.data.order.seed

    @property
    def only_feeds(self) -> bool:
        """True when there is no net: the job feeds an emulated device and learns nothing."""
        return self.net is None


# key -> the values that work in this version
_NOW: dict[str, tuple[Any, ...]] = {
    "trainers": (1,),
    "shards": (1,),
    "profile.fingerprints": ("off", "step"),
    "chaos": ((),),
}


def _refuse_later_values(config: Config) -> None:
    for key, allowed in _NOW.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part, None)
        if value not in allowed:
            shown = " or ".join("left out" if item is None else "[]" if item == () else str(item) for item in allowed)
            found = list(value) if isinstance(value, tuple) else value
            raise UsageError(
                f"not supported in this version: {key}: {found}", expected=shown, hint=f"leave {key} out or set it so"
            )


def _order_notes(config: Config) -> tuple[str, ...]:
    """What has to be said of ``emit: arrival``. Raises :class:`UsageError` where equal runs are asked for beside it."""
    if config.data.order.emit == "strict":
        return ()
    if config.feed.engine == "inline" and config.feed.threads == 0:
        return (
            "data.order.emit: arrival changes nothing with feed.engine: inline without threads: its order is strict",
        )
    if config.device.deterministic and "deterministic" in config.device.model_fields_set:
        raise UsageError(
            "data.order.emit: arrival and device.deterministic: true exclude each other",
            expected="emit: strict, or deterministic: false (or left out: then it holds for the arithmetic alone)",
            hint="batches that are taken as they become ready come in another order in each run",
        )
    return (
        "data.order.emit: arrival takes batches as they become ready: their order, and so the weights, differ from run "
        "to run; each batch's own bytes do not",
    )


def _check_transform(name: str, transform: TransformConfig | None) -> None:
    if transform is None:
        return
    for one, other in (("force_color", "force_gray"), ("mean_value", "mean_file")):
        if getattr(transform, one) and getattr(transform, other):
            raise UsageError(
                f"{name}: {one} and {other} exclude each other", expected="one of the two", hint=f"remove {name}.{one}"
            )
    part = transform.random_resized_crop
    check_decode(name, transform.decode, transform.crop, part is not None, transform.resize is not None)
    if part is not None:
        _check_resized_crop(name, transform, part)


def _check_resized_crop(name: str, transform: TransformConfig, part: ResizedCropConfig) -> None:
    key = f"{name}.random_resized_crop"
    if transform.resize is not None:
        raise UsageError(
            f"{name}: resize and random_resized_crop exclude each other",
            expected="one of the two",
            hint=f"remove {name}.resize",
        )
    if part.size and transform.crop and part.size != transform.crop:
        raise UsageError(
            f"{key}.size and {name}.crop differ",
            expected="one of the two, or the same number",
            found=f"{part.size} and {transform.crop}",
            hint=f"remove {name}.crop",
        )
    if not (part.size or transform.crop):
        raise UsageError(f"{key} has no size", expected=f"{name}.crop, or {key}.size", hint="224 is usual")
    for what, (low, high) in (("scale", part.scale), ("ratio", part.ratio)):
        if low > high:
            raise UsageError(f"{key}.{what} is upside down", expected="the lower number first", found=[low, high])


def validate(document: Mapping[str, Any], where: str = "the configuration") -> Config:
    """A :class:`Config` from a plain mapping.

    Raises :class:`UsageError` that names the first wrong key, what is allowed there and, for an unknown key, the
    nearest one that exists.
    """
    try:
        return Config.model_validate(dict(document))
    except ValidationError as error:
        raise _readable(error, where) from None


def _readable(error: ValidationError, where: str) -> UsageError:
    problems = error.errors(include_url=False)
    first = problems[0]
    # A union reports its branches as extra parts of the location; only names of fields are keys.
    path: list[str] = []
    model: type[_Model] | None = Config
    field: FieldInfo | None = None
    for part in first["loc"]:
        if model is None:
            if isinstance(part, int):
                path[-1] += f"[{part}]"
            continue
        path.append(str(part))
        field = model.model_fields.get(str(part))
        model = _model_of(field) if field else None
    key = ".".join(path)
    others = {problem["loc"][: len(path)] for problem in problems} - {first["loc"][: len(path)]}
    more = f" ({len(others)} more problem{'s' if len(others) > 1 else ''})" if others else ""
    if first["type"] == "extra_forbidden":
        parent = [*path[:-1]]
        return unknown_key(key, allowed_at(parent), where, more)
    expected = field.description if field is not None and field.description else first["msg"]
    return UsageError(f"{where}: {key} has a value that is not allowed{more}", expected=expected, found=first["input"])


def allowed_at(path: list[str]) -> list[str]:
    """Names of the keys under a path of keys."""
    model: type[_Model] | None = Config
    for part in path:
        model = _model_of(model.model_fields[part]) if model else None
    return list(model.model_fields) if model else []


def unknown_key(key: str, siblings: list[str], where: str, more: str = "") -> UsageError:
    """The error for a key that does not exist: with the nearest existing one and those allowed beside it."""
    prefix, _, last = key.rpartition(".")
    by_last_word: dict[str, str] = {}
    for name, _description in keys():
        by_last_word.setdefault(name.rpartition(".")[2], name)
    near = difflib.get_close_matches(last, siblings, n=1, cutoff=_SIMILAR)
    guess = f"{prefix}.{near[0]}" if near and prefix else near[0] if near else None
    if last in by_last_word or guess is None:  # right word, wrong place
        guess = next(
            (by_last_word[word] for word in difflib.get_close_matches(last, by_last_word, n=1, cutoff=_SIMILAR)), guess
        )
    return UsageError(
        f"{where}: unknown key {key}{more}",
        expected="one of " + ", ".join(siblings) if siblings else None,
        hint=f"did you mean {guess}?" if guess else None,
    )


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf key with its description, dotted: ``("feed.workers", "auto or an integer ...")``."""
    for name, field in model.model_fields.items():
        inner = _model_of(field)
        if inner is not None:
            if inner is ResizedCropConfig:  # true and false stand for the mapping
                yield f"{prefix}{name}", field.description or ""
            yield from keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or ""


def _model_of(field: FieldInfo) -> type[_Model] | None:
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((item for item in options if isinstance(item, type) and issubclass(item, _Model)), None)
