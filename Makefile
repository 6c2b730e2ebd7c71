# make demo  — environment, a real data set into LMDB, LeNet trained through Ray, the report printed and written
# make test  — environment and the test suite
# Both need Python 3.11 or 3.12 and nothing else; everything they install goes into .venv.

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PYTEST := $(PY) -m pytest

.PHONY: env demo test test-long test-oracle test-gpu fuzz lint clean

env: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 found; try: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@echo "Making $(VENV) with $(PYTHON) (about 1 GB, one to three minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --editable '.[examples,test]'
	@touch $@

data/mnist_train.npz data/mnist_test.npz: examples/mnist_subset.py | $(READY)
	$(PY) examples/mnist_subset.py data/mnist

data/mnist_%_lmdb: data/mnist_%.npz
	$(PY) -m datasets.convert npz $< $@ --backend lmdb --force
	@touch $@

demo: $(READY) data/mnist_train_lmdb data/mnist_test_lmdb
	$(PY) -m pipeline.train examples/lenet_mnist.yaml --run.if_exists replace
	$(PY) -m profiler.report runs/lenet --quiet --html runs/lenet/report.html --json runs/lenet/report.json --trace runs/lenet/trace.json

# Beside one another what bears it, then one after the other what measures.
TESTS := not gpu and not long and not oracle
test: $(READY)
	$(PYTEST) -m "$(TESTS) and not alone" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
	$(PYTEST) -m "$(TESTS) and alone" $$(grep -rl "mark\.alone" tests)

test-long: $(READY)
	$(PYTEST) -m "long and not gpu" --timeout 1800

test-oracle: $(READY)
	$(PY) -c 'import cv2, torch' 2>/dev/null || $(PIP) --editable '.[oracle]'
	$(PYTEST) -m "oracle and not long"

# For a machine with an NVIDIA driver: the tests, then the acceptance, whose results lie in gpu_acceptance.json.
GPU_EXTRA ?= gpu
test-gpu: $(READY)
	$(PY) -c 'import cupy, cudnn' 2>/dev/null || $(PIP) --editable '.[$(GPU_EXTRA)]'
	$(PYTEST) tests/cuda -m gpu --timeout 1800
	$(PY) -m benchmarks.gpu_acceptance --json gpu_acceptance.json

# Records, image files and pages of an LMDB with any bytes, guided by coverage; what ends the run lies in .fuzz/ (see tests/fuzz).
FUZZ_SECONDS ?= 600
fuzz: $(READY)
	$(PY) -c 'import atheris' 2>/dev/null || $(PIP) --editable '.[fuzz]'
	$(PY) -m tests.fuzz.fuzz_records .fuzz/corpus -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=1500 \
		-max_len=4096 -artifact_prefix=.fuzz/
	$(PY) -m tests.fuzz.fuzz_pages .fuzz/pages -max_total_time=$(FUZZ_SECONDS) -timeout=30 -rss_limit_mb=1500 \
		-max_len=170 -artifact_prefix=.fuzz/

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) .fuzz data runs
