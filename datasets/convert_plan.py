"""What a conversion is to make, and whether it may be made, or is there already."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from datasets.convert_work import OPTIONS
from datasets.manifest import Manifest, read_manifest
from datasets.source import open_source
from datasets.targets import check_parent, check_target
from profiler.errors import StallscopeError, UsageError

DEFAULT_SEED = 1
MOST_RECORDS = 10**8
"""Keys begin with eight digits; with more records their byte order would not be their numeric order."""


@dataclass(frozen=True)
class Plan:
    """How to convert.

    Attributes
    ----------
    out: the new database. label_out: a second one with the same keys, for inputs whose items have several labels.
    shuffle_seed: seed of the order in which the items are stored; None keeps their own.
    force: replace databases that are there already.
    skip: leave out items that cannot be read, and list them in the manifest, instead of stopping at the first. Keys
        are numbered by place, so a skipped item leaves a gap.
    workers: threads that decode. Neither bytes nor order depend on it.
    source, options: what the manifest says of the source; ``options`` also tell whether a killed run can go on.
    """

    out: Path
    backend: str = "lmdb"
    shuffle_seed: int | None = DEFAULT_SEED
    force: bool = False
    skip: bool = False
    workers: int = 1
    label_out: Path | None = None
    source: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def outs(self) -> list[Path]:
        return [self.out] if self.label_out is None else [self.out, self.label_out]

    def told(self, fingerprint: str) -> dict[str, Any]:
        """All that the bytes of the result depend on."""
        libraries = {name: metadata.version(name) for name in ("numpy", "pillow", "simplejpeg", "pyarrow")}
        options = {**self.options, "backend": self.backend, "shuffle": self.shuffle_seed}
        options["pairs"] = self.label_out is not None
        told = {"the input": fingerprint, OPTIONS: options, "libraries": libraries}
        return json.loads(json.dumps(told))  # as it will be read again


def check_names(plan: Plan) -> None:
    """Raises :class:`UsageError` for targets that cannot be, whatever is there."""
    for out in plan.outs:
        if not out.name or out.name == "..":
            raise UsageError(f"'{out}' is no name for a new database", expected="a folder that does not exist yet")
    if len({out.absolute() for out in plan.outs}) < len(plan.outs):
        raise UsageError("images and labels cannot go into one database", found=plan.out)
    if plan.label_out is not None and plan.label_out.absolute().parent != plan.out.absolute().parent:
        raise UsageError(
            "the database of labels must lie beside that of the images",
            expected=f"a name in {plan.out.absolute().parent}",
            found=plan.label_out,
        )
    for out in plan.outs:
        check_parent(out)


def check_targets(plan: Plan) -> None:
    """Raises :class:`UsageError` unless databases may be made where the plan says."""
    check_names(plan)
    for out in plan.outs:
        check_target(out, plan.force)


def may_be_there(plan: Plan) -> bool:
    """Whether what lies at the targets was made with these options, maybe of the same input."""
    options = json.loads(json.dumps(plan.options))
    for out in plan.outs:
        manifest = _manifest(out)
        if manifest is None or not manifest.made_from:
            return False
        if (manifest.options, manifest.backend, manifest.shuffle_seed) != (options, plan.backend, plan.shuffle_seed):
            return False
    return True


def already_there(plan: Plan, told: dict[str, Any]) -> Manifest | None:
    """The manifest of the database that the plan would make, if it is there already, whole as far as opening tells."""
    manifests = []
    for out in plan.outs:
        manifest = _manifest(out)
        if manifest is None or manifest.made_from != told_hash(told) or (manifest.skipped_count and not plan.skip):
            return None
        try:
            with open_source(out):
                manifests.append(manifest)
        except StallscopeError:
            return None
    return manifests[0]


def _manifest(out: Path) -> Manifest | None:
    try:
        return read_manifest(out)
    except StallscopeError:
        return None  # of a newer version or damaged: the database is none that we know


def told_hash(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
