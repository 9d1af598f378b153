"""TransferQueue as data plane (extra `tq`)."""

try:
    from participants.transfer_queue.cluster import connect, start
    from participants.transfer_queue.participant import TransferQueue
    from participants.transfer_queue.plane import TransferQueuePlane
    from participants.transfer_queue.sink import TransferQueueSink
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"TransferQueue needs {error.name}: pip install 'quiesce[tq]'", name=error.name
    ) from error

__all__ = ["TransferQueue", "TransferQueuePlane", "TransferQueueSink", "connect", "start"]
