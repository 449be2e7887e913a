# The project's commands. `make help` lists them; README.md has the same for who has no
# make. Everything is installed into .venv and nothing outside this folder changes, but
# for the model cache.

# Overrides: make test TORCH=torch==2.10.0 TORCH_ARGS="--index-url ..." PYTHON=python3.12
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
TORCH ?= $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)
TORCH_ARGS ?=
PROMPT ?= Why is the sky blue?
export PROMPT_TEXT := $(value PROMPT)
CHAPTERS ?=
PORT ?= 8000
WORKERS ?= 2

ifeq ($(OS),Windows_NT)
BIN := .venv/Scripts
else
BIN := .venv/bin
endif
PIP := $(BIN)/python -m pip --disable-pip-version-check
BOOK := _build/html

# Several processes with several threads each on few cores wait for one another. And what
# the tests compare was made without a GPU: those that want one run with `make gpu`.
TESTING := CI=true OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
	TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=

.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-kernels test-soak test-ray gpu check book chapters serve-book clean clean-all

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" \
	read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

demo: .venv/package.stamp  ## install, fetch the default model, answer a question
	$(BIN)/python -m minivllm generate -- "$$PROMPT_TEXT"

test: check  ## install the test extras, then run what CI runs
	$(BIN)/jupyter-book build . --all -W --keep-going -q
	$(TESTING) BOOK_HTML="$(CURDIR)/$(BOOK)" $(BIN)/python -m pytest -q -n $(WORKERS) \
		--dist loadfile --nbval-lax --nbval-current-env --nbval-cell-timeout=600 \
		--nbval-sanitize-with book/tools/nbval.cfg chapters tests

test-slow: .venv/test.stamp  ## run the tests that take minutes
	$(TESTING) $(BIN)/python -m pytest -q -m slow tests || [ $$? -eq 5 ]  # 5: there is none

test-kernels: .venv/test.stamp  ## all kernel tests: every shape, order and planted bug
	$(TESTING) $(BIN)/python -m pytest -q -n $(WORKERS) --dist load -m kernels tests

test-soak: .venv/test.stamp  ## 64 clients who come and go, for two minutes (SOAK_SECONDS=120)
	$(TESTING) $(BIN)/python -m pytest -q -s -m soak tests

test-ray: .venv/ray.stamp  ## two replicas on Ray Serve: answers, cancelling, a killed one
	$(TESTING) $(BIN)/python -m pytest -q -m ray tests

# -m "" takes the slow ones, too. Numbers are written only if all tests pass.
gpu: has-gpu .venv/test.stamp  ## on an NVIDIA GPU: test the kernels, then measure them
	@$(BIN)/python -c "import sys; from minivllm.ops.launch import why_no_launch; \
		sys.exit(why_no_launch())" || { echo "make gpu: no kernel can run: see above," \
		"and 'Which torch' in README.md for TORCH and TORCH_ARGS" >&2; exit 1; }
	$(BIN)/python -m pytest -q -m "" tests/gpu
	$(BIN)/python -m benchmarks.kernels

# Before anything is installed; a driver without a GPU does not start.
.PHONY: has-gpu
has-gpu: .venv/venv.stamp
	@$(BIN)/python -c "import ctypes, sys; \
		sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))" 2>/dev/null || { \
		echo "make gpu: there is no NVIDIA GPU here, or no driver for it" >&2; exit 1; }

check: .venv/test.stamp  ## lint; are sources, notebooks and package in step?
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python book/tools/tidy.py --check
	$(BIN)/python book/tools/run.py --check
	$(BIN)/python book/tools/export.py --check

chapters: .venv/test.stamp  ## run the chapters and export the package (CHAPTERS="01 a3")
	$(BIN)/python book/tools/run.py $(CHAPTERS)

# --all, since a page from the last build would not warn again.
book: .venv/book.stamp  ## build the book as HTML
	$(BIN)/jupyter-book build . --all -W --keep-going -q
	@echo "The book: $(CURDIR)/$(BOOK)/index.html"

serve-book: book  ## build the book and serve it on this machine (PORT=8000)
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(BOOK) $(PORT)

clean:  ## remove what was built (the model cache and .venv stay)
	rm -rf _build build dist .pytest_cache .ruff_cache .hypothesis

clean-all: clean  ## remove .venv, too
	rm -rf .venv minivllm.egg-info

# Installing. A stamp is touched when its step has succeeded, so nothing runs twice and
# an interrupted step runs again.

.venv/venv.stamp:
	@test -n "$(PYTHON)" || { echo "minivllm needs Python 3.11 or newer:" \
		"install it, or name it with make PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.prefix == sys.base_prefix)' \
		2>/dev/null || "$(PYTHON)" -m venv .venv || { \
		echo "$(PYTHON) cannot make a virtual environment: on Debian and Ubuntu" \
		"'apt install python3-venv' mends it; then run make again" >&2; exit 1; }
	@touch $@

# pip's constraints, less torch: that one is the user's choice.
.venv/constraints.txt: requirements.txt .venv/venv.stamp
	@sed '/^torch==/d' requirements.txt > $@

.venv/package.stamp: pyproject.toml .venv/constraints.txt
	@echo "installing the package into .venv: half a minute"
	$(PIP) install -q -c .venv/constraints.txt -e .
	@touch $@

.venv/book.stamp: .venv/package.stamp
	$(PIP) install -q -c .venv/constraints.txt -e ".[book]"
	@touch $@

# torch comes first and alone, so that nothing else brings another build of it. One that
# is there already stays, unless TORCH was given.
ifeq ($(origin TORCH),file)
.venv/torch.stamp: .venv/venv.stamp
	$(BIN)/python -c "import torch; assert torch.__version__ >= (2, 6)" 2>/dev/null \
		|| $(PIP) install $(TORCH_ARGS) "$(TORCH)"
	@touch $@
else
.PHONY: .venv/torch.stamp
.venv/torch.stamp: .venv/venv.stamp
	$(PIP) install $(TORCH_ARGS) "$(TORCH)"
	@touch $@
endif

# A torch for GPUs has brought parts of CUDA, in the versions that it needs.
.venv/test.stamp: .venv/torch.stamp .venv/book.stamp
	@$(BIN)/python -c "import sys, torch; sys.exit(torch.version.cuda is None)" \
		&& sed '/^nvidia-/d' .venv/constraints.txt > .venv/test.txt \
		|| cp .venv/constraints.txt .venv/test.txt
	$(PIP) install -q -c .venv/test.txt -e ".[torch,grammar,server,book,test]"
	@touch $@

# Without the constraints: Ray says which versions go with it.
.venv/ray.stamp: .venv/test.stamp
	$(PIP) install -q -e ".[ray]" "$$(sed -n 's/^\(ray==.*\)/\1/p' requirements.txt)"
	@touch $@
