# make demo — the whole story on this machine.
# make check — linters, types, the fast tests: what to run after every change.
# make test — linters, types, all tests but those of faults and of a cluster.
# make test-faults — kills at calls that change files, edited and broken files, signals.
# make test-cluster — jobs on a SLURM cluster that the tests start here; needs slurm-wlm, munge, root.
# make test-extras — the extras at the lowest and the newest versions of pyproject.toml.
# make pictures — the pictures of the documentation; needs graphviz, chromium and a finished demo.
# make docs — the generated pages, and the documentation site in build/site.
# PIP_ARGS is passed to pip, e.g. to point it at an index with CPU-only builds of torch.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
# conftest.py puts the longest files first; xdist would put those of the most tests first. Hundreds of
# processes import the code: it is compiled once, also where the environment says otherwise.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q --durations 30
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder
PIP_INSTALL := $(VENV)/bin/python -m pip install --constraint constraints.txt $(PIP_ARGS)

.PHONY: demo check test fast-tests most-tests test-cluster test-extras test-faults
.PHONY: lint style types docs pictures bench clean

demo: $(VENV)/installed
	$(VENV)/bin/mmnmt run demo

# mypy, which takes a minute without a cache and one core, runs next to the tests.
check: style
	$(MAKE) --jobs 2 types fast-tests

test: style
	$(MAKE) --jobs 2 types most-tests

fast-tests:
	$(PYTEST) $(PARALLEL) -m "not slow and not cluster" --ignore tests/faults

most-tests:
	$(PYTEST) $(PARALLEL) -m "not cluster" --ignore tests/faults

test-cluster: $(VENV)/installed-dev
	$(PYTEST) -m cluster -rs tests/cluster

# torch is the tested one. comet, which asks for numpy 1, would hold the newest others back. At last
# transformers 5, which the extra excludes, loads the exports that it can compute.
EXTRAS := analysis,dev,export,hub,monitors,mpi,parquet,serve,zstd
test-extras:
	mkdir -p build
	grep ^torch== constraints.txt > build/newest.txt
	tr '"' '\n' < pyproject.toml | sed -nE 's/^([A-Za-z0-9_-]+)(\[[a-z]+\])?>=([0-9.]+).*/\1==\3/p' \
		| grep -vE '^(torch|setuptools)==' | cat - build/newest.txt > build/lowest.txt
	$(MAKE) test-versions-lowest EXTRAS=$(EXTRAS),comet
	$(MAKE) test-versions-newest
	build/newest/bin/python -m pip install --upgrade $(PIP_ARGS) transformers
	OMP_NUM_THREADS=1 build/newest/bin/python -m pytest -q \
		tests/checkpoints/foreign/test_export_to_transformers.py

test-versions-%:
	$(PYTHON) -m venv --clear build/$*
	build/$*/bin/python -m pip install --constraint build/$*.txt $(PIP_ARGS) --editable '.[$(EXTRAS)]'
	OMP_NUM_THREADS=1 build/$*/bin/python -m pytest -q -m "not slow and not cluster" \
		tests/analysis tests/artifacts/test_raw_input.py tests/checkpoints tests/data_prep/readers \
		tests/evaluation/test_comet.py tests/serving tests/tasks tests/test_translate_text.py
	OMP_NUM_THREADS=1 build/$*/bin/python -m pytest -q tests/faults/test_fuzz.py \
		-k "zstandard or Parquet"

# Faults on two cores within a quarter of an hour: a sample of all calls that change state, killed
# plans, full disks, bad bytes; all edited and broken files; five minutes of signals to a plan.
test-faults: $(VENV)/installed-dev
	$(PYTEST) $(PARALLEL) tests/faults --ignore tests/faults/test_fuzz.py \
		--ignore tests/faults/test_readers_sweep.py
	$(PYTEST) $(PARALLEL) --every-case tests/faults/test_fuzz.py tests/faults/test_readers_sweep.py
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(VENV)/bin/python tests/faults/soak.py --minutes 5 --seed 1

lint: style types

style: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/installed-dev
	$(VENV)/bin/mypy

docs: $(VENV)/installed-docs
	$(VENV)/bin/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

pictures:
	for name in pipeline update moe_layer; do \
		dot -Tsvg docs/pictures/$$name.dot -o docs/pictures/$$name.svg || exit 1; done
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,1030 \
		--screenshot=docs/pictures/report.png file://$(CURDIR)/runs/demo/evaluation/report.html

bench: $(VENV)/installed-dev
	for script in $$(grep -l '^if __name__' tests/bench/*.py); do \
		$(VENV)/bin/python $$script || failed=1; done; test -z "$$failed"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP_INSTALL) --editable '.[dev,gpu-tests,parquet,zstd]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP_INSTALL) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
