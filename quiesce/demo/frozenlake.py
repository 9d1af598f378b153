"""FrozenLake as a tool server: stateful, random, and exact to the last bit after a restore.

A rollout plays several episodes in a row on Gymnasium's slippery 8x8 lake, 12 to 20 turns in all
(drawn from its seed). The server keeps one session per rollout, found by the header
`x-quiesce-rollout`, and is its own codec.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
from attrs import define, field, frozen, validators
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from fsm import strict
from participants.gym import wire
from quiesce.demo.effects import Effect, EffectLog

ACTIONS = ("left", "down", "right", "up")  # Gymnasium's numbers 0 to 3
MIN_TURNS, MAX_TURNS = 12, 20
SIDE, GOAL = 8, 63
CODES = {400: wire.BAD_REQUEST, 404: "no_session", 409: "rollout_over"}


def turns_of(seed: int) -> int:
    """How many turns the rollout with this seed has."""
    digest = hashlib.sha256(f"turns {seed}".encode()).digest()
    return MIN_TURNS + digest[0] % (MAX_TURNS - MIN_TURNS + 1)


@frozen(kw_only=True)
class State:
    """A session as JSON. generator: numpy's bit generator state; its integers have 128 bits,
    which Python's json keeps exact. returns: of the episodes that ended; best: of the current."""

    turns: int = field(validator=[validators.ge(MIN_TURNS), validators.le(MAX_TURNS)])
    turn: int = field(validator=validators.ge(0))
    position: int = field(validator=[validators.ge(0), validators.le(GOAL)])
    generator: dict[str, Any]
    returns: tuple[float, ...]
    best: float
    token: str


@define
class Session:
    """One rollout's lake. `env` holds position and generator, the rest is counted here."""

    env: Any
    turns: int
    turn: int = 0
    returns: tuple[float, ...] = ()
    best: float = 0.0
    token: str = ""

    @classmethod
    def start(cls, seed: int) -> Session:
        env = _lake()
        env.reset(seed=seed)
        return cls(env, turns_of(seed))

    def step(self, action: str) -> dict[str, Any]:
        """Apply one action; the next episode starts where one ends."""
        position, reward, ended, _, _ = self.env.step(ACTIONS.index(action))
        self.turn += 1
        self.best = max(self.best, _progress(int(position)))
        if ended:
            self.returns, self.best = (*self.returns, self.best), 0.0
            self.env.reset()
        return self.view(reward=float(reward), episode_over=bool(ended))

    def view(self, *, reward: float = 0.0, episode_over: bool = False) -> dict[str, Any]:
        """What the agent may see."""
        return {
            "board": self.board(),
            "reward": reward,
            "episode": len(self.returns) + 1,
            "episode_over": episode_over,
            "turn": self.turn,
            "done": self.turn >= self.turns,
        }

    def board(self) -> str:
        """Eight lines; A is the player, S start, F ice, H hole, G goal."""
        cells = [bytes(cell).decode() for cell in self.env.desc.flat]
        cells[int(self.env.s)] = "A"
        return "\n".join("".join(cells[row : row + SIDE]) for row in range(0, SIDE * SIDE, SIDE))

    def verdict(self) -> dict[str, Any]:
        """Reward: the mean over all episodes of how near each came to the goal (1: reached)."""
        played = (*self.returns, self.best)
        reward = round(sum(played) / len(played), 6)
        return {"reward": reward, "episodes": len(played), "turns": self.turn, "token": self.token}

    def state(self) -> State:
        return State(
            turns=self.turns,
            turn=self.turn,
            position=int(self.env.s),
            generator=self.env.np_random.bit_generator.state,
            returns=self.returns,
            best=self.best,
            token=self.token,
        )

    @classmethod
    def of(cls, state: State) -> Session:
        """The reverse of `state`. Raises ValueError for a generator state that numpy refuses."""
        env = _lake()
        env.reset()
        env.s = state.position
        try:
            env.np_random.bit_generator.state = state.generator
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a state of numpy's generator: {error}") from None
        return cls(env, state.turns, state.turn, state.returns, state.best, state.token)


class Lake:
    """The server: `app` with POST /seed, /step and /verify, and a codec for its sessions.

    effects: the log of what was really applied; it lives outside the sessions on purpose.
    """

    def __init__(self, effects: Path) -> None:
        self.sessions: dict[str, Session] = {}
        self.log = EffectLog(effects)
        routes = {"/seed": self._seed, "/step": self._step, "/verify": self._verify}
        self.app = Starlette(
            routes=[Route(path, handler, methods=["POST"]) for path, handler in routes.items()],
            exception_handlers={HTTPException: _refusal},
        )

    async def _seed(self, request: Request) -> JSONResponse:
        seed = (await _body(request)).get("seed")
        if type(seed) is not int or seed < 0:
            raise HTTPException(400, f"seed must be an int >= 0, not {seed!r}")
        session = self.sessions[_rollout(request)] = Session.start(seed)
        self._record(session, request, "seed", str(seed))
        return JSONResponse(session.view())

    async def _step(self, request: Request) -> JSONResponse:
        action = (await _body(request)).get("action")
        if action not in ACTIONS:
            raise HTTPException(400, f"action must be one of {', '.join(ACTIONS)}, not {action!r}")
        session = self._session(request)
        if session.turn >= session.turns:
            raise HTTPException(409, f"{_rollout(request)} has played its {session.turns} turns")
        seen = session.step(action)
        self._record(session, request, "step", f"{action} {session.env.s}")
        return JSONResponse(seen)

    async def _verify(self, request: Request) -> JSONResponse:
        return JSONResponse(self._session(request).verdict())

    def _record(self, session: Session, request: Request, kind: Any, outcome: str) -> None:
        """Log the effect; an error here leaves the session uncertain, and says so (500)."""
        cause = request.headers.get(wire.REQUEST, "")
        # The nonce tells an effect from the same call applied again, with the same outcome.
        whole = "\n".join((session.token, cause, outcome, secrets.token_hex(8)))
        token = hashlib.sha256(whole.encode()).hexdigest()[:24]
        effect = Effect(
            kind=kind,
            rollout=_rollout(request),
            run=request.headers.get(wire.RUN, ""),
            lineage=request.headers.get(wire.LINEAGE, ""),
            request=cause,
            turn=session.turn,
            parent=session.token,
            token=token,
        )
        self.log.append(effect)
        session.token = token

    def _session(self, request: Request) -> Session:
        rollout = _rollout(request)
        if rollout not in self.sessions:
            raise HTTPException(404, f"{rollout} has no session here: POST /seed first")
        return self.sessions[rollout]

    # The codec (participants.gym.servers.resource.SessionCodec): one synchronous copy (H4).

    def export_session(self, rollout_id: str) -> Any:
        """The state as JSON, or None when there is no such session."""
        session = self.sessions.get(rollout_id)
        return None if session is None else strict.write(session.state())

    def import_session(self, rollout_id: str, state: object) -> None:
        """Raises `strict.BadInput` naming the rollout; a session that lived here stays then."""
        what = f"FrozenLake session of {rollout_id}"
        known = strict.read(State, state, what)
        try:
            self.sessions[rollout_id] = Session.of(known)
        except ValueError as error:
            raise strict.BadInput(what, [str(error)]) from None

    def drop_session(self, rollout_id: str) -> None:
        self.sessions.pop(rollout_id, None)


def _lake() -> Any:
    # Unwrapped: no time limit and no order checks, so that (position, generator) is all its state.
    return gymnasium.make("FrozenLake-v1", map_name="8x8", is_slippery=True).unwrapped


def _progress(position: int) -> float:
    """0 at the start, 1 at the goal, by steps still to go."""
    row, column = divmod(position, SIDE)
    return round((row + column) / (2 * (SIDE - 1)), 6)


def _rollout(request: Request) -> str:
    rollout = request.headers.get(wire.ROLLOUT, "")
    if not rollout:
        raise HTTPException(400, f"the header {wire.ROLLOUT} must name the rollout")
    return rollout


async def _body(request: Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        raise HTTPException(400, "the body must be JSON") from None
    if not isinstance(body, dict):
        raise HTTPException(400, f"the body must be a JSON object, not {type(body).__name__}")
    return body


async def _refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body = {"error": {"code": CODES[error.status_code], "detail": error.detail}}
    return JSONResponse(body, status_code=error.status_code)
