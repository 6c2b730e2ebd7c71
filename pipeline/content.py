"""What a data set holds, told by a few of its records: two are the same wherever and in whatever kind they lie."""

from __future__ import annotations

import hashlib

from datasets.errors import DatasetCorrupt
from datasets.paired import PairedRecord
from datasets.source import Source

_PROBES = 16  # records that are read


def content(source: Source, *, tolerant: bool = False) -> str:
    """A hash of the length and of keys and values spread over the data set, 64 hexadecimal digits.

    The same records give the same one whichever database they lie in, so a run may move from one to another.
    tolerant: a record that cannot be read is one of them, and no reason to stop before the first step.
    """
    records = len(source)
    digest = hashlib.sha256(str(records).encode())
    for index in sorted({round(i * (records - 1) / (_PROBES - 1)) for i in range(_PROBES)}) if records else ():
        try:
            record = source.read(index)
        except DatasetCorrupt:
            if not tolerant:
                raise
            digest.update(b"record %d cannot be read" % index)
            continue
        digest.update(hashlib.sha256(record.key).digest() + hashlib.sha256(record.value).digest())
        if isinstance(record, PairedRecord):
            digest.update(hashlib.sha256(record.label_value).digest())
    return digest.hexdigest()
