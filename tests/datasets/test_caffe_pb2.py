"""Caffe's messages: golden files written by Caffe, wire bytes spelled out by hand, and the private pool."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import descriptor_pool, text_format, unknown_fields

from datasets import caffe_pb2

DATA = Path(__file__).parents[1] / "data"
KINDS = {".binaryproto": "BlobProto", ".caffemodel": "NetParameter", ".solverstate": "SolverState"}
BINARIES = sorted(path for path in DATA.rglob("*") if path.suffix in KINDS)
TEXTS = sorted(DATA.rglob("*.prototxt"))


def unknown(message) -> int:
    count = len(unknown_fields.UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            count += sum(unknown(item) for item in (value if field.is_repeated else [value]))
    return count


@pytest.mark.parametrize("path", BINARIES, ids=lambda path: path.name)
def test_files_written_by_caffe_survive_a_round_trip(path: Path) -> None:
    stored = path.read_bytes()
    message = caffe_pb2.MESSAGES[KINDS[path.suffix]].FromString(stored)
    assert unknown(message) == 0
    assert message.SerializeToString() == stored


def test_the_mean_of_mnist() -> None:
    blob = caffe_pb2.BlobProto.FromString((DATA / "proto" / "mean_mnist.binaryproto").read_bytes())
    assert (blob.num, blob.channels, blob.height, blob.width) == (1, 1, 28, 28)
    mean = np.array(blob.data, np.float32)
    assert mean.shape == (784,)
    assert 30 < mean.mean() < 36  # MNIST's mean is 0.1307 of 255


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_texts_parse(path: Path) -> None:
    kind = caffe_pb2.SolverParameter if "solver" in path.name else caffe_pb2.NetParameter
    assert text_format.Parse(path.read_text(), kind()).ByteSize() > 0


def test_values_of_a_solver_and_of_an_old_net() -> None:
    solver = text_format.Parse((DATA / "proto/lenet_solver.prototxt").read_text(), caffe_pb2.SolverParameter())
    assert (solver.lr_policy, solver.max_iter, solver.random_seed) == ("inv", 200, 1701)
    assert solver.solver_mode == caffe_pb2.SolverParameter.CPU
    assert (solver.type, solver.snapshot_format) == ("SGD", caffe_pb2.SolverParameter.BINARYPROTO)
    net = text_format.Parse((DATA / "proto/v1_net.prototxt").read_text(), caffe_pb2.NetParameter())
    assert not net.layer
    assert net.layers[0].type == caffe_pb2.V1LayerParameter.CONVOLUTION
    drop = next(layer for layer in net.layers if layer.name == "drop")
    assert drop.include[0].phase == caffe_pb2.TRAIN
    assert drop.dropout_param.dropout_ratio == np.float32(0.3)


# Tag = number · 8 + wire type (0 varint, 2 bytes, 5 four bytes), worked out by hand.
@pytest.mark.parametrize(
    ("kind", "text", "wire"),
    [
        ("BlobShape", "dim: 2 dim: 300", "0a03 02 ac02"),
        ("Datum", 'channels: 1 data: "ab" label: -1 encoded: true', "0801 22026162 28ffffffffffffffffff01 3801"),
        ("Datum", "float_data: 1 float_data: 2", "350000803f 3500000040"),
        ("BlobProto", "data: 1 data: 2 shape { dim: 2 }", "2a08 0000803f 00000040 3a03 0a01 02"),
        ("SolverParameter", "random_seed: 5 layer_wise_reduce: false", "a00105 c80200"),
        ("LayerParameter", "clip_param { min: 0 max: 6 }", "a2090a 0d00000000 150000c040"),
        ("LayerParameter", "swish_param { beta: 2 }", "9a0905 0d00000040"),
        ("LayerParameter", "phase: TEST propagate_down: false", "5001 5800"),
        ("ConvolutionParameter", "kernel_size: 5 kernel_size: 3 dilation: 2", "2005 2003 900102"),
    ],
)
def test_wire_bytes(kind: str, text: str, wire: str) -> None:
    message = text_format.Parse(text, caffe_pb2.MESSAGES[kind]())
    assert message.SerializeToString() == bytes.fromhex(wire)


def test_defaults() -> None:
    layer = caffe_pb2.LayerParameter()
    assert layer.convolution_param.bias_term is True
    assert layer.data_param.backend == caffe_pb2.DataParameter.LEVELDB
    assert layer.data_param.prefetch == 4
    assert layer.lrn_param.beta == 0.75
    assert layer.loss_param.normalization == caffe_pb2.LossParameter.VALID
    assert layer.window_data_param.crop_mode == "warp"
    assert layer.python_param.param_str == ""
    assert layer.hinge_loss_param.norm == caffe_pb2.HingeLossParameter.L1 == 1
    assert layer.batch_norm_param.eps == np.float32(1e-5)
    solver = caffe_pb2.SolverParameter()
    assert (solver.solver_mode, solver.clip_gradients, solver.random_seed) == (caffe_pb2.SolverParameter.GPU, -1, -1)
    assert caffe_pb2.NetState().phase == caffe_pb2.TEST
    assert caffe_pb2.FillerParameter().type == "constant"


def test_a_required_field_is_required() -> None:
    layer = text_format.Parse("clip_param { min: 0 }", caffe_pb2.LayerParameter())
    assert layer.FindInitializationErrors() == ["clip_param.max"]


def test_the_default_pool_is_left_alone_and_messages_pickle() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("caffe.Datum")
    assert caffe_pb2.POOL.FindMessageTypeByName("caffe.Datum").full_name == "caffe.Datum"
    datum = caffe_pb2.Datum(label=3)
    assert pickle.loads(pickle.dumps(datum)) == datum


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchParameter"):
        _ = caffe_pb2.NoSuchParameter


def test_importing_it_alone_pulls_in_nothing_heavy() -> None:
    script = (
        "import sys, datasets.caffe_pb2\n"
        "sys.exit(' '.join({'numpy', 'lmdb', 'plyvel', 'ray', 'cupy', 'PIL'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=DATA.parents[1])
    assert (done.returncode, done.stderr) == (0, "")
