"""Failures of user code, in one line: exceptions that a user's own class raised, or caused in our code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import index
from pathlib import Path
from typing import Any

from experiments.configuration.config import JUDGING, RunConfig
from experiments.configuration.own_class import ROOMS, imported, place_in_own_code, told
from experiments.configuration.own_source import unseeded_in
from testbed.core.sequence import Sequence
from testbed.errors import LivelockError, TestbedError
from testbed.foreign_text import shown
from testbed.policies.oracle import has_no_opinion


class PolicyError(TestbedError):
    """A user's own class failed, or returned an invalid value."""


class CheckedOracle:
    """Wraps a user's oracle and checks its predictions; other attributes are passed through. Raises PolicyError."""

    def __init__(self, oracle: Any) -> None:
        self._oracle = oracle
        self.is_none = has_no_opinion(oracle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)

    def predict(self, seq: Sequence) -> int | None:
        said = self._oracle.predict(seq)
        if said is None:
            return None
        with suppress(TypeError):  # index() also accepts numpy's integers
            if (length := index(said)) >= 1:
                return length
        raise PolicyError(
            f"scheduler.oracle: {type(self._oracle).__name__} predicts {shown(said)} for request {seq.request_id!r}; "
            "it must be a whole number of tokens, at least 1, or None"
        )


def is_foreign(name: str) -> bool:
    """Whether a dotted name is not in a package of this repository."""
    return name.partition(".")[0] not in ROOMS


def named_classes(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields (key, class) for every `_target_` in a configuration that is not in this repository."""
    if isinstance(tree, dict) and isinstance(target := tree.get("_target_"), str) and is_foreign(target):
        yield key, target
    for name, value in tree.items() if isinstance(tree, dict) else ():
        yield from named_classes(value, f"{key}.{name}".lstrip("."))
    for place, value in enumerate(tree if isinstance(tree, list) else ()):
        yield from named_classes(value, f"{key}[{place}]")


def own_classes(config: RunConfig) -> list[str]:
    """Returns `key=module.Class` for each user's class that takes part in a run."""
    decides = {group: values for group, values in config.raw.items() if group not in JUDGING}
    return [f"{key}={target}" for key, target in named_classes(decides)]


def unseeded_notes(config: RunConfig) -> list[str]:
    """Returns a note on each user's class by which a run may decide otherwise the next time."""
    found = ((item, unseeded_in(imported(*item.split("=", 1)))) for item in own_classes(config))
    return [
        f"{item} calls {name}, which the seed does not set: the same run may end otherwise the next time (draw by "
        "testbed.streams.draw, take time from now_ns)"
        for item, name in found if name
    ]  # fmt: skip


def check_importable(config: RunConfig) -> None:
    """Raises ConfigError if a user's class cannot be imported; called before anything runs."""
    for key, target in named_classes(config.raw):
        imported(key, target)


@contextmanager
def failures_named(config: RunConfig) -> Iterator[None]:
    """Context in which what a user's class raises while it is made or bound is a PolicyError that names it."""
    try:
        yield
    except TestbedError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's class may raise anything when it is made or bound)
        raise policy_failure(error, config) or error from None


def policy_failure(error: BaseException, config: RunConfig) -> PolicyError | None:
    """Returns the error for an exception that ended a run with user classes; None if the run has only our classes."""
    own = own_classes(config)
    if not own:
        return None
    if isinstance(error, LivelockError):
        return PolicyError(f"{error} (in {', '.join(own)})")
    cause = error.__context__  # compiled code sets no __cause__
    if isinstance(error, RuntimeError) and isinstance(cause, StopIteration):  # in whose place a generator raises it
        error = cause
    if place := place_in_own_code(error):
        return PolicyError(f"{place}: {told(error)} (in {', '.join(own)})")
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    place = f"{Path(last.filename).name}:{last.lineno}" if last is not None else "?"
    return PolicyError(
        f"{told(error)} at {place}, most likely because {' or '.join(own)} returned what it may not, changed what it "
        "was shown, or has a method with other parameters; see docs/extending.md"
    )
