# Bifrost: `make demo` to see it, `make test` for everything that must hold, `make bench` for full measurements.
# Everything but the build needs root: experiments run in network namespaces of their own.

SUDO := $(shell [ "$$(id -u)" -eq 0 ] || echo sudo)
TARGET := $(or $(CARGO_TARGET_DIR),target)
LAB := $(SUDO) $(TARGET)/release/bifrost-lab
OUT ?= out

.PHONY: help packages build demo test bench clean-lab

help:
	@echo "make demo       install packages, build, compare Redis over three networks while packets are lost"
	@echo "make test       formatting, lints, documentation, all tests, end-to-end runs"
	@echo "make bench      every experiment in full, and whether it clears its bars (about an hour)"
	@echo "make build      release build"
	@echo "make clean-lab  remove what a crashed experiment has left behind"

packages:
	@$(SUDO) scripts/install-debian-packages.sh

build:
	cargo build --release --workspace --locked

demo: packages build
	$(LAB) run redis-loss --quick --out $(OUT)/demo

test:
	@scripts/test.sh

bench: packages build
	@failed=""; \
	for name in redis-loss path-failure iperf soak; do \
		$(LAB) run $$name --out $(OUT)/bench/$$name || exit 1; \
		$(LAB) check $$name --out $(OUT)/bench/$$name || failed="$$failed $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "bars missed:$$failed"; exit 1; fi

clean-lab:
	$(LAB) clean
