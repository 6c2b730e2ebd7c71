"""Records from anywhere: only named errors, bounded memory, and nothing in them is ever run."""

from __future__ import annotations

import ast
import io
import json
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from datasets import contact_sheet, datum, decode, inspect, survey
from datasets.datum import Datum, DatumError
from datasets.image_file import MAX_PIXELS
from datasets.source import Record, Source
from tests.datasets.golden import in_child
from tests.fuzz import bombs, seeds, target

ROOT = Path(__file__).resolve().parents[2]
CORPUS = sorted(path for path in (ROOT / "tests" / "fuzz" / "corpus").rglob("*") if path.is_file())
SEEDS = seeds.images() | seeds.records()
MAGIC = [b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0", b"RIFF\0\0\0\0WEBP", b"BM", b"P5\n"]


def test_the_corpus_keeps_the_rules() -> None:
    assert len(CORPUS) > 50
    for path in CORPUS:
        target.one_input(path.read_bytes())


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_keep_the_rules_and_are_what_they_say(name: str) -> None:
    target.one_input(SEEDS[name])
    if name in seeds.images():
        assert decode.probe(Datum(data=SEEDS[name], encoded=True)).encoding.startswith(name[:3].replace("pgm", "ppm"))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid record or image file with bytes overwritten, cut out, repeated, inserted, or joined with another's."""
    data = bytearray(draw(st.sampled_from(list(SEEDS.values()))))
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("set", "cut", "repeat", "insert", "number", "splice"))):
            case "set" if data:
                data[place % len(data)] = draw(st.integers(0, 255))
            case "cut":
                del data[place : place + draw(st.integers(1, 64))]
            case "repeat":
                data[place:place] = data[place : place + draw(st.integers(1, 16))] * draw(st.integers(1, 40))
            case "insert":
                data[place:place] = draw(st.binary(max_size=20))
            case "number":
                width = draw(st.sampled_from((1, 2, 4)))
                data[place : place + width] = draw(st.sampled_from((b"\xff", b"\x7f", b"\x00", b"\x80"))) * width
            case "splice":
                data = data[:place] + draw(st.sampled_from(list(SEEDS.values())))[place:]
    return bytes(data)


@settings(max_examples=400, deadline=None)
@given(mutated())
def test_mutated_records_and_files_keep_the_rules(data: bytes) -> None:
    target.one_input(data)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([b"", *MAGIC]), st.binary(max_size=400))
@example(b"BM", bytes(12))
@example(b"P5\n", b"9999999999999 99999999999 255\n")
def test_arbitrary_bytes_keep_the_rules(head: bytes, body: bytes) -> None:
    target.one_input(head + body)


class Held(Source):
    """Records in a list, under keys of any bytes."""

    backend, path = "memory", "memory:held"

    def __init__(self, values: list[bytes], keys: list[bytes]) -> None:
        self.values, self.keys = values, sorted(keys)

    def __len__(self) -> int:
        return len(self.values)

    def key(self, index: int) -> bytes:
        return self.keys[index]

    def read(self, index: int) -> Record:
        return Record(index, self.keys[index], self.values[index], self.name)

    def identity(self) -> dict[str, object]:
        return {"records": len(self)}

    def close(self) -> None:
        pass


@settings(max_examples=60, deadline=None)
@given(st.lists(mutated(), min_size=1, max_size=8), st.data())
def test_a_set_of_mutated_records_can_be_inspected_and_shown(values: list[bytes], data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.binary(max_size=30), min_size=len(values), max_size=len(values), unique=True))
    source = Held(values, keys)
    found = survey.survey(source, max_pixels=target.MAX_PIXELS)
    document = inspect.describe(source, found, target.MAX_PIXELS)
    json.dumps(document, allow_nan=False)
    assert found.bad_records + sum(found.shapes.values()) == len(values)
    page = contact_sheet.page(source, found, document, target.MAX_PIXELS)
    assert "<script" not in page
    inspect.render(document, Console(file=io.StringIO()))


# bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        b"\x32\x00" * 20_000,  # empty packed floats
        b"\x32\x04\0\0\0\0" * 10_000,  # packed floats, one by one
        b"\x35\0\0\0\0" * 10_000,
        b"\x35\0\0\0\0\x38\x01" * 10_000,  # no two floats in a row
        b"\xb5\x00\0\0\0\0" * 10_000,  # the tag of a float in two bytes
        b"\x22\x00" * 20_000,
        b"\x4b" * 100 + b"\x4c" * 100,
        b"\x4b\x4c" * 20_000,
        b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" * 4_000,
    ],
)
def test_parsing_takes_no_more_memory_than_a_small_multiple_of_the_record(record: bytes) -> None:
    datum.parse(record)  # imports and caches
    tracemalloc.start()
    try:
        parsed = datum.parse(record)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(record) + 20_000
    floats = 0 if parsed.float_data is None else len(parsed.float_data)
    assert floats == {0x35: 10_000, 0xB5: 10_000}.get(record[0], 10_000 if record[:2] == b"\x32\x04" else 0)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return bombs.bombs()


def _limited(look: Callable[[], None]) -> Callable[[], None]:
    """``look`` with 48 MB of new memory at most: less than any of the bombs takes."""

    def run() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (48 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        look()

    return run


def test_bombs_are_refused_before_they_are_decoded(files: dict[str, bytes]) -> None:
    assert {name: len(data) for name, data in files.items() if len(data) > bombs.PIXELS // 40} == {}
    for data in SEEDS.values():
        target.one_input(data)  # decoders load their tables before memory is limited

    def look() -> None:
        for name, data in files.items():
            for color in (None, "color", "gray"):
                with pytest.raises(DatumError, match=r"too large|too many scans|cannot be decoded") as caught:
                    decode.to_image(Datum(data=data, encoded=True), target.WHERE, color)
                told = str(caught.value)
                assert ("too many scans" if name == "jpeg-scans" else "too large") in told.lower(), (name, color, told)
            if name not in ("png-text", "png-profile"):
                with pytest.raises(DatumError, match=r"too large|too many scans"):
                    decode.probe(Datum(data=data, encoded=True), target.WHERE)

    assert in_child(_limited(look)) == 0


DECODE = """
import io, resource, sys, warnings
from pathlib import Path
from PIL import Image
warnings.simplefilter("ignore")
Image.MAX_IMAGE_PIXELS = None
Image.init()
data = Path(sys.argv[1]).read_bytes()
limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (48 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    Image.open(io.BytesIO(data)).load()
except (MemoryError, OSError) as error:
    sys.exit(7)
"""


def test_the_bombs_are_real(files: dict[str, bytes], tmp_path: Path) -> None:
    """What the limit of memory forbids is what decoding would take. In a process without freed memory to reuse."""
    for name in ("png", "gif", "tiff-deflate", "webp", "jpeg"):
        (tmp_path / name).write_bytes(files[name])
        done = subprocess.run([sys.executable, "-c", DECODE, tmp_path / name], check=False, timeout=60)
        assert done.returncode == 7, name


def test_bombs_are_below_no_limit_of_their_own(files: dict[str, bytes]) -> None:
    """The same files are read where the limit allows it, so it is the size that they are refused for."""
    assert bombs.PIXELS > MAX_PIXELS
    smaller = bombs.webp(64)
    assert decode.to_image(Datum(data=smaller, encoded=True), max_pixels=64 * 64)[:, 3, 3].tolist() == [3, 2, 1]
    with pytest.raises(DatumError, match="too large"):
        decode.to_image(Datum(data=smaller, encoded=True), max_pixels=64 * 64 - 1)


# nothing is run -------------------------------------------------------------------------------------------------------

NEVER = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "dill.loads",
    "cloudpickle.load", "cloudpickle.loads", "joblib.load", "torch.load", "yaml.unsafe_load", "yaml.full_load",
    "yaml.load_all", "yaml.unsafe_load_all", "eval", "exec", "compile", "builtins.eval", "builtins.exec", "__import__",
    "pandas.read_pickle", "os.system",
}  # fmt: skip


def code() -> Iterator[tuple[Path, ast.AST]]:
    for package in ("datasets", "gpu", "pipeline", "profiler"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def faults(tree: ast.AST) -> list[str]:
    """Calls that could run what lies in data: pickles, object arrays, YAML tags, text as code."""
    names: dict[str, str] = {}
    safe_loaders = {"SafeLoader", "CSafeLoader"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("SafeLoader") for base in node.bases):
            safe_loaders.add(node.name)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append(f"line {node.value.lineno}: allow_pickle={ast.unparse(node.value)}")
        if not isinstance(node, ast.Call):
            continue
        head, _, rest = ast.unparse(node.func).partition(".")
        name = names.get(head, head) + ("." + rest if rest else "")
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in NEVER:
            found.append(f"line {node.lineno}: {name}")
        elif name in ("numpy.load", "numpy.lib.npyio.NpzFile") and keywords.get("allow_pickle") != "False":
            found.append(f"line {node.lineno}: {name} without allow_pickle=False")
        elif name == "yaml.load":
            loader = ast.unparse(node.args[1]) if len(node.args) > 1 else keywords.get("Loader", "none")
            if loader.rsplit(".", 1)[-1] not in safe_loaders:
                found.append(f"line {node.lineno}: yaml.load with {loader}")
    return found


def test_no_data_is_ever_run_as_code() -> None:
    assert {str(path.relative_to(ROOT)): faults(tree) for path, tree in code() if faults(tree)} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle\npickle.loads(b)", "from pickle import load as l\nl(f)", "import numpy as np\nnp.load(f)",
        "import numpy as np\nnp.load(f, allow_pickle=True)", "f(allow_pickle=x)", "import yaml\nyaml.load(t)",
        "import yaml\nyaml.load(t, yaml.Loader)", "import yaml\nyaml.load(t, Loader=yaml.FullLoader)", "eval(t)",
        "exec(t)", "import torch\ntorch.load(p)",
    ],
)  # fmt: skip
def test_the_check_sees_what_it_is_for(line: str) -> None:
    assert faults(ast.parse(line))


@pytest.mark.parametrize(
    "line",
    [
        "import numpy as np\nnp.load(f, allow_pickle=False)", "import yaml\nyaml.load(t, yaml.SafeLoader)",
        "import yaml\nclass L(yaml.SafeLoader): ...\nyaml.load(t, L)", "model.eval()", "import re\nre.compile(p)",
    ],
)  # fmt: skip
def test_the_check_lets_pass_what_is_safe(line: str) -> None:
    assert faults(ast.parse(line)) == []
