"""The comparison with other libraries, run small on ours and the limit; and that it would notice a feed that cheats."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.feeds import data, reading, rounds
from benchmarks.feeds.cases import CASES, MEAN, case_named
from benchmarks.feeds.checking import Check, WrongWork
from benchmarks.feeds.environment import REQUIREMENTS, Peers
from benchmarks.feeds.processes import Usage, is_rays_own, usage
from benchmarks.feeds.table import TARGETS, summarise, verdicts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers")


Opener = Callable[[str], reading.Records]


@pytest.fixture
def opened(folder: Path) -> Iterator[Opener]:
    """Records of a case, let go of at the end."""
    made: list[reading.Records] = []

    def open_records(name: str) -> reading.Records:
        case = case_named(name, quick=True)
        made.append(reading.Records(case, data.build(folder, case.data)))
        return made[-1]

    yield open_records
    for records in made:
        records.close()


def batch_of(records: reading.Records, seed: int = 1) -> tuple[Any, Any]:
    samples, labels = reading.empty(records.case)
    numbers = np.random.default_rng(seed).permutation(len(records))[: records.case.batch].tolist()
    reading.fill(records, numbers, np.random.default_rng(seed), samples, labels)
    return samples, labels


# -- the command -----------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.long
def test_quick_measures_ours_and_the_limit_and_goes_on_where_it_stopped(folder: Path) -> None:
    out = folder / "out.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--folder", str(folder), "--cases", "small-f32"]
    command += ["--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    rows = {(row["feed"], row["variant"]): row for row in document["rows"]}
    assert set(rows) == {("limit", ""), *(("ours", variant) for variant in rounds.QUICK_OURS)}
    for name, row in rows.items():
        assert "error" not in row, (name, row)
        assert row["samples_per_s"] > 0
        if name[0] == "ours":
            assert row["order"] == "random"
            assert row["cpu_us_per_sample"] >= 0
            assert 10 < row["anon_shmem_mb"] <= row["pss_mb"] + 1
            assert 0 < row["first_after_imports_s"] < row["first_s"]
    targets = {row["what"]: row for row in document["targets"]}
    assert targets["small-f32: times the best peer"]["found"] is None, "no peer was asked for"
    assert set(document["machine"]) >= {"cpu", "cores", "load_average", "numpy", "lmdb"}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert again.returncode == 0, again.stderr
    assert f"{len(rows)} measurements of an earlier run" in again.stdout
    assert json.loads(out.read_text())["rows"] == document["rows"]


def test_a_configuration_that_this_version_refuses_is_a_row_with_its_reason(folder: Path) -> None:
    settings = rounds.Settings(folder, 0.1, 0.03, quick=True)
    data.build(folder, case_named("small-u8", True).data)
    found = rounds.measure(rounds.Entry("small-u8", "ours", "no such engine, lmdb"), settings, Peers(folder / "none"))
    assert "UsageError" in found["error"]


def test_a_peer_that_is_not_installed_is_a_row_with_its_reason(folder: Path) -> None:
    peers = Peers(folder / "none")
    peers.outcome = {"grain": {"installed": False, "reason": "no wheel for this Python"}}
    settings = rounds.Settings(folder, 0.1, 0.03, quick=True)
    entry = rounds.Entry("small-u8", "grain", "2 processes")
    found = rounds.measure(entry, settings, peers)
    assert found == {"error": "not installed: no wheel for this Python"}
    rows = summarise([{"round": 1, **vars(entry), **found}])
    assert (rows[0]["rounds"], rows[0]["error"]) == (0, found["error"])


def test_a_process_that_hangs_ends_with_all_that_it_started(folder: Path) -> None:
    code = (
        "import subprocess,time; p=subprocess.Popen(['sleep','60']); open('{0}','w').write(str(p.pid)); time.sleep(60)"
    )
    note = folder / "pid"
    found = rounds._run([sys.executable, "-c", code.format(note)], 4.0)
    assert found == {"error": "nothing after 4 s"}
    with contextlib.suppress(psutil.NoSuchProcess):  # whoever reaps orphans may not have come by
        assert psutil.Process(int(note.read_text())).status() == psutil.STATUS_ZOMBIE


def test_every_peer_has_a_module_and_requirements() -> None:
    assert set(rounds.PEERS) == set(REQUIREMENTS)
    for peer in rounds.PEERS:
        text = (ROOT / "benchmarks" / "feeds" / f"feed_{peer}.py").read_text()
        assert ("def prepare(" in text) == (peer in rounds.OWN_FORMAT), peer


# -- is it the same work? --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small-f32", "raw-u8", "jpeg-u8"])
def test_the_limit_does_the_work(opened: Opener, name: str) -> None:
    """Its batches go through :class:`Check` before it is timed."""
    from benchmarks.feeds import limit

    records = opened(name)
    case = records.case
    ways = (limit.ways_encoded if case.data.encoded else limit.ways_raw)(case, records)
    for make in ways.values():
        make(3)()


@pytest.mark.parametrize("name", ["small-u8", "raw-f32"])
def test_the_peers_reader_does_the_work(opened: Opener, name: str) -> None:
    records = opened(name)
    checked = Check(records.case)
    for seed in range(3):
        checked.batch(*batch_of(records, seed))
    assert checked.order() == "random"
    assert len(set(checked.places)) > 4
    assert set(checked.mirrored) == {True, False}


def _spoilt(name: str, samples: Any, labels: Any) -> tuple[Any, Any]:
    samples, labels = samples.copy(), labels.copy()
    if name == "fewer":
        return samples[:-1], labels[:-1]
    if name == "other type":
        return samples.astype(np.float64), labels
    if name == "labels of others":
        return samples, np.roll(labels, 1)
    if name == "no labels":
        return samples, labels * 0 - 1
    if name == "channels last":
        return np.ascontiguousarray(samples.transpose(0, 2, 3, 1)), labels
    if name == "one pixel":
        samples[0, 1, 5, 5] += 1
    if name == "no mean":
        samples += np.array(MEAN, np.float32).reshape(3, 1, 1)
    return samples, labels


@pytest.mark.parametrize(
    "name", ["fewer", "other type", "labels of others", "no labels", "channels last", "one pixel", "no mean"]
)
def test_other_work_is_noticed(opened: Opener, name: str) -> None:
    records = opened("small-f32")
    samples, labels = batch_of(records)
    Check(records.case).batch(samples, labels)
    with pytest.raises(WrongWork):
        Check(records.case).batch(*_spoilt(name, samples, labels))


def test_crops_that_never_move_or_mirror_are_noticed(opened: Opener) -> None:
    records = opened("raw-u8")
    case = records.case
    for mirror, rows in ((False, None), (None, [7] * case.batch)):
        checked = Check(case)
        for seed in range(3):
            samples, labels = reading.empty(case)
            chance = list(reading.draw(case, np.random.default_rng(seed), case.batch))
            chance[0] = chance[0] if mirror is None else [mirror] * case.batch
            chance[1:] = chance[1:] if rows is None else [rows, rows]
            for place in range(case.batch):
                stored, labels[place] = records.sample(seed * case.batch + place)
                samples[place] = reading.part(case, stored, tuple(chance), place)
            checked.batch(samples, labels)
        with pytest.raises(WrongWork, match="mirrored" if rows is None else "crops lie at"):
            checked.order()


def test_order_is_told(opened: Opener) -> None:
    records = opened("small-u8")
    checked = Check(records.case)
    for start in (0, 16, 32):
        samples, labels = reading.empty(records.case)
        reading.fill(records, range(start, start + 16), np.random.default_rng(start), samples, labels)
        checked.batch(samples, labels)
    assert checked.order() == "sequential"


def test_a_resized_part_is_bilinear() -> None:
    from benchmarks.feeds import kernels

    rng = np.random.default_rng(1)
    picture = rng.integers(0, 256, (60, 80, 3), np.uint8)
    row, column, height, width = 5, 7, 50, 61
    for mirror in (False, True):
        out = np.empty((3, 24, 24), np.uint8)
        kernels.resize_part(picture, row, column, height, width, mirror, out)
        y = np.clip((np.arange(24) + 0.5) * height / 24 - 0.5, 0, height - 1)[:, None, None]
        x = np.clip((np.arange(24) + 0.5) * width / 24 - 0.5, 0, width - 1)[None, :, None]
        part = picture[row : row + height, column : column + width].astype(np.float64)
        top, left = y.astype(int)[:, 0, 0], x.astype(int)[0, :, 0]
        down, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
        upper = part[top][:, left] * (1 - x % 1) + part[top][:, right] * (x % 1)
        lower = part[down][:, left] * (1 - x % 1) + part[down][:, right] * (x % 1)
        want = (upper * (1 - y % 1) + lower * (y % 1)).transpose(2, 0, 1)
        assert np.abs((out[:, :, ::-1] if mirror else out) - want).max() < 0.7


# -- rounds and figures ----------------------------------------------------------------------------------------


def row(feed: str, variant: str, rate: float, number: int = 1, case: str = "raw-u8", **more: Any) -> dict[str, Any]:
    figures = {"samples_per_s": rate, "anon_shmem_mb": 100.0, "pss_mb": 200.0, "order": "random", "first_s": 3.0}
    figures |= {"first_after_imports_s": 0.2, "cpu_us_per_sample": 1.0}
    return {"round": number, "case": case, "feed": feed, "variant": variant, "read_all": False, **figures, **more}


def test_later_rounds_repeat_ours_the_limit_and_the_best_ways_of_good_peers() -> None:
    wanted = rounds.entries(["raw-u8"], ["ours", "limit", "spdl", "torch", "mosaic"])
    rates = {"2 workers, samples": 60.0, "2 workers, whole batches": 80.0, "no workers": 70.0}
    results = [row("torch", variant, rate) for variant, rate in rates.items()]
    results += [row("spdl", "2 threads", 100.0), row("mosaic", "2 workers", 49.0), row("limit", "", 400.0)]
    results += [row("ours", variant, 300.0) for variant in rounds.OURS]
    kept = {(entry.feed, entry.variant) for entry in rounds.worth_repeating(wanted, results)}
    assert kept == {
        *(("ours", variant) for variant in rounds.OURS),
        ("limit", ""),
        ("spdl", "2 threads"),
        ("torch", "2 workers, whole batches"),
    }


def test_the_order_of_a_round_is_its_own_and_known() -> None:
    wanted = rounds.entries(CASES, ["ours", "limit", "spdl"])
    first, second = (rounds.in_turns(wanted, 1, number) for number in (1, 2))
    assert sorted(map(str, first)) == sorted(map(str, second)) == sorted(map(str, wanted))
    assert first != second
    assert first == rounds.in_turns(list(reversed(wanted)), 1, 1)
    cases = [entry.case for entry in first]
    assert cases == sorted(cases, key=cases.index), "one case after the other"


def test_region_decode_is_measured_of_ours_alone_and_compared_with_full_decode() -> None:
    entries = rounds.entries(["jpeg-region"], ["ours", "limit", "spdl"])
    assert {entry.feed for entry in entries} == {"ours"}
    results = [row("ours", "ray, lmdb", 300.0, case="jpeg-region"), row("spdl", "2 threads", 150.0, case="jpeg-u8")]
    found = {one["what"]: one for one in verdicts(results, summarise(results))}
    assert found["jpeg-region: times the best peer"]["found"] == 2.0
    assert found["jpeg-region: times the best peer"]["against"] == "spdl, 2 threads"


def test_ratios_are_those_of_rounds_and_misses_are_told() -> None:
    results = []
    for number, (ours, spdl, limit) in enumerate([(300.0, 100.0, 390.0), (200.0, 100.0, 400.0), (280.0, 100.0, 410.0)]):
        results += [row("ours", "ray, lmdb", ours, number), row("spdl", "2 threads", spdl, number)]
        results += [row("limit", "", limit, number), row("torch", "no workers", 50.0, number, anon_shmem_mb=80.0)]
        results += [row("dali", "2 threads", 60.0, number)]
    found = {one["what"]: one for one in verdicts(results, summarise(results))}
    times = found["raw-u8: times the best peer"]
    assert (times["found"], times["range"], times["reached"]) == (2.8, [2.0, 3.0], True)
    share = found["raw-u8: of the limit"]
    assert (share["found"], share["reached"]) == (pytest.approx(280 / 410, abs=1e-3), False)
    memory = found["raw-u8: anonymous and shared MB (torch, no workers)"]
    assert (memory["target"], memory["found"], memory["reached"]) == (80.0, 100.0, False)
    assert not found["first batch, ray, after workers are up, slowest case, s"].get("reached"), "was not measured"
    assert set(TARGETS) == set(CASES)


def test_what_a_net_and_a_feed_allow_together() -> None:
    from benchmarks.feeds.training import allowed_rate

    assert allowed_rate(0.010, 0.001, 0.002, 2) == 100, "the net is the bound"
    assert allowed_rate(0.010, 0.020, 0.002, 2) == 50, "the feed is"
    assert allowed_rate(0.010, 0.009, 0.018, 2) == pytest.approx(2 / 0.028), "the cores are"


def test_training_beside_a_feed_is_measured(opened: Opener) -> None:
    from benchmarks.feeds import training

    records = opened("small-f32")
    case = records.case
    found = training.share(case, Path(records.path).parent, "inline, lmdb", 0.02)
    assert found["samples_per_s"] > 0
    assert found["share"] == pytest.approx(found["samples_per_s"] / found["allowed_samples_per_s"], rel=0.01)
    row_of = {"round": 1, "case": "small-f32", "feed": "training", "variant": "", "read_all": False, **found}
    verdict = {one["what"]: one for one in verdicts([row_of], summarise([row_of]))}
    assert verdict["small-f32: while a net trains, of what both allow"]["found"] == found["share"]


def test_rays_own_processes_are_told_from_those_that_work() -> None:
    place = "/v/lib/python3.11/site-packages/ray"
    assert is_rays_own(f"{place}/core/src/ray/raylet/raylet --raylet_socket_name=x")
    assert is_rays_own(f"python -u {place}/autoscaler/_private/monitor.py --logs-dir=x")
    assert is_rays_own(f"python {place}/dashboard/dashboard.py")
    assert is_rays_own("ray::IDLE")
    assert is_rays_own("ray::DashboardAgent")
    assert not is_rays_own("ray::WorkerActor.run")
    assert not is_rays_own("ray::MapBatches(make)")
    assert not is_rays_own("python -m benchmarks.feeds.child ray_data raw-u8")


def test_workers_of_rays_that_end_do_not_take_time_back() -> None:
    before = Usage({1: 5.0, 2: 3.0, 3: 4.0}, ray_workers=frozenset({2}))
    after = Usage({1: 6.0 + 4.5}, ray_workers=frozenset())  # 3 was waited for by 1, after half a second more
    assert after.cpu_since(before) == 1.5


def test_usage_counts_children_and_their_memory() -> None:
    code = "import time; block = bytearray(60 << 20); print(1, flush=True); time.sleep(60)"
    before = usage(os.getpid())
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = usage(os.getpid())
        child.kill()
    assert after.processes >= before.processes + 1
    assert after.anon_shmem - before.anon_shmem > 55e6
    assert after.cpu_since(before) >= 0
