# Every target sets up what it needs. PYTHON is the interpreter to build the environment from. CONSTRAINTS names the file
# of exact versions; `make demo CONSTRAINTS=` takes the newest that pyproject.toml allows instead.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS),--upgrade --upgrade-strategy eager)
INSTALLED := $(VENV)/installed-by-$(or $(notdir $(CONSTRAINTS)),nothing)
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --upgrade pyproject.toml

.PHONY: demo serve docs test test-fast sanitize quality format update wheels clean

demo: $(INSTALLED)
	$(BIN)/forerun demo $(if $(TARGET),--target $(TARGET))

serve: $(INSTALLED)-serve
	$(BIN)/forerun fetch smollm2 || true
	$(BIN)/forerun serve

# The site, into site/. A dead link, a page that the site does not list and a warning end it.
docs: $(INSTALLED)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: $(INSTALLED)-dev
	$(BIN)/pytest -n auto --dist worksteal

# One case of each test that is not marked `slow`.
test-fast: $(INSTALLED)-dev
	$(BIN)/pytest -n auto --dist worksteal -m "not slow" --first-cases

# Tests of C under AddressSanitizer and UBSan, which end at the first fault; then half a minute of damaged GGUF files with
# each variant that this machine runs. The library is built again after them, without a warning. The test of test_forward.py
# drives all variants.
SANITIZED := $(addprefix tests/,$(addprefix backends/test_,quantised.py chain.py quantised_heads.py) model/test_kv_cache.py csrc/test_shared.py \
	csrc/test_forward.py::test_every_variant_gives_the_same_bits)
SANITIZERS := LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
sanitize: $(INSTALLED)-dev
	CC=gcc CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -g -O1" $(BIN)/python forerun/csrc/build.py
	( $(SANITIZERS) $(BIN)/pytest -n auto --dist worksteal -vv $(SANITIZED) && \
	$(SANITIZERS) $(BIN)/python -c "from forerun.csrc.library import variants; print(*variants(), sep='\n')" | \
	xargs -P 2 -I % env FORERUN_KERNELS=% FORERUN_FUZZ=30 $(SANITIZERS) $(BIN)/pytest tests/backends/test_damaged_files.py -k damaged_files_are ); \
	found=$$?; CFLAGS=-Werror $(BIN)/python forerun/csrc/build.py && exit $$found

C_FILES := $(wildcard forerun/csrc/*.[ch] tests/csrc/drivers/*.c)
quality: $(INSTALLED)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/python .ci/tidy $(BIN)/clang-tidy
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: $(INSTALLED)-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

# The newest versions of everything, and the lowest of what pyproject.toml names.
update: $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(COMPILE) --all-extras --output-file constraints.txt
	$(COMPILE) --extra serve --extra grammar --resolution lowest-direct --output-file constraints-lowest.txt

# Wheels for all platforms, and the sdist, into dist/: by Zig's compiler, so that no other is needed. The versions of
# what builds them are exact, because they are in the bytes.
WHEELS := $(VENV)/wheels
wheels: $(WHEELS)/installed
	$(WHEELS)/bin/python -m deploy.wheels dist
	$(WHEELS)/bin/python -m deploy.check_wheels dist

$(WHEELS)/installed: deploy/wheels.txt
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install --quiet --requirement deploy/wheels.txt
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Installing by other constraints makes what was installed before stale.
$(INSTALLED): $(BIN)/python pyproject.toml setup.py $(wildcard forerun/csrc/*.[ch]) $(CONSTRAINTS)
	$(INSTALL) --editable .
	rm -f $(VENV)/installed-by-*
	touch $@

$(INSTALLED)-serve: $(INSTALLED)
	$(INSTALL) --editable ".[serve,grammar]"
	touch $@

$(INSTALLED)-docs: $(INSTALLED)
	$(INSTALL) --editable ".[docs]"
	touch $@

$(INSTALLED)-dev: $(INSTALLED)
	$(INSTALL) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
