# make test, make demo: all that is needed to try the library. Both set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
BIN := $(VENV)/bin

.PHONY: test demo lint docs bench chaos coverage notebooks fuzz mutants dist oldest clean

test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --dist worksteal

demo: $(VENV)/installed
	$(BIN)/backdrop run gp --preset quick

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# New random examples; what fails is printed with the command that tries it again. make fuzz FUZZ='--seconds 60'
# And new random models, of which the suite has a few that stay the same.
FUZZ ?= --examples 50000
MODELS ?= 60

fuzz: $(VENV)/installed
	$(BIN)/python tests/fuzz.py $(FUZZ)
	BACKDROP_FRESH=$(MODELS) $(BIN)/python -m pytest -n auto --dist worksteal tests/skip/test_random.py tests/placement/test_fields.py -k "random or far"

# Small faults put into functional, layers, losses and skip: which does no test see? make mutants MUTANTS='--count 100'
MUTANTS ?=

mutants: $(VENV)/installed
	$(BIN)/python tests/mutants.py $(MUTANTS)

docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict

bench: $(VENV)/installed
	$(BIN)/python benchmarks/bench_all.py

# Studies whose processes are killed a thousand times: an hour or two. The tests have a short form.
chaos: $(VENV)/installed
	$(BIN)/python tests/chaos.py --kills 1000

# How much of models that others wrote is skipped: figures and a page.
coverage: $(VENV)/coverage
	$(BIN)/python benchmarks/bench_coverage.py --json benchmarks/results/coverage.json --markdown docs/coverage.md

# Beside timm and torchvision, without what they would bring along.
$(VENV)/coverage: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps --constraint $(VENV)/constraints.txt --target $(VENV)/foreign monai segmentation-models-pytorch
	touch $@

# The examples that are notebooks too, run anew.
notebooks: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[notebooks]'
	$(BIN)/python examples/notebooks/make.py

# What is released: a wheel and an sdist, each tried in an environment that has nothing but torch.
dist: $(VENV)/installed
	rm -rf dist $(VENV)/empty
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(VENV)/empty
	for package in dist/*.whl dist/*.tar.gz; do \
		$(VENV)/empty/bin/pip install --quiet --constraint $(VENV)/constraints.txt $$package && \
		$(VENV)/empty/bin/python tests/smoke.py && \
		$(VENV)/empty/bin/pip uninstall --quiet --yes torch-backdrop || exit 1; \
	done
	rm -rf $(VENV)/empty

# The core with the oldest torch that is supported, in an environment that has little else.
OLDEST := $(shell sed -n 's/.*"torch>=\([0-9.]*\),.*/\1.0/p' pyproject.toml)
CORE := test_functional.py test_layers.py test_schedules.py core/test_checks.py losses placement graph skip textures
LATER := random reasons

oldest: .venv-core/installed
	.venv-core/bin/python -m pytest -n auto --dist worksteal $(CORE:%=tests/%) $(LATER:%=--ignore=tests/skip/test_%.py) --deselect tests/skip/test_samples.py::test_any_nesting_of_tensors --deselect tests/skip/test_samples.py::test_nested_outputs_without_skipping_share_one_mask

.venv-core/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-core
	sed 's/^torch==.*/torch==$(OLDEST)/' constraints.txt > .venv-core/constraints.txt
	.venv-core/bin/python -m pip install --quiet --constraint .venv-core/constraints.txt --editable . hypothesis matplotlib numpy pytest pytest-xdist rich scikit-learn
	touch $@

clean:
	rm -rf $(VENV) .venv-core bench dist site

# timm wants torchvision, whose wheels want a torch of their own; the tests need neither that nor its compiled part. Both
# lie aside, where only tests look: other libraries import torchvision wherever they see it.
# Another version of torch or Python, beside the usual environment:
#   make test TORCH=2.6.0 PYTHON=python3.10 VENV=.venv-oldest
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed, but $(PYTHON) is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev,docs,experiments]'
	$(if $(filter $(PINNED),$(TORCH)),$(BIN)/python -m pip install --quiet --no-deps --constraint $(VENV)/constraints.txt --target $(VENV)/foreign timm torchvision)
	touch $@
