"""Who may import whom, and other promises of the layout that no type checker sees."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fsm", "participants", "storage", "quiesce")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

# Modules of the pure core: they decide, and never wait, look at a clock or touch a file.
PURE = ("table", "checks", "save", "restore", "hold", "machine", "diagram", "outcome", "trace")
WAITING = frozenset({"asyncio", "threading", "os", "time", "httpx", "ray", "pathlib", "socket"})
ACTOR = "participants/gym/actor.py"
EXTRAS = {
    "ray": (
        "participants/transfer_queue",
        "participants/gym/remote.py",
        "participants/gym/actor.py",
    ),
    "torch": ("participants/transfer_queue",),
    "tensordict": ("participants/transfer_queue",),
    "transfer_queue": ("participants/transfer_queue",),
    "starlette": ("participants/gym/servers", "participants/gym/fake.py"),
    "uvicorn": ("participants/gym/servers/serve.py",),
    "transitions": ("fsm/machine.py",),
}


def modules(folder: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def tops(tree: ast.AST) -> set[str]:
    return {name.partition(".")[0] for name in imported(tree)}


def test_the_engine_knows_neither_plugins_nor_disks() -> None:
    wrong = [n for n, tree in modules("fsm") if tops(tree) & {"participants", "storage", "quiesce"}]
    assert wrong == []


def test_plugins_do_not_know_the_facade() -> None:
    assert [name for name, tree in modules("participants") if "quiesce" in tops(tree)] == []


def test_gym_servers_import_neither_ray_nor_the_engine() -> None:
    for name, tree in modules("participants/gym/servers"):
        assert not set(imported(tree)) & {"fsm.engine", "fsm.save_steps", "fsm.run"}, name
        assert "ray" not in tops(tree), name


@pytest.mark.parametrize("module", PURE)
def test_the_core_never_waits(module: str) -> None:
    tree = ast.parse((ROOT / f"fsm/{module}.py").read_text(encoding="utf-8"))
    assert tops(tree) & WAITING == set()


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_are_imported_only_where_they_belong(extra: str) -> None:
    for package in PACKAGES:
        for name, tree in modules(package):
            if extra in tops(tree) and not name.startswith("quiesce/demo"):
                assert name.startswith(EXTRAS[extra]), f"{name} imports {extra}"


def test_the_public_package_needs_no_extra() -> None:
    """In a process of its own: nothing of an optional extra is loaded by `import quiesce`."""
    names = ", ".join(map(repr, EXTRAS.keys() - {"transitions"}))
    code = (
        "import sys, quiesce, quiesce.cli, quiesce.gym, quiesce.controller\n"
        f"print([name for name in ({names},) if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_examples_import_only_the_public_names() -> None:
    for name, tree in modules("examples"):
        assert not tops(tree) & {"fsm", "participants", "storage"}, name


def test_files_and_functions_stay_readable() -> None:
    long = []
    for package in PACKAGES:
        for name, tree in modules(package):
            lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
            if lines > MAX_FILE_LINES:
                long.append(f"{name}: {lines} lines; split it by what a reader looks for")
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > MAX_FUNCTION_LINES:
                        long.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    assert long == []


def test_every_package_is_listed_for_the_build() -> None:
    """Auto-discovery refuses this layout, so a forgotten package would miss in the wheel."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package in PACKAGES:
        for init in (ROOT / package).rglob("__init__.py"):
            name = init.parent.relative_to(ROOT).as_posix().replace("/", ".")
            assert f'"{name}",' in text, f"{name} is not in [tool.setuptools] packages"


def test_the_specs_are_those_of_the_code() -> None:
    ran = subprocess.run(
        [sys.executable, "specs/generate.py", "--check"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout


def test_every_clause_is_cited_by_a_test_or_the_code() -> None:
    """A clause that nothing refers to is a promise that nobody keeps."""
    stated = set()
    for name in ("save", "restore", "hold", "folder"):
        stated |= set(re.findall(r"\b([SRHF]\d+)\b", (ROOT / f"specs/{name}.md").read_text()))
    sources = [
        *ROOT.glob("tests/**/*.py"),
        *(p for k in PACKAGES for p in ROOT.glob(f"{k}/**/*.py")),
    ]
    cited = {c for path in sources for c in re.findall(r"\b([SRHF]\d+)\b", path.read_text())}
    assert stated - cited == set()
