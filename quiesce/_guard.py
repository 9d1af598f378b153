"""Our packages have common names (`storage`, `fsm`, `participants`): say so at once when somebody
else's stand in the way, instead of failing later on a missing name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# One module of each that nobody else's package of the name would have.
OURS = {"fsm": "save_steps", "participants": "data_plane", "storage": "durable"}


def check_packages(ours: dict[str, str] = OURS) -> None:
    """Raises ImportError naming the folder that shadows one of ours, and the way out."""
    for package, module in ours.items():
        spec = importlib.util.find_spec(package)
        where = list(spec.submodule_search_locations or []) if spec is not None else []
        if not any((Path(folder) / f"{module}.py").is_file() for folder in where):
            found = where[0] if where else (spec.origin if spec is not None else "nothing")
            raise ImportError(
                f"quiesce needs its own package {package!r}, but Python finds {found}. Start from "
                f"another folder, rename that {package!r}, or put quiesce first on sys.path"
            )
