"""Fields and layer types that forks of Caffe added, and which fork that was.

From the ``caffe.proto`` files that these projects publish; where several forks have a name, the one it is known from.
"""

from __future__ import annotations

from gpu.prototxt import UnknownField

_SSD = "caffe-ssd"
_NVIDIA = "NVIDIA's Caffe"
_INTEL = "Intel's Caffe"
_RCNN = "caffe-fast-rcnn"
_SEGNET = "caffe-segnet"
_DEEPLAB = "DeepLab's Caffe"
_MOBILENET = "the MobileNet and ShuffleNet forks"


def _all_from(fork: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), fork)


FIELDS = {
    **_all_from(_SSD, "resize_param noise_param distort_param expand_param emit_constraint crop_h crop_w"),
    **_all_from(_SSD, "annotated_data_param detection_evaluate_param detection_output_param multibox_loss_param"),
    **_all_from(_SSD, "norm_param permute_param prior_box_param video_data_param plateau_winsize"),
    **_all_from(_SSD, "eval_type ap_version show_per_class_result"),
    **_all_from(_NVIDIA, "max_epoch epoch_size test_epoch_size test_interval_epoch per_parameter_reduce threads"),
    **_all_from(_NVIDIA, "use_gpu_transform cudnn_convolution_algo_seeker detectnet_groundtruth_param"),
    **_all_from(_NVIDIA, "detectnet_augmentation_param forward_type backward_type forward_math backward_math"),
    **_all_from(_NVIDIA, "default_forward_type default_backward_type default_forward_math default_backward_math"),
    **_all_from(_NVIDIA, "cudnn_math_override conv_algos_override global_grad_scale solver_data_type reduce_buckets"),
    **_all_from(_NVIDIA, "larc larc_policy rampup_interval rampup_lr min_lr parser_threads store_blobs_in_old_format"),
    **_all_from(_NVIDIA, "img_rand_resize_lower img_rand_resize_upper"),
    **_all_from(
        _INTEL, "disabled_update warmup_iter warmup_start_lr local_lr_auto local_gw_ratio split_param multinode"
    ),
    **_all_from(_INTEL, "mn_activation_param mn_grad_compress_param quantization_param spatial_dropout_param"),
    **_all_from(_INTEL, "continuation_indicator_param random_resize_param random_aspect_ratio_param"),
    **_all_from(_RCNN, "roi_pooling_param smooth_l1_loss_param psroi_pooling_param box_annotator_ohem_param"),
    **_all_from(_SEGNET, "bn_param upsample_param dense_image_data_param weight_by_label_freqs class_weighting"),
    **_all_from(_DEEPLAB, "interp_param"),
}
"""Fork by the field's name. Left out: names that mean something else in another message of BVLC Caffe."""

BY_MESSAGE = {
    ("BatchNormParameter", "scale_filler"): _NVIDIA,
    ("BatchNormParameter", "bias_filler"): _NVIDIA,
    ("LayerParameter", "engine"): _INTEL,
    ("SolverParameter", "engine"): _INTEL,
    **dict.fromkeys(
        (("NetParameter", name) for name in ("op", "external_input", "external_output", "arg", "device_option")),
        "Caffe2 (a NetDef, another format)",
    ),
}
"""The same for names that only say something together with their message."""

TYPES = {
    **_all_from(
        _SSD, "AnnotatedData DetectionEvaluate DetectionOutput MultiBoxLoss Normalize Permute PriorBox VideoData"
    ),
    **_all_from(_NVIDIA, "DetectNetTransformation"),
    **_all_from(_RCNN, "ROIPooling SmoothL1Loss PSROIPooling BoxAnnotatorOHEM"),
    **_all_from(_SEGNET, "BN Upsample DenseImageData"),
    **_all_from(_DEEPLAB, "Interp"),
    **_all_from(_MOBILENET, "DepthwiseConvolution ConvolutionDepthwise ShuffleChannel ReLU6"),
    "Axpy": "SENet's Caffe",
    "CenterLoss": "caffe-face",
}
"""Fork by the layer's type."""


def origin(field: UnknownField) -> str | None:
    """Where an unknown field comes from, as far as that is known."""
    return BY_MESSAGE.get((field.message, field.name)) or FIELDS.get(field.name)
