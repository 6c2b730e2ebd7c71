"""The net's block: places that never collide, the same bits with and without reuse, and no blob that lies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu import arena
from gpu.backend import Backend
from gpu.blob import BlobReused
from gpu.describe import describe
from gpu.memory import ALIGNMENT, Request, aligned, plan
from gpu.net import Net
from gpu.solver import Solver
from gpu.warm import warm_up
from profiler.errors import StallscopeError, UsageError
from tests.gpu import nets, test_layers

LENET = nets.DATA / "proto" / "lenet_train_test.prototxt"
SHAPES = {"data": (4, 1, 28, 28)}
EXAMPLES: dict[str, dict[str, Any]] = {
    "every": {"prototxt": nets.every_layer()},
    "lenet": {"prototxt": LENET, "input_shapes": SHAPES},
    "quick": {"prototxt": nets.DATA / "nets" / "cifar10_quick_b4.prototxt"},
    "lenet_b8": {"prototxt": nets.DATA / "nets" / "lenet_iter200_b8.prototxt"},
}


@st.composite
def requests(draw: Any) -> list[Request]:
    made = []
    for i in range(draw(st.integers(0, 15))):
        edges = draw(st.lists(st.integers(0, 26), min_size=2, max_size=4, unique=True).filter(lambda e: len(e) != 3))
        edges = sorted(edges)
        live = tuple(zip(edges[::2], edges[1::2], strict=True))
        made.append(Request(f"b{i}", "data", draw(st.integers(1, 5000)), live))
    return made


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests(), st.booleans())
def test_no_two_buffers_in_use_at_one_time_share_a_byte(wanted: list[Request], reuse: bool) -> None:
    made = plan(wanted, [str(i) for i in range(30)], reuse)
    assert [b.name for b in made.buffers] == [r.name for r in wanted]
    for i, a in enumerate(made.buffers):
        assert a.offset % ALIGNMENT == 0
        assert a.offset + a.nbytes <= made.total
        for b in made.buffers[:i]:
            if not reuse or set(_moments(a)) & set(_moments(b)):
                assert a.end <= b.offset or b.end <= a.offset
    assert made.peak == max((sum(aligned(r.nbytes) for r in wanted if t in _moments(r)) for t in range(40)), default=0)
    assert made.peak <= made.total <= made.unshared
    assert made == plan(wanted, [str(i) for i in range(30)], reuse)


def _moments(request: Request) -> set[int]:
    return {t for start, end in request.live for t in range(start, end + 1)}


def test_places_by_hand() -> None:
    """a, b and c follow one another, so c goes where a was; d lives throughout."""
    live = {"a": (0, 1), "b": (1, 2), "c": (2, 3), "d": (0, 3)}
    sizes = {"a": 640, "b": 320, "c": 600, "d": 64}
    made = plan([Request(n, "data", sizes[n], (live[n],)) for n in live], ["t0", "t1", "t2", "t3"], True)
    places = {b.name: b.offset for b in made.buffers}
    assert places == {"a": 0, "b": 640, "c": 0, "d": 960}
    assert (made.total, made.peak, made.unshared) == (1024, 1024, 1664)
    text = made.table()
    assert "total 1,024 bytes (62 %) of 1,664 without reuse" in text
    assert next(line for line in text.splitlines() if line.startswith("c")).split()[1:] == [
        "data", "600", "0", "t2", "t3",
    ]  # fmt: skip


def outcome(steps: int = 3, backend: str = "numpy", **how: Any) -> list[np.ndarray]:
    """All that a net says of itself over some steps: outputs, loss, gradients of inputs and of parameters."""
    net = Net(phase="TRAIN", seed=5, backend=Backend(backend, np, "test"), **how)
    said: list[Any] = []
    for step in range(steps):
        out = net.forward(**nets.feed(net, step))
        net.clear_param_diffs()
        gradients = net.backward()
        said += [out[name] for name in sorted(out)] + [net.loss] + [gradients[name] for name in sorted(gradients)]
        said += [param.blob.diff.copy() for param in net.learnable]
        for param in net.learnable:
            param.blob.data -= np.float32(0.01) * param.blob.diff
    said += [blob.data.copy() for blobs in net.params.values() for blob in blobs]
    return [np.asarray(value) for value in said]


def assert_same_bits(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.tobytes() == y.tobytes()
        assert np.isfinite(x).all()


@pytest.mark.parametrize("backend", ["numpy", "portable"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_same_bits_with_and_without_reuse(name: str, backend: str) -> None:
    plain = outcome(backend=backend, **EXAMPLES[name])
    assert_same_bits(plain, outcome(backend=backend, reuse=True, **EXAMPLES[name]))
    assert_same_bits(plain, outcome(backend=backend, reuse=True, poison=True, **EXAMPLES[name]))
    assert_same_bits(plain, outcome(backend=backend, poison=True, **EXAMPLES[name]))


@pytest.mark.filterwarnings("ignore::gpu.fields.FieldWarning")  # of gradients in place that Caffe gets wrong
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(nets.random_net())
def test_random_nets_give_the_same_bits_with_and_without_reuse(text: str) -> None:
    plain = outcome(2, prototxt=text)
    if all(np.isfinite(value).all() for value in plain):
        assert_same_bits(plain, outcome(2, prototxt=text, reuse=True, poison=True))


def test_poison_finds_a_layer_that_reads_what_it_did_not_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu.layers.pointwise import Sigmoid

    monkeypatch.setattr(Sigmoid, "reads_top", lambda self: False)
    text = nets.inputs(x=(2, 4, 6, 6), l=(2,)) + nets.layer("Convolution", "conv", ["x"], ["conv"], nets.CONV)
    text += nets.layer("Sigmoid", "s", ["conv"], ["s"])
    text += nets.layer("Pooling", "pool", ["s"], ["pool"], "pooling_param { kernel_size: 2 stride: 2 }")
    text += nets.layer("InnerProduct", "ip", ["pool"], ["ip"], f"inner_product_param {{ num_output: 5 {nets.FILL} }}")
    text += nets.layer("SoftmaxWithLoss", "loss", ["ip", "l"], ["loss"])
    # Without reuse: with it, another blob's numbers may lie there by then, wrong but finite.
    found = outcome(1, prototxt=text, poison=True)
    assert not all(np.isfinite(value).all() for value in found)


def test_reuse_takes_much_less() -> None:
    shapes = {"data": (64, 1, 28, 28)}
    train = Net(LENET, "TRAIN", input_shapes=shapes, reuse=True).memory_plan()
    test = Net(LENET, "TEST", input_shapes=shapes, reuse=True).memory_plan()
    assert train.total < 0.8 * train.unshared
    assert test.total < 0.7 * test.unshared
    for made in (train, test):
        assert made.peak <= made.total <= 1.1 * made.peak
    kinds = {buffer.kind for buffer in train.buffers}
    assert kinds == {"data", "diff", "work", "sum"}
    assert "forward conv1" in train.table()
    whole = Net(LENET, "TRAIN", input_shapes=shapes).memory_plan()
    assert whole.total == whole.unshared == train.unshared


@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
def test_a_blob_tells_the_truth_or_says_that_it_cannot(phase: str) -> None:
    """After each pass, every blob shows what the same net without reuse shows, or raises."""
    nets_ = [Net(nets.every_layer(), phase, reuse=reuse, seed=5) for reuse in (False, True)]
    gone, lost = {"forward": 0, "backward": 0}, set()
    for step in range(2):
        for pass_ in ("forward", "backward") if phase == "TRAIN" else ("forward",):
            for net in nets_:
                if pass_ == "forward":
                    net.forward(**nets.feed(net, step))
                else:
                    net.backward()
            for name in nets_[0].blobs:
                for what in ("data", "diff") if pass_ == "backward" else ("data",):
                    true = getattr(nets_[0].blobs[name], what)
                    try:
                        shown = getattr(nets_[1].blobs[name], what)
                    except BlobReused:
                        gone[pass_] += 1
                        lost.add(name)
                        assert name not in (*nets_[1].outputs, *nets_[1].inputs)
                        continue
                    assert shown.tobytes() == true.tobytes(), (name, what, pass_)
    assert gone["backward" if phase == "TRAIN" else "forward"] > 0
    assert {"relu", "lrn"} & lost


def test_diffs_between_a_backward_and_the_next_forward() -> None:
    """A second forward pass writes over gradients: they must not be shown as those of the pass before."""
    plain, net = (Net(nets.every_layer(), "TRAIN", reuse=reuse, seed=5) for reuse in (False, True))
    for each in (plain, net):
        each.forward(**nets.feed(each))
        each.backward()
        each.forward(**nets.feed(each, 1))
        each.forward(**nets.feed(each, 2))
    for name, blob in net.blobs.items():
        try:
            shown = blob.diff
        except BlobReused:
            continue
        assert shown.tobytes() == plain.blobs[name].diff.tobytes(), name


def test_what_reuse_cannot_do_is_refused_by_name() -> None:
    net = Net(LENET, "TRAIN", input_shapes=SHAPES, reuse=True)
    inputs = nets.feed(net)
    with pytest.raises(UsageError, match="backward needs a forward pass of its own"):
        net.backward() and net.backward()
    net.forward(**inputs)
    net.backward()
    with pytest.raises(UsageError, match="backward needs a forward pass of its own"):
        net.backward()
    test = Net(LENET, "TEST", input_shapes=SHAPES, reuse=True)
    test.forward(**inputs)
    with pytest.raises(UsageError, match="has no backward pass"):
        test.backward()


def test_after_a_pass_that_failed_no_blob_is_believed() -> None:
    net = Net(LENET, "TRAIN", input_shapes=SHAPES, reuse=True)
    with pytest.raises(StallscopeError, match="is not a class"):
        net.forward(data=np.ones(SHAPES["data"]), label=np.full(4, 10))
    with pytest.raises(BlobReused, match="a pass that failed"):
        _ = net.blobs["ip1"].data
    net.forward(**nets.feed(net))
    net.backward()


def test_one_block_holds_all_of_it_and_the_next_net_lies_in_it() -> None:
    gc.collect()
    arena.blocks(np).release()
    shapes = {"data": (32, 1, 28, 28)}
    net = Net(LENET, "TRAIN", input_shapes=shapes)
    block = net._layout._block
    places = [blob.data for blob in net.blobs.values()] + [
        blob.diff for blob in net.blobs.values() if blob._diff is not None
    ]
    assert all(np.shares_memory(block, array) for array in places)
    assert block.ctypes.data % ALIGNMENT == 0
    reserved = arena.blocks(np).usage().reserved
    address = block.ctypes.data
    del net, block, places
    for _ in range(5):
        net = Net(LENET, "TRAIN", input_shapes=shapes)
        assert net._layout._block.ctypes.data == address
        assert not net.blobs["conv1"].data.any()
        net.forward(**nets.feed(net))
        assert arena.blocks(np).usage().reserved == reserved
        del net
    usage = arena.blocks(np).usage()
    assert usage.largest_free is not None
    assert usage.largest_free > 0
    assert arena.blocks(np).release() > 0


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is in a circle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings("ignore::gpu.fields.FieldWarning")  # see test_fields
def test_a_net_that_nobody_has_any_more_is_gone_at_once(no_collector: None) -> None:
    """With its parameters and its place in the block, whatever its layers are: no collector has to come by first."""
    before = arena.blocks(np).usage()
    left: dict[str, list[str]] = {}
    for case in test_layers.CASES:
        net, golden = test_layers.load(case, "compiled", reuse=True)
        net.forward_only(**{name: golden[f"in_{name}"] for name in net.inputs})
        if net.phase == "TRAIN" and net.loss:
            net.backward_only()
        parts = {"net": net, **{layer.name: layer for layer in net.layers}, **net.blobs}
        parts |= {f"{name} {i}": blob for name, blobs in net.params.items() for i, blob in enumerate(blobs)}
        seen = {name: weakref.ref(part) for name, part in parts.items()}
        del net, parts
        if alive := [name for name, part in seen.items() if part() is not None]:
            left[case] = alive
    assert left == {}
    after = arena.blocks(np).usage()
    assert (after.live_blobs, after.used) == (before.live_blobs, before.used)


def test_live_blobs_are_those_of_the_nets_that_there_are(no_collector: None) -> None:
    """Solvers in turn with test nets, which share parameters; nets that only tools make; float16; Filter."""

    def live() -> int:
        return arena.blocks(np).usage().live_blobs

    text = 'base_lr: 0.001 lr_policy: "fixed" momentum: 0.9 test_iter: 1 test_iter: 1 test_interval: 1'
    how = {"backend": "numpy", "input_shapes": SHAPES, "test_input_shapes": SHAPES}
    before, counts = live(), []
    for precision in ("fp32", "fp16", "fp32"):
        solver = Solver(text, net=LENET, precision=precision, **how)  # type: ignore[arg-type]
        solver.step_on(nets.feed(solver.net))
        for index, net in enumerate(solver.test_nets):
            solver.test(index, [nets.feed(net)])
        every = [net.blobs.values() for net in (solver.net, *solver.test_nets)]
        own = {blob for blobs in (*every, *solver.net.params.values()) for blob in blobs}
        own |= {blob for net in (solver.net, *solver.test_nets) for blob in net._passes.homes.values()}
        counts.append((live() - before, len(own)))
        warm_up(solver.backend)
        describe(solver.net)
        debug = Solver(f"{text} debug_info: true display: 1", net=LENET, **how)  # type: ignore[arg-type]
        debug.step_on(nets.feed(debug.net))
        del solver, net, every, own, debug
        counts.append((live() - before, 0))
    net = Net(nets.inputs(x=(4, 2), s=(4,)) + nets.layer("Filter", "f", ["x", "s"], ["y"]))
    for rows in (4, 2):
        net.forward(x=np.ones((4, 2)), s=np.arange(4) < rows)
    del net
    counts.append((live() - before, 0))
    assert [found for found, _ in counts] == [wanted for _, wanted in counts]


def test_arrays_that_outlive_their_net_keep_their_numbers() -> None:
    net = Net(LENET, "TRAIN", input_shapes=SHAPES)
    net.forward(**nets.feed(net))
    kept = net.blobs["conv1"].data
    numbers = kept.copy()
    del net
    gc.collect()
    other = Net(LENET, "TRAIN", input_shapes=SHAPES)
    other.forward(**nets.feed(other, 9))
    assert kept.tobytes() == numbers.tobytes()


def test_short_memory_is_tried_twice_and_then_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = arena.Blocks.take, []

    def take(self: arena.Blocks, nbytes: int) -> Any:
        calls.append(nbytes)
        if len(calls) <= failures:
            raise MemoryError("no more")
        return real(self, nbytes)

    monkeypatch.setattr(arena.Blocks, "take", take)
    failures = 1
    Net(LENET, "TRAIN", input_shapes=SHAPES)
    calls.clear()
    failures = 99
    with pytest.raises(StallscopeError, match="no memory for net 'LeNet' in phase TRAIN") as caught:
        Net(LENET, "TRAIN", input_shapes=SHAPES)
    assert re_numbers(str(caught.value.found))
    assert "smaller batch" in str(caught.value.hint)


def re_numbers(text: str) -> bool:
    return "nets of this process use" in text and "largest free block" in text and "largest request" in text


def test_the_batch_that_would_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.net.available_memory", lambda: 100 * 2**20)
    shapes = {"data": (10_000, 1, 28, 28)}
    with pytest.raises(StallscopeError, match="no memory") as caught:
        Net(LENET, "TRAIN", input_shapes=shapes)
    count = int(str(caught.value.hint).split("about ")[1].split()[0])
    Net(LENET, "TRAIN", input_shapes={"data": (count, 1, 28, 28)})
    with pytest.raises(StallscopeError, match="no memory"):
        Net(LENET, "TRAIN", input_shapes={"data": (int(count * 1.2), 1, 28, 28)})


def test_a_layer_that_runs_out_of_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(LENET, "TRAIN", input_shapes=SHAPES)

    def fails(*_: object) -> None:
        raise MemoryError("Unable to allocate 3 GiB")

    layer = next(layer for layer in net.layers if layer.name == "conv2")
    monkeypatch.setattr(layer, "forward", fails)
    with pytest.raises(StallscopeError, match=r"layer 'conv2' \(Convolution\): no memory in forward"):
        net.forward(**nets.feed(net))


GLOBAL = (
    nets.inputs(x=(1, 3, 8, 9), l=(1,))
    + nets.layer("Convolution", "conv", ["x"], ["conv"], nets.CONV)
    + nets.layer("ReLU", "relu", ["conv"], ["conv"])
    + nets.layer("Pooling", "half", ["conv"], ["half"], "pooling_param { kernel_size: 2 stride: 2 }")
    + nets.layer("Dropout", "drop", ["half"], ["half"], "dropout_param { dropout_ratio: 0.3 }")
    + nets.layer("Pooling", "all", ["half"], ["all"], "pooling_param { pool: AVE global_pooling: true }")
    + nets.layer("InnerProduct", "ip", ["all"], ["ip"], f"inner_product_param {{ num_output: 5 {nets.FILL} }}")
    + nets.layer("SoftmaxWithLoss", "loss", ["ip", "l"], ["loss"])
)


@pytest.mark.parametrize("reuse", [False, True])
def test_inputs_of_other_sizes_give_the_bits_of_a_net_of_that_size(reuse: bool) -> None:
    net = Net(GLOBAL, "TRAIN", seed=3, reuse=reuse, poison=reuse)
    rng = np.random.default_rng(0)
    sizes = [(1, 3, 8, 9), (1, 3, 20, 17), (2, 3, 5, 6), (1, 3, 20, 17), (1, 3, 8, 9)]
    blocks = []
    for i, size in enumerate(sizes):
        x, labels = rng.standard_normal(size, np.float32), rng.integers(0, 5, size[:1])
        fresh = Net(GLOBAL, "TRAIN", seed=3, input_shapes={"x": size, "l": size[:1]})
        fresh.iteration = net.iteration = i
        results = []
        for each in (net, fresh):
            out = each.forward(x=x, l=labels)
            each.clear_param_diffs()
            each.backward()
            results.append([out["loss"], *[param.blob.diff.copy() for param in each.learnable]])
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True)), size
        assert net.blobs["x"].shape == size
        blocks.append((net._layout._block.ctypes.data, net._layout.nbytes))
    assert len(set(blocks[1:])) == 1  # grew once for the largest, and neither shrank nor moved after it
    assert blocks[0] != blocks[1]


def test_a_layer_that_cannot_follow_is_named_and_nothing_changes() -> None:
    net = Net(LENET, "TRAIN", input_shapes=SHAPES)
    given = nets.feed(net)
    loss = net.forward(**given)["loss"]
    with pytest.raises(StallscopeError, match=r"layer 'ip1' \(InnerProduct\): its parameters cannot follow"):
        net.reshape(data=(4, 1, 36, 36))
    with pytest.raises(UsageError, match="reshape names blobs that are no inputs"):
        net.reshape(conv1=(1,))
    with pytest.raises(StallscopeError, match=r"layer 'conv1' \(Convolution\)"):
        net.forward(data=np.zeros((4, 1, 2, 2)))
    assert net.blobs["data"].shape == SHAPES["data"]
    assert net.forward(**given)["loss"] == loss
    net.reshape(data=(2, 1, 28, 28))
    assert net.blobs["label"].shape == (2,)


def test_the_plan_of_a_golden_net_can_be_printed(tmp_path: Path) -> None:
    text = str(Net(nets.DATA / "nets" / "cifar10_quick_b4.prototxt", "TRAIN", reuse=True).memory_plan())
    lines = text.splitlines()
    assert lines[0].split() == ["name", "kind", "bytes", "offset", "first", "use", "last", "use"]
    assert lines[-1].startswith("total ")
