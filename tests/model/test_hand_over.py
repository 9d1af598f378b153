"""R8: a restore that is begun in one process and finished in another."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from fsm.engine import SnapshotEngine
from fsm.outcome import InvariantError, RestoreFailed, Saved
from fsm.participant import Elsewhere, Participant
from fsm.storing import Fence, SavedSnapshot
from fsm.strict import BadInput
from fsm.token import RestoreToken
from participants.memory import Fault, MemoryParticipant
from participants.virtual_time import run
from storage.memory import MemoryDisk, MemoryStore
from tests.model.test_engine import CONFIG

LONG_S = 5 * CONFIG.lease_s


class Servers:
    """A Gym and a data plane that both processes reach; a controller that lives in the second."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.gym = MemoryParticipant("gym")
        self.data_plane = MemoryParticipant("data_plane", restore_step="load_data_plane")
        self.controller = MemoryParticipant(
            "controller", calls={"gym", "data_plane"}, restore_step="load_controller"
        )
        self.driver = self._engine(Elsewhere("controller", calls={"gym", "data_plane"}))
        self.actor = self.new_actor()

    def new_actor(self) -> SnapshotEngine:
        return self._engine(self.controller)

    def _engine(self, controller: Participant) -> SnapshotEngine:
        store = MemoryStore(self.disk)
        return SnapshotEngine(CONFIG, store, [self.gym, self.data_plane, controller])

    @property
    def everyone(self) -> list[MemoryParticipant]:
        return [self.gym, self.data_plane, self.controller]

    def held(self) -> list[str]:
        return [one.name for one in self.everyone if one.is_held]


async def saved() -> tuple[Servers, str]:
    """A snapshot with one item each, and servers that went on since."""
    servers = Servers()
    for one in servers.everyone:
        one.work("saved")
    outcome = await servers.actor.save()
    assert isinstance(outcome, Saved)
    await servers.actor.close()
    for one in servers.everyone:
        one.work("since")
    servers.actor = servers.new_actor()
    return servers, outcome.snapshot


def items(servers: Servers) -> list[list[str]]:
    return [one.items for one in servers.everyone]


RESTORED, LIVED_ON = [["saved"]] * 3, [["saved", "since"]] * 3


def test_the_other_process_goes_on_and_activates() -> None:
    async def main() -> None:
        servers, snapshot = await saved()
        token = await servers.driver.restore(until="gym_restored")
        assert servers.held() == ["gym", "data_plane"]
        assert items(servers) == LIVED_ON, "nothing is activated yet"
        restored = await servers.actor.restore(token)
        assert restored.snapshot == snapshot
        assert items(servers) == RESTORED
        assert servers.held() == []
        assert await servers.driver.let_go() == {}
        saves = await servers.actor.save()
        assert isinstance(saves, Saved)
        assert servers.actor.store.incarnation == token.fence.incarnation, "the same incarnation"

    run(main())


@pytest.mark.parametrize("by", ["pickle", "json"])
def test_the_token_crosses_a_process_border(by: str) -> None:
    async def main() -> None:
        servers, _ = await saved()
        token = await servers.driver.restore(until="gym_restored")
        again = (
            pickle.loads(pickle.dumps(token))
            if by == "pickle"
            else RestoreToken.from_json(token.to_json())
        )
        assert again == token
        await servers.actor.restore(again)
        assert items(servers) == RESTORED

    run(main())


def test_the_first_process_renews_while_the_second_starts() -> None:
    """R7: the hand-over may take longer than a lease."""

    async def main() -> None:
        servers, _ = await saved()
        token = await servers.driver.restore(until="gym_restored")
        await asyncio.sleep(LONG_S)
        assert servers.held() == ["gym", "data_plane"]
        await servers.actor.restore(token)
        assert items(servers) == RESTORED
        await asyncio.sleep(LONG_S)
        assert servers.held() == []
        assert items(servers) == RESTORED, "a first process that was not told does no harm"

    run(main())


def test_a_first_process_that_dies_leaves_a_lease_of_time() -> None:
    async def main() -> None:
        servers, _ = await saved()
        token = await servers.driver.restore(until="gym_restored")
        await servers.driver.close()
        await asyncio.sleep(CONFIG.lease_s / 2)
        await servers.actor.restore(token)
        assert items(servers) == RESTORED

    run(main())


def test_nobody_who_takes_over_means_that_nothing_happened() -> None:
    """R1: the leases end the holds, and what was staged is dropped; the snapshot is untouched."""

    async def main() -> None:
        servers, snapshot = await saved()
        token = await servers.driver.restore(until="gym_restored")
        await servers.driver.let_go()
        await asyncio.sleep(2 * CONFIG.lease_s)
        assert servers.held() == []
        assert items(servers) == LIVED_ON
        with pytest.raises(RestoreFailed, match="hold"):
            await servers.actor.restore(token)
        assert items(servers) == LIVED_ON
        assert servers.held() == []
        await servers.actor.close()
        assert (await servers.new_actor().restore()).snapshot == snapshot
        assert items(servers) == RESTORED

    run(main())


def test_a_first_process_stops_to_renew_when_it_is_too_late() -> None:
    async def main() -> None:
        servers, _ = await saved()
        await servers.driver.restore(until="gym_restored")
        await asyncio.sleep(CONFIG.restore_timeout_s + 2 * CONFIG.lease_s)
        assert servers.held() == []
        assert servers.driver.activity() is None

    run(main())


def test_a_failure_in_the_second_process_rolls_everybody_back() -> None:
    async def main() -> None:
        servers, _ = await saved()
        token = await servers.driver.restore(until="gym_restored")
        servers.controller.fault("restore", Fault.refuse("no_such_loader"))
        with pytest.raises(RestoreFailed, match="no_such_loader"):
            await servers.actor.restore(token)
        assert items(servers) == LIVED_ON
        assert servers.held() == []

    run(main())


def test_a_failure_in_the_first_process_gives_no_token() -> None:
    async def main() -> None:
        servers, _ = await saved()
        servers.gym.fault("restore", Fault.refuse("busy"))
        with pytest.raises(RestoreFailed, match="rolled back"):
            await servers.driver.restore(until="gym_restored")
        assert items(servers) == LIVED_ON
        assert servers.held() == []

    run(main())


def test_a_token_is_good_for_one_process() -> None:
    async def main() -> None:
        servers, _ = await saved()
        token = await servers.driver.restore(until="gym_restored")
        await servers.actor.restore(token)
        with pytest.raises(BlockingIOError, match="in use"):
            await servers.new_actor().restore(token)
        await servers.actor.close()
        with pytest.raises(ValueError, match="finished already"):
            await servers.new_actor().restore(token)
        assert items(servers) == RESTORED
        assert servers.held() == []

    run(main())


def test_a_controller_that_began_in_between_wins() -> None:
    async def main() -> None:
        servers, _ = await saved()
        token = await servers.driver.restore(until="gym_restored")
        other = servers.new_actor()
        await other.restore()
        await other.close()
        with pytest.raises(ValueError, match="controller 3 began after the restore"):
            await servers.actor.restore(token)
        assert items(servers) == RESTORED
        assert servers.held() == []

    run(main())


def test_the_first_process_may_begin_anew_but_not_save() -> None:
    async def main() -> None:
        servers, _ = await saved()
        token = await servers.driver.restore(until="gym_restored")
        with pytest.raises(ValueError, match="handed its restore over"):
            await servers.driver.save()
        again = await servers.driver.restore(until="gym_restored")
        assert again.fence > token.fence
        await servers.actor.restore(again)
        assert items(servers) == RESTORED

    run(main())


def test_taking_over_that_is_cancelled_does_not_lock_the_root() -> None:
    """F6: the store's own work goes on when its caller is gone."""

    class Slow(MemoryStore):
        async def take_over(self, fence: Fence, snapshot: str | None) -> SavedSnapshot | None:
            await asyncio.sleep(5)
            return await super().take_over(fence, snapshot)

    async def main() -> None:
        servers, _ = await saved()
        token = await servers.driver.restore(until="gym_restored")
        parts = [servers.gym, servers.data_plane, servers.controller]
        slow = SnapshotEngine(CONFIG, Slow(servers.disk), parts)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await slow.restore(token)
        await slow.close()
        await servers.actor.restore(token)
        assert items(servers) == RESTORED

    run(main())


def test_a_hand_over_that_is_cancelled_keeps_nobody_held() -> None:
    """Nobody has the token, so the leases end the holds, not the restore's deadline."""

    class Slow(MemoryStore):
        async def close(self) -> None:
            await asyncio.sleep(5)
            await super().close()

    async def main() -> None:
        servers, _ = await saved()
        parts = [servers.gym, servers.data_plane, Elsewhere("controller")]
        slow = SnapshotEngine(CONFIG, Slow(servers.disk), parts)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await slow.restore(until="gym_restored")
        assert servers.held() == ["gym", "data_plane"]
        await asyncio.sleep(2 * CONFIG.lease_s)
        assert servers.held() == []
        assert items(servers) == LIVED_ON

    run(main())


def test_a_start_from_nothing_can_be_split_too() -> None:
    async def main() -> None:
        servers = Servers()
        token = await servers.driver.restore(until="gym_restored", if_none="start")
        assert token.snapshot is None
        assert (await servers.actor.restore(token)).snapshot is None
        assert servers.held() == []
        assert isinstance(await servers.actor.save(), Saved)

    run(main())


def test_other_participants_are_refused_before_anybody_is_told() -> None:
    async def main() -> None:
        servers, _ = await saved()
        token = await servers.driver.restore(until="gym_restored")
        other = SnapshotEngine(CONFIG, MemoryStore(servers.disk), [servers.gym])
        with pytest.raises(ValueError, match="give both the same ones"):
            await other.restore(token)
        await servers.actor.restore(token)
        assert items(servers) == RESTORED

    run(main())


def test_a_stand_in_cannot_save() -> None:
    async def main() -> None:
        engine = SnapshotEngine(CONFIG, MemoryStore(), [Elsewhere("controller")])
        with pytest.raises(InvariantError, match="lives in another process"):
            await engine.save()

    run(main())


def test_a_damaged_token_is_refused_by_key() -> None:
    with pytest.raises(BadInput, match="fence"):
        RestoreToken.from_json('{"schema_version": 1}')
