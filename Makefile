# make setup   a virtual environment with everything in it      make demo    train a real model on two workers
# make test    set up what tests need and run them              make lint    style, types, import rules
# make bench   the benchmarks                                   make proto   regenerate the etcd messages
#
# PYTHON=python3.12   the interpreter the environment is made with
# TORCH=torch==2.12.0 another torch (any pip requirement; 2.11 to 2.13)
# TESTS_AT_ONCE=1     how many tests run at a time (3: many of them wait more than they compute)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
TESTS_AT_ONCE ?= 3
# Whole clusters, whose nodes are to come at about the same time: one after the other.
STORIES := tests/cluster tests/elastic/test_chaos.py tests/lab tests/net/test_namespaces.py
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
CPP := $(shell find cpp_ext -type f 2>/dev/null)
CPP_FORMATTED = $(shell git ls-files 'cpp_ext/**' 'tests/**' | grep -E '\.(c|h|hpp|cc|cpp|cu|cuh)$$')

.PHONY: help setup test-deps test lint demo bench proto clean

help:
	@sed -n '1,/^SHELL/{s/^# \{0,1\}//p}' Makefile

setup: baguarun/_build_info.py

# The environment and torch. scripts/make_venv.sh takes over a torch that PYTHON already has.
$(STAMPS)/torch: scripts/make_venv.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/make_venv.sh $(VENV)
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/package: $(STAMPS)/torch pyproject.toml setup.py
	$(BIN)/python -m pip install --no-build-isolation -e '.[dev]'
	touch $@

# setup.py knows the compiler's dependencies: only what changed is compiled.
baguarun/_build_info.py: $(STAMPS)/package $(CPP) scripts/nccl_plugin.py
	$(BIN)/python setup.py -q build_ext --inplace

test-deps:
	scripts/test_deps.sh

# tc and iptables lie there, which is not on every user's PATH.
test bench: export PATH := $(PATH):/usr/sbin:/sbin
test: setup test-deps
	$(BIN)/python -m pytest -m "not gpu" -n $(TESTS_AT_ONCE) --dist worksteal $(addprefix --ignore=,$(STORIES))
	$(BIN)/python -m pytest -m "not gpu" $(STORIES)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	scripts/clang_format.sh $(CPP_FORMATTED)

demo: setup
	$(BIN)/baguarun run --nproc-per-node 2 examples/digits/train.py

bench: setup
	for name in startup rendezvous restart step codec net_tcp net_shm net_backend algorithms quality time_to_loss memory recovery stream chaos false_alarms; do $(BIN)/python -m benchmarks.$$name; done

proto:
	scripts/proto.sh

clean:
	rm -rf build dist *.egg-info baguarun/_build_info.py baguarun/_C*.so baguarun/lib $(STAMPS)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
