"""What a user can do wrong, as exceptions. Each message is one line: the thing, the place, the fix.

The command line prints `error: <message>` and exits with the class's status; bugs of ours stay `AssertionError`s.
"""


class TestbedError(Exception):
    """Base of every error that a user can cause and mend."""

    __test__ = False  # not a test class, whatever pytest thinks of its name
    exit_status = 1


class ConfigError(TestbedError):
    """A configuration value is unknown, out of range, or contradicts another."""


class RequestError(TestbedError):
    """A request is malformed: empty prompt, duplicate id, negative length."""


class TraceError(TestbedError):
    """A trace file is missing or has a bad row; the message names file, line and reason."""


class ModelError(TestbedError):
    """No model at the path, an unsupported architecture, a missing or wrong-shaped weight."""


class DeviceError(TestbedError):
    """A device that was asked for is absent, or has too little memory."""


class RunFolderError(TestbedError):
    """A run folder is missing, incomplete, already used, or cannot be paired with another."""


class ProfileError(TestbedError):
    """A profile of measured steps, a fit to one, or a table of measured operators is missing, damaged, or of another
    model or device."""


class LivelockError(TestbedError):
    """Work remains, nothing can be scheduled, and nothing will ever change that."""


class IllegalTransitionError(AssertionError):
    """A sequence was asked to enter a state that its present state does not lead to. A bug, not a user's mistake."""
