"""The suite that tells the author of a participant whether it is right (extra `testing`).

>>> from quiesce.testing import Conformance

See docs/write-a-participant.md.
"""

try:
    from participants.conformance import Conformance
    from participants.conformance.plugin import IN_PROCESS
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the conformance suite needs {error.name}: pip install 'quiesce[testing]'",
        name=error.name,
    ) from error

__all__ = ["IN_PROCESS", "Conformance"]
