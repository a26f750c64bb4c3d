# Bifrost: `make demo` to see it, `make test` for everything that must hold, `make bench` for full measurements.
# Everything but the build needs root: experiments run in network namespaces of their own.

SUDO := $(shell [ "$$(id -u)" -eq 0 ] || echo sudo)
TARGET := $(or $(CARGO_TARGET_DIR),target)
LAB := $(SUDO) $(TARGET)/release/bifrost-lab
OUT ?= out

.PHONY: help packages build demo demo-rdma demo-gateway demo-fleet test bench cost cost-accept studies swarm fuzz prove miri deb gw-image try-guide clean-lab

help:
	@echo "make demo       build three programs, compare Redis over three networks while packets are lost: five minutes"
	@echo "make demo-rdma  messages over RoCEv2 in software beside TCP, while packets are lost: two minutes, and a build"
	@echo "make demo-gateway  four tenants' packets through a gateway pod while one of them bursts: a minute, and a build"
	@echo "make demo-fleet three hosts from one place: a relay, agents, containers by six commands: half a minute, and a build. ETCD=1: with a real etcd"
	@echo "make test       formatting, lints, documentation, all tests, end-to-end runs"
	@echo "make bench      every experiment in full that is not there yet, and one report of all: $(OUT)/bench/report"
	@echo "make cost       what the transport costs: instructions a packet, bytes a connection (docs/COST.md)"
	@echo "make studies    questions about the transport, many simulated worlds each: plots and bars (docs/STUDIES.md)"
	@echo "make build      release build"
	@echo "make deb        the Debian packages, in $(OUT)"
	@echo "make gw-image   the OCI image of a gateway pod, localhost/bifrost-gw, by Podman (docs/GATEWAY.md)"
	@echo "make try-guide  the operator's guide, step by step on clean, emulated machines (minutes)"
	@echo "make swarm      random worlds, a million unless SEEDS=n says otherwise; goes on where it was stopped"
	@echo "make fuzz       every fuzz target for a minute, guided by coverage; SECONDS=n for longer"
	@echo "make prove      exhaustive tests that take minutes"
	@echo "make miri       what can run under Miri; installs the nightly toolchain"
	@echo "make clean-lab  remove what a crashed experiment has left behind"

packages:
	@$(SUDO) scripts/install-debian-packages.sh

build:
	cargo build --release --workspace --locked

# Three programs, built without link-time optimisation (profile `demo` of Cargo.toml), and their packages alone.
demo:
	@echo "Bifrost: what packet loss does to Redis, and what it does not do over BIFROST. Some 3 minutes to build, 2 to measure."
	@echo "Two hosts from network namespaces are joined by four links. One guest asks the other's Redis (50 clients) over three networks:"
	@echo "the kernel's VXLAN, Bifrost's switch without its transport (off), and Bifrost. 0, 0.1 and 1 % of the packets are dropped."
	@echo "Look at the column P99.9: TCP alone waits 200 ms and more for a lost packet; Bifrost repairs the loss before TCP sees it."
	@$(SUDO) scripts/install-debian-packages.sh demo
	cargo build --profile demo --locked --bins -p bifrostd -p bifrostctl -p bifrost-lab
	$(SUDO) $(TARGET)/demo/bifrost-lab run redis-loss --quick --injectors wire --out $(OUT)/demo

# Two programs, built like those of `demo`.
demo-rdma:
	@echo "Bifrost: messages over RDMA while packets are lost, beside TCP. Some 3 minutes to build, 2 to measure."
	@echo "Two network namespaces with a processor each are joined by a link. No RDMA NIC is needed: a NIC in software sends RoCEv2 over UDP."
	@echo "Gigabytes in messages of 1 MiB, then calls of 32 KiB, without loss and with one packet in 256 dropped; TCP (cubic, BBR) does the same."
	@echo "Look at what each keeps of its own rate, and at P99.9 of the calls: TCP waits 200 ms for a lost last packet, messages 1 or 2."
	@echo "At the end four bars are checked. On a machine that has other work they may be missed: the processes compete for the two processors."
	@$(SUDO) scripts/install-debian-packages.sh demo-rdma
	cargo build --profile demo --locked --bins -p bifrost-perf -p bifrost-lab
	$(SUDO) $(TARGET)/demo/bifrost-lab run rdm-loss --quick --out $(OUT)/demo-rdma
	$(TARGET)/demo/bifrost-lab check rdm-loss --out $(OUT)/demo-rdma

demo-gateway: packages
	cargo build --profile demo --locked --bins --example gateway-report -p bifrost-gatewayd
	$(SUDO) env OUT=$(OUT) BIN=$(TARGET)/demo scripts/demo-gateway.sh

demo-fleet:
	@$(SUDO) scripts/install-debian-packages.sh demo-fleet
	cargo build --profile demo --locked --bins -p bifrostd -p bifrostctl -p bifrost-relay -p bifrost-agent
	$(SUDO) env OUT=$(OUT) BIN=$(TARGET)/demo scripts/demo-fleet.sh $(if $(ETCD),--etcd)

test:
	@scripts/test.sh

bench: packages build
	$(LAB) run all --out $(OUT)/bench

cost: packages
	@scripts/cost.sh

cost-accept: packages
	@scripts/cost.sh --accept

studies:
	cargo build --release --locked -p bifrost-sim
	$(TARGET)/release/bifrost-sim study all --out $(OUT)/studies

swarm:
	@OUT=$(OUT) scripts/swarm.sh $(or $(SEEDS),1000000)

fuzz:
	@OUT=$(OUT) scripts/fuzz.sh $(or $(SECONDS),60)

prove: packages
	cargo test --release --locked --workspace -- --ignored --nocapture

miri:
	@scripts/miri.sh

deb:
	@command -v dh >/dev/null || $(SUDO) apt-get install -y -qq --no-install-recommends debhelper
	@rm -f $(OUT)/bifrost_*.deb $(OUT)/bifrost-*.deb $(OUT)/libbifrost-rdm*.deb $(OUT)/libnccl-net-bifrost_*.deb
	@OUT=$(OUT) scripts/build-deb.sh
	@OUT=$(OUT) scripts/try-library-debs.sh

gw-image:
	@command -v podman >/dev/null || $(SUDO) apt-get install -y -qq --no-install-recommends podman runc
	cargo build --release --locked -p bifrost-gatewayd --bin bifrost-gw
	$(SUDO) scripts/gw-image.sh $(TARGET)/release/bifrost-gw

try-guide: packages deb
	@{ command -v debootstrap && command -v ssh; } >/dev/null || $(SUDO) apt-get install -y -qq --no-install-recommends debootstrap openssh-client
	@$(SUDO) env OUT=$(OUT) scripts/try-guide.sh $(OUT)/bifrost_*.deb $(OUT)/bifrost-agent_*.deb $(OUT)/bifrost-relay_*.deb \
		$(OUT)/bifrost-gateway_*.deb

clean-lab:
	$(LAB) clean
