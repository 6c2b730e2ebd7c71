"""``data.on_bad_record``: the same bytes, counts and notes for each engine, worker count and database, and in a job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import ray_runtime
from pipeline.bad_records import TooManyBadRecords
from pipeline.feed import Feed
from pipeline.run import run
from pipeline.settings import load
from profiler import store
from profiler.errors import UsageError
from tests.pipeline.bad_sets import PINNED, hashes, spec, values, zeroable


def pinned(policy: str) -> list[dict[str, int]]:
    return [{key: int(value, 16) for key, value in step.items()} for step in json.loads(PINNED.read_text())[policy]]


def stable(found: list[dict[str, int]]) -> list[dict[str, int]]:
    """The hashes that do not depend on what the image library of the day writes."""
    return [{key: step[key] for key in ("ids", "ids_set", "fill")} for step in found]


def source_for(policy: str, backend: str, sets: dict[str, str], folder: Path) -> str:
    return sets[backend] if policy == "skip" else zeroable(folder / "zero")


@pytest.mark.parametrize("policy", ["skip", "zero"])
@pytest.mark.parametrize("start", [0, 7])
def test_inline_gives_the_pinned_hashes_from_any_step(
    sets: dict[str, str], tmp_path: Path, policy: str, start: int
) -> None:
    asked = spec(source_for(policy, "lmdb", sets, tmp_path), policy, start_step=start)
    assert stable(hashes(asked)) == pinned(policy)[start:]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_runtime.running(num_cpus=2):
        yield


@pytest.mark.ray
@pytest.mark.parametrize(
    ("policy", "backend", "workers"),
    [
        ("skip", "lmdb", 2),
        *(
            pytest.param(policy, backend, workers, marks=pytest.mark.long)
            for policy, backend, workers in [
                ("skip", "lmdb", 1),
                ("skip", "leveldb", 2),
                ("zero", "lmdb", 1),
                ("zero", "lmdb", 2),
            ]
        ),
    ],
)
def test_ray_gives_the_pinned_hashes(
    local_ray: None, sets: dict[str, str], tmp_path: Path, policy: str, backend: str, workers: int
) -> None:
    asked = spec(source_for(policy, backend, sets, tmp_path), policy, engine="ray", workers=workers)
    with Feed.from_spec(asked) as feed:
        found = [batch.hashes for batch in feed]
        stats = feed.stats()["bad_records"]
    assert stable(found) == pinned(policy)
    with Feed.from_spec(replace(asked, engine="inline")) as feed:
        assert [batch.hashes for batch in feed] == found
        assert feed.stats()["bad_records"] == stats


@pytest.mark.ray
def test_the_cap_is_judged_in_strict_order_whoever_made_the_batches(local_ray: None, sets: dict[str, str]) -> None:
    texts = []
    for engine in ("inline", "ray"):
        asked = spec(sets["lmdb"], "skip", bad_record_cap=0.04, engine=engine, workers=2)
        with Feed.from_spec(asked) as feed, pytest.raises(TooManyBadRecords) as caught:
            list(feed)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


_NET = """
layer {{ name: "d" type: "Data" top: "data" top: "label" data_param {{ source: "{path}" batch_size: 8 backend: LMDB }}
  transform_param {{ crop_size: 20 mirror: true scale: 0.004 }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param {{ num_output: 10 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
"""


def test_a_job_that_skips_resumes_to_the_same_bits_and_reports_the_keys(sets: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(_NET.format(path=sets["lmdb"]))
    (tmp_path / "solver.prototxt").write_text('net: "net.prototxt" base_lr: 0.001 lr_policy: "fixed" random_seed: 1\n')

    def train(folder: str, iterations: int, **more: str) -> store.Run:
        flags = {
            "solver": str(tmp_path / "solver.prototxt"), "run.folder": str(tmp_path / folder), "feed.engine": "inline",
            "run.iterations": str(iterations), "run.log_level": "error", "profile.samplers_hz": "0",
            "device.backend": "numpy", "data.on_bad_record": "skip", "data.bad_record_cap": "0.1", **more,
        }  # fmt: skip
        assert run(load(None, [f"--{key}={value}" for key, value in flags.items()])) == 0
        return store.load_run(tmp_path / folder)

    whole = train("whole", 20)
    train("parts", 10)
    parts = train("parts", 20, **{"run.if_exists": "resume"})
    weights = [(tmp_path / name / "snapshots" / "iter_20.caffemodel").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    assert parts.manifest["feed"]["bad_records"]["records"] == whole.manifest["feed"]["bad_records"]["records"] == 7
    for done in (whole, parts):
        notes = [note["record"] for note in done.notes if note["note"] == "bad_record"]
        assert sorted(notes) == sorted(values())  # once each, also where a resume went on
    text = json.loads((tmp_path / "whole" / "report.json").read_text())["findings"]
    assert any("7 records of the TRAIN set could not be used" in finding["text"] for finding in text)
    assert "00000017_img" in (tmp_path / "whole" / "report.html").read_text()
    with pytest.raises(UsageError, match="on_bad_record"):
        train("parts", 30, **{"run.if_exists": "resume", "data.on_bad_record": "stop"})
