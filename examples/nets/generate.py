"""``python examples/nets/generate.py [FOLDER]``: the prototxts in this folder, from the tables of the papers.

Every net has data layers for TRAIN and TEST whose sources a job's YAML replaces, and the usual ends: a loss in both
phases, accuracy in TEST. A net made by hand needs shapes only:

    gpu.Net("examples/nets/vgg16.prototxt", "TEST", input_shapes={"data": (8, 3, 224, 224)})
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

MULTS = ("lr_mult: 1 decay_mult: 1", "lr_mult: 2 decay_mult: 0")
STATISTICS = ("lr_mult: 0 decay_mult: 0",) * 3
PLAIN = ("lr_mult: 1 decay_mult: 0",) * 2


class Text:
    """A prototxt under construction; every method adds one layer (or a few) and returns the name of its top."""

    def __init__(self, name: str, about: str, source: str, size: int, batches: tuple[int, int], values: str) -> None:
        self._out = [*(f"# {line}" for line in textwrap.wrap(about, 110)), f'name: "{name}"']
        crop = f"crop_size: {size} " if source == "imagenet" else ""
        for phase, mirror, batch in (("TRAIN", "mirror: true " if crop else "", batches[0]), ("TEST", "", batches[1])):
            self._out.append(
                f"""layer {{
  name: "data"
  type: "Data"
  top: "data"
  top: "label"
  include {{ phase: {phase} }}
  transform_param {{ {mirror}{crop}{values} }}
  data_param {{ source: "data/{source}_{phase.lower()}_lmdb" batch_size: {batch} backend: LMDB }}
}}"""
            )

    def layer(
        self,
        kind: str,
        name: str,
        bottoms: str | Sequence[str],
        top: str | None = None,
        *,
        params: Sequence[str] = (),
        phase: str = "",
        extra: str = "",
        **settings: str,
    ) -> str:
        """One layer; ``settings``: the text inside its message, by the message's name."""
        bottoms = [bottoms] if isinstance(bottoms, str) else bottoms
        top = name if top is None else top
        lines = [f'name: "{name}"', f'type: "{kind}"', *(f'bottom: "{b}"' for b in bottoms), f'top: "{top}"']
        lines += [f"include {{ phase: {phase} }}"] if phase else []
        lines += [extra] if extra else []
        lines += [f"param {{ {text} }}" for text in params]
        lines += [f"{message} {{ {text} }}" for message, text in settings.items()]
        self._out.append("layer {\n" + "".join(f"  {line}\n" for line in lines) + "}")
        return top

    def conv(
        self,
        name: str,
        bottom: str,
        outputs: int,
        kernel: int,
        stride: int = 1,
        pad: int = 0,
        group: int = 1,
        weight: str = 'type: "xavier"',
        bias: float | None = 0.0,
    ) -> str:
        text = f"num_output: {outputs} kernel_size: {kernel}"
        text += f" stride: {stride}" * (stride > 1) + f" pad: {pad}" * (pad > 0) + f" group: {group}" * (group > 1)
        text += f" weight_filler {{ {weight} }}"
        text += " bias_term: false" if bias is None else _bias(bias)
        return self.layer(
            "Convolution", name, bottom, params=MULTS[:1] if bias is None else MULTS, convolution_param=text
        )

    def dense(self, name: str, bottom: str, outputs: int, weight: str = 'type: "xavier"', bias: float = 0.0) -> str:
        text = f"num_output: {outputs} weight_filler {{ {weight} }}{_bias(bias)}"
        return self.layer("InnerProduct", name, bottom, params=MULTS, inner_product_param=text)

    def relu(self, name: str, blob: str) -> str:
        return self.layer("ReLU", name, blob, blob)

    def dropout(self, name: str, blob: str, ratio: float) -> str:
        return self.layer("Dropout", name, blob, blob, dropout_param=f"dropout_ratio: {ratio}")

    def pool(self, name: str, bottom: str, kernel: int, stride: int, pad: int = 0, method: str = "MAX") -> str:
        text = f"pool: {method} kernel_size: {kernel} stride: {stride}" + f" pad: {pad}" * (pad > 0)
        return self.layer("Pooling", name, bottom, pooling_param=text)

    def pool_all(self, name: str, bottom: str) -> str:
        return self.layer("Pooling", name, bottom, pooling_param="pool: AVE global_pooling: true")

    def lrn(self, name: str, bottom: str, size: int, alpha: str, within: bool = False) -> str:
        text = f"local_size: {size} alpha: {alpha} beta: 0.75" + " norm_region: WITHIN_CHANNEL" * within
        return self.layer("LRN", name, bottom, lrn_param=text)

    def conv_norm(
        self,
        name: str,
        bottom: str,
        outputs: int,
        kernel: int,
        stride: int,
        pad: int,
        group: int = 1,
        relu: bool = True,
    ) -> str:
        """Convolution without bias, batch normalisation, scale and, in place on its top, ReLU."""
        top = self.conv(name, bottom, outputs, kernel, stride, pad, group, 'type: "msra"', None)
        self.layer("BatchNorm", f"{name}/bn", top, top, params=STATISTICS, batch_norm_param="eps: 1e-05")
        self.layer("Scale", f"{name}/scale", top, top, params=PLAIN, scale_param="bias_term: true")
        return self.relu(f"{name}/relu", top) if relu else top

    def ends(self, scores: str, top5: bool = True) -> None:
        self.layer("Accuracy", "accuracy", [scores, "label"], phase="TEST")
        if top5:
            self.layer("Accuracy", "accuracy_top5", [scores, "label"], phase="TEST", accuracy_param="top_k: 5")
        self.layer("SoftmaxWithLoss", "loss", [scores, "label"])

    def text(self) -> str:
        return "\n".join(self._out) + "\n"


def _bias(value: float) -> str:
    return f' bias_filler {{ type: "constant" value: {value:g} }}' if value else ' bias_filler { type: "constant" }'


def _gaussian(std: float) -> str:
    return f'type: "gaussian" std: {std}'


BGR = "mean_value: 104 mean_value: 117 mean_value: 123"
CIFAR = "mean_value: 114 mean_value: 123 mean_value: 125"


def lenet() -> str:
    """LeCun et al. 1998, with Caffe's sizes: rectified units and max pooling."""
    net = Text("LeNet", f"{lenet.__doc__} 431,080 parameters.", "mnist", 28, (64, 100), "scale: 0.00390625")
    top = net.pool("pool1", net.conv("conv1", "data", 20, 5), 2, 2)
    top = net.pool("pool2", net.conv("conv2", top, 50, 5), 2, 2)
    top = net.relu("relu1", net.dense("ip1", top, 500))
    net.ends(net.dense("ip2", top, 10), top5=False)
    return net.text()


def _cifar(net: Text, weights: Sequence[float], norm: bool) -> str:
    """The three convolutions of both nets for CIFAR-10 up to the last pooling."""
    top = net.pool("pool1", net.conv("conv1", "data", 32, 5, pad=2, weight=_gaussian(weights[0])), 3, 2)
    top = net.relu("relu1", top)
    for i, outputs in ((2, 32), (3, 64)):
        if norm:
            top = net.lrn(f"norm{i - 1}", top, 3, "5e-05", within=True)
        top = net.conv(f"conv{i}", top, outputs, 5, pad=2, weight=_gaussian(weights[i - 1]))
        top = net.pool(f"pool{i}", net.relu(f"relu{i}", top), 3, 2, method="AVE")
    return top


def cifar10_quick() -> str:
    """Krizhevsky's small net for CIFAR-10 (cuda-convnet, 2011), the version that trains in minutes."""
    net = Text("CIFAR10_quick", f"{cifar10_quick.__doc__} 145,578 parameters.", "cifar10", 32, (100, 100), CIFAR)
    top = net.dense("ip1", _cifar(net, (0.0001, 0.01, 0.01), norm=False), 64, _gaussian(0.1))
    net.ends(net.dense("ip2", top, 10, _gaussian(0.1)), top5=False)
    return net.text()


def cifar10_full() -> str:
    """Krizhevsky's net for CIFAR-10 (cuda-convnet, 2011), with response normalisation within channels."""
    net = Text("CIFAR10_full", f"{cifar10_full.__doc__} 89,578 parameters.", "cifar10", 32, (100, 100), CIFAR)
    net.ends(net.dense("ip1", _cifar(net, (0.0001, 0.01, 0.01), norm=True), 10, _gaussian(0.01)), top5=False)
    return net.text()


def _alexnet(net: Text, norm_first: bool) -> str:
    def shrink(i: int, top: str) -> str:
        """Pooling and normalisation: AlexNet normalises first, CaffeNet pools first and so normalises less."""
        if norm_first:
            return net.pool(f"pool{i}", net.lrn(f"norm{i}", top, 5, "0.0001"), 3, 2)
        return net.lrn(f"norm{i}", net.pool(f"pool{i}", top, 3, 2), 5, "0.0001")

    def rectified(i: int, bottom: str, outputs: int, kernel: int, bias: float, **more: int) -> str:
        top = net.conv(f"conv{i}", bottom, outputs, kernel, weight=_gaussian(0.01), bias=bias, **more)
        return net.relu(f"relu{i}", top)

    one = 0.1 if norm_first else 1.0
    top = shrink(1, rectified(1, "data", 96, 11, 0, stride=4))
    top = shrink(2, rectified(2, top, 256, 5, one, pad=2, group=2))
    top = rectified(3, top, 384, 3, 0, pad=1)
    top = rectified(4, top, 384, 3, one, pad=1, group=2)
    top = net.pool("pool5", rectified(5, top, 256, 3, one, pad=1, group=2), 3, 2)
    for i in (6, 7):
        top = net.relu(f"relu{i}", net.dense(f"fc{i}", top, 4096, _gaussian(0.005), one))
        top = net.dropout(f"drop{i}", top, 0.5)
    net.ends(net.dense("fc8", top, 1000, _gaussian(0.01)))
    return net.text()


def caffenet() -> str:
    """Krizhevsky et al. 2012 in the variant CaffeNet, which pools before it normalises; input 227 x 227."""
    about = f"{caffenet.__doc__} 60,965,224 parameters."
    return _alexnet(Text("CaffeNet", about, "imagenet", 227, (256, 50), BGR), norm_first=False)


def alexnet() -> str:
    """Krizhevsky et al. 2012; input 227 x 227."""
    about = f"{alexnet.__doc__} 60,965,224 parameters."
    return _alexnet(Text("AlexNet", about, "imagenet", 227, (256, 50), BGR), norm_first=True)


def vgg16() -> str:
    """Simonyan and Zisserman 2015, configuration D; input 224 x 224."""
    net = Text("VGG16", f"{vgg16.__doc__} 138,357,544 parameters.", "imagenet", 224, (64, 25), BGR)
    top = "data"
    for block, (outputs, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for i in range(1, count + 1):
            top = net.conv(f"conv{block}_{i}", top, outputs, 3, pad=1, weight='type: "msra"')
            net.relu(f"relu{block}_{i}", top)
        top = net.pool(f"pool{block}", top, 2, 2)
    for i in (6, 7):
        top = net.relu(f"relu{i}", net.dense(f"fc{i}", top, 4096, _gaussian(0.005)))
        top = net.dropout(f"drop{i}", top, 0.5)
    net.ends(net.dense("fc8", top, 1000, _gaussian(0.01)))
    return net.text()


INCEPTIONS = {
    # outputs of: 1x1 | 1x1 before 3x3, 3x3 | 1x1 before 5x5, 5x5 | 1x1 after pooling
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def googlenet() -> str:
    """Szegedy et al. 2015, table 1, with both auxiliary classifiers in TRAIN; input 224 x 224."""
    about = f"{googlenet.__doc__} 6,998,552 parameters, in TRAIN 13,378,280."
    net = Text("GoogLeNet", about, "imagenet", 224, (32, 50), BGR)

    def rectified(name: str, bottom: str, outputs: int, kernel: int, stride: int = 1, pad: int = 0) -> str:
        return net.relu(f"{name}/relu", net.conv(name, bottom, outputs, kernel, stride, pad, bias=0.2))

    def inception(name: str, bottom: str) -> str:
        one, three_in, three, five_in, five, pooled = INCEPTIONS[name]
        here = f"inception_{name}"
        parts = [
            rectified(f"{here}/1x1", bottom, one, 1),
            rectified(f"{here}/3x3", rectified(f"{here}/3x3_reduce", bottom, three_in, 1), three, 3, pad=1),
            rectified(f"{here}/5x5", rectified(f"{here}/5x5_reduce", bottom, five_in, 1), five, 5, pad=2),
            rectified(f"{here}/pool_proj", net.pool(f"{here}/pool", bottom, 3, 1, 1), pooled, 1),
        ]
        return net.layer("Concat", f"{here}/output", parts)

    def auxiliary(name: str, bottom: str) -> None:
        train = _Phase(net, "TRAIN")
        top = train.layer("Pooling", f"{name}/pool", bottom, pooling_param="pool: AVE kernel_size: 5 stride: 3")
        top = train.conv(f"{name}/conv", top, 128, 1, bias=0.2)
        train.layer("ReLU", f"{name}/relu_conv", top, top)
        top = train.dense(f"{name}/fc", top, 1024, bias=0.2)
        train.layer("ReLU", f"{name}/relu_fc", top, top)
        train.layer("Dropout", f"{name}/drop", top, top, dropout_param="dropout_ratio: 0.7")
        top = train.dense(f"{name}/classifier", top, 1000)
        train.layer("SoftmaxWithLoss", f"{name}/loss", [top, "label"], extra="loss_weight: 0.3")

    top = net.pool("pool1/3x3_s2", rectified("conv1/7x7_s2", "data", 64, 7, 2, 3), 3, 2)
    top = rectified("conv2/3x3_reduce", net.lrn("pool1/norm1", top, 5, "0.0001"), 64, 1)
    top = net.lrn("conv2/norm2", rectified("conv2/3x3", top, 192, 3, pad=1), 5, "0.0001")
    top = net.pool("pool2/3x3_s2", top, 3, 2)
    for name in INCEPTIONS:
        top = inception(name, top)
        if name in ("4a", "4d"):
            auxiliary(f"loss{1 if name == '4a' else 2}", top)
        if name in ("3b", "4e"):
            top = net.pool(f"pool{int(name[0])}/3x3_s2", top, 3, 2)
    top = net.dropout("pool5/drop", net.pool_all("pool5/global", top), 0.4)
    net.ends(net.dense("loss3/classifier", top, 1000))
    return net.text()


class _Phase(Text):
    """Adds to another text, in one phase only."""

    def __init__(self, net: Text, phase: str) -> None:
        self._out, self._phase = net._out, phase

    def layer(self, *args: object, **more: object) -> str:
        return super().layer(*args, **{**more, "phase": self._phase})  # type: ignore[arg-type]


def resnet50() -> str:
    """He et al. 2016, table 1, 50 layers, stride in the first 1 x 1 of a block as in the paper; input 224 x 224."""
    about = f"{resnet50.__doc__} 25,557,032 learned parameters (and 53,120 means and variances)."
    net = Text("ResNet50", about, "imagenet", 224, (32, 25), BGR)
    top = net.pool("pool1", net.conv_norm("conv1", "data", 64, 7, 2, 3), 3, 2)
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 2):
        for block in range(blocks):
            here = f"res{stage}{'abcdef'[block]}"
            stride = 2 if stage > 2 and block == 0 else 1
            shortcut = top
            if block == 0:
                shortcut = net.conv_norm(f"{here}/project", top, 4 * width, 1, stride, 0, relu=False)
            inner = net.conv_norm(f"{here}/1x1_in", top, width, 1, stride, 0)
            inner = net.conv_norm(f"{here}/3x3", inner, width, 3, 1, 1)
            inner = net.conv_norm(f"{here}/1x1_out", inner, 4 * width, 1, 1, 0, relu=False)
            top = net.relu(f"{here}/relu", net.layer("Eltwise", here, [shortcut, inner]))
    net.ends(net.dense("fc1000", net.pool_all("pool5", top), 1000))
    return net.text()


def mobilenet() -> str:
    """Howard et al. 2017, table 1, width 1.0; input 224 x 224."""
    about = f"{mobilenet.__doc__} 4,231,976 learned parameters (and 21,888 means and variances)."
    net = Text("MobileNet", about, "imagenet", 224, (32, 50), "mean_value: 127.5 scale: 0.0078431")
    top, channels = net.conv_norm("conv1", "data", 32, 3, 2, 1), 32
    table = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
    for i, (outputs, stride) in enumerate(table, 2):
        top = net.conv_norm(f"conv{i}/dw", top, channels, 3, stride, 1, group=channels)
        top, channels = net.conv_norm(f"conv{i}/pw", top, outputs, 1, 1, 0), outputs
    net.ends(net.dense("fc", net.pool_all("pool", top), 1000))
    return net.text()


def squeezenet() -> str:
    """Iandola et al. 2016, version 1.1; input 227 x 227."""
    net = Text("SqueezeNet", f"{squeezenet.__doc__} 1,235,496 parameters.", "imagenet", 227, (32, 25), BGR)

    def rectified(name: str, bottom: str, outputs: int, kernel: int, stride: int = 1, pad: int = 0) -> str:
        return net.relu(f"{name}/relu", net.conv(name, bottom, outputs, kernel, stride, pad))

    def fire(i: int, bottom: str, squeeze: int, expand: int) -> str:
        inner = rectified(f"fire{i}/squeeze1x1", bottom, squeeze, 1)
        parts = [
            rectified(f"fire{i}/expand1x1", inner, expand, 1),
            rectified(f"fire{i}/expand3x3", inner, expand, 3, pad=1),
        ]
        return net.layer("Concat", f"fire{i}/concat", parts)

    top = net.pool("pool1", rectified("conv1", "data", 64, 3, 2), 3, 2)
    for i, (squeeze, expand) in enumerate(
        ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256)), 2
    ):
        top = fire(i, top, squeeze, expand)
        if i in (3, 5):
            top = net.pool(f"pool{i}", top, 3, 2)
    top = net.dropout("drop9", top, 0.5)
    top = net.conv("conv10", top, 1000, 1, weight=_gaussian(0.01))
    top = net.pool_all("pool10", net.relu("relu_conv10", top))
    net.ends(top)
    return net.text()


NETS: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        lenet,
        cifar10_quick,
        cifar10_full,
        caffenet,
        alexnet,
        vgg16,
        googlenet,
        resnet50,
        mobilenet,
        squeezenet,
    )
}


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0]) if arguments else Path(__file__).parent
    for name, make in NETS.items():
        (folder / f"{name}.prototxt").write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
