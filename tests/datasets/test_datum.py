import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasets import caffe_pb2, datum
from datasets.datum import Datum, DatumError

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=20)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "channels": INT32,
        "height": INT32,
        "width": INT32,
        "data": st.binary(max_size=300),
        "label": INT32,
        "float_data": FLOATS,
        "encoded": st.booleans(),
    },
)


def _message(fields):
    message = caffe_pb2.Datum()
    for name, value in fields.items():
        if name == "float_data":
            message.float_data.extend(value)
        else:
            setattr(message, name, value)
    return message


def _assert_same(parsed: Datum, message):
    assert (parsed.channels, parsed.height, parsed.width) == (message.channels, message.height, message.width)
    assert bytes(parsed.data) == message.data
    assert parsed.label == (message.label if message.HasField("label") else None)
    assert parsed.encoded == message.encoded
    if message.float_data:
        assert parsed.float_data.dtype == np.float32
        np.testing.assert_array_equal(parsed.float_data, np.array(message.float_data, np.float32))
    else:
        assert parsed.float_data is None


@given(FIELDS)
def test_writes_the_bytes_protobuf_writes(fields):
    assert datum.serialize(**fields) == _message(fields).SerializeToString()


@given(FIELDS)
def test_reads_what_protobuf_wrote(fields):
    message = _message(fields)
    _assert_same(datum.parse(message.SerializeToString()), message)


@given(FIELDS, FIELDS)
def test_of_repeated_fields_the_last_counts(first, second):
    value = _message(first).SerializeToString() + _message(second).SerializeToString()
    _assert_same(datum.parse(value), caffe_pb2.Datum.FromString(value))


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_datum_error(value):
    try:
        parsed = datum.parse(value, "fuzz")
    except DatumError:
        return
    # What we accept, protobuf must accept too, and read the same way.
    _assert_same(parsed, caffe_pb2.Datum.FromString(value))


@given(FIELDS, st.data())
def test_mutated_records_raise_nothing_but_datum_error(fields, data):
    value = bytearray(datum.serialize(**fields))
    if value:
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(value)))
    try:
        parsed = datum.parse(value[:cut])
    except DatumError:
        return
    _assert_same(parsed, caffe_pb2.Datum.FromString(bytes(value[:cut])))


def test_unknown_fields_of_every_kind_are_skipped():
    group = b"\x4b" + b"\x08\x07" + b"\x53\x10\x01\x54" + b"\x4c"  # field 9, a group with a group (10) inside
    unknown = b"\x40\x96\x01" + b"\x42\x03abc" + b"\x41" + bytes(8) + b"\x45" + bytes(4) + group
    value = unknown + datum.serialize(channels=1, label=3) + unknown
    parsed = datum.parse(value)
    assert (parsed.channels, parsed.label) == (1, 3)


def test_known_number_with_another_wire_type_is_unknown():
    assert datum.parse(b"\x0a\x02hi").channels == 0  # field 1 as bytes
    assert datum.parse(b"\x20\x05").data == b""  # field 4 as a number


def test_packed_and_unpacked_floats_mix():
    packed = np.array([1.5, -2.0], "<f4").tobytes()
    value = b"\x32" + bytes([len(packed)]) + packed + datum.serialize(float_data=[3.0])
    np.testing.assert_array_equal(datum.parse(value).float_data, np.array([1.5, -2.0, 3.0], np.float32))


def test_image_bytes_are_not_copied():
    value = bytearray(datum.serialize(channels=1, height=1, width=4, data=b"abcd"))
    parsed = datum.parse(value)
    value[value.index(b"a")] = ord("x")
    assert bytes(parsed.data) == b"xbcd"


def test_label_absent_is_not_label_zero():
    assert datum.parse(datum.serialize(channels=1)).label is None
    assert datum.parse(datum.serialize(channels=1, label=0)).label == 0
    whole = datum.serialize(channels=1, height=1, width=2, data=b"ab", label=7)
    assert datum.parse(whole[:-2]).label is None  # a record cut just before its label parses


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"\x22\x05abc", "5 bytes of field 4"),
        (b"\x08", "the rest of a number"),
        (b"\x08" + b"\xff" * 11, "at most 10 bytes"),
        (b"\x00\x00", "a field tag"),
        (b"\x0f", "wire type 7"),
        (b"\x32\x03abc", "a multiple of 4"),
        (b"\x35\x00", "4 bytes of field 6"),
        (b"\x41\x00", "8 bytes of field 8"),
        (b"\x4b\x08\x01", "the end of group 9"),
        (b"\x4c", "the start of a group"),
        (b"\x4b" * 200, "nested at most"),
    ],
)
def test_malformed_records_name_record_and_byte(value, problem):
    good = datum.serialize(channels=3)
    with pytest.raises(DatumError) as caught:
        datum.parse(good + value, "record 17 (key '00000017') of LMDB /data/x")
    text = str(caught.value)
    assert "record 17 (key '00000017') of LMDB /data/x" in text
    assert problem in text
    byte = int(text.split("malformed at byte ")[1].split()[0])
    assert len(good) <= byte <= len(good + value)


def test_where_becomes_text_only_in_an_error():
    class Where:
        def __str__(self):
            raise AssertionError("formatted without need")

    assert datum.parse(datum.serialize(channels=3), Where()).channels == 3


@pytest.mark.parametrize("label", [2.5, 2.0, "3"])
def test_labels_are_integers(label):
    with pytest.raises(DatumError, match="integer"):
        datum.serialize(label=label)


@pytest.mark.parametrize("label", [2**31, -(2**31) - 1])
def test_labels_fit_into_int32(label):
    with pytest.raises(DatumError, match="int32"):
        datum.serialize(label=label)


def test_numpy_values_are_taken():
    image = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    value = datum.serialize(channels=np.int64(3), height=2, width=2, data=image.data, label=np.uint8(9))
    parsed = datum.parse(value)
    assert bytes(parsed.data) == image.tobytes()
    assert parsed.label == 9
