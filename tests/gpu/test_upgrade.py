"""Old formats of nets and of weights: one net in three generations, and what V0 alone had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from datasets import caffe_pb2
from gpu.net import Net
from gpu.prototxt import PrototxtError, load_net
from profiler.errors import StallscopeError

INPUT = 'name: "n" input: "data" input_dim: 2 input_dim: 3 input_dim: 8 input_dim: 8\n'
V0 = (
    INPUT
    + """
layers { layer { name: "conv" type: "conv" num_output: 4 kernelsize: 3 stride: 2 pad: 1 biasterm: true
    weight_filler { type: "gaussian" std: 0.1 } bias_filler { type: "constant" value: 0.2 }
    blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0 } bottom: "data" top: "conv" }
layers { layer { name: "pool" type: "pool" pool: AVE kernelsize: 2 stride: 2 } bottom: "conv" top: "pool" }
layers { layer { name: "ip" type: "innerproduct" num_output: 5 weight_filler { type: "xavier" } }
  bottom: "pool" top: "ip" }
"""
)
V1 = (
    INPUT
    + """
layers { name: "conv" type: CONVOLUTION bottom: "data" top: "conv" blobs_lr: 1 blobs_lr: 2 weight_decay: 1
  weight_decay: 0 convolution_param { num_output: 4 kernel_size: 3 stride: 2 pad: 1 bias_term: true
    weight_filler { type: "gaussian" std: 0.1 } bias_filler { type: "constant" value: 0.2 } } }
layers { name: "pool" type: POOLING bottom: "conv" top: "pool"
  pooling_param { pool: AVE kernel_size: 2 stride: 2 } }
layers { name: "ip" type: INNER_PRODUCT bottom: "pool" top: "ip"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
"""
)
V2 = """
name: "n"
layer { name: "input" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" param { lr_mult: 1 decay_mult: 1 }
  param { lr_mult: 2 decay_mult: 0 } convolution_param { num_output: 4 kernel_size: 3 stride: 2 pad: 1 bias_term: true
    weight_filler { type: "gaussian" std: 0.1 } bias_filler { type: "constant" value: 0.2 } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool"
  pooling_param { pool: AVE kernel_size: 2 stride: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
"""


def v0(layers: str, rest: str = 'input: "data" input_dim: 1 input_dim: 1 input_dim: 4 input_dim: 4\n') -> Any:
    return load_net(rest + layers)


def test_three_generations_are_one_net() -> None:
    current = load_net(V2)
    assert load_net(V1) == current
    assert load_net(V0) == current
    data = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    results = [Net(text, seed=3).forward(data=data)["ip"] for text in (V0, V1, V2)]
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    assert np.abs(results[0]).max() > 0


@pytest.mark.parametrize("text", [V0, V1, V2], ids=["V0", "V1", "V2"])
def test_weights_of_every_generation_fit_a_current_net(tmp_path: Path, text: str) -> None:
    """The weights file is its prototxt with blobs in it, as old Caffe wrote it."""
    trained = Net(V2, seed=3)
    stored = caffe_pb2.NetParameter()
    text_format.Parse(text, stored)
    for outer in (*stored.layers, *stored.layer):
        layer = outer.layer if outer in list(stored.layers) and outer.HasField("layer") else outer
        for blob in trained.params.get(layer.name, []):
            proto = layer.blobs.add(data=blob.data.reshape(-1).tolist())
            if text is V2:
                proto.shape.dim.extend(blob.shape)
            else:
                axes = (1,) * (4 - len(blob.shape)) + blob.shape
                proto.num, proto.channels, proto.height, proto.width = axes
    path = tmp_path / "old.caffemodel"
    path.write_bytes(stored.SerializeToString())
    net = Net(V2, seed=4)
    report = net.copy_from(path)
    assert report.copied == ["conv", "ip"]
    for name, blobs in trained.params.items():
        for one, other in zip(blobs, net.params[name], strict=True):
            assert one.data.tobytes() == other.data.tobytes()


def test_padding_layers_become_padding() -> None:
    net = v0(
        """
        layers { layer { name: "pad1" type: "padding" pad: 2 } bottom: "data" top: "padded" }
        layers { layer { name: "conv" type: "conv" num_output: 1 kernelsize: 3 } bottom: "padded" top: "conv" }
        layers { layer { name: "pad2" type: "padding" pad: 1 } bottom: "conv" top: "again" }
        layers { layer { name: "pool" type: "pool" kernelsize: 3 } bottom: "again" top: "pool" }
        """
    )
    assert [layer.name for layer in net.layer] == ["input", "conv", "pool"]
    assert [list(layer.bottom) for layer in net.layer[1:]] == [["data"], ["conv"]]
    assert list(net.layer[1].convolution_param.pad) == [2]
    assert net.layer[2].pooling_param.pad == 1


def test_data_layers_move_their_settings() -> None:
    net = v0(
        """
        layers { layer { name: "d" type: "data" source: "db" batchsize: 4 scale: 0.5 meanfile: "m" cropsize: 3
            mirror: true rand_skip: 7 } top: "data" top: "label" }
        layers { layer { name: "i" type: "images" source: "list" batchsize: 2 shuffle_images: true new_height: 5
            new_width: 6 cropsize: 4 } top: "a" top: "b" }
        layers { layer { name: "h" type: "hdf5_data" source: "files" batchsize: 3 } top: "c" }
        layers { layer { name: "w" type: "window_data" source: "w" batchsize: 1 det_fg_threshold: 0.6
            det_bg_threshold: 0.4 det_fg_fraction: 0.3 det_context_pad: 2 det_crop_mode: "square" } top: "e" top: "f" }
        """,
        "",
    )
    data, images, hdf5, window = net.layer
    assert (data.type, data.data_param.source, data.data_param.batch_size) == ("Data", "db", 4)
    assert data.data_param.rand_skip == 7
    moved = data.transform_param
    assert (moved.scale, moved.mean_file, moved.crop_size, moved.mirror) == (0.5, "m", 3, True)
    assert not data.data_param.HasField("scale")
    assert images.type == "ImageData"
    assert images.transform_param.crop_size == 4
    settings = images.image_data_param
    assert (settings.source, settings.shuffle, settings.new_height, settings.new_width) == ("list", True, 5, 6)
    assert (hdf5.type, hdf5.hdf5_data_param.source, hdf5.hdf5_data_param.batch_size) == ("HDF5Data", "files", 3)
    detail = window.window_data_param
    assert (detail.fg_threshold, detail.bg_threshold) == pytest.approx((0.6, 0.4))
    assert (detail.fg_fraction, detail.context_pad, detail.crop_mode) == (pytest.approx(0.3), 2, "square")


def test_the_other_settings_go_to_their_types() -> None:
    net = v0(
        """
        layers { layer { name: "l" type: "lrn" local_size: 3 alpha: 0.1 beta: 0.5 k: 2 } bottom: "data" top: "l" }
        layers { layer { name: "d" type: "dropout" dropout_ratio: 0.3 } bottom: "l" top: "l" }
        layers { layer { name: "c" type: "concat" concat_dim: 0 } bottom: "l" bottom: "data" top: "c" }
        layers { layer { name: "g" type: "conv" num_output: 2 group: 2 kernelsize: 1 biasterm: false }
          bottom: "c" top: "g" }
        layers { layer { name: "s" type: "softmax_loss" } bottom: "g" bottom: "data" top: "s" }
        """
    )
    lrn, dropout, concat, conv, loss = net.layer[1:]
    assert lrn.lrn_param.local_size == 3
    assert (lrn.lrn_param.alpha, lrn.lrn_param.beta, lrn.lrn_param.k) == pytest.approx((0.1, 0.5, 2))
    assert dropout.dropout_param.dropout_ratio == pytest.approx(0.3)
    assert concat.concat_param.concat_dim == 0
    assert concat.concat_param.HasField("concat_dim")
    assert (conv.convolution_param.group, conv.convolution_param.bias_term) == (2, False)
    assert loss.type == "SoftmaxWithLoss"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ('layers { layer { name: "a" type: "relu" } } layer { name: "b" type: "ReLU" }', "both 'layers' .*and 'layer'"),
        ('layers { layer { name: "a" type: "relu" } } layers { name: "b" type: RELU }', r"both V0 and V1 .*'b' is V1"),
        ('layers { layer { name: "a" type: "convolution" } }', "'a'.*unknown type 'convolution'"),
        ('layers { layer { name: "a" } }', "'a'.*no type"),
        ('layers { layer { name: "a" type: "relu" } bottom: "x" top: "y" }', "'a'.*reads 'x', which no layer produces"),
        (
            'layers { layer { name: "p" type: "padding" pad: 1 } bottom: "data" top: "p" }'
            ' layers { layer { name: "a" type: "relu" } bottom: "p" top: "y" }',
            "'a'.*type 'relu'.*padding layer 'p'",
        ),
        (
            'layers { layer { name: "p" type: "padding" pad: 1 } bottom: "data" bottom: "data" top: "p" }'
            ' layers { layer { name: "a" type: "pool" } bottom: "p" top: "y" }',
            "padding layer 'p'.*one bottom and one top",
        ),
        ('layers { layer { name: "p" type: "padding" pad: 1 } bottom: "data" top: "p" }', None),
    ],
)
def test_v0_nets_that_cannot_be_followed(layers: str, message: str | None) -> None:
    if message is None:  # only padding: an input is left
        assert [layer.type for layer in v0(layers).layer] == ["Input"]
        return
    with pytest.raises(PrototxtError, match=message):
        v0(layers)


def test_a_setting_without_meaning_is_named_and_left_out() -> None:
    with pytest.warns(RuntimeWarning, match="'a' .V0 format.: 'stride' means nothing to type 'relu'"):
        net = v0('layers { layer { name: "a" type: "relu" stride: 2 } bottom: "data" top: "a" }')
    assert net.layer[1] == caffe_pb2.LayerParameter(name="a", type="ReLU", bottom=["data"], top=["a"])


def test_a_file_that_yields_no_layer_and_weights_that_yield_no_blob(tmp_path: Path) -> None:
    with pytest.raises(PrototxtError, match="no layers"):
        load_net('name: "x"\n')
    path = tmp_path / "empty.caffemodel"
    path.write_bytes(caffe_pb2.NetParameter(name="x", layer=[{"name": "ip"}]).SerializeToString())
    with pytest.raises(StallscopeError, match="nothing was copied"):
        Net(V2).copy_from(path)
