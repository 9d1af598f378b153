"""A model that costs nothing: an OpenAI-compatible upstream whose answers are drawn from a digest.

The same conversation always gets the same answer, so that two runs can be compared turn by turn.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

VOCABULARY = 49_152  # as many token ids as SmolLM2 has


class Scripted:
    """POST /v1/chat/completions, GET /calls (how many there were), GET /health.

    seed: another seed is another model. delay_s: how long each answer takes.
    """

    def __init__(self, seed: int = 0, *, delay_s: float = 0.0) -> None:
        self.seed, self.delay_s, self.calls = seed, delay_s, 0
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/calls", self._count),
                Route("/health", self._health),
            ]
        )

    async def _complete(self, request: Request) -> JSONResponse:
        try:
            body = await request.json()
            choices = _choices(body)
        except (ValueError, KeyError, TypeError) as error:
            return _refusal(f"the request must offer choices in a JSON schema: {error!r}")
        self.calls += 1
        await asyncio.sleep(self.delay_s)
        return JSONResponse(completion(body, self.draw(body, choices)))

    def draw(self, body: Mapping[str, Any], choices: Mapping[str, list[Any]]) -> str:
        """The answer to this conversation: one value for each property, as JSON text."""
        said = json.dumps([self.seed, body.get("seed"), body["messages"]], sort_keys=True)
        digest = hashlib.sha256(said.encode()).digest()
        picks = zip(choices.items(), digest, strict=False)
        return json.dumps({name: values[byte % len(values)] for (name, values), byte in picks})

    async def _count(self, _: Request) -> JSONResponse:
        return JSONResponse({"calls": self.calls})

    async def _health(self, _: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})


def completion(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The reply, with token ids and logprobs where llama.cpp's server has them:
    `choices[0].logprobs.content[i].id` and `.logprob`."""
    tokens = [_token(piece) for piece in re.findall(r"\s*\w+|\s*[^\w\s]+", text)]
    said = sum(len(str(message.get("content", ""))) for message in body["messages"])
    return {
        "id": f"chatcmpl-{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
                "logprobs": {"content": tokens},
            }
        ],
        "usage": {
            "prompt_tokens": said,
            "completion_tokens": len(tokens),
            "total_tokens": said + len(tokens),
        },
    }


def _token(piece: str) -> dict[str, Any]:
    number = zlib.crc32(piece.encode())
    return {
        "id": number % VOCABULARY,
        "token": piece,
        "bytes": list(piece.encode()),
        "logprob": -(number % 64) / 16,
        "top_logprobs": [],
    }


def _choices(body: Mapping[str, Any]) -> dict[str, list[Any]]:
    properties = body["response_format"]["json_schema"]["schema"]["properties"]
    if not isinstance(body["messages"], list) or not body["messages"]:
        raise ValueError("messages must be a list, and not empty")
    return {name: list(allowed["enum"]) for name, allowed in properties.items()}


def _refusal(message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "code": "bad_request"}
    return JSONResponse({"error": error}, status_code=400)


def main(arguments: list[str] | None = None) -> None:
    from participants.gym.servers.serve import serve

    parser = argparse.ArgumentParser(prog="python -m quiesce.demo.scripted", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delay-s", type=float, default=0.0, help="seconds each answer takes")
    given = parser.parse_args(arguments)
    serve(Scripted(given.seed, delay_s=given.delay_s).app, "127.0.0.1", given.port)


if __name__ == "__main__":
    main()
