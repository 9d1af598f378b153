"""What `show` and `verify` read from Gym's folder, without any server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve, frozen

from fsm import strict
from fsm.outcome import SnapshotRejected
from fsm.storing import FileEntry
from participants.gym.participant import Gym
from tests.gym_support import continuation, entry

P7 = continuation("p7_g2", "call-2", tools=3)
P8 = continuation("p8_g0", None)
FILES: dict[str, list[Any]] = {
    "agent/a0/continuations": [strict.write(P7)],
    "agent/a0/finished": [{"rollout_id": "p9_g1", "attempt_index": 0, "result": 1.0}],
    "agent/a1/continuations": [strict.write(P8)],
    "agent/a0/journals": [{"anything": 1}],
    "policy/p0/rows": [{"rollout_id": "p7_g2", "rows": ["p7_g2/call-1", "p7_g2/call-2"]}],
    "resource/tools/sessions": [{"rollout_id": "p7_g2", "revision": 3, "state": {}}],
}


@frozen
class Part:
    content: dict[str, list[Any]]

    def files(self) -> tuple[FileEntry, ...]:
        return tuple(entry(f"gym/{name}.jsonl") for name in self.content)

    def records(self, name: str) -> Iterator[Any]:
        yield from self.content[name]


def inspected(**changed: Any) -> Any:
    return Gym.inspect(Part(FILES | changed))  # type: ignore[arg-type]


def test_where_each_rollout_stands() -> None:
    assert inspected() == {
        "rollouts": {
            "p7_g2": {
                "server": "a0",
                "run": 0,
                "last_call": "call-2",
                "rows": 2,
                "starts_over": None,
            },
            "p8_g0": {
                "server": "a1",
                "run": 0,
                "last_call": None,
                "rows": 0,
                "starts_over": None,
            },
        },
        "finished": {"p9_g1": "a0"},
        "sessions": 1,
        "_needs": {"capture row": {"p7_g2/call-1": "p7_g2", "p7_g2/call-2": "p7_g2"}},
    }


def test_what_was_not_saved_with_it_starts_over() -> None:
    without = inspected(**{"policy/p0/rows": [], "resource/tools/sessions": []})
    assert without["rollouts"]["p7_g2"]["starts_over"] == "not saved: tools, token rows"
    assert without["rollouts"]["p8_g0"]["starts_over"] is None


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        (
            "resource/tools/sessions",
            {"rollout_id": "p7_g2", "revision": 4},
            "p7_g2 is at revision 4, its continuation depends on 3",
        ),
        (
            "policy/p0/rows",
            {"rollout_id": "p7_g2", "rows": ["p7_g2/call-1"]},
            "none is of its last, call-2",
        ),
        (
            "agent/a0/continuations",
            strict.write(P7) | {"attempt_index": "0"},
            "expected int, got '0'",
        ),
    ],
)
def test_parts_that_contradict_each_other_are_refused(name: str, record: Any, words: str) -> None:
    with pytest.raises(SnapshotRejected, match=words):
        inspected(**{name: [record]})


def test_rows_of_an_earlier_run_belong_to_the_same_history() -> None:
    later = evolve(
        P7, attempt_index=1, capture_key="p7_g2-a1", last_committed_model_call_id="call-3"
    )
    rows = ["p7_g2/call-1", "p7_g2/call-2", "p7_g2-a1/call-3"]
    found = inspected(
        **{
            "agent/a0/continuations": [strict.write(later)],
            "policy/p0/rows": [{"rollout_id": "p7_g2", "rows": rows}],
        }
    )
    assert found["rollouts"]["p7_g2"]["rows"] == 3
