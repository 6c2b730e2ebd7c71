"""Caffe's protocol buffer messages, built at run time from the table below.

The classes look and behave as if they had been generated (``caffe_pb2.NetParameter()``, ``google.protobuf.text_format``
and so on work as usual), but they live in a descriptor pool of their own: another package in the same process may
register its own ``caffe.proto`` in protobuf's default pool, and the two never meet.

The names, numbers, types and defaults are those of BVLC Caffe 1.0 (master of 2018 and later, with Swish and Clip), the
old V1 and V0 layer formats included: any ``.prototxt``, ``.caffemodel``, ``.solverstate`` and ``.binaryproto`` of that
era reads without an unknown field and is written back to the same bytes.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# How to read the table. A message begins in the first column and goes on in the indented lines below it; its entries
# end in ';'. A field is `name number type`, after which come `*` (repeated), `**` (repeated and packed) or `!`
# (required) and `=default`. `enum Name A=0 B=1` declares an enum inside the message. A type that is neither scalar nor
# an enum of the same message is another message of the table, or the one enum outside of messages, Phase.
_TABLE = """
BlobShape dim 1 int64**
BlobProto num 1 int32 =0; channels 2 int32 =0; height 3 int32 =0; width 4 int32 =0; data 5 float**; diff 6 float**;
  shape 7 BlobShape; double_data 8 double**; double_diff 9 double**
BlobProtoVector blobs 1 BlobProto*
Datum channels 1 int32; height 2 int32; width 3 int32; data 4 bytes; label 5 int32; float_data 6 float*;
  encoded 7 bool =false
FillerParameter enum VarianceNorm FAN_IN=0 FAN_OUT=1 AVERAGE=2; type 1 string =constant; value 2 float =0;
  min 3 float =0; max 4 float =1; mean 5 float =0; std 6 float =1; sparse 7 int32 =-1;
  variance_norm 8 VarianceNorm =FAN_IN
NetParameter name 1 string; layers 2 V1LayerParameter*; input 3 string*; input_dim 4 int32*;
  force_backward 5 bool =false; state 6 NetState; debug_info 7 bool =false; input_shape 8 BlobShape*;
  layer 100 LayerParameter*
SolverParameter enum SnapshotFormat HDF5=0 BINARYPROTO=1; enum SolverMode CPU=0 GPU=1;
  enum SolverType SGD=0 NESTEROV=1 ADAGRAD=2 RMSPROP=3 ADADELTA=4 ADAM=5;
  train_net 1 string; test_net 2 string*; test_iter 3 int32*; test_interval 4 int32 =0; base_lr 5 float;
  display 6 int32; max_iter 7 int32; lr_policy 8 string; gamma 9 float; power 10 float; momentum 11 float;
  weight_decay 12 float; stepsize 13 int32; snapshot 14 int32 =0; snapshot_prefix 15 string;
  snapshot_diff 16 bool =false; solver_mode 17 SolverMode =GPU; device_id 18 int32 =0;
  test_compute_loss 19 bool =false; random_seed 20 int64 =-1; train_net_param 21 NetParameter;
  test_net_param 22 NetParameter*; debug_info 23 bool =false; net 24 string; net_param 25 NetParameter;
  train_state 26 NetState; test_state 27 NetState*; snapshot_after_train 28 bool =true;
  regularization_type 29 string =L2; solver_type 30 SolverType =SGD; delta 31 float =1e-8;
  test_initialization 32 bool =true; average_loss 33 int32 =1; stepvalue 34 int32*; clip_gradients 35 float =-1;
  iter_size 36 int32 =1; snapshot_format 37 SnapshotFormat =BINARYPROTO; rms_decay 38 float =0.99;
  momentum2 39 float =0.999; type 40 string =SGD; layer_wise_reduce 41 bool =true; weights 42 string*
SolverState iter 1 int32; learned_net 2 string; history 3 BlobProto*; current_step 4 int32 =0
NetState phase 1 Phase =TEST; level 2 int32 =0; stage 3 string*
NetStateRule phase 1 Phase; min_level 2 int32; max_level 3 int32; stage 4 string*; not_stage 5 string*
ParamSpec enum DimCheckMode STRICT=0 PERMISSIVE=1; name 1 string; share_mode 2 DimCheckMode; lr_mult 3 float =1;
  decay_mult 4 float =1
LayerParameter name 1 string; type 2 string; bottom 3 string*; top 4 string*; loss_weight 5 float*; param 6 ParamSpec*;
  blobs 7 BlobProto*; include 8 NetStateRule*; exclude 9 NetStateRule*; phase 10 Phase; propagate_down 11 bool*;
  transform_param 100 TransformationParameter; loss_param 101 LossParameter; accuracy_param 102 AccuracyParameter;
  argmax_param 103 ArgMaxParameter; concat_param 104 ConcatParameter;
  contrastive_loss_param 105 ContrastiveLossParameter; convolution_param 106 ConvolutionParameter;
  data_param 107 DataParameter; dropout_param 108 DropoutParameter; dummy_data_param 109 DummyDataParameter;
  eltwise_param 110 EltwiseParameter; exp_param 111 ExpParameter; hdf5_data_param 112 HDF5DataParameter;
  hdf5_output_param 113 HDF5OutputParameter; hinge_loss_param 114 HingeLossParameter;
  image_data_param 115 ImageDataParameter; infogain_loss_param 116 InfogainLossParameter;
  inner_product_param 117 InnerProductParameter; lrn_param 118 LRNParameter; memory_data_param 119 MemoryDataParameter;
  mvn_param 120 MVNParameter; pooling_param 121 PoolingParameter; power_param 122 PowerParameter;
  relu_param 123 ReLUParameter; sigmoid_param 124 SigmoidParameter; softmax_param 125 SoftmaxParameter;
  slice_param 126 SliceParameter; tanh_param 127 TanHParameter; threshold_param 128 ThresholdParameter;
  window_data_param 129 WindowDataParameter; python_param 130 PythonParameter; prelu_param 131 PReLUParameter;
  spp_param 132 SPPParameter; reshape_param 133 ReshapeParameter; log_param 134 LogParameter;
  flatten_param 135 FlattenParameter; reduction_param 136 ReductionParameter; embed_param 137 EmbedParameter;
  tile_param 138 TileParameter; batch_norm_param 139 BatchNormParameter; elu_param 140 ELUParameter;
  bias_param 141 BiasParameter; scale_param 142 ScaleParameter; input_param 143 InputParameter;
  crop_param 144 CropParameter; parameter_param 145 ParameterParameter; recurrent_param 146 RecurrentParameter;
  swish_param 147 SwishParameter; clip_param 148 ClipParameter
TransformationParameter scale 1 float =1; mirror 2 bool =false; crop_size 3 uint32 =0; mean_file 4 string;
  mean_value 5 float*; force_color 6 bool =false; force_gray 7 bool =false
LossParameter enum NormalizationMode FULL=0 VALID=1 BATCH_SIZE=2 NONE=3; ignore_label 1 int32; normalize 2 bool;
  normalization 3 NormalizationMode =VALID
AccuracyParameter top_k 1 uint32 =1; axis 2 int32 =1; ignore_label 3 int32
ArgMaxParameter out_max_val 1 bool =false; top_k 2 uint32 =1; axis 3 int32
ClipParameter min 1 float!; max 2 float!
ConcatParameter concat_dim 1 uint32 =1; axis 2 int32 =1
BatchNormParameter use_global_stats 1 bool; moving_average_fraction 2 float =0.999; eps 3 float =1e-5
BiasParameter axis 1 int32 =1; num_axes 2 int32 =1; filler 3 FillerParameter
ContrastiveLossParameter margin 1 float =1; legacy_version 2 bool =false
ConvolutionParameter enum Engine DEFAULT=0 CAFFE=1 CUDNN=2; num_output 1 uint32; bias_term 2 bool =true; pad 3 uint32*;
  kernel_size 4 uint32*; group 5 uint32 =1; stride 6 uint32*; weight_filler 7 FillerParameter;
  bias_filler 8 FillerParameter; pad_h 9 uint32 =0; pad_w 10 uint32 =0; kernel_h 11 uint32; kernel_w 12 uint32;
  stride_h 13 uint32; stride_w 14 uint32; engine 15 Engine =DEFAULT; axis 16 int32 =1;
  force_nd_im2col 17 bool =false; dilation 18 uint32*
CropParameter axis 1 int32 =2; offset 2 uint32*
DataParameter enum DB LEVELDB=0 LMDB=1; source 1 string; scale 2 float =1; mean_file 3 string; batch_size 4 uint32;
  crop_size 5 uint32 =0; mirror 6 bool =false; rand_skip 7 uint32 =0; backend 8 DB =LEVELDB;
  force_encoded_color 9 bool =false; prefetch 10 uint32 =4
DropoutParameter dropout_ratio 1 float =0.5
DummyDataParameter data_filler 1 FillerParameter*; num 2 uint32*; channels 3 uint32*; height 4 uint32*; width 5 uint32*;
  shape 6 BlobShape*
EltwiseParameter enum EltwiseOp PROD=0 SUM=1 MAX=2; operation 1 EltwiseOp =SUM; coeff 2 float*;
  stable_prod_grad 3 bool =true
ELUParameter alpha 1 float =1
EmbedParameter num_output 1 uint32; input_dim 2 uint32; bias_term 3 bool =true; weight_filler 4 FillerParameter;
  bias_filler 5 FillerParameter
ExpParameter base 1 float =-1; scale 2 float =1; shift 3 float =0
FlattenParameter axis 1 int32 =1; end_axis 2 int32 =-1
HDF5DataParameter source 1 string; batch_size 2 uint32; shuffle 3 bool =false
HDF5OutputParameter file_name 1 string
HingeLossParameter enum Norm L1=1 L2=2; norm 1 Norm =L1
ImageDataParameter source 1 string; scale 2 float =1; mean_file 3 string; batch_size 4 uint32 =1; crop_size 5 uint32 =0;
  mirror 6 bool =false; rand_skip 7 uint32 =0; shuffle 8 bool =false; new_height 9 uint32 =0; new_width 10 uint32 =0;
  is_color 11 bool =true; root_folder 12 string =
InfogainLossParameter source 1 string; axis 2 int32 =1
InnerProductParameter num_output 1 uint32; bias_term 2 bool =true; weight_filler 3 FillerParameter;
  bias_filler 4 FillerParameter; axis 5 int32 =1; transpose 6 bool =false
InputParameter shape 1 BlobShape*
LogParameter base 1 float =-1; scale 2 float =1; shift 3 float =0
LRNParameter enum NormRegion ACROSS_CHANNELS=0 WITHIN_CHANNEL=1; enum Engine DEFAULT=0 CAFFE=1 CUDNN=2;
  local_size 1 uint32 =5; alpha 2 float =1; beta 3 float =0.75; norm_region 4 NormRegion =ACROSS_CHANNELS;
  k 5 float =1; engine 6 Engine =DEFAULT
MemoryDataParameter batch_size 1 uint32; channels 2 uint32; height 3 uint32; width 4 uint32
MVNParameter normalize_variance 1 bool =true; across_channels 2 bool =false; eps 3 float =1e-9
ParameterParameter shape 1 BlobShape
PoolingParameter enum PoolMethod MAX=0 AVE=1 STOCHASTIC=2; enum Engine DEFAULT=0 CAFFE=1 CUDNN=2;
  enum RoundMode CEIL=0 FLOOR=1; pool 1 PoolMethod =MAX; kernel_size 2 uint32; stride 3 uint32 =1; pad 4 uint32 =0;
  kernel_h 5 uint32; kernel_w 6 uint32; stride_h 7 uint32; stride_w 8 uint32; pad_h 9 uint32 =0; pad_w 10 uint32 =0;
  engine 11 Engine =DEFAULT; global_pooling 12 bool =false; round_mode 13 RoundMode =CEIL
PowerParameter power 1 float =1; scale 2 float =1; shift 3 float =0
PythonParameter module 1 string; layer 2 string; param_str 3 string =; share_in_parallel 4 bool =false
RecurrentParameter num_output 1 uint32 =0; weight_filler 2 FillerParameter; bias_filler 3 FillerParameter;
  debug_info 4 bool =false; expose_hidden 5 bool =false
ReductionParameter enum ReductionOp SUM=1 ASUM=2 SUMSQ=3 MEAN=4; operation 1 ReductionOp =SUM; axis 2 int32 =0;
  coeff 3 float =1
ReLUParameter enum Engine DEFAULT=0 CAFFE=1 CUDNN=2; negative_slope 1 float =0; engine 2 Engine =DEFAULT
ReshapeParameter shape 1 BlobShape; axis 2 int32 =0; num_axes 3 int32 =-1
ScaleParameter axis 1 int32 =1; num_axes 2 int32 =1; filler 3 FillerParameter; bias_term 4 bool =false;
  bias_filler 5 FillerParameter
SigmoidParameter enum Engine DEFAULT=0 CAFFE=1 CUDNN=2; engine 1 Engine =DEFAULT
SliceParameter slice_dim 1 uint32 =1; slice_point 2 uint32*; axis 3 int32 =1
SoftmaxParameter enum Engine DEFAULT=0 CAFFE=1 CUDNN=2; engine 1 Engine =DEFAULT; axis 2 int32 =1
SwishParameter beta 1 float =1
TanHParameter enum Engine DEFAULT=0 CAFFE=1 CUDNN=2; engine 1 Engine =DEFAULT
TileParameter axis 1 int32 =1; tiles 2 int32
ThresholdParameter threshold 1 float =0
WindowDataParameter source 1 string; scale 2 float =1; mean_file 3 string; batch_size 4 uint32; crop_size 5 uint32 =0;
  mirror 6 bool =false; fg_threshold 7 float =0.5; bg_threshold 8 float =0.5; fg_fraction 9 float =0.25;
  context_pad 10 uint32 =0; crop_mode 11 string =warp; cache_images 12 bool =false; root_folder 13 string =
SPPParameter enum PoolMethod MAX=0 AVE=1 STOCHASTIC=2; enum Engine DEFAULT=0 CAFFE=1 CUDNN=2; pyramid_height 1 uint32;
  pool 2 PoolMethod =MAX; engine 6 Engine =DEFAULT
PReLUParameter filler 1 FillerParameter; channel_shared 2 bool =false
V1LayerParameter enum LayerType NONE=0 ACCURACY=1 BNLL=2 CONCAT=3 CONVOLUTION=4 DATA=5 DROPOUT=6 EUCLIDEAN_LOSS=7
  FLATTEN=8 HDF5_DATA=9 HDF5_OUTPUT=10 IM2COL=11 IMAGE_DATA=12 INFOGAIN_LOSS=13 INNER_PRODUCT=14 LRN=15
  MULTINOMIAL_LOGISTIC_LOSS=16 POOLING=17 RELU=18 SIGMOID=19 SOFTMAX=20 SOFTMAX_LOSS=21 SPLIT=22 TANH=23
  WINDOW_DATA=24 ELTWISE=25 POWER=26 SIGMOID_CROSS_ENTROPY_LOSS=27 HINGE_LOSS=28 MEMORY_DATA=29 ARGMAX=30
  THRESHOLD=31 DUMMY_DATA=32 SLICE=33 MVN=34 ABSVAL=35 SILENCE=36 CONTRASTIVE_LOSS=37 EXP=38 DECONVOLUTION=39;
  enum DimCheckMode STRICT=0 PERMISSIVE=1; layer 1 V0LayerParameter; bottom 2 string*; top 3 string*; name 4 string;
  type 5 LayerType; blobs 6 BlobProto*; blobs_lr 7 float*; weight_decay 8 float*; concat_param 9 ConcatParameter;
  convolution_param 10 ConvolutionParameter; data_param 11 DataParameter; dropout_param 12 DropoutParameter;
  hdf5_data_param 13 HDF5DataParameter; hdf5_output_param 14 HDF5OutputParameter;
  image_data_param 15 ImageDataParameter; infogain_loss_param 16 InfogainLossParameter;
  inner_product_param 17 InnerProductParameter; lrn_param 18 LRNParameter; pooling_param 19 PoolingParameter;
  window_data_param 20 WindowDataParameter; power_param 21 PowerParameter; memory_data_param 22 MemoryDataParameter;
  argmax_param 23 ArgMaxParameter; eltwise_param 24 EltwiseParameter; threshold_param 25 ThresholdParameter;
  dummy_data_param 26 DummyDataParameter; accuracy_param 27 AccuracyParameter; hinge_loss_param 29 HingeLossParameter;
  relu_param 30 ReLUParameter; slice_param 31 SliceParameter; include 32 NetStateRule*; exclude 33 NetStateRule*;
  mvn_param 34 MVNParameter; loss_weight 35 float*; transform_param 36 TransformationParameter;
  tanh_param 37 TanHParameter; sigmoid_param 38 SigmoidParameter; softmax_param 39 SoftmaxParameter;
  contrastive_loss_param 40 ContrastiveLossParameter; exp_param 41 ExpParameter; loss_param 42 LossParameter;
  param 1001 string*; blob_share_mode 1002 DimCheckMode*
V0LayerParameter enum PoolMethod MAX=0 AVE=1 STOCHASTIC=2; name 1 string; type 2 string; num_output 3 uint32;
  biasterm 4 bool =true; weight_filler 5 FillerParameter; bias_filler 6 FillerParameter; pad 7 uint32 =0;
  kernelsize 8 uint32; group 9 uint32 =1; stride 10 uint32 =1; pool 11 PoolMethod =MAX; dropout_ratio 12 float =0.5;
  local_size 13 uint32 =5; alpha 14 float =1; beta 15 float =0.75; source 16 string; scale 17 float =1;
  meanfile 18 string; batchsize 19 uint32; cropsize 20 uint32 =0; mirror 21 bool =false; k 22 float =1;
  blobs 50 BlobProto*; blobs_lr 51 float*; weight_decay 52 float*; rand_skip 53 uint32 =0;
  det_fg_threshold 54 float =0.5; det_bg_threshold 55 float =0.5; det_fg_fraction 56 float =0.25;
  det_context_pad 58 uint32 =0; det_crop_mode 59 string =warp; new_num 60 int32 =0; new_channels 61 int32 =0;
  new_height 62 int32 =0; new_width 63 int32 =0; shuffle_images 64 bool =false; concat_dim 65 uint32 =1;
  hdf5_output_param 1001 HDF5OutputParameter
"""

TRAIN = 0
"""Phase.TRAIN, the enum outside of messages."""
TEST = 1
"""Phase.TEST."""

_PACKAGE = "caffe"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {name: getattr(_Field, f"TYPE_{name.upper()}") for name in
            ("int32", "int64", "uint32", "float", "double", "bool", "string", "bytes")}  # fmt: skip


def _enum(target: Any, name: str, values: list[str]) -> None:
    enum = target.add(name=name)
    for value in values:
        label, number = value.split("=")
        enum.value.add(name=label, number=int(number))


def _field(message: Any, entry: str) -> None:
    name, number, kind, *rest = entry.split(" ", 3)
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.endswith("*"):
        field.label = _Field.LABEL_REPEATED
        if kind.endswith("**"):
            field.options.packed = True
    elif kind.endswith("!"):
        field.label = _Field.LABEL_REQUIRED
    kind = kind.rstrip("*!")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    elif kind in {enum.name for enum in message.enum_type}:
        field.type, field.type_name = _Field.TYPE_ENUM, f".{_PACKAGE}.{message.name}.{kind}"
    else:
        field.type = _Field.TYPE_ENUM if kind == "Phase" else _Field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"
    if rest:
        field.default_value = rest[0].removeprefix("=")


def _build() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="stallscope/caffe.proto", package=_PACKAGE, syntax="proto2")
    _enum(file.enum_type, "Phase", [f"TRAIN={TRAIN}", f"TEST={TEST}"])
    for line in _TABLE.strip().replace("\n  ", " ").splitlines():
        name, entries = line.split(" ", 1)
        message = file.message_type.add(name=name)
        for entry in entries.split("; "):
            if entry.startswith("enum "):
                _, enum, *values = entry.split()
                _enum(message.enum_type, enum, values)
            else:
                _field(message, entry)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _build()
"""The private descriptor pool; its one file is the package ``caffe``."""
DESCRIPTOR = POOL.FindFileByName("stallscope/caffe.proto")

MESSAGES: dict[str, Any] = {
    name: message_factory.GetMessageClass(descriptor) for name, descriptor in DESCRIPTOR.message_types_by_name.items()
}
"""Every message class by its name; each is an attribute of this module as well."""
globals().update(MESSAGES)


def __getattr__(name: str) -> Any:
    # Only reached for a name that is not there; its presence tells type checkers that the classes are made at run time.
    raise AttributeError(f"Caffe has no message called {name!r}")
