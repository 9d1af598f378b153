"""The controller's participant and the data plane's, the protocols behind them, and one
implementation of each: a trainer brings its own, or takes ours."""

from participants.controller.controller import RlController
from participants.controller.loader import ListLoader, Loader
from participants.controller.participant import Controller
from participants.controller.pumps import RolloutPump
from participants.controller.state import Found, Loaded, Records, RlCut, RlState, Watched
from participants.data_plane import (
    CAPTURE,
    TRAIN,
    Barrier,
    CaptureSink,
    DataPlane,
    DataPlanePart,
    Row,
    check_row,
)
from participants.memory_data_plane import MemoryDataPlane

__all__ = [
    "CAPTURE",
    "TRAIN",
    "Barrier",
    "CaptureSink",
    "Controller",
    "DataPlane",
    "DataPlanePart",
    "Found",
    "ListLoader",
    "Loaded",
    "Loader",
    "MemoryDataPlane",
    "Records",
    "RlController",
    "RlCut",
    "RlState",
    "RolloutPump",
    "Row",
    "Watched",
    "check_row",
]
