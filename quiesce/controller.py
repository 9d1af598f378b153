"""The controller's participant, the protocol behind it, and our implementation of that."""

from participants.controller.controller import RlController
from participants.controller.loader import ListLoader, Loader
from participants.controller.participant import Controller
from participants.controller.pumps import RolloutPump
from participants.controller.state import Found, Loaded, RlCut, RlState
from participants.data_plane import DataPlane, DataPlanePart
from participants.memory_data_plane import MemoryDataPlane

__all__ = [
    "Controller",
    "DataPlane",
    "DataPlanePart",
    "Found",
    "ListLoader",
    "Loaded",
    "Loader",
    "MemoryDataPlane",
    "RlController",
    "RlCut",
    "RlState",
    "RolloutPump",
]
