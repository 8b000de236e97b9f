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
EXTRAS := $(addprefix --extra ,train serve prep pipeline)
COMPILE := $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header

.PHONY: demo test test-slow check format lock golden frontend clean

demo: .venv/.installed
	$(BIN)/evernear demo --source $(SOURCE) --workdir $(WORKDIR) $(if $(KEEP),--keep)

test: .venv/.installed .venv/kserve/.installed .venv/swift/.installed
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-slow: .venv/.installed .venv/swift/.installed
	$(BIN)/pytest -m slow

check: .venv/.installed .venv/kserve/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright --project src/evernear/serving/kserve
	$(BIN)/lint-imports
	$(BIN)/python -m pipelines.compile --check

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: .venv/.installed
	$(BIN)/python -m pipelines.compile

# After a change of Frontend.java; needs a JDK.
frontend: .venv/.installed
	$(BIN)/python -m evernear.serving.frontend.build

lock: $(UV)
	$(COMPILE) --upgrade --excludes requirements-torch.in pyproject.toml $(EXTRAS) --group dev -o requirements.lock
	$(COMPILE) --upgrade --constraints requirements.lock requirements-torch.in -o requirements-torch.lock
	cp requirements.lock requirements-kserve.lock  # what stands there is preferred: both locks differ where they must
	$(COMPILE) --excludes requirements-torch.in pyproject.toml --extra model --extra kserve -o requirements-kserve.lock
	$(COMPILE) --upgrade tests/store/requirements-swift.in -o tests/store/requirements-swift.lock

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
