"""Coverage-guided fuzzing of an LMDB's pages: ``python -m tests.fuzz.fuzz_pages FOLDER [-option=value …]``.

As :mod:`tests.fuzz.fuzz_records` does it for records. The walk is compiled and gives no coverage of its own; the rest
guides.
"""

import random
import sys
from pathlib import Path

import atheris

# Before the others: what is compiled must not be rewritten by the fuzzer.
import datasets.lmdb_walk  # noqa: F401

with atheris.instrument_imports(include=["datasets"]):
    from tests.fuzz import pages

    pages.one_input(b"")


def main() -> None:
    """Fuzz for as long as the options of libFuzzer say."""
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    draw = random.Random(1)
    for folder in folders[:1]:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(len(pages.files()) * 5):
            (folder / f"seed-{number}").write_bytes(bytes([number]) + draw.randbytes(3 * pages.CHANGE - 1))
    atheris.Setup(sys.argv, pages.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
