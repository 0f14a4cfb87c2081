# CyNode. `make up` sets up and starts everything on a fresh Debian or Ubuntu machine; `make help` lists all targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# scripts/setup may have installed cargo, and apt some of Podman's tools, outside the PATH of this shell.
export PATH := $(PATH):$(if $(CARGO_HOME),$(CARGO_HOME),$(HOME)/.cargo)/bin:/usr/local/sbin:/usr/sbin:/sbin

.PHONY: help up down test soak fuzz mutants bench bench-audit bench-images images fmt lint

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

up: ## install dependencies, build, start in the background, run a smoke test (FOREGROUND=1 stays in front)
	@scripts/setup
	@scripts/build
	@scripts/up

down: ## stop CyNode and all its containers
	@scripts/down

test: ## run all checks and tests
	@scripts/test

soak: ## run the long tests: load, faults and restarts (CYNODE_SEED=N repeats a run)
	@scripts/test soak

fuzz: ## fuzz the parsers of hostile input, FUZZ_SECONDS (120) for each target
	@scripts/fuzz

mutants: ## run mutation tests of the policy code (an hour on two cores)
	@[[ -x target/tools/bin/cargo-mutants ]] || cargo install cargo-mutants --version 27.1.0 --locked --root target/tools
	target/tools/bin/cargo-mutants mutants --package cynode-policy --output target/mutants --timeout 120 \
		--test-tool nextest --cargo-test-arg=--retries=0 --cargo-test-arg=--fail-fast

bench: ## compare sessions with Podman's own ways into a container (ARGS=--quick)
	cargo build --release --locked -p cynode -p cynode-bench
	@$(MAKE) bench-images
	@CYNODE_TEST_IMAGE_STORE=$(CURDIR)/target/bench-store/root target/release/cynode-bench $(ARGS)

# Builds without the trail first, so that target/release/cynode ends up as the audited build.
bench-audit: ## compare the audit trail with a build without one (ARGS='--records 100000')
	cargo build --release --locked -p cynode --features unaudited
	@mv target/release/cynode target/release/cynode-unaudited
	cargo build --release --locked -p cynode -p cynode-bench-audit
	@$(MAKE) bench-images
	@CYNODE_TEST_IMAGE_STORE=$(CURDIR)/target/bench-store/root target/release/cynode-bench-audit $(ARGS)

bench-images:
	@cargo xtask sba >/dev/null
	@mkdir -p target/bench-store/root
	@run=$$( ((EUID == 0)) && echo /run || echo "$${XDG_RUNTIME_DIR:-/tmp}")/cynode-bench/$$(sha256sum <<<"$(CURDIR)" | cut -c1-8); mkdir -p "$$run"; \
	images/fixture --into "--root $(CURDIR)/target/bench-store/root --runroot $$run --storage-driver overlay"

images: ## build the runner image and the test images into this user's Podman store
	@images/build --sba "$$(cargo xtask sba | tail -n 1)"
	@images/fixture

fmt: ## format the code
	cargo fmt --all

lint: ## check formatting, lints, shell scripts and unused dependencies
	cargo fmt --all --check
	shellcheck -x scripts/setup scripts/build scripts/up scripts/down scripts/test scripts/fuzz tests/suite/src/cleanup.sh \
		images/build images/rootfs images/fetch images/fixture images/check images/lib.sh .ci/run
	cargo clippy --workspace --all-targets --locked -- -D warnings
	@[[ -x target/tools/bin/cargo-machete ]] || cargo install cargo-machete --version 0.9.2 --locked --root target/tools
	target/tools/bin/cargo-machete
