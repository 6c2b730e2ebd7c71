"""The one error type a person sees: what went wrong, what was expected, what was found, what to try.

Every package raises :class:`StallscopeError` (or a subclass of its own room) for anything a user can cause.
Command-line tools catch it once, in :mod:`profiler.cli`, print it without a traceback and exit with code 2.
"""

from __future__ import annotations


class StallscopeError(Exception):
    """A failure that a person can act on.

    Parameters
    ----------
    what: one sentence naming the thing (data set, key, record, file, configuration key) and the problem.
    expected, found: the two sides of the mismatch, where there are two.
    hint: what to try next.
    """

    def __init__(self, what: str, *, expected: object = None, found: object = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        if self.found is not None:
            lines.append(f"  found:    {self.found}")
        if self.hint:
            lines.append(f"  try:      {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not survive pickling by default; actors send these to the driver.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(kind: type[StallscopeError], state: dict[str, object]) -> StallscopeError:
    error = kind.__new__(kind)
    Exception.__init__(error, state.get("what", ""))
    error.__dict__.update(state)
    return error


class UsageError(StallscopeError):
    """Wrong use: a bad flag, an unknown configuration key, a value out of range."""


def is_users_own(error: BaseException) -> bool:
    """Whether what came out of a user's function is its failure: ``sys.exit()`` is, an end that Ray asks for is not."""
    return isinstance(error, Exception) or (isinstance(error, SystemExit) and not hasattr(error, "is_ray_terminate"))


class MissingExtraError(StallscopeError):
    """An optional dependency is not installed. ``extra``: the one of this project that has it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed",
            hint=f"pip install '.[{extra}]' in the checkout of Stallscope",
        )
