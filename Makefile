# make train      the main job: trains a real model on real text with its state on NVMe
# make test       the tests
# make test-slow  the long ones: about 50 minutes on 2 cores
# make check      lint, types, formats, layering and packaging
# Each does the set-up it needs, once. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAYERS := aio_native tiers zero engine bench
C_FILES := $(wildcard aio_native/csrc/*.[ch] zero/csrc/*.[ch])
HAND_WRITTEN_C := $(C_FILES)

.PHONY: train test test-slow check build setup clean
.DEFAULT_GOAL := help
.PHONY: help
help:
	@sed -n '1,5s/^# //p' Makefile

train: setup
	$(BIN)/lamina train --size small --host-bytes 80MiB --device-bytes 24MiB $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(HAND_WRITTEN_C)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_packaging.py

setup: .setup/install

# System packages: the C headers of liburing and pkg-config. Without them the threads backend is built.
.setup/system:
	@mkdir -p .setup
	@PYTHON="$(PYTHON)" sh .ci/system-packages
	@touch $@

.setup/venv: .setup/system constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools wheel cffi
	$(BIN)/python -m pip install -q -c constraints.txt "torch" numpy
	@touch $@

# The link tree lets mypy and pyright see the folders under the names that an install gives them.
.setup/install: .setup/venv setup.py pyproject.toml $(C_FILES) $(wildcard */_*_build.py)
	@mkdir -p build/typing/lamina
	@for layer in $(LAYERS); do ln -sfn ../../../$$layer build/typing/lamina/$$layer; done
	$(BIN)/python -m pip install -q --no-build-isolation -c constraints.txt -e '.[dev,hf]'
	@touch $@

build: setup

clean:
	rm -rf build dist .setup *.egg-info aio_native/*.so zero/*.so
