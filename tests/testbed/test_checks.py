"""A setting that may not be is one line: the key as it was typed, the value, what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.checks import MAX_SEED, choose, require, require_type, require_whole, require_whole_or_null
from testbed.errors import ConfigError, RequestError


def said(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        call(*arguments, **named)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_condition_that_does_not_hold_is_told_with_key_and_value() -> None:
    require("a.b", 1, True, "anything")
    assert said(require, "a.b", -1, False, "0 or above") == "a.b is -1; it must be 0 or above"
    assert said(require, "a.b", "x\ny", False, "a name") == "a.b is 'x\\ny'; it must be a name"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_setting_is_infinite_or_nan(value: float) -> None:
    assert said(require, "a", value, True, "a number") == f"a is {value}; it must be a number"


def test_the_error_is_the_caller_s() -> None:
    with pytest.raises(RequestError, match=r"^sampling\.n is 0; it must be at least 1$"):
        require("sampling.n", 0, False, "at least 1", RequestError)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "n is 0; it must be from 1 to 10,000"),
        (10_001, "n is 10001; it must be from 1 to 10,000"),
        (10**400, "n is a whole number of about 401 digits; it must be from 1 to 10,000"),
        (1.0, "n is 1.0; it must be a whole number from 1 to 10,000"),
        (True, "n is true; it must be a whole number from 1 to 10,000"),
        ("3", "n is '3'; it must be a whole number from 1 to 10,000"),
        (None, "n is null; it must be a whole number from 1 to 10,000"),
    ],
)
def test_a_whole_number_has_its_bounds_and_its_type(value: Any, expected: str) -> None:
    assert require_whole("n", 10_000, 1, 10_000) == 10_000
    assert said(require_whole, "n", value, 1, 10_000) == expected


def test_with_no_upper_bound_of_its_own_and_where_null_is_allowed() -> None:
    assert require_whole("n", 10**18, 0, MAX_SEED) == 10**18
    assert said(require_whole, "n", 2**31, 1) == "n is 2147483648; it must be from 1 to 2,147,483,647"
    assert said(require_whole, "n", -1, 0, also=" (0: off)") == "n is -1; it must be at least 0 (0: off)"
    assert said(require_whole, "n", 0.5, 0) == "n is 0.5; it must be a whole number of at least 0"
    assert require_whole_or_null("n", None, 1) is None
    assert require_whole_or_null("n", 2, 1) == 2
    assert said(require_whole_or_null, "n", 0, 1) == "n is 0; it must be at least 1, or null"


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (float, 1, None),
        (float, float("inf"), None),  # ranges are the caller's
        (float, True, "it must be a number"),
        (float | None, None, None),
        (float | None, "x", "it must be a number or null"),
        (float, 10**400, "it must be a number that fits a float"),
        (int, 1.5, "it must be a whole number"),
        (bool, 1, "it must be true or false"),
        (str, 1, "it must be a string"),
        (list[float] | None, (1, 2), None),
        (tuple[Any, ...], "ab", "it must be a list"),
    ],
)
def test_a_value_has_its_field_s_type(annotation: Any, value: Any, expected: str | None) -> None:
    if expected is None:
        require_type("a", value, annotation)
    else:
        assert said(require_type, "a", value, annotation).endswith(expected)


def test_a_choice_names_the_nearest_first() -> None:
    names = ("fcfs", "lcfs", "random")
    assert choose("order", "fcfs", names) == "fcfs"
    assert said(choose, "order", "fcsf", names) == (
        "order is 'fcsf'; did you mean 'fcfs'? choose one of fcfs, lcfs, random"
    )
    assert said(choose, "order", 3, names) == "order is 3; choose one of fcfs, lcfs, random"
