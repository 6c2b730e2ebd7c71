"""Compile the NumPy backend's kernels before the first step, so that no step is charged with it."""

from __future__ import annotations

import numpy as np

from gpu.backend import Backend
from profiler import hashing

# One layer for each compiled kernel, on blobs of six by six values.
_NET = """
input: "data" input_shape { dim: 1 dim: 1 dim: 6 dim: 6 } force_backward: true
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 2 kernel_size: 3 pad: 1 } }
layer { name: "bare" type: "Convolution" bottom: "conv" top: "bare"
  convolution_param { num_output: 2 kernel_size: 3 bias_term: false } }
layer { name: "deep" type: "Convolution" bottom: "bare" top: "deep"
  convolution_param { num_output: 2 group: 2 kernel_size: 1 } }
layer { name: "max" type: "Pooling" bottom: "deep" top: "max" pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "ave" type: "Pooling" bottom: "max" top: "ave" pooling_param { pool: AVE kernel_size: 2 stride: 2 } }
layer { name: "rows" type: "DummyData" top: "rows" dummy_data_param { shape { dim: 2 } } }
layer { name: "table" type: "Embed" bottom: "rows" top: "table" embed_param { input_dim: 1 num_output: 2 } }
layer { name: "chosen" type: "Filter" bottom: "table" bottom: "rows" top: "chosen" }
layer { name: "places" type: "ArgMax" bottom: "table" top: "places" }
"""
_LARGE = 1 << 17  # float32 values: enough for the hashes to take their compiled path


def warm_up(backend: Backend) -> None:
    """Compile, or load from the cache, what training on the CPU uses. cupy has a cache of its own."""
    if backend.name == "cupy":
        return
    from gpu.net import Net

    for images in (1, 2):  # convolution has a way of its own for one image at a time
        net = Net(_NET, phase="TRAIN", backend=backend, input_shapes={"data": (images, 1, 6, 6)})
        net.forward()
        net.backward(ave=np.ones(net.blobs["ave"].shape, np.float32))
    values = np.zeros(_LARGE, np.float32)
    hashing.ordered(values)
    hashing.stats(values)
