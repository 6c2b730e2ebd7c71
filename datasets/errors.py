"""What can go wrong with a data set, one name each. Datum and image errors are in their own modules."""

from __future__ import annotations

from profiler.errors import StallscopeError


class SourceError(StallscopeError):
    """A data set cannot be opened or read."""


class EmptyPath(SourceError):
    """The path of a data set is the empty string."""


class SourceMissing(SourceError):
    """Nothing lies at the path of a data set."""


class EmptyFolder(SourceError):
    """The folder named as a data set holds nothing."""


class NotADataset(SourceError):
    """What lies at the path is neither an LMDB nor a LevelDB."""


class CurrentMissing(SourceError):
    """A LevelDB folder has lost its CURRENT file; opening it with 'create' would delete its tables."""


class WrongBackend(SourceError):
    """The folder holds one kind of database, and the caller named the other."""


class DatasetTruncated(SourceError):
    """A database file is shorter than the database needs: an interrupted copy, most likely."""


class DatasetCorrupt(SourceError):
    """The database library found damage."""


class CodecMissing(SourceError):
    """A database is sound, but the library that reads it was built without the codec of its blocks."""


class DatasetChanged(SourceError):
    """The data set was written to while it was being read, or since it was pickled."""


class LockRefused(SourceError):
    """Locking was asked for, and the lock table of the database cannot be used."""


class ReadersFull(LockRefused):
    """Locking was asked for, and all reader slots of the database are taken by live processes."""


class EnvUsedAfterFork(SourceError):
    """What belongs to one process was used in another, forked from it.

    Attributes
    ----------
    opened_in, used_in: numbers of the two processes.
    """

    def __init__(self, name: str, opened_in: int, used_in: int) -> None:
        super().__init__(
            f"{name}: a reader slot was used after a fork",
            expected=f"process {opened_in}, which took it",
            found=f"process {used_in}",
            hint="let each process open the data set, or use its source: a source opens what it needs by itself",
        )
        self.opened_in, self.used_in = opened_in, used_in


class ManifestMismatch(SourceError):
    """The data set is not what the manifest beside it describes."""


class PairMismatch(SourceError):
    """Two sources that are read as pairs hold different keys."""


class SourceClosed(SourceError):
    """A source was used after ``close()``."""


class DatasetWarning(UserWarning):
    """Something about a data set that a person should look at, and that does not stop the run."""
