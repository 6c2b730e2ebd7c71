"""Case C7: a loss of 87.3365 is no measurement but the end of float32."""

from __future__ import annotations

import numpy as np
import pytest

from gpu import Net
from gpu.saturation import CEILING, ceiling, hint

_INPUTS = 'input: "x" input_shape { dim: 4 dim: 10 } input: "l" input_shape { dim: 4 } '


def net_of(*losses: str) -> Net:
    texts = [
        f'layer {{ name: "loss{i}" bottom: "x" bottom: "l" top: "loss{i}" {text} }}' for i, text in enumerate(losses)
    ]
    return Net(_INPUTS + " ".join(texts), "TRAIN")


@pytest.mark.parametrize(
    ("losses", "weight"),
    [
        (['type: "SoftmaxWithLoss"'], 1.0),
        (['type: "SoftmaxWithLoss" loss_weight: 0.3', 'type: "SoftmaxWithLoss"'], 1.3),
        (['type: "SoftmaxWithLoss"', 'type: "HingeLoss"'], None),
        (['type: "SoftmaxWithLoss"', 'type: "HingeLoss" loss_weight: 0'], 1.0),
        (['type: "HingeLoss"'], None),
        (['type: "Accuracy"'], None),
        (['type: "Accuracy"', 'type: "SoftmaxWithLoss"'], 1.0),
    ],
)
def test_the_most_a_net_can_lose(losses: list[str], weight: float | None) -> None:
    net = net_of(*losses)
    most = ceiling(net)
    assert most == (None if weight is None else pytest.approx(weight * CEILING))
    if most is not None:
        scores = np.zeros((4, 10), np.float32)
        scores[:, 3] = 1000
        net.forward(x=scores, l=np.zeros(4, np.float32))
        softmax = sum(
            float(net.blobs[layer.spec.top[0]].data) * (layer.spec.loss_weight[0] if layer.spec.loss_weight else 1)
            for layer in net.layers
            if layer.spec.type == "SoftmaxWithLoss"
        )
        assert softmax == pytest.approx(most, rel=1e-6)
        assert hint(softmax, most) is not None


def test_what_is_said_and_when() -> None:
    assert round(CEILING, 5) == 87.33654
    for loss in (87.3365, 78.6, 74.3):
        said = hint(loss, CEILING)
        assert said is not None
        assert "87.3365" in said
        assert "base_lr" in said
    for loss in (2.3, 40.0, 88.0, float("nan"), float("inf")):
        assert hint(loss, CEILING) is None
    assert hint(87.3365, None) is None
