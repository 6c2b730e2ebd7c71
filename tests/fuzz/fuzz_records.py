"""Coverage-guided fuzzing of records: ``make fuzz``, or ``python -m tests.fuzz.fuzz_records FOLDER [-option=value …]``.

Needs the extra ``fuzz`` (atheris). FOLDER grows by what reaches new code. The seeds are written into it first; inputs
worth keeping go to tests/fuzz/corpus, which the test suite replays. A crash, a hang or an input that breaks a rule of
:mod:`tests.fuzz.target` ends the run and leaves the input as a file ``crash-…`` or ``timeout-…``.
"""

import hashlib
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["datasets", "PIL"]):
    from tests.fuzz import seeds, target

    # Pillow imports its readers when it meets their files.
    SEEDS = seeds.images() | seeds.records()
    for seed in SEEDS.values():
        target.one_input(seed)

CORPUS = Path(__file__).with_name("corpus")


def main() -> None:
    """Fuzz for as long as the options of libFuzzer say."""
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    for folder in folders[:1]:
        folder.mkdir(parents=True, exist_ok=True)
        for data in SEEDS.values():
            (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)
    atheris.Setup([*sys.argv, str(CORPUS)] if folders else sys.argv, target.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
