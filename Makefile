# Every target sets up what it needs. Variables: PYTHON, BASE, COMMIT, UPSTREAM (a source tree), MINUTES, ONLY.
# BASE is a release, or `installed`: the torch that PYTHON has, and all else too, so that nothing is downloaded.
PYTHON ?= python3
BASE ?=
COMMIT ?=
UPSTREAM ?=
MINUTES ?=
ONLY ?=
# What this make is told is not for a make that a command calls.
MAKEOVERRIDES =
unexport ONLY
# With this, Python does not find fork/ in the folder that it runs in.
unexport PYTHONSAFEPATH

ifneq ($(BASE),)
export BASE
endif
PROJECT := $(shell sed -n 's/^project = "\([^"]*\)".*/\1/p' pyproject.toml)

BOOTSTRAP = @command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON): install Python 3.10 or newer, or name one with PYTHON=" >&2; exit 1; }; \
	exec $(PYTHON) -m fork.bootstrap

.PHONY: $(PROJECT) test test-upstream test-stack lint clean help
$(PROJECT): ## graft the tip, install it in .venv, run example.py
	$(BOOTSTRAP) install --example $(if $(COMMIT),--commit $(COMMIT))

test: ## the fork's tests, the operator's tests, the checks of the stack; ONLY=fork, operator or stack: these
	$(BOOTSTRAP) test $(if $(ONLY),--only $(ONLY))

test-upstream: ## PyTorch's own suites on the release whose source is at hand
	$(BOOTSTRAP) test-upstream $(if $(COMMIT),--commit $(COMMIT)) $(if $(UPSTREAM),--upstream $(UPSTREAM))

test-stack: ## each commit of the stack built and tested by itself, where that is not in stack/results.json
	$(BOOTSTRAP) test-stack $(if $(UPSTREAM),--upstream $(UPSTREAM)) $(if $(MINUTES),--minutes $(MINUTES))

lint: ## ruff, clang-format, mdformat, yamllint
	$(BOOTSTRAP) lint

clean: ## remove all that was built and downloaded
	rm -rf build dist .venv .venv.before *.egg-info test-reports
	rm -rf site/course site/generated site/notes site/sg_execution_times.rst

help: ## this list
	@awk -F ': ## ' '/^[^\t]+: ## / { sub(/\$$\(PROJECT\)/, "$(PROJECT)", $$1); printf "%-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

-include $(PROJECT).mk
