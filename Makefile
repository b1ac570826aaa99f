# `make demo` and `make test` set everything up on a fresh machine: nothing but Python 3.11+ and a package index is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TYPED := build/typed/h3opt

.PHONY: demo test test-slow lint types test-gpu sanitize clean
.DELETE_ON_ERROR:

demo: $(VENV)/ready
	$(BIN)/h3opt demo --out out

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu and not slow" -n 2 --dist loadgroup

# What takes more than ten seconds a test: whole demos, Inductor.
test-slow: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow and not gpu"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The top-level folders are subpackages of h3opt (see package-dir in pyproject.toml), which mypy cannot know: link them so.
types: $(VENV)/ready
	rm -rf $(TYPED) && mkdir -p $(TYPED)
	ln -s $(CURDIR)/h3opt/* $(TYPED)/
	ln -s $(CURDIR)/passes $(CURDIR)/reference $(CURDIR)/configs $(TYPED)/
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p h3opt

# On a CUDA machine, with the python that has torch: make test-gpu PYTEST="python3 -m pytest"
# What is skipped is listed with its reason (-rs): a missing GPU or library never passes for a tested one.
PYTEST ?= $(BIN)/pytest
test-gpu: $(if $(filter $(BIN)/pytest,$(PYTEST)),$(VENV)/ready)
	$(PYTEST) -m gpu -rs

# Every kernel of ours at few odd shapes under compute-sanitizer; TOOL=racecheck looks for races in shared memory.
# Each tensor is an allocation of its own, so that a read past its end is one; --padding keeps neighbours apart.
TOOL ?= memcheck
PADDING := $(if $(filter memcheck,$(TOOL)),--padding 64)
sanitize: $(if $(filter $(BIN)/pytest,$(PYTEST)),$(VENV)/ready)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) $(PADDING) --report-api-errors no \
		--target-processes application-only --error-exitcode 9 $(PYTEST) tests/kernels -m sanitize -rs -p no:cacheprovider

$(VENV)/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.14.1 torchvision==0.29.1
	$(BIN)/pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf build out .pytest_cache .mypy_cache .ruff_cache .hypothesis
