"""Which prompt comes next: anything with `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import evolve, frozen

from fsm import strict


class Loader(Protocol):
    """Prompts by integer index, so that a snapshot holds indexes and not prompts."""

    @property
    def drawn(self) -> int:
        """How many prompts were handed out, over all epochs and restores."""

    @property
    def exhausted(self) -> bool:
        """The next `draw` has nothing to give."""

    def draw(self) -> int | None:
        """Index of the next prompt; None when there is no more."""

    def put_back(self, index: int) -> None:
        """This prompt is to be drawn again, before any new one."""

    def task(self, index: int) -> dict[str, Any]:
        """The prompt itself: what the agent's loop is given."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit."""


@frozen
class Place:
    """State of a `ListLoader`. length: of the list, to notice another one; ended: after the last
    epoch; spare: prompts put back, which are drawn first."""

    length: int
    drawn: int = 0
    epoch: int = 0
    next: int = 0
    ended: bool = False
    spare: tuple[int, ...] = ()


class ListLoader:
    """Hands out a list in order, `epochs` times (None: for ever)."""

    def __init__(self, tasks: Sequence[Mapping[str, Any]], epochs: int | None = 1) -> None:
        if not tasks or (epochs is not None and epochs < 1):
            raise ValueError("ListLoader needs at least one task and one epoch")
        self._tasks, self._epochs = tasks, epochs
        self._at = Place(len(tasks))

    @property
    def drawn(self) -> int:
        return self._at.drawn

    @property
    def exhausted(self) -> bool:
        return self._at.ended and not self._at.spare

    def draw(self) -> int | None:
        at = self._at
        if at.spare:
            self._at = evolve(at, drawn=at.drawn + 1, spare=at.spare[1:])
            return at.spare[0]
        if at.ended:
            return None
        epoch, following = at.epoch, at.next + 1
        if following == at.length:
            epoch, following = epoch + 1, 0
        ended = self._epochs is not None and epoch >= self._epochs
        self._at = evolve(at, drawn=at.drawn + 1, epoch=epoch, next=following, ended=ended)
        return at.next

    def put_back(self, index: int) -> None:
        self.task(index)
        self._at = evolve(self._at, spare=(*self._at.spare, index))

    def task(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._at.length:
            raise ValueError(f"prompt {index} is not in a list of {self._at.length}")
        return dict(self._tasks[index])

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = strict.write(self._at)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        place = strict.read(Place, state, "the loader's place")
        if place.length != self._at.length:
            raise ValueError(
                f"the loader's place is of a list of {place.length} prompts, "
                f"this list has {self._at.length}: start with the same data set"
            )
        if not 0 <= place.next < place.length or not all(
            0 <= index < place.length for index in place.spare
        ):
            raise ValueError(f"the loader's place is outside of its list: {place}")
        self._at = place
