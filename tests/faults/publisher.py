"""A controller that publishes and prunes, to be killed: `python -m tests.faults.publisher ROOT`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.folders import gone_on, save


async def main(root: Path) -> None:
    store = await gone_on(root, keep_latest=1)
    await save(store, 7)
    await store.prune()
    await store.close()


asyncio.run(main(Path(sys.argv[1])))
