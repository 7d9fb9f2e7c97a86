# What one does here, each as one command that first does the set-up that is missing. `make` lists them.

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Extras to install beside the base: `make setup EXTRAS="te wandb"`. Once installed they stay.
EXTRAS ?=
# What `make grpo`, `make sft` and `make dpo` run, and what they change in it: `make grpo ARGS="grpo.max_num_steps=20"`.
CONFIG_grpo ?= examples/configs/grpo_tiny_cpu.yaml
CONFIG_sft ?= examples/configs/sft_tiny_cpu.yaml
CONFIG_dpo ?= examples/configs/dpo_tiny_cpu.yaml
ARGS ?=

PYTHON := .venv/bin/python

# Without bytecode each process of `make test` compiles the package and rewrites the tests' assertions anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup grpo sft dpo test messages testgpu lint docs lock clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## Install what uv.lock pins into .venv (EXTRAS=te for GPUs)
	@tools/setup.sh $(EXTRAS:%=--extra %)

grpo: setup ## Train the tiny model with GRPO (ARGS="key=value ..." changes the recipe)
	$(PYTHON) examples/run_grpo.py --config $(CONFIG_grpo) $(ARGS)

sft: setup ## Train the tiny model with SFT
	$(PYTHON) examples/run_sft.py --config $(CONFIG_sft) $(ARGS)

dpo: setup ## Train the tiny model with DPO, after its SFT
	$(PYTHON) examples/run_dpo.py --config $(CONFIG_dpo) $(ARGS)

test: ## Run every test; those that need a GPU skip where there is none (ARGS="-k name" selects)
	@tools/setup.sh $(EXTRAS:%=--extra %) --group adapters
	$(PYTHON) -m pytest -q -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

messages: setup ## Write the golden file of recipe errors anew; review its diff
	WRITE_MESSAGES=1 $(PYTHON) -m pytest -q tests/unit/config

testgpu: setup ## Run the tests that need a GPU (make setup EXTRAS="te vllm" first)
	$(PYTHON) -m pytest -q -m "gpu and not whole_gpu" -n 9 --dist worksteal $(ARGS)
	$(PYTHON) -m pytest -q -m "gpu and whole_gpu" $(ARGS)

lint: setup ## Check style, formatting, types and the lock
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) tools/portable_lock.py check

docs: ## Build the documentation into site/
	@tools/setup.sh $(EXTRAS:%=--extra %) --group docs
	$(PYTHON) tools/keys_page.py
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

lock: setup ## Resolve the dependencies anew and write uv.lock
	.venv/bin/uv lock
	$(PYTHON) tools/portable_lock.py strip

clean: ## Delete what is built or cached (not the environments .venv and .uv, nor results/)
	rm -rf build dist site docs/recipe-keys.md .ruff_cache .mypy_cache .pytest_cache
	find . -name __pycache__ -not -path './.venv/*' -not -path './.uv/*' -prune -exec rm -rf {} +
