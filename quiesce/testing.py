"""The suites that tell authors whether their part is right (extra `testing`).

>>> from quiesce.testing import Conformance

`Conformance` is for a participant (docs/write-a-participant.md). The others are for what a trainer
may bring itself: `RlState`, `DataPlane`, `CaptureSink`, `Barrier` (docs/embed.md).
"""

try:
    from participants.conformance import Conformance
    from participants.conformance.barrier import BarrierConformance
    from participants.conformance.data_plane import CaptureSinkConformance, DataPlaneConformance
    from participants.conformance.plugin import IN_PROCESS
    from participants.conformance.rl_state import RlStateConformance
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the conformance suite needs {error.name}: pip install 'quiesce[testing]'",
        name=error.name,
    ) from error

__all__ = [
    "IN_PROCESS",
    "BarrierConformance",
    "CaptureSinkConformance",
    "Conformance",
    "DataPlaneConformance",
    "RlStateConformance",
]
