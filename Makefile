# What there is to do; `make help` lists it.
.DEFAULT_GOAL := help
.PHONY: help demo test soak builds aarch64 deny advisories bench pictures

CARGO_TARGET_DIR ?= target
BLOCKLOCK := $(CARGO_TARGET_DIR)/demo/blocklock

help: ## list the targets
	@grep -E '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):.*## /  make \1\t/' | expand -t 20

demo: ## build, fetch a small model, and check whether its answers depend on what shares their batch
	@echo "== 1 of 3: building blocklock (three to four minutes on 2 cores the first time)"
	cargo build --profile demo --locked -p cli
	@echo "== 2 of 3: fetching SmolLM2-135M-Instruct (93 MB) into the cache folder, unless it is there"
	$(BLOCKLOCK) pull
	@echo "== 3 of 3: one request alone, then in crowds of other requests: are its bits the same?"
	@echo "   'none' runs every request on the fastest kernels; 'invariant' promises bits that depend on the request alone."
	$(BLOCKLOCK) check --protection none,invariant

test: ## the whole suite: format, lints, documentation, tests
	@scripts/test.sh

soak: ## long tests that the suite runs at a smaller size: 30 answers of 4096 tokens, all orders of eight scores, ten minutes of mixed load, and ten of a storm of HTTP clients
	cargo test --workspace --locked --test cases --test cli -- --ignored --nocapture

builds: ## the same bits from an unoptimised build, the demo's and a release build (a few minutes each)
	for profile in plain demo release; do \
	    cargo build --profile $$profile --locked -p cli && \
	    BLOCKLOCK_OTHER_BUILD=$$(realpath $(CARGO_TARGET_DIR)/$$profile/blocklock) \
	        cargo test --workspace --locked --test cli golden_bits -- --nocapture || exit 1; \
	done

aarch64: ## the CPU device's tests on aarch64, under QEMU on another machine (tens of minutes)
	@scripts/aarch64.sh

deny: ## dependencies: bans, licences, sources (needs cargo-deny)
	cargo deny --locked check bans licenses sources

advisories: ## dependencies: known vulnerabilities (needs cargo-deny and a network)
	cargo deny --locked check advisories

bench: ## blocklock beside llama.cpp, in turns (builds llama.cpp the first time)
	scripts/bench.sh

pictures: ## draw the pictures of docs/pictures again, with the numbers behind them
	cargo build --profile demo --locked -p cli
	for study in drift flips near-ties; do $(BLOCKLOCK) lab $$study --out docs/pictures || exit 1; done
