# make train   the debug model on this machine's GPUs, or on two CPU ranks
# make test    the tests            make check   lint, format, types
# make bench   tokens/s and where the time goes, on a GPU: ARGS="--cases wide-rowwise"
# Everything is installed once, into .venv; a change of the requirements installs again.

PYTHON ?= python3
ARGS ?=
RUN := outputs/debug
export OMP_NUM_THREADS := 1

.PHONY: train test check format docs bench clean

train: .venv/installed
	@if [ -d $(RUN) ]; then rm -rf $(RUN).previous && mv $(RUN) $(RUN).previous && echo "the run before is now in $(RUN).previous"; fi
	.venv/bin/torchrun --nproc-per-node $$(.venv/bin/python -c "import torch; print(torch.cuda.device_count() or 2)") \
		train.py --config debug.toml $(ARGS)

test: .venv/installed-dev
	.venv/bin/python -m pytest $(ARGS)

check: .venv/installed-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

format: .venv/installed-dev
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

docs: .venv/installed
	.venv/bin/python -m scripts.configuration_reference

bench: .venv/installed
	.venv/bin/python -m scripts.bench $(ARGS)

clean:
	rm -rf .venv

.venv/installed: requirements.txt
	$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed: make PYTHON=python3.11' if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
