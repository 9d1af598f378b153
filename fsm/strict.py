"""Strict reading of data that somebody else wrote: configuration, messages, manifests.

Plain cattrs turns "300", 1.9 and True into numbers and drops unknown keys; here every value has
to have its own type, and every bad key is named at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.v import format_exception

T = TypeVar("T")


class BadInput(ValueError):
    """Data has the wrong shape. `problems` has a line for every bad key."""

    def __init__(self, what: str, problems: list[str]) -> None:
        super().__init__(f"{what}: " + "; ".join(problems))
        self.what, self.problems = what, problems


def read(kind: type[T], data: object, what: str) -> T:
    """`data` as an instance of the attrs class `kind`. Raises `BadInput` naming every bad key.

    what: says whose data it is, for the message ("manifest.json", "the configuration").
    """
    if not isinstance(data, Mapping):
        raise BadInput(what, [f"expected a mapping, got {type(data).__name__}"])
    try:
        return _converter().structure(dict(data), kind)
    except cattrs.BaseValidationError as error:
        raise BadInput(what, _problems(error, kind)) from None
    except (TypeError, ValueError) as error:
        raise BadInput(what, [str(error)]) from None


def write(value: Any) -> Any:
    """An attrs instance as plain JSON-able data: the reverse of `read`."""
    return _converter().unstructure(value)


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(int, functools.partial(_exact, (int,)))
    converter.register_structure_hook(str, functools.partial(_exact, (str,)))
    converter.register_structure_hook(bool, functools.partial(_exact, (bool,)))
    converter.register_structure_hook(float, _number)
    return converter


def _exact(kinds: tuple[type, ...], value: Any, _: Any) -> Any:
    if type(value) not in kinds:
        raise ValueError(f"expected {kinds[0].__name__}, got {value!r}")
    return value


def _number(value: Any, _: Any) -> float:
    if type(value) not in (int, float) or value != value:
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def _problems(error: cattrs.BaseValidationError, kind: type) -> list[str]:
    known = ", ".join(a.name for a in attrs.fields(kind)) if attrs.has(kind) else ""

    def one(problem: BaseException, expected: type | None) -> str:
        if isinstance(problem, cattrs.ForbiddenExtraKeysError):
            return f"unknown key {', '.join(sorted(map(repr, problem.extra_fields)))} (known: {known})"
        if isinstance(problem, (ValueError, TypeError)):
            return str(problem)
        return format_exception(problem, expected)

    return cattrs.transform_error(error, path="", format_exception=one)
