# `make demo` and `make test` are all the set-up there is: both make the environment first.
#   make demo SOURCE=mnist        the full MNIST instead of scikit-learn's digits
#   make demo TORCH_BACKEND=cpu   the small CPU build of torch (or cu128, auto ...; empty: the index's default)
#   make demo KEEP=1              leave TorchServe up; `.venv/bin/evernear stop` ends it
SOURCE ?= digits
TORCH_BACKEND ?=
KEEP ?=
PYTHON ?= python3
BIN := .venv/bin
UV := .venv/tools/bin/uv

.PHONY: demo test test-slow check format lock golden clean

.venv/.installed: pyproject.toml requirements.lock Makefile
	@echo "Making the environment (.venv); torch is the large part ..."
	$(PYTHON) -m venv .venv/tools
	.venv/tools/bin/pip install --quiet uv
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv
	$(UV) pip install --quiet --python $(BIN)/python $(if $(TORCH_BACKEND),--torch-backend=$(TORCH_BACKEND)) \
		--requirements requirements.lock --editable '.[train,serve,pipeline]' --group dev
	@touch $@
