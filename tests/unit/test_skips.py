"""CI notices a skip that nobody expected."""

from __future__ import annotations

import pytest

from tests.skips import expected

TORCH = ("tests/unit/test_x.py", 9, "Skipped: could not import 'torch'")


@pytest.mark.parametrize(
    ("skip", "allowed", "fine"),
    [
        (TORCH, "could not import '(ray|torch)'", True),
        (TORCH, "could not import 'ray'", False),
        (TORCH, "", False),
        (("/x/participants/conformance/hold.py", 84, "it has no hook 'renew'"), "", True),
    ],
)
def test_what_is_expected(skip: tuple[str, int, str], allowed: str, fine: bool) -> None:
    assert expected(skip, allowed) is fine
