"""The test suite that every participant must pass (`quiesce.testing`; needs the extra `testing`).

An author subclasses `Conformance` and says how to make the participant, how to work with it, and
how to look at it (`plugin.py`). The rules themselves, with what to change when one is broken, are
`rules.py`; the tests are grouped as in specs/: saving, hold (with fences and leases),
restoring, folder.
"""

from participants.conformance.fences import FenceRules
from participants.conformance.folder import FolderRules
from participants.conformance.hand_over import HandOverRules
from participants.conformance.hold import HoldRules
from participants.conformance.leases import LeaseRules
from participants.conformance.restoring import RestoreRules
from participants.conformance.saving import SaveRules


class Conformance(
    FolderRules, HandOverRules, RestoreRules, LeaseRules, FenceRules, HoldRules, SaveRules
):
    """Subclass it in a test file and fill in `make`, `work`, `observe` and `is_held`.

    (pytest runs the tests of the last base class first.)
    """


__all__ = ["Conformance"]
