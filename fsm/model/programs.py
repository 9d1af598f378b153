"""What each step does, action by action, in the engine's order (fsm/save_steps.py,
fsm/restore_steps.py; inside Gym: participants/gym/actor.py).

An action is `verb whom` for a message to a rank of servers, or a thing the controller does
itself. Callers stand for agents, callees for policy and resource servers (S5).
"""

from __future__ import annotations

from collections.abc import Mapping

Programs = Mapping[str, tuple[str, ...]]

# S5: open from the callee's side. H3: no renewal may re-arm a lease that was let go.
_RELEASE = ("stop renewal", "resume callees", "resume callers", "open dispatch")

SAVE_PROGRAMS: Programs = {
    "pause": ("stop dispatch",),
    # S6: told before sent.
    "prepare": (
        "start renewal",
        "tell callers",
        "prepare callers",
        "tell callees",
        "prepare callees",
    ),
    "drain": ("drain callers", "drain callees"),
    "commit": ("commit callers", "commit callees"),
    # S3: nothing is asked of Gym under the barrier. S4: the check comes after the cut.
    "cut": ("take barrier", "cut", "drop barrier", "check everyone"),
    "seal": ("seal",),
    "publish": ("rename",),
    # S11: a hold may have been lost since the cut, which did no harm until now.
    "stay": ("stop renewal", "start renewal", "check everyone", "wait"),
    "resume": _RELEASE,
    # S6: a release never waits for the disk.
    "abort": (*_RELEASE, "claim"),
    "discard": ("claim",),
}

RESTORE_PROGRAMS: Programs = {
    "discover": ("choose",),
    "fence": (
        "start renewal",
        "tell callers",
        "fence callers",
        "tell callees",
        "fence callees",
        "drain callers",
        "drain callees",
    ),
    "load_data_plane": ("load rows",),
    "restore_gym": ("stage callees", "stage callers"),
    # R8: the first process only renews, until it is told to stop.
    "hand_over": ("wait",),
    "take_over": ("start renewal", "take over", "check everyone"),
    # R1: the check is the last moment at which a lapsed lease may still roll back.
    "load_controller": ("load controller", "check everyone", "record"),
    "resume": ("stop renewal", "activate callees", "activate callers", "open dispatch"),
    "rollback": ("stop renewal", "rollback callees", "rollback callers"),
}

# What must have been done before the rename, and before anything is activated (R1).
BEFORE_PUBLISH = (
    "prepare callers",
    "prepare callees",
    "commit callers",
    "commit callees",
    "cut",
    "check everyone",
    "seal",
)
BEFORE_ACTIVATION = (
    "choose",
    "fence callers",
    "fence callees",
    "load rows",
    "stage callees",
    "stage callers",
    "load controller",
    "check everyone",
    "record",
)
# Callee or not, of the servers that an action is for.
RANKS = {"callers": (False,), "callees": (True,), "everyone": (False, True)}
UNDOING = frozenset({"abort", "rollback", "discard"})
RELEASING = UNDOING | {"resume"}
MESSAGES = frozenset({"prepare", "fence", "drain", "commit", "stage", "check"})
RELEASES = frozenset({"resume", "activate", "rollback"})
ON_DISK = frozenset({"seal", "rename", "claim"})
REPEATED = frozenset({"check everyone"})  # any other action is done once in an attempt
AT_ONCE = frozenset(
    {"start renewal", "stop renewal", "tell callers", "tell callees", "take barrier"}
    | {"drop barrier", "open dispatch"}
)
