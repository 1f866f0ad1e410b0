"""Exceptions for users' mistakes. Each message is one line with the fault, its place and the fix.

The command line prints `error: <message>` and exits with the class's status. Our own bugs stay `AssertionError`s.
"""


class TestbedError(Exception):
    """Base of every error that a user can cause and fix."""

    __test__ = False  # pytest would take it for a test class by its name
    exit_status = 1

    def _render_traceback_(self) -> list[str]:
        """What a notebook (IPython) shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(TestbedError):
    """A configuration value is unknown, out of range, or contradicts another."""


class RequestError(TestbedError):
    """A request is malformed (empty prompt, duplicate id, a sampling parameter out of range), or cannot be served."""


class TraceError(TestbedError):
    """A trace file is missing or has a bad row; the message names file, line and reason."""


class ModelError(TestbedError):
    """No model at the path, an unsupported architecture, a missing or wrong-shaped weight."""


class DeviceError(TestbedError):
    """A requested device is absent, or has too little memory."""


class RunFolderError(TestbedError):
    """A run folder is missing, incomplete, already used, or cannot be paired with another."""


class ProfileError(TestbedError):
    """A profile of measured steps, a fit to one, or a table of measured operators is missing, damaged, or of another
    model or device."""


class LivelockError(TestbedError):
    """Work remains, but nothing can be scheduled, now or later; or preemptions repeat without any progress."""


class IllegalTransitionError(AssertionError):
    """A sequence was to enter a state that cannot follow its present state. A bug, not a user's mistake."""
