"""A skip that nobody expected fails: a machine that lost a tool must not look green.

`pytest --strict-skips=REGEX`: skips whose reason matches REGEX are expected, and so are those of
the conformance suite, where a rule does not apply to a participant.
"""

from __future__ import annotations

import re

import pytest

OF_THE_SUITE = "participants/conformance/"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-skips", metavar="REGEX", help="fail on skips with another reason")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    allowed = session.config.getoption("--strict-skips")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if allowed is None or reporter is None:
        return
    skips = [report.longrepr for report in reporter.stats.get("skipped", [])]
    strange = [skip for skip in skips if isinstance(skip, tuple) and not expected(skip, allowed)]
    for path, line, reason in strange:
        reporter.write_line(f"unexpected skip at {path}:{line}: {reason}", red=True)
    if strange:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def expected(skip: tuple[str, int, str], allowed: str) -> bool:
    path, _, reason = skip
    return OF_THE_SUITE in path or (bool(allowed) and re.search(allowed, reason) is not None)
