"""Strict reading of data that somebody else wrote: configuration, messages, manifests.

Plain cattrs turns "300", 1.9 and True into numbers and drops unknown keys; here every value has
to have its own type, and every bad key is named at once.
"""

from __future__ import annotations

import functools
import math
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
        problems = _problems(error, kind) + _out_of_range(kind, data)
        raise BadInput(what, list(dict.fromkeys(problems))) from None
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
    if type(value) not in (int, float) or math.isnan(value):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def _problems(error: cattrs.BaseValidationError, kind: type) -> list[str]:
    known = ", ".join(a.name for a in attrs.fields(kind)) if attrs.has(kind) else ""

    def one(problem: BaseException, expected: type | None) -> str:
        if isinstance(problem, cattrs.ForbiddenExtraKeysError):
            extra = ", ".join(sorted(map(repr, problem.extra_fields)))
            return f"unknown key {extra} (known: {known})"
        if isinstance(problem, (ValueError, TypeError)) or type(problem) is Exception:
            return str(problem).replace("typing.Literal", "")
        return format_exception(problem, expected)

    lines = cattrs.transform_error(error, path="", format_exception=one)
    return [_with_path(*line.rsplit(" @ ", 1)) for line in lines]


def _with_path(problem: str, path: str) -> str:
    where = path.strip(".")
    return f"{where}: {problem}" if where else problem


def _out_of_range(kind: type, data: Mapping[Any, Any]) -> list[str]:
    """What the validators say of each value by itself: construction stops at the first."""
    problems = []
    for attribute in attrs.fields(kind) if attrs.has(kind) else ():
        if attribute.validator is None or attribute.name not in data:
            continue
        try:
            attribute.validator(None, attribute, data[attribute.name])
        except ValueError as error:
            problems.append(str(error))
        except TypeError:
            continue  # of another type: named already
    return problems
