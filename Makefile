# Every target sets up what it needs. Variables: PYTHON, BASE, COMMIT, UPSTREAM (a source tree), CONFIGURE, MINUTES,
# SANITIZE.
# BASE is a release, or `installed`: the torch that PYTHON has, and all else too, so that nothing is downloaded.
PYTHON ?= python3
BASE ?=
COMMIT ?=
UPSTREAM ?=
CONFIGURE ?=
SANITIZE ?=
MINUTES ?=

ifneq ($(BASE),)
export ATTN_BASE := $(BASE)
endif

BOOTSTRAP = @command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON): install Python 3.11 or newer, or name one with PYTHON=" >&2; exit 1; }; \
	exec $(PYTHON) -m fork.bootstrap

.PHONY: attn test test-long test-upstream test-stack test-sanitizers source course site test-site bench bench-gpu cuda-check lint clean
attn: ## graft the tip, install it in .venv, run the lab's example
	$(BOOTSTRAP) install --example $(if $(COMMIT),--commit $(COMMIT))

test: ## the fork's tests, the operator's tests, the checks of the stack
	$(BOOTSTRAP) test

test-long: ## the same with the slow ones: every float, the largest cases
	$(BOOTSTRAP) test --long

test-upstream: ## PyTorch's own suites on the release whose source is at hand
	$(BOOTSTRAP) test-upstream $(if $(COMMIT),--commit $(COMMIT)) $(if $(UPSTREAM),--upstream $(UPSTREAM))

test-stack: ## each commit of the stack built and tested by itself, where that is not in stack/results.json
	$(BOOTSTRAP) test-stack $(if $(UPSTREAM),--upstream $(UPSTREAM)) $(if $(MINUTES),--minutes $(MINUTES))

test-sanitizers: ## the operator's tests with AddressSanitizer and UndefinedBehaviorSanitizer in it
	$(BOOTSTRAP) test-sanitizers

source: ## PyTorch built whole from its source, with the stack as commits: hours; CONFIGURE=1: only until it is configured
	$(BOOTSTRAP) source $(if $(UPSTREAM),--upstream $(UPSTREAM) --python $(PYTHON)) $(if $(CONFIGURE),--configure)

course: ## run every lesson of course/, check its exercises, build and test its extension
	$(BOOTSTRAP) course

site: ## the manual and the course as pages, in build/site
	$(BOOTSTRAP) site

test-site: ## the site in a browser (Debian: chromium, chromium-driver), and the code that it shows
	$(BOOTSTRAP) site --test

bench: ## the operator's speed beside eager, torch.compile, JAX and the machine's limits
	$(BOOTSTRAP) bench --publish

bench-gpu: ## build, test and measure on this machine's GPU, with the torch that is installed; SANITIZE=1 instead: compute-sanitizer
	$(BOOTSTRAP) bench-gpu --base $(or $(BASE),installed) $(if $(SANITIZE),--sanitize)

cuda-check: ## compile and link the kernels for CUDA without a GPU; fails if one spills registers
	$(BOOTSTRAP) cuda-check

lint: ## ruff, clang-format, mdformat, yamllint
	$(BOOTSTRAP) lint

clean: ## remove all that was built and downloaded
	rm -rf build dist .venv *.egg-info test-reports
	rm -rf site/course site/generated site/notes site/sg_execution_times.rst
