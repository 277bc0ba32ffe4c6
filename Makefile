# Two commands set everything up on a machine that has Python 3.11 or newer and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
GPU_JOBS ?= 8
GPU_LARGE_JOBS ?= 2
GPU_TESTS ?= build/gpu.xml
GPU_RANKS ?= build/ranks.json
ANY_DEVICE ?= tests/tensors tests/compiler tests/runtime tests/inspect tests/fusions tests/ops
BIN = $(VENV)/bin
# What is imported is compiled at its first import and no more, also in processes that tests start.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test docs check lint types suite slow fuzz mutants gpu gpu-distributed gpu-suite sanitize install clean

demo: install
	$(BIN)/opfuse run configs/quickstart.yaml --force

# mypy takes one core, so it runs beside the tests and not before them.
test: install lint
	$(MAKE) --no-print-directory --jobs 2 types suite

# A worker that is done takes half of what another has left: files stay together, and none waits.
suite: install
	$(BIN)/pytest -n $(JOBS) --dist worksteal

# The documentation site, in build/site; every warning is an error.
docs: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/pytest -m docs tests/test_site.py

check: lint types

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

slow: install
	$(BIN)/pytest -n $(JOBS) -m slow --timeout 0

# 5000 random graphs, fused against op by op against plain torch, half an hour on two cores; then 50 000 generated models and
# scripts, converted against plain.
fuzz: install
	$(BIN)/pytest -n $(JOBS) -m slow --timeout 0 tests/compiler/test_graphs.py tests/convert/differential

# Small changes of the source that a test must notice, by mutmut: `make mutants PATHS=opfuse/core TESTS=tests/ops`. It works in a
# copy, where a second run goes on; `cd build/mutants && ../../.venv/bin/mutmut show NAME` shows a survivor.
PATHS ?= opfuse/recipes
TESTS ?= $(PATHS:opfuse/%=tests/%)
mutants: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mutants]'
	mkdir -p build/mutants
	git ls-files -z | xargs -0 cp --parents --preserve=timestamps --update --target-directory build/mutants
	cd build/mutants && sed -i 's|^only_mutate = .*|only_mutate = ["$(PATHS)*"]|; s|^pytest_add_cli_args_test_selection = .*|pytest_add_cli_args_test_selection = ["$(TESTS)"]|' pyproject.toml
	cd build/mutants && PYTHONPATH= $(CURDIR)/$(BIN)/mutmut run --max-children $(JOBS)
	cd build/mutants && $(CURDIR)/$(BIN)/mutmut results

# On a machine with a GPU, in an environment that has torch and CuPy already. `gpu` takes ten minutes at most: parity, then timings
# and the record, named after the device, then what needs tens of GB or many processes.
gpu:
	$(PYTHON) -m pytest tests/gpu -n $(GPU_JOBS) --junit-xml $(GPU_TESTS)
	$(PYTHON) -m benchmarks.record --tests $(GPU_TESTS)
	$(PYTHON) -m pytest tests/gpu -n $(GPU_LARGE_JOBS) -m slow

# On a machine with several GPUs: training over NCCL beside training in one process, every recipe in every way, one rank a GPU;
# then timings and the record, named after the devices.
gpu-distributed:
	$(PYTHON) -m tests.distributed --device cuda --report $(GPU_RANKS)
	$(PYTHON) -m benchmarks.distributed --tests $(GPU_RANKS)

# The whole suite on a machine with a GPU, as it is and with the tensors of its tests on the GPU.
gpu-suite:
	$(PYTHON) -m pytest -n $(GPU_JOBS)
	$(PYTHON) -m pytest -n $(GPU_JOBS) --device cuda $(ANY_DEVICE)
	$(PYTHON) -m pytest tests/gpu -n $(GPU_LARGE_JOBS) -m slow

# With the CUDA toolkit as well: compute-sanitizer over every kernel, added to the record.
sanitize:
	$(PYTHON) -m benchmarks.record --only memcheck racecheck initcheck synccheck

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test,plot]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
