"""LSTM, RNN and LSTMUnit: float64, differences, PyTorch, and Caffe's rules for states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.layers.base import LayerError
from gpu.net import Net
from tests.gpu.layer_checks import BACKENDS, check_against, largest_allocation, one_layer

Values = dict[str, np.ndarray]


def recurrent(kind: str, size: int, shapes: dict[str, tuple[int, ...]], exposed: bool = False, **options: Any) -> Net:
    tops = ["y", *(["h", "c"][: 2 if kind == "LSTM" else 1] if exposed else [])]
    fillers = 'weight_filler { type: "uniform" min: -0.8 max: 0.8 } bias_filler { type: "uniform" min: -0.5 max: 0.5 }'
    return one_layer(
        f'type: "{kind}" {" ".join(f"bottom: {name!r}" for name in shapes)} {" ".join(f"top: {t!r}" for t in tops)}'
        f" recurrent_param {{ num_output: {size} expose_hidden: {str(exposed).lower()} {fillers} }}",
        shapes,
        **options,
    )


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def reference(kind: str, v: Values) -> Values:
    """Straight from Caffe's description, in float64. Names: x, cont, s, h0, c0 and p0 ..."""
    steps, streams = v["x"].shape[:2]
    w = [v[f"p{i}"] for i in range(len([name for name in v if name.startswith("p")]))]
    static = v["s"].reshape(streams, -1) @ w[2].T if "s" in v else 0.0
    rest = w[3:] if "s" in v else w[2:]
    size = rest[0].shape[1]
    h = v["h0"][0] if "h0" in v else np.zeros((streams, size))
    c = v["c0"][0] if "c0" in v else np.zeros((streams, size))
    out = []
    for t in range(steps):
        keep = v["cont"][t][:, None]
        total = v["x"][t].reshape(streams, -1) @ w[0].T + w[1] + static + (keep * h) @ rest[0].T
        if kind == "LSTM":
            i, f, o, g = np.split(total, 4, axis=1)
            c = keep * sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            out.append(h)
        else:
            h = np.tanh(total)
            out.append(np.tanh(h @ rest[1].T + rest[2]))
    tops = {"y": np.stack(out)}
    if "h0" in v:
        tops["h"] = h[None]
    if "c0" in v:
        tops["c"] = c[None]
    return tops


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_as_float64(data: st.DataObject) -> None:
    pick = data.draw
    kind, exposed, static = pick(st.sampled_from(["LSTM", "RNN"])), pick(st.booleans()), pick(st.booleans())
    steps, streams, size = (pick(st.integers(1, 4)) for _ in range(3))
    inputs = tuple(pick(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    rng = np.random.default_rng(pick(st.integers(0, 999)))
    arrays = {"x": rng.standard_normal((steps, streams, *inputs)), "cont": rng.integers(0, 2, (steps, streams))}
    if pick(st.booleans()):
        arrays["cont"] = rng.random((steps, streams))  # no indicator: Caffe multiplies by it all the same
    if static:
        arrays["s"] = rng.standard_normal((streams, *inputs))
    if exposed:
        arrays |= {name: rng.standard_normal((1, streams, size)) for name in ("h0", "c0")[: 2 if kind == "LSTM" else 1]}
    net = recurrent(
        kind,
        size,
        {name: array.shape for name, array in arrays.items()},
        exposed,
        seed=pick(st.integers(0, 9)),
        backend=BACKENDS[pick(st.sampled_from(sorted(BACKENDS)))],
    )
    smooth = [name for name in ("x", "s") if name in arrays] + [f"p{i}" for i in range(len(net.params["L"]))]
    if exposed:
        # Caffe passes no gradient back from exposed states, so they have no say in the differences.
        tops = list(reference(kind, {**arrays, **{f"p{i}": b.data for i, b in enumerate(net.params["L"])}}))
        found = net.forward(**{name: array.astype(np.float32) for name, array in arrays.items()})
        assert list(found) == tops
        return
    check_against(lambda v: reference(kind, v), net, {k: a.astype(np.float32) for k, a in arrays.items()}, 1, smooth)


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_exposed_states_in_and_out(kind: str) -> None:
    """A sequence in two halves, the state handed over, is the sequence in one; gradients stop at the seam."""
    rng = np.random.default_rng(3)
    names = ["h0", "c0"][: 2 if kind == "LSTM" else 1]
    state = dict.fromkeys(names, (1, 2, 4))
    half = recurrent(kind, 4, {"x": (3, 2, 5), "cont": (3, 2), **state}, True, seed=1)
    whole = recurrent(kind, 4, {"x": (6, 2, 5), "cont": (6, 2), **state}, True, seed=1)
    x, cont = rng.standard_normal((6, 2, 5)), np.ones((6, 2))
    start = {name: rng.standard_normal((1, 2, 4)) for name in names}
    first = half.forward(x=x[:3], cont=cont[:3], **start)
    given = dict(zip(names, (first["h"], first.get("c")), strict=False))
    second = half.forward(x=x[3:], cont=cont[3:], **given)
    both = whole.forward(x=x, cont=cont, **start)
    np.testing.assert_allclose(np.concatenate([first["y"], second["y"]]), both["y"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(second["h"], both["h"], rtol=1e-6, atol=1e-7)
    gradients = half.backward(y=np.ones((3, 2, 4)), h=np.ones((1, 2, 4)))
    assert {name for name, array in gradients.items() if array.any()} == {"x"}


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_states_carry_over_to_the_next_pass_until_a_sequence_begins(kind: str) -> None:
    net = recurrent(kind, 3, {"x": (2, 2, 4), "cont": (2, 2)}, seed=2)
    long = recurrent(kind, 3, {"x": (4, 2, 4), "cont": (4, 2)}, seed=2)
    x, cont = np.random.default_rng(0).standard_normal((4, 2, 4)), np.float32([[0, 0], [1, 1], [1, 0], [1, 1]])
    parts = [net.forward(x=x[i : i + 2], cont=cont[i : i + 2])["y"] for i in (0, 2)]
    np.testing.assert_allclose(np.concatenate(parts), long.forward(x=x, cont=cont)["y"], rtol=1e-6, atol=1e-7)
    net.layers[-1].reset()  # type: ignore[attr-defined]
    begun = net.forward(x=x[:2], cont=np.ones((2, 2)))["y"]
    np.testing.assert_allclose(begun, parts[0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_parameters_lie_as_in_caffe(kind: str) -> None:
    shapes = {"x": (2, 3, 5), "cont": (2, 3), "s": (3, 7)}
    rows = 16 if kind == "LSTM" else 4
    wanted = [(rows, 5), (rows,), (rows, 7), (rows, 4)] + ([(4, 4), (4,)] if kind == "RNN" else [])
    assert [blob.shape for blob in recurrent(kind, 4, shapes).params["L"]] == wanted


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_nothing_is_allocated_in_passing(kind: str) -> None:
    net = recurrent(kind, 256, {"x": (4, 128, 48), "cont": (4, 128), "s": (128, 16)})
    assert largest_allocation(net) < 128 * 256 * 4  # one step's state; NumPy's own buffers are half of that


@settings(max_examples=20, deadline=None)
@given(streams=st.integers(1, 4), size=st.integers(1, 4), seed=st.integers(0, 99))
def test_one_step_as_float64(streams: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = {"b": rng.standard_normal((1, streams, size)), "g": rng.standard_normal((1, streams, 4 * size))}
    arrays["cont"] = rng.integers(0, 2, (1, streams))

    def unit(v: Values) -> Values:
        i, f, o, g = np.split(v["g"], 4, axis=2)
        c = v["cont"][..., None] * sigmoid(f) * v["b"] + sigmoid(i) * np.tanh(g)
        return {"c": c, "h": sigmoid(o) * np.tanh(c)}

    net = one_layer(
        'type: "LSTMUnit" bottom: "b" bottom: "g" bottom: "cont" top: "c" top: "h"',
        {name: array.shape for name, array in arrays.items()},
    )
    check_against(unit, net, {k: a.astype(np.float32) for k, a in arrays.items()}, seed, ["b", "g"])


def test_large_sums_do_not_overflow() -> None:
    net = recurrent("LSTM", 2, {"x": (2, 1, 2), "cont": (2, 1)})
    y = net.forward(x=np.float32([[[1e4, -1e4]], [[-3e38, 3e38]]]), cont=np.ones((2, 1)))["y"]
    assert np.isfinite(y).all()
    assert np.isfinite(net.backward(y=np.ones((2, 1, 2)))["x"]).all()


@pytest.mark.parametrize(
    ("shapes", "text", "message"),
    [
        ({"x": (2, 3), "cont": (2, 3)}, "", "timesteps, streams"),
        ({"x": (2, 3, 4), "cont": (2, 2)}, "", "indicators"),
        ({"x": (2, 3, 4), "cont": (2, 3), "s": (2, 5)}, "", "static"),
        ({"x": (2, 3, 4), "cont": (2, 3)}, "expose_hidden: true", "4 or 5 bottoms"),
        ({"x": (2, 3, 4), "cont": (2, 3), "h": (1, 3, 2), "c": (1, 3, 2)}, "", "2 or 3 bottoms"),
    ],
)
def test_what_does_not_fit(shapes: dict[str, tuple[int, ...]], text: str, message: str) -> None:
    bottoms = " ".join(f'bottom: "{name}"' for name in shapes)
    with pytest.raises(LayerError) as caught:
        one_layer(f'type: "LSTM" {bottoms} top: "y" recurrent_param {{ num_output: 2 {text} }}', shapes)
    assert message in str(caught.value)


@pytest.mark.oracle
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_as_torch(data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    pick = data.draw
    kind = pick(st.sampled_from(["LSTM", "RNN"]))
    steps, streams, inputs, size = (pick(st.integers(1, 6)) for _ in range(4))
    rng = np.random.default_rng(pick(st.integers(0, 99)))
    net = recurrent(kind, size, {"x": (steps, streams, inputs), "cont": (steps, streams)}, seed=1)
    cont = np.ones((steps, streams))
    cont[0] = 0  # one sequence from its begin, as torch's layers have it
    x = rng.standard_normal((steps, streams, inputs), np.float32)
    blobs = net.params["L"]
    theirs = (torch.nn.LSTM if kind == "LSTM" else torch.nn.RNN)(inputs, size)
    order = [0, 1, 3, 2] if kind == "LSTM" else [0]  # theirs: input, forget, candidate, output

    def rows(array: np.ndarray) -> Any:
        return torch.tensor(np.concatenate([np.split(array, len(order))[i] for i in order]))

    with torch.no_grad():
        theirs.weight_ih_l0[...] = rows(blobs[0].data)
        theirs.bias_ih_l0[...] = rows(blobs[1].data)
        theirs.weight_hh_l0[...] = rows(blobs[2].data)
        theirs.bias_hh_l0[...] = 0
    tx = torch.tensor(x, requires_grad=True)
    ty = theirs(tx)[0]
    if kind == "RNN":
        ty = torch.tanh(ty @ torch.tensor(blobs[3].data).T + torch.tensor(blobs[4].data))
    y = net.forward(x=x, cont=cont)["y"]
    np.testing.assert_allclose(y, ty.detach().numpy(), rtol=1e-4, atol=1e-5)
    dy = rng.standard_normal(y.shape, np.float32)
    ty.backward(torch.tensor(dy))
    np.testing.assert_allclose(net.backward(y=dy)["x"], tx.grad.numpy(), rtol=1e-4, atol=1e-5)
    for blob, gradient in zip(blobs, (theirs.weight_ih_l0, theirs.bias_ih_l0, theirs.weight_hh_l0), strict=False):
        np.testing.assert_allclose(rows(blob.diff).numpy(), gradient.grad.numpy(), rtol=1e-4, atol=1e-4)
