from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import caffe_pb2
from pipeline.philox import Draws
from pipeline.spec import TransformSpec
from pipeline.transforms import Transform, TransformError, load_mean
from profiler.errors import StallscopeError, UsageError


def ready(shape: tuple[int, int, int], **settings: Any) -> Transform:
    transform = Transform(TransformSpec(**settings), seed=1, phase=0)
    transform.fit(shape, "record 0")
    return transform


def draws_for(images: list[np.ndarray], transform: Transform, seed: int = 0) -> Draws:
    rng = np.random.default_rng(seed)
    _, height, width = transform.sample_shape
    return Draws(
        rng.random(len(images)) < 0.5,
        np.array([rng.integers(image.shape[1] - height + 1) for image in images]),
        np.array([rng.integers(image.shape[2] - width + 1) for image in images]),
    )


def mean_file(folder: Path, image: np.ndarray, *, legacy: bool = True) -> str:
    blob = caffe_pb2.BlobProto(data=image.ravel().tolist())
    if legacy:
        blob.num, (blob.channels, blob.height, blob.width) = 1, image.shape
    else:
        blob.shape.dim.extend(image.shape)
    path = folder / "mean.binaryproto"
    path.write_bytes(blob.SerializeToString())
    return str(path)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("mean", ["none", "one", "channel", "image"])
@pytest.mark.parametrize("crop", [0, 1, 5, 9])
def test_kernel_and_reference_give_the_formulas_bits(tmp_path: Path, dtype: Any, mean: str, crop: int) -> None:
    rng = np.random.default_rng(crop)
    shape = (3, 9, 12)
    images = [rng.integers(0, 256, shape).astype(dtype) for _ in range(17)]
    means = rng.normal(100, 40, shape).astype(np.float32)
    settings: dict[str, Any] = {"crop": crop, "mirror": True, "scale": 0.017}
    if mean == "one":
        settings["mean_value"] = (33.3,)
    elif mean == "channel":
        settings["mean_value"] = (33.3, 104.007, 122.68)
    elif mean == "image":
        settings["mean_file"] = mean_file(tmp_path, means)
    transform = ready(shape, **settings)
    draws = draws_for(images, transform)
    out, reference = (np.full((len(images), *transform.sample_shape), np.nan, np.float32) for _ in range(2))
    transform.fill(images, draws, out)
    transform.fill_numpy(images, draws, reference)
    assert out.tobytes() == reference.tobytes()
    scale = np.float32(0.017)
    whole = np.broadcast_to(transform.mean, shape)
    _, height, width = transform.sample_shape
    for i in range(0, len(images), 5):
        for c, y, x in [(0, 0, 0), (2, height - 1, 0), (1, height // 2, width - 1)]:
            column = width - 1 - x if draws.mirror[i] else x
            at = (c, y + draws.h_off[i], column + draws.w_off[i])
            # Two roundings, each to float32; the mean belongs to the pixel's place before crop and mirror.
            expected = np.float32(np.float32(images[i][at]) - whole[at]) * scale
            assert out[i, c, y, x] == expected


def test_kernel_takes_images_of_mixed_sizes_and_views_that_are_not_contiguous() -> None:
    rng = np.random.default_rng(2)
    images = [rng.integers(0, 256, (3, 8 + i, 20 - i)).astype(np.uint8) for i in range(6)]
    images[3] = images[3].transpose(0, 2, 1)
    transform = ready((3, 8, 20), crop=7, mirror=True, mean_value=(1.5,))
    for image in images:
        transform.check(image.shape, "x")
    draws = draws_for(images, transform)
    out, reference = np.zeros((6, 3, 7, 7), np.float32), np.ones((6, 3, 7, 7), np.float32)
    transform.fill(images, draws, out)
    transform.fill_numpy(images, draws, reference)
    np.testing.assert_array_equal(out, reference)


def test_crop_larger_than_image_names_both_sizes() -> None:
    with pytest.raises(TransformError, match="crop is larger than the image of record 0") as caught:
        ready((3, 28, 30), crop=29)
    assert "at most 28" in str(caught.value)
    assert "3 x 28 x 30" in str(caught.value)


def test_mixed_sizes_without_crop_name_both_records() -> None:
    transform = ready((3, 20, 20))
    with pytest.raises(TransformError, match="record 9 has another size than record 0, and there is no crop") as caught:
        transform.check((3, 20, 21), "record 9")
    assert "3 x 20 x 20" in str(caught.value)
    assert "3 x 20 x 21" in str(caught.value)
    ready((3, 20, 20), crop=10).check((3, 31, 12), "record 9")


def test_other_channel_count_names_the_keys_that_help() -> None:
    with pytest.raises(TransformError, match="another number of channels") as caught:
        ready((3, 20, 20), crop=4).check((1, 20, 20), "record 5")
    assert "force_color" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "mean_shape", "crop"), [((3, 10, 10), (3, 12, 12), 0), ((3, 10, 10), (10, 10, 3), 8)]
)
def test_mean_image_that_does_not_fit_shows_mean_record_and_crop(
    tmp_path: Path, shape: tuple[int, int, int], mean_shape: tuple[int, int, int], crop: int
) -> None:
    path = mean_file(tmp_path, np.zeros(mean_shape, np.float32))
    with pytest.raises(TransformError, match="does not fit record 0") as caught:
        ready(shape, mean_file=path, crop=crop)
    text = str(caught.value)
    assert " x ".join(map(str, shape)) in text
    assert " x ".join(map(str, mean_shape)) in text
    assert "nothing is resized" in text


def test_three_mean_values_on_gray() -> None:
    with pytest.raises(TransformError, match="mean_value does not fit") as caught:
        ready((1, 10, 10), mean_value=(1.0, 2.0, 3.0))
    assert "1 channels" in str(caught.value)


def test_mean_value_and_file_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        Transform(TransformSpec(mean_value=(1.0,), mean_file="x"), 0, 0)


@pytest.mark.parametrize("legacy", [True, False])
def test_mean_file_in_old_and_new_dimensions(tmp_path: Path, legacy: bool) -> None:
    image = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(load_mean(mean_file(tmp_path, image, legacy=legacy)), image)


def test_caffes_own_mean_file() -> None:
    mean = load_mean("tests/data/proto/mean_mnist.binaryproto")
    assert mean.shape == (1, 28, 28)
    assert 20 < mean.mean() < 50


@pytest.mark.parametrize("content", [None, b"", b"\xff\xff\xff no blob", b"\x08\x02"])
def test_unreadable_mean_files_are_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mean.binaryproto"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StallscopeError, match=r"mean\.binaryproto"):
        load_mean(str(path))


def test_user_function_gets_its_own_copy_and_its_own_random_numbers() -> None:
    transform = ready((1, 4, 4), python="tests.pipeline.functions:noise")
    image = np.zeros((1, 4, 4), np.uint8)
    function = transform.function
    assert function is not None
    first = function.on_image(image, 3, 0, 8, "record 8")
    again = function.on_image(image, 3, 0, 8, "record 8")
    other = function.on_image(image, 3, 1, 8, "record 8")
    assert not image.any()
    np.testing.assert_array_equal(first[0], again[0])
    assert first[1] == again[1]
    assert (first[0] != other[0]).any()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("breaks_on_label_7", "ArithmeticError: seven is right out"),
        ("leaves", "SystemExit: enough"),
        ("returns_nothing", "something else than a pair"),
    ],
)
def test_failing_user_function_is_named_with_the_record(name: str, text: str) -> None:
    transform = ready((1, 4, 4), python=f"tests.pipeline.functions:{name}")
    function = transform.function
    assert function is not None
    with pytest.raises(TransformError) as caught:
        function.on_image(np.zeros((1, 4, 4), np.uint8), 7, 0, 8, "record 8 of set")
    assert text in str(caught.value)
    assert name in str(caught.value)
    assert "record 8 of set" in str(caught.value)


@pytest.mark.parametrize("name", ["no_such_module_here:f", "tests.pipeline.functions:absent"])
def test_user_function_that_does_not_exist(name: str) -> None:
    with pytest.raises(UsageError, match=r"transform\.python"):
        Transform(TransformSpec(python=name), 0, 0)


def test_bytes_are_turned_round_and_none_beside_them() -> None:
    from pipeline.kernels import turned

    source = np.random.default_rng(1).integers(0, 256, 400, dtype=np.uint8)
    for count in [*range(1, 131), 227, 256]:
        for begin in (0, 1, 3):
            out = np.full(400, 7, np.uint8)
            turned(source.ctypes.data + begin, out.ctypes.data + 50 + begin, count)
            assert out[50 + begin : 50 + begin + count].tolist() == source[begin : begin + count][::-1].tolist()
            assert set(out[: 50 + begin].tolist() + out[50 + begin + count :].tolist()) == {7}
