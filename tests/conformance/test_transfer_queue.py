"""The real TransferQueue on a real Ray."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ray = pytest.importorskip("ray")
pytest.importorskip("transfer_queue")
pytest.importorskip("torch")

from participants.transfer_queue.participant import TransferQueue  # noqa: E402
from tests.conformance.test_data_plane import DataPlaneConformance  # noqa: E402
from tests.integration.test_transfer_queue import Cluster  # noqa: E402


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    ray.init(
        num_cpus=12,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200 * 2**20,
    )
    one = Cluster()
    yield one
    one.close()
    ray.shutdown()


class TestTransferQueue(DataPlaneConformance):
    """A start takes many seconds. So one is emptied instead, but for the round trip, where the
    actors of the old one really end."""

    ends = False
    cluster: Cluster

    @pytest.fixture(autouse=True)
    def _running(self, running: Cluster) -> None:
        self.cluster = running

    async def make(self) -> TransferQueue:
        return TransferQueue(await self.cluster.empty())

    async def crash_and_replace(self, one: TransferQueue) -> TransferQueue:
        if self.ends:
            self.cluster.fresh()
        return await self.make()

    def test_round_trip(self) -> None:
        self.ends = True
        super().test_round_trip()
