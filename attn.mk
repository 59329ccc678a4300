# Targets that a fork of one's own operator does not get. Variables: CONFIGURE, SANITIZE, LESSONS.
CONFIGURE ?=
SANITIZE ?=
LESSONS ?=

.PHONY: test-long test-releases test-sanitizers test-arm64 test-mutants source course extension wheel site test-site bench bench-gpu cuda-check triton-check
test-long: ## what `test` runs, and the slow tests: every float, the largest cases
	$(BOOTSTRAP) test --long

test-releases: ## the operator's tests on each release, or on BASE, where that is not in stack/releases.json
	$(BOOTSTRAP) test-releases $(if $(MINUTES),--minutes $(MINUTES))

test-sanitizers: ## the operator's tests with AddressSanitizer and UndefinedBehaviorSanitizer in it
	$(BOOTSTRAP) test-sanitizers

test-arm64: ## the operator's tests on 64-bit ARM, in an emulator (Debian: g++-aarch64-linux-gnu, mmdebstrap, qemu-user-static)
	$(BOOTSTRAP) test-arm64

test-mutants: ## one test must fail for each fault in commands/mutants.yaml
	$(BOOTSTRAP) test-mutants

source: ## PyTorch built whole from its source, with the stack as commits: hours; CONFIGURE=1: only until it is configured
	$(BOOTSTRAP) source $(if $(UPSTREAM),--upstream $(UPSTREAM) --python $(PYTHON)) $(if $(CONFIGURE),--configure)

course: ## run every lesson of course/, check its exercises, its extension, operators of one's own; ONLY=lessons or operators: these
	$(BOOTSTRAP) course $(if $(ONLY),--only $(ONLY))

extension: ## build the package torch-attn, test its wheel on several releases; BASE=2.13.0: on that one; MACHINE=aarch64: in an emulator
	$(BOOTSTRAP) extension $(if $(MACHINE),--machine $(MACHINE))

wheel: ## the package torch-attn, and the package of its sources, into dist/; MACHINE=aarch64: for ARM
	$(BOOTSTRAP) wheel $(if $(MACHINE),--machine $(MACHINE))

site: ## the manual and the course as pages, in build/site; LESSONS=no: without running a lesson
	$(BOOTSTRAP) site $(if $(filter no,$(LESSONS)),--no-lessons)

test-site: ## the site in a browser (Debian: chromium, chromium-driver), and the code that it shows; ONLY=pages or browser: these
	$(BOOTSTRAP) site --test $(if $(filter no,$(LESSONS)),--no-lessons) $(if $(ONLY),--only $(ONLY))

bench: ## the operator's speed beside eager, torch.compile, JAX and the machine's limits
	$(BOOTSTRAP) bench --publish

bench-gpu: ## build, test and measure on this machine's GPU, with the torch that is installed; SANITIZE=1 instead: compute-sanitizer
	$(BOOTSTRAP) bench-gpu --base $(or $(BASE),installed) $(if $(SANITIZE),--sanitize)

triton-check: ## compile the Triton kernels for GPUs that need not be here; fails if one spills registers where it must not
	$(BOOTSTRAP) triton-check

cuda-check: ## compile the kernels for Hopper, which need not be here, and look at their code; passes without an nvcc
	$(BOOTSTRAP) cuda-check
