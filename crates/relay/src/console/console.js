// The relay's console: shows what its API says, and changes nothing.

import { ago, ask, curves, el, filtered, link, run, section, table } from "./base.js";

const KEPT_SAMPLES = 300;
const MAX_PORTS = 5000;
const KINDS = {
  project: "projects", vpc: "networks (VPCs)", subnet: "subnets", address_set: "address sets", security_group: "security groups",
  port: "ports", peering: "peerings",
};

const now = { status: null, hosts: [], overview: null };
const history = [];

// ---- The API -----------------------------------------------------------------------------------------------------------------

/** Objects of a kind and project, page by page, at most `most`. */
async function objects(kind, project, most = MAX_PORTS) {
  const found = [];
  let from = null;
  do {
    const page = await ask("objects", { kind, project, from });
    found.push(...page.objects);
    from = page.next ?? null;
  } while (from !== null && found.length < most);
  return { found, isCut: from !== null };
}

// ---- States ------------------------------------------------------------------------------------------------------------------

/** A host's state: class, word. The worst one counts. */
function hostState(host) {
  if (host.dead_since_ms) return ["bad", "dead"];
  if (!host.connected) return ["bad", host.since_ms ? "agent disconnected" : "agent never connected"];
  if (host.problems.length + host.more_problems > 0) return ["bad", "refuses objects"];
  if (host.applied < host.changed) return ["warn", "changes in progress"];
  return ["good", "in sync"];
}

/** What a host refuses, in short. Objects of projects that the viewer has no role for are only counted. */
function refused({ problems: [first, ...others], more_problems: unlisted }) {
  if (!first) return `: ${unlisted} of other projects`;
  const more = others.length + unlisted;
  return `: ${first.kind} ${first.key}: ${first.what}${more ? ` and ${more} more` : ""}`;
}

function alarms() {
  const list = [];
  if (now.status && !now.status.in_sync) {
    list.push(["bad", "The relay does not follow its store: it shows old objects and accepts no changes."]);
  }
  const frozen = now.status?.frozen;
  if (frozen) {
    const text = `${frozen.vanished} of ${frozen.of} hosts have vanished together: none of them is taken for dead.`;
    list.push(["bad", text]);
  }
  for (const host of now.hosts) {
    const [level, word] = hostState(host);
    if (level !== "bad") continue;
    list.push([level, link("host/" + host.name), ` ${word}${host.connected ? refused(host) : ""}`]);
  }
  for (const host of now.hosts) {
    for (const peer of host.paths?.impaired ?? []) {
      const text = ` ${peer.working} of ${peer.paths} paths to ${peer.peer} work`;
      list.push([peer.working === 0 ? "bad" : "warn", link("host/" + host.name), text]);
    }
  }
  for (const [key, why] of now.status?.unreadable ?? []) list.push(["warn", `Record ${key} in the store is unreadable: ${why}`]);
  return list;
}

// ---- Views -------------------------------------------------------------------------------------------------------------------

function overviewView() {
  const { status, overview } = now;
  const list = alarms();
  const shown = list.slice(0, 50).map(([level, ...text]) => el("li", { class: level }, ...text));
  const hosts = status.hosts;
  const card = (value, text, level) => el("div", { class: "card" }, el("b", { class: level }, value), el("span", {}, text));
  const kinds = Object.entries(overview?.objects ?? {}).filter(([kind]) => kind !== "host");
  return [
    ...section("Alarms", list.length === 0 ? el("p", { class: "good" }, "None") : el("ul", { class: "alarms" }, shown),
      list.length > shown.length ? el("p", {}, `${list.length - shown.length} more: see `, link("hosts", "hosts")) : null),
    el("h2", {}, "Now"),
    el("div", { class: "cards" },
      card(`${hosts.in_sync} / ${hosts.known}`, "hosts in sync", hosts.in_sync === hosts.known ? "good" : "warn"),
      card(`${hosts.connected} / ${hosts.known}`, "agents connected", hosts.connected === hosts.known ? "good" : "bad"),
      kinds.map(([kind, n]) => card(n, KINDS[kind] ?? kind.replaceAll("_", " ")))),
    ...section("Propagation", historyView()),
    ...networksView(),
  ];
}

/** How many hosts were in sync in the last minutes, as this page has seen it. */
function historyView() {
  const latest = history.at(-1);
  const text = latest ? `${latest.inSync} of ${latest.known} hosts have every change that concerns them` : "no samples yet";
  const most = Math.max(1, ...history.map((sample) => sample.known));
  const lines = [["known", history.map((sample) => sample.known)], ["inSync", history.map((sample) => sample.inSync)]];
  return [
    curves(text, KEPT_SAMPLES, most, lines),
    el("p", { class: "faint" }, `Hosts in sync (of known hosts) while this page was open, up to 10 min. ${text}.`),
  ];
}

function hostsView() {
  const order = { bad: 0, warn: 1, good: 2 };
  const hosts = now.hosts.map((host) => [host, ...hostState(host)]);
  hosts.sort((a, b) => order[a[1]] - order[b[1]] || a[0].name.localeCompare(b[0].name));
  const row = ([host, level, word]) => [
    link("host/" + host.name, host.name), el("span", { class: level }, word), ago(host.since_ms), host.software,
    `${host.applied} / ${host.changed}`, host.objects, host.problems.length + host.more_problems,
  ];
  const columns = [["Host"], ["State"], ["Since"], ["Agent"], ["Revision applied / needed", "number"], ["Objects", "number"], ["Refused", "number"]];
  const draw = (matches) => table(columns, hosts.filter(([host, , word]) => matches(host.name + " " + word)).map(row));
  return section(`Hosts (${hosts.length})`, ...filtered("hosts", "Filter by name or state", draw));
}

function networksView() {
  const vpcs = now.overview?.vpcs ?? [];
  const row = (vpc) => [
    link(vpc.key), vpc.vni ?? "", vpc.subnets.map((s) => el("div", { class: "mono" }, s.prefix)), vpc.ports, Object.keys(vpc.hosts).length,
    vpc.peers.map((name) => el("div", {}, link(sibling(vpc.key, "vpc", name), name))),
  ];
  const columns = [["Network"], ["VNI", "number"], ["Subnets"], ["Ports", "number"], ["Hosts", "number"], ["Peerings"]];
  const draw = (matches) => table(columns, vpcs.filter((vpc) => matches(vpc.key + " " + vpc.subnets.map((s) => s.prefix))).map(row));
  return section(`Networks (${vpcs.length})`, ...filtered("networks", "Filter by name or prefix", draw));
}

function hostView(name) {
  const host = now.hosts.find((host) => host.name === name);
  if (!host) return section(name, el("p", {}, "There is no such host."));
  const [level, word] = hostState(host);
  const networks = (now.overview?.vpcs ?? []).filter((vpc) => vpc.hosts[name]);
  const problems = host.problems.map((problem) => [problem.kind, problem.key, problem.what]);
  return [
    ...section("host/" + name, el("dl", {},
      el("dt", {}, "State"), el("dd", { class: level }, word),
      el("dt", {}, "Since"), el("dd", {}, ago(host.since_ms)),
      host.dead_since_ms ? [el("dt", {}, "Taken for dead"), el("dd", {}, ago(host.dead_since_ms))] : null,
      el("dt", {}, "Agent"), el("dd", {}, host.software || "unknown"),
      host.relay ? [el("dt", {}, "Follows relay"), el("dd", {}, host.relay)] : null,
      el("dt", {}, "Revision"), el("dd", {}, `${host.applied} applied, ${host.changed} needed, ${now.status.revision} in the store`),
      el("dt", {}, "Objects"), el("dd", {}, host.objects))),
    ...section("Paths to other hosts", ...pathsOf(host)),
    ...section("Networks with ports here", table([["Network"], ["Ports here", "number"]],
      networks.map((vpc) => [link(vpc.key), vpc.hosts[name]]))),
    ...section("Objects that this host refuses",
      problems.length ? table([["Kind"], ["Key"], ["Reason"]], problems) : el("p", { class: "good" }, "None"),
      host.more_problems ? el("p", {}, `and ${host.more_problems} more`) : null),
  ];
}

/** How the paths from a host to others are. */
function pathsOf(host) {
  const { peers, impaired, more_impaired: more } = host.paths;
  if (peers === 0) return [el("p", { class: "faint" }, "No paths are known.")];
  const good = peers - impaired.length - more;
  const rows = impaired.map((peer) => [link("host/" + peer.peer, peer.peer),
    el("span", { class: peer.working ? "warn" : "bad" }, `${peer.working} of ${peer.paths}`)]);
  return [
    el("p", { class: rows.length ? "" : "good" }, `All paths to ${good} of ${peers} hosts work.`),
    rows.length ? table([["Host"], ["Paths that work"]], rows) : null,
    more ? el("p", {}, `and ${more} more hosts with impaired paths`) : null,
  ];
}

/** The key of another object of the same project. */
function sibling(key, kind, name) {
  return `${kind}/${key.split("/")[1]}/${name}`;
}

async function vpcView(key) {
  const vpc = (now.overview?.vpcs ?? []).find((vpc) => vpc.key === key);
  if (!vpc) return section(key, el("p", {}, "There is no such network."));
  const [{ object }, { found, isCut }] = await Promise.all([ask("why", { key }), objects("port", key.split("/")[1])]);
  const subnets = new Set(vpc.subnets.map((subnet) => subnet.name));
  const ports = found.filter((port) => port.spec.subnets.some((name) => subnets.has(name)));
  const byHost = new Map();
  for (const port of ports) byHost.set(port.spec.host, [...(byHost.get(port.spec.host) ?? []), port]);
  const box = ([name, here]) => {
    const host = now.hosts.find((host) => host.name === name);
    const [level, word] = host ? hostState(host) : ["bad", "unknown host"];
    const chips = here.slice(0, 30).map((port) => el("span", { class: "chip" }, link(port.key, port.key.split("/")[2])));
    return el("div", { class: `host ${level}` }, el("h3", {}, link("host/" + name, name), " ", el("span", { class: `faint ${level}` }, word)),
      chips, here.length > chips.length ? el("span", { class: "faint" }, `and ${here.length - chips.length} more`) : null);
  };
  const row = (port) => [
    link(port.key, port.key.split("/")[2]), (port.spec.addresses ?? []).map((a) => el("div", { class: "mono" }, a)),
    el("span", { class: "mono" }, port.spec.mac ?? ""), link("host/" + port.spec.host, port.spec.host),
    (port.spec.security_groups ?? []).join(", "), ago(port.committed_ms),
  ];
  const text = (port) => [port.key, port.spec.host, port.spec.mac, ...(port.spec.addresses ?? []), ...(port.spec.security_groups ?? [])].join(" ");
  const columns = [["Port"], ["Addresses"], ["MAC"], ["Host"], ["Security groups"], ["Changed"]];
  return [
    ...section(key, el("dl", {},
      el("dt", {}, "VNI"), el("dd", {}, vpc.vni ?? "none"),
      el("dt", {}, "Changed"), el("dd", {}, ago(object.committed_ms)),
      el("dt", {}, "Peerings"), el("dd", {}, vpc.peers.length ? vpc.peers.map((name) => [link(sibling(key, "vpc", name), name), " "]) : "none"),
      el("dt", {}, "Definition"), el("dd", {}, el("pre", {}, JSON.stringify(object.spec, null, 2))))),
    ...section("Subnets", table([["Subnet"], ["Prefix"], ["Ports", "number"], ["In use"]],
      vpc.subnets.map((subnet) => [subnet.name, el("span", { class: "mono" }, subnet.prefix), subnet.ports, useBar(subnet)]))),
    isCut ? el("p", { class: "warn" }, `The project has more than ${MAX_PORTS} ports; only these are searched.`) : null,
    ...section("Hosts and ports", el("div", { class: "network" }, [...byHost].sort().slice(0, 200).map(box))),
    ...section(`Ports (${ports.length})`, ...filtered("ports", "Filter by name, address, host or group",
      (matches) => table(columns, ports.filter((port) => matches(text(port))).map(row)))),
  ];
}

/** How much of a subnet is in use; without one for prefixes of which a share says nothing. */
function useBar(subnet) {
  const [address, length] = subnet.prefix.split("/");
  const bits = (address.includes(":") ? 128 : 32) - Number(length);
  if (bits > 24) return el("span", { class: "faint" }, "large");
  const share = Math.min(1, (subnet.ports + 1) / Math.max(1, 2 ** bits - 2));
  const bar = el("i");
  bar.style.width = `${(share * 100).toFixed(1)}%`;
  return [el("span", { class: "use", role: "img", "aria-label": `${Math.round(share * 100)} %` }, bar), ` ${Math.round(share * 100)} %`];
}

async function portView(key) {
  const project = key.split("/")[1];
  const [why, groups, ports] = await Promise.all([ask("why", { key }), objects("security_group", project), objects("port", project)]);
  const spec = why.object.spec;
  const mine = (spec.security_groups ?? []).map((name) => groups.found.find((group) => group.key === `security_group/${project}/${name}`));
  const members = (name) => ports.found.filter((port) => (port.spec.security_groups ?? []).includes(name));
  const end = (text) => {
    if (!text.startsWith("group:")) return el("div", { class: "mono" }, text);
    const who = members(text.slice(6));
    return el("div", {}, text, ": ", who.length === 0 ? "no ports" : who.slice(0, 20).map((port) => [link(port.key, port.key.split("/")[2]), " "]),
      who.length > 20 ? `and ${who.length - 20} more` : null);
  };
  const rows = (direction, which) => mine.filter(Boolean).flatMap((group) => (group.spec[direction] ?? []).map((rule) => [
    group.key.split("/")[2], rule.protocol ?? "any", [rule.ports ?? []].flat().join(", ") || "all",
    (rule[which] ?? []).length ? [rule[which]].flat().map(end) : "anyone",
  ]));
  const open = mine.length === 0;
  const ingress = rows("ingress", "from");
  const egressOpen = open || mine.some((group) => group && group.spec.egress === undefined);
  const egress = rows("egress", "to");
  const columns = (last) => [["Group"], ["Protocol"], ["Ports"], [last]];
  const others = Object.entries(spec).filter(([name]) => !["addresses", "mac", "host", "subnets", "security_groups"].includes(name));
  return [
    ...section(key, el("dl", {},
      el("dt", {}, "Addresses"), el("dd", { class: "mono" }, (spec.addresses ?? []).join(", ")),
      el("dt", {}, "MAC"), el("dd", { class: "mono" }, spec.mac ?? ""),
      el("dt", {}, "Host"), el("dd", {}, link("host/" + spec.host, spec.host)),
      el("dt", {}, "Subnets"), el("dd", {}, spec.subnets.join(", ")),
      el("dt", {}, "Security groups"), el("dd", {}, (spec.security_groups ?? []).join(", ") || "none"),
      el("dt", {}, "Changed"), el("dd", {}, ago(why.object.committed_ms)),
      others.length ? [el("dt", {}, "Other settings"), el("dd", {}, el("pre", {}, JSON.stringify(Object.fromEntries(others), null, 2)))] : null)),
    ...section("Who may open connections to this port",
      open ? el("p", {}, "Everyone in the network: the port has no security group.")
        : ingress.length ? table(columns("From"), ingress) : el("p", {}, "Nobody: its security groups have no ingress rule.")),
    ...section("Where this port may open connections to",
      egressOpen ? el("p", {}, "Everywhere: no egress rules restrict it.")
        : egress.length ? table(columns("To"), egress) : el("p", {}, "Nowhere: its security groups have no egress rule.")),
    ...section("State on hosts", table([["Host"], ["Why it needs the port"], ["State"]],
      why.hosts.map((host) => [link("host/" + host.host, host.host), host.reason,
        el("span", { class: { "in force": "good", "on its way": "warn" }[host.state] ?? "bad" }, host.state)]))),
  ];
}

// ---- The loop ----------------------------------------------------------------------------------------------------------------

function view(hash) {
  if (hash === "hosts") return hostsView();
  if (hash === "networks") return networksView();
  if (hash.startsWith("host/")) return hostView(hash.slice(5));
  if (hash.startsWith("vpc/")) return vpcView(hash);
  if (hash.startsWith("port/")) return portView(hash);
  return overviewView();
}

async function load() {
  const before = JSON.stringify([now.status?.revision, now.hosts]);
  [now.status, now.hosts] = await Promise.all([ask("status"), ask("hosts")]);
  if (now.overview?.revision !== now.status.revision) now.overview = await ask("overview");
  history.push({ known: now.status.hosts.known, inSync: now.status.hosts.in_sync });
  if (history.length > KEPT_SAMPLES) history.shift();
  return location.hash.length <= 1 || before !== JSON.stringify([now.status.revision, now.hosts]);
}

function headline() {
  return `relay ${now.status.version}, ${now.status.store.split(":")[0]} store, revision ${now.status.revision}`;
}

run({ load, headline, view });
