# On a fresh machine: `make demo`, `make quick`, `make test`. They build .venv by themselves.
PYTHON ?= python3
# More arguments of `pip install`, none by default. With --extra-index-url and the address of PyTorch's index of CPU
# wheels, the installation takes torch without CUDA; README.md says how much smaller that is.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL ?= examples/segue-shapes
PORT ?= 8000

# The packages of `make nightly` lie in an environment of their own, over .venv: `make test` shows that none is needed.
NIGHTLY := $(VENV)/nightly
# of the lowest versions that pyproject.toml allows; their torch is the CUDA build, 5 GB
LOWEST := $(VENV)/lowest
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder
MINUTES ?= 600
SEED ?= $(shell date +%s)

# memory that tests free stays with the process, as in Segue's workers: getting it anew takes longer
quick test nightly: export MALLOC_MMAP_THRESHOLD_ := 67108864
quick test nightly: export MALLOC_TRIM_THRESHOLD_ := 268435456

.PHONY: demo serve quick test check nightly readme resolve lowest minutes cover bench figures gpu-check clean

$(INSTALLED): pyproject.toml constraints.txt $(wildcard src/segue/kernels/cpu/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]'
	touch $@

demo: $(INSTALLED)  ## one request of each kind against a real server; results in out/
	$(BIN)/python examples/demo.py '$(MODEL)' out

serve: $(INSTALLED)  ## leave the server running (Ctrl-C drains and stops it)
	$(BIN)/segue serve '$(MODEL)' --port $(PORT)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

quick: check  ## and the tests that need no checkpoint, in less than two minutes
	$(BIN)/python $(PYTEST) --quick

test: check  ## everything that needs no GPU; a process per core takes one file of tests after another
	$(BIN)/python $(PYTEST) --junitxml=out/tests.xml

$(NIGHTLY)/.installed: $(INSTALLED)
	$(BIN)/python -m venv --clear --without-pip $(NIGHTLY)
	$(BIN)/python -c 'import site, sys; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> $$($(NIGHTLY)/bin/python -c 'import site; print(site.getsitepackages()[0])')/over.pth
	$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
		print(*extras["nightly"], sep="\n")' > $(NIGHTLY)/requirements.txt
	$(BIN)/python -m pip --python $(NIGHTLY)/bin/python install --quiet --disable-pip-version-check -c constraints.txt \
		-r $(NIGHTLY)/requirements.txt
	touch $@

nightly: $(NIGHTLY)/.installed  ## what `make test` leaves out, for as many minutes, in an order drawn from SEED
	$(NIGHTLY)/bin/python $(PYTEST) --nightly --minutes $(MINUTES) --shuffle $(SEED)

readme: $(INSTALLED)  ## each command of README.md, as it stands
	$(BIN)/python tests/docs/readme_commands.py

resolve: $(NIGHTLY)/.installed  ## do the pinned, the lowest and the newest versions fit together on a new machine?
	$(NIGHTLY)/bin/python -m pytest tests/test_versions.py

lowest: $(NIGHTLY)/.installed  ## the tests with the lowest versions that pyproject.toml allows
	$(BIN)/python -m venv --clear --without-pip $(LOWEST)
	$(NIGHTLY)/bin/uv --no-config pip install --python $(LOWEST)/bin/python --quiet --resolution lowest-direct -e '.[dev]'
	$(LOWEST)/bin/python $(PYTEST)

minutes:  ## write the table of CONTRIBUTING.md from the durations of the last `make test`
	$(BIN)/python tests/minutes.py out/tests.xml CONTRIBUTING.md

CONTROL_PLANE := graph messages connectors orchestrator
cover: $(INSTALLED)  ## coverage of the control plane, at least 95%
	$(BIN)/python -m pytest -q tests/graph tests/connectors tests/orchestrator tests/server \
		tests/e2e/recovery/test_truth_requests.py tests/e2e/recovery/test_truth_alone.py \
		$(CONTROL_PLANE:%=--cov=segue.%) --cov-branch --cov-report=term --cov-fail-under=95

bench: $(INSTALLED)
	$(BIN)/segue bench

# It needs pip and an index. Where segue is installed already, without network and in parts of some 15 minutes:
# segue bench gpu --only AB --out out/gpu/AB; then CD, then EFGH.
gpu-check: $(INSTALLED)  ## on a machine with an NVIDIA GPU: tests and measurements in 40 minutes; report in out/gpu/
	$(BIN)/segue bench gpu

figures: $(INSTALLED)  ## the tables of README.md, docs/benchmarks.md and docs/scale.md, from bench/results
	$(BIN)/python -m segue.bench.figures

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
