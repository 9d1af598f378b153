"""TransferQueuePlane: `data_plane.DataPlane` over TransferQueue's key-value calls.

A put is four calls of which the tag is the last, so the tag is the commit mark: a key without tag
is half-born, its writer died or is still writing. TransferQueue's calls have no time-out (a dead
controller never answers) and serialise on the event loop that awaits them. So they run on a loop
of their own, in a thread that never keeps the process alive, each with our deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import transfer_queue as tq
import zmq
from tensordict import TensorDict

from participants.data_plane import CAPTURE, Listing, Row, Tag, batches, check_row
from participants.transfer_queue import columns
from participants.transfer_queue.columns import Group, Shape
from participants.transfer_queue.contents import Topology

T = TypeVar("T")


class TransferQueuePlane:
    """Rows in a running TransferQueue; get one from `cluster.start` or `cluster.connect`.

    timeout_s: of each call. After a TimeoutError nothing is known of what the call did; to repeat
    a put is safe, its key is the same. Overwriting a row is not atomic: until the new tag is
    there, the new columns stand under the old one.
    """

    def __init__(self, topology: Topology, timeout_s: float = 60.0) -> None:
        self.topology = topology
        self._timeout_s = timeout_s
        self._kinds: dict[str, dict[str, str]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_serve, args=(self._loop,), name="quiesce-transfer-queue", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, and calls under way. TransferQueue goes on (`cluster.stop` ends it)."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # -- DataPlane -----------------------------------------------------------------------------

    async def put(self, key: str, row: Row) -> None:
        await self.put_rows(CAPTURE, {key: row}, {})

    async def put_rows(self, partition: str, rows: Mapping[str, Row], tag: Tag) -> None:
        for key, row in rows.items():
            check_row(key, row)
        groups = columns.pack(rows, self._kinds.setdefault(partition, {}))
        await self._put(partition, groups, [tag] * len(rows), list(rows))

    async def put_batch(
        self, partition: str, keys: Sequence[str], batch: TensorDict, tags: Sequence[Tag]
    ) -> None:
        """Put a trainer's TensorDict; dense columns are converted, whatever their size.

        batch: of size (len(keys), ...). tags: one per key. Raises ValueError for sizes that
        differ, or a column whose dtype is another than before.
        """
        if len(tags) != len(keys):
            raise ValueError(f"{len(tags)} tags for {len(keys)} keys")
        groups = columns.pack_batch(keys, batch, self._kinds.setdefault(partition, {}))
        await self._put(partition, groups, tags, keys)

    async def get_rows(self, partition: str, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        wanted = list(dict.fromkeys(keys))
        found: dict[str, dict[str, Any]] = {}
        for some in batches(wanted):
            for shape, group in (await self._shapes(partition, some)).items():
                found |= await self._get(partition, group, shape)
        return {key: found[key] for key in wanted}

    async def keys(self, partition: str) -> dict[str, dict[str, Any]]:
        stored = await self._stored(partition)
        return {key: columns.read_tag(tag)[0] for key, tag in stored.items() if tag}

    async def half_born(self, partition: str) -> list[str]:
        stored = await self._stored(partition)
        return sorted(key for key, tag in stored.items() if not tag)

    async def clear(self, partition: str, keys: Iterable[str]) -> None:
        for some in batches(keys):
            await self._call("clear rows", tq.async_kv_clear(some, partition))

    async def listing(self) -> Listing:
        """Every key of every partition in one call."""
        stored: dict[str, Any] = await self._call("list keys", tq.async_kv_list())
        return Listing(
            tags={
                partition: {key: columns.read_tag(tag)[0] for key, tag in keys.items() if tag}
                for partition, keys in stored.items()
            },
            half_born={
                partition: tuple(sorted(key for key, tag in keys.items() if not tag))
                for partition, keys in stored.items()
            },
        )

    # -- calls ---------------------------------------------------------------------------------

    async def _stored(self, partition: str) -> dict[str, dict[str, Any]]:
        stored: dict[str, Any] = await self._call("list keys", tq.async_kv_list(partition))
        return stored.get(partition) or {}

    async def _put(
        self, partition: str, groups: list[Group], tags: Sequence[Tag], keys: Sequence[str]
    ) -> None:
        tag_of_key = dict(zip(keys, tags, strict=True))
        for group in groups:
            marks = [columns.tag_of(group.shape, tag_of_key[key]) for key in group.keys]
            put = tq.async_kv_batch_put(group.keys, partition, fields=group.fields, tags=marks)
            await self._call("put rows", put)

    async def _shapes(self, partition: str, keys: list[str]) -> dict[Shape | None, list[str]]:
        """Keys by shape. Raises KeyError for one that is not there, or not committed."""
        client = tq.get_client()
        meta = await self._call(
            "find rows", client.async_kv_retrieve_meta(keys, partition, create=False)
        )
        present = keys
        if meta.size != len(keys):
            indexes = meta.global_indexes
            found = client.async_kv_retrieve_keys(indexes, partition) if indexes else _nothing()
            present = await self._call("find rows", found)
        tags = dict(zip(present, meta.custom_meta, strict=True))
        shapes: dict[Shape | None, list[str]] = {}
        for key in keys:
            if not tags.get(key):
                raise KeyError(f"partition {partition!r} has no row {key!r}")
            shapes.setdefault(columns.read_tag(tags[key])[1], []).append(key)
        return shapes

    async def _get(
        self, partition: str, keys: list[str], shape: Shape | None
    ) -> dict[str, dict[str, Any]]:
        names = None if shape is None else columns.stored_columns(shape)
        if names == []:
            empty = TensorDict({}, batch_size=len(keys))
            return dict(zip(keys, columns.unpack(empty, shape), strict=True))
        try:
            batch = await self._call("get rows", tq.async_kv_batch_get(keys, partition, names))
        except ValueError as error:  # cleared since they were found
            raise KeyError(f"partition {partition!r} lacks one of {keys}: {error}") from error
        return dict(zip(keys, columns.unpack(batch, shape), strict=True))

    async def _call(self, what: str, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise TimeoutError(
                f"TransferQueue did not {what} within {self._timeout_s:g} s; "
                "its controller or a storage unit is dead or overloaded"
            ) from None
        except (RuntimeError, zmq.ZMQError) as error:
            raise OSError(f"TransferQueue failed to {what}: {error}") from error


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped; the runner then ends what is left in it."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


async def _nothing() -> list[str]:
    return []
