# Every target sets up .venv by itself, from a fresh clone on.

PYTHON ?= python3
# The builds of torch and Triton to install first, so that nothing else picks others. Triton is for
# the tests: its interpreter, and compiling for GPUs that are not here.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: help demo test browser docs aot lint format bench clean

help:
	@echo "make demo    load SmolLM2-135M (fetched once, 93 MB) and write text with it"
	@echo "make test    run the tests"
	@echo "make browser install what the tests of pages need: playwright, and chromium on Debian"
	@echo "make docs    draw the pictures and fill in the numbers of docs/attention.md again"
	@echo "make aot     compile every kernel for every GPU of the tables (no GPU needed; minutes)"
	@echo "make lint    check style"
	@echo "make format  apply style"
	@echo "make bench   run the benchmarks of this machine"
	@echo "make clean   remove $(VENV)"

$(VENV)/installed: pyproject.toml
	@echo "-- setting up $(VENV): $(TORCH), $(TRITON), then flashpage and what it needs (a few minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check $(TORCH) $(TRITON)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: $(VENV)/installed
	@echo "-- writing text with SmolLM2-135M-Instruct through the paged engine, on the CPU"
	$(RUN) -m flashpage generate "Explain in three sentences how a library index works."

# Waiting threads that spin would take the processor from the tests beside them.
test: $(VENV)/installed
	@echo "-- running the tests"
	OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal

browser: $(VENV)/installed
	@echo "-- installing playwright, and chromium if there is none (Debian, as root)"
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[browser]"
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then \
	  echo "chromium is there"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	else \
	  echo "no chromium, and not root on Debian: apt install chromium" >&2; exit 1; \
	fi

docs: $(VENV)/installed
	@echo "-- drawing docs/pictures, filling in the numbers of docs/attention.md"
	$(RUN) docs/make_docs.py

aot: $(VENV)/installed
	@echo "-- compiling the kernels ahead of time"
	PYTHONPATH=src:tests $(RUN) tests/attention/triton/aot.py --all
	PYTHONPATH=src:tests $(RUN) tests/attention/hopper/aot.py --all

lint: $(VENV)/installed
	@echo "-- checking style"
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/installed
	@echo "-- attention against torch"
	$(RUN) benchmarks/attention.py
	$(RUN) benchmarks/backward.py
	$(RUN) benchmarks/paged.py
	@echo "-- products of a few rows against cuBLAS (GPU only)"
	$(RUN) benchmarks/linear.py
	@echo "-- the engine against transformers"
	$(RUN) benchmarks/engine.py

clean:
	rm -rf $(VENV)
