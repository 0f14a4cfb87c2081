# CyNode: `make up` on a fresh Debian or Ubuntu machine gives a running system. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# scripts/setup may have installed cargo where this shell does not look yet, and Podman's tools where a user's does not.
export PATH := $(PATH):$(if $(CARGO_HOME),$(CARGO_HOME),$(HOME)/.cargo)/bin:/usr/local/sbin:/usr/sbin:/sbin

.PHONY: help up down test soak fuzz mutants bench bench-audit bench-images images fmt lint

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

up: ## install what is missing, build, start in the background, prove a round (FOREGROUND=1 stays in front)
	@scripts/setup
	cargo build --release --locked -p cynode
	@images/build --sba "$$(cargo xtask sba | tail -n 1)"
	@scripts/up

down: ## stop it and leave nothing running
	@scripts/down

test: ## every check and every test
	@scripts/test

soak: ## the long runs: load, faults and restarts again and again (CYNODE_SEED=N repeats one)
	@scripts/test soak

fuzz: ## everything that reads hostile input, FUZZ_SECONDS (120) for each target
	@scripts/fuzz

mutants: ## change the code that decides in every small way and see that a test notices each (an hour on two cores)
	@[[ -x target/tools/bin/cargo-mutants ]] || cargo install cargo-mutants --version 27.1.0 --locked --root target/tools
	target/tools/bin/cargo-mutants mutants --package cynode-policy --output target/mutants --timeout 120 --test-tool nextest --cargo-test-arg=--retries=0 --cargo-test-arg=--fail-fast

bench: ## measure sessions against Podman's own ways into a container, in one run (ARGS=--quick)
	cargo build --release --locked -p cynode -p cynode-bench
	@$(MAKE) bench-images
	@CYNODE_TEST_IMAGE_STORE=$(CURDIR)/target/bench-store/root target/release/cynode-bench $(ARGS)

# The build without a trail first: what is called cynode in the end keeps one.
bench-audit: ## measure what the audit trail costs, against a build without one (ARGS='--records 100000')
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

images: ## build the runner image and the tests' images into this user's Podman store
	@images/build --sba "$$(cargo xtask sba | tail -n 1)"
	@images/fixture

fmt: ## format the code
	cargo fmt --all

lint: ## formatting, lints, shell scripts
	cargo fmt --all --check
	shellcheck -x scripts/setup scripts/up scripts/down scripts/test scripts/fuzz tests/suite/src/cleanup.sh images/build images/rootfs images/fixture images/check images/lib.sh .ci/run
	cargo clippy --workspace --all-targets --locked -- -D warnings
