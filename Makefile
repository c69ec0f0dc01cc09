# Every target makes its own environment first; nothing else has to be run before.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Outside clients have an environment of their own: their dependencies stay out of ours.
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed

# What runs on a GPU where there is one, else under Triton's interpreter (then `make test` has it).
GPU_TESTS := tests/unit/test_triton_*.py tests/models/test_fused_ops.py \
	tests/engine/test_device_runner.py tests/engine/test_device_profile.py

.PHONY: setup serve test test-gpu test-clients check format bench clean
.DEFAULT_GOAL := setup

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25" -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

$(CLIENTS_STAMP): pyproject.toml constraints-clients.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --upgrade "pip>=25"
	$(CLIENTS)/bin/python -m pip install --quiet -c constraints-clients.txt torch
	$(CLIENTS)/bin/python -m pip install --quiet -c constraints-clients.txt -e ".[clients]"
	@touch $(CLIENTS_STAMP)

setup: $(STAMP) ## the virtual environment with everything

serve: $(STAMP) ## the server on the embedded default model, port 8000; ARGS="--port 8123": other options
	$(BIN)/emberline serve $(ARGS)

test: $(STAMP) ## every test
	$(BIN)/python -m pytest

test-gpu: ## kernels and captured steps, in the environment of $(PYTHON), which brings PyTorch with CUDA
	$(PYTHON) -m pytest $(GPU_TESTS)

# xgrammar comes without its dependencies: what it needs of them is there, the rest is for GPUs.
test-clients: $(STAMP) $(CLIENTS_STAMP) ## outside clients against the server (2 GB of them)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(CLIENTS)/xgrammar \
		-c constraints-clients.txt xgrammar apache-tvm-ffi
	PYTHONPATH=$(CLIENTS)/xgrammar $(BIN)/python -m pytest tests/engine/test_grammar_backends.py
	$(BIN)/python -m pytest tests/clients

check: $(STAMP) ## format, lint, types, import layers, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit tests/docs

format: $(STAMP) ## apply formatting and safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## acceptance and CPU decode benchmarks
	$(BIN)/python benchmarks/acceptance.py
	$(BIN)/python benchmarks/decode_cpu.py

clean:
	rm -rf $(VENV) $(CLIENTS) build dist .mypy_cache .ruff_cache .pytest_cache
