# Two commands on a fresh machine: `make demo` and `make test`. Both build .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL ?= out/qwen2.5-omni-tiny
PORT ?= 8000

.PHONY: demo serve test check cover bench clean

$(INSTALLED): pyproject.toml constraints.txt $(wildcard src/segue/kernels/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(MODEL)/config.json: $(INSTALLED)
	$(BIN)/segue tiny qwen2.5-omni $(MODEL)

demo: $(MODEL)/config.json  ## one request of each kind against a real server; results in out/
	$(BIN)/python examples/demo.py $(MODEL) out

serve: $(MODEL)/config.json  ## leave the server running (Ctrl-C drains and stops it)
	$(BIN)/segue serve $(MODEL) --port $(PORT)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check  ## everything that needs no GPU; a process per core takes one file of tests after another
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

CONTROL_PLANE := graph messages connectors orchestrator
cover: $(INSTALLED)  ## coverage of the control plane, at least 95%
	$(BIN)/python -m pytest -q tests/graph tests/connectors tests/orchestrator tests/server \
		tests/e2e/test_truth_requests.py tests/e2e/test_truth_alone.py \
		$(CONTROL_PLANE:%=--cov=segue.%) --cov-branch --cov-report=term --cov-fail-under=95

bench: $(INSTALLED)
	$(BIN)/segue bench

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
