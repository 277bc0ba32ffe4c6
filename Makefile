# Two commands set everything up on a machine that has Python 3.11 or newer and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
GPU_JOBS ?= 8
BIN = $(VENV)/bin

.PHONY: demo test check slow gpu sanitize install clean

demo: install
	$(BIN)/opfuse run configs/quickstart.yaml

test: install check
	$(BIN)/pytest -n $(JOBS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: install
	$(BIN)/pytest -n $(JOBS) -m slow

# On a machine with a GPU, in an environment that has torch and CuPy already: parity, then timings, then the record; ten minutes.
gpu:
	$(PYTHON) -m pytest tests/gpu -n $(GPU_JOBS)
	$(PYTHON) -m benchmarks.record benchmarks/results/h200.json

# With the CUDA toolkit as well: compute-sanitizer over every kernel, added to the record.
sanitize:
	$(PYTHON) -m benchmarks.record benchmarks/results/h200.json --only sanitizer

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,plot]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
