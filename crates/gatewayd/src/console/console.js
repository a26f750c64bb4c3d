// The gateway's console: shows what the programs of each server say of themselves, and changes nothing.

import { ago, ask, curves, el, filtered, link, run, section, table } from "./base.js";

/** How many samples `history.rs` keeps: of an hour, at one in five seconds. */
const SAMPLES = 720;

let servers = [];

// ---- States ------------------------------------------------------------------------------------------------------------------

/** Everything about a pod: what the pipeline says, what it says itself, and its history. */
function podsOf(server) {
  return (server.pipeline?.pods ?? []).map((pod) => ({
    server, pod, key: `${server.name}/${pod.name}`, self: server.pods[pod.name] ?? null, error: server.pod_errors[pod.name] ?? null,
    curves: server.history.pods[pod.name] ?? null, cores: server.history.cores_percent[pod.name] ?? [],
  }));
}

function allPods() {
  return servers.flatMap(podsOf);
}

/** A pod's state: class, word. */
function podState({ pod, self, error }) {
  const up = pod.interfaces_up.filter(Boolean).length;
  if (up === 0) return ["bad", "not connected"];
  if (error) return ["warn", "its control socket does not answer"];
  if (self?.draining) return ["warn", "draining"];
  if (self?.bgp?.some((peer) => peer.state !== "established" || peer.bfd === "down")) return ["bad", "BGP session down"];
  if (up < pod.interfaces_up.length) return ["warn", `${up} of ${pod.interfaces_up.length} interfaces connected`];
  return ["good", "works"];
}

function alarms() {
  const list = [];
  for (const server of servers) {
    if (server.error) list.push(["bad", link("server/" + server.name, server.name), `: ${server.error}`]);
  }
  for (const one of allPods()) {
    const [level, word] = podState(one);
    if (level !== "good") list.push([level, link("pod/" + one.key, one.key), `: ${word}`]);
    const load = Math.max(0, ...one.cores);
    if (load > 90) list.push(["warn", link("pod/" + one.key, one.key), `: a core is busy for ${load.toFixed(0)} % of the time`]);
    if (one.pod.limited_vnis.length) list.push(["warn", link("pod/" + one.key, one.key), `: limits ${one.pod.limited_vnis.length} tenants`]);
  }
  return list;
}

// ---- Numbers -----------------------------------------------------------------------------------------------------------------

function latest(line) {
  return line?.at(-1) ?? null;
}

/** A rate with a unit of a readable size. */
function rate(pps) {
  if (pps === null) return "";
  if (pps >= 1e6) return `${(pps / 1e6).toFixed(2)} M`;
  if (pps >= 1e3) return `${(pps / 1e3).toFixed(1)} k`;
  return pps.toFixed(0);
}

/** How busy each core is, as bars. */
function coreBars(cores) {
  if (cores.length === 0) return el("span", { class: "faint" }, "unknown");
  return cores.map((percent, number) => {
    const bar = el("i");
    bar.style.width = `${percent.toFixed(1)}%`;
    return el("div", {}, el("span", { class: "use", role: "img", "aria-label": `core ${number}: ${percent.toFixed(0)} %` }, bar),
      ` ${percent.toFixed(0)} %`);
  });
}

// ---- Views -------------------------------------------------------------------------------------------------------------------

function podsTable(pods) {
  const row = (one) => {
    const [level, word] = podState(one);
    const bgp = one.self?.bgp ?? [];
    const up = bgp.filter((peer) => peer.state === "established").length;
    return [
      link("pod/" + one.key, one.key), el("span", { class: level }, word), rate(latest(one.curves?.arrived_pps)),
      rate(latest(one.curves?.limited_pps)), rate(latest(one.curves?.dropped_pps)), coreBars(one.cores), one.pod.mode.toUpperCase(),
      bgp.length ? el("span", { class: up === bgp.length ? "good" : "bad" }, `${up} of ${bgp.length}`) : "none",
    ];
  };
  const columns = [["Pod"], ["State"], ["Packets/s", "number"], ["Limited/s", "number"], ["Dropped/s", "number"], ["Cores"], ["Spread"], ["BGP"]];
  return filtered("pods", "Filter by server or pod", (matches) => table(columns, pods.filter((one) => matches(one.key)).map(row)));
}

function overviewView() {
  const list = alarms();
  const row = (server) => [
    link("server/" + server.name, server.name),
    el("span", { class: server.error ? "bad" : "good" }, server.error ? "does not answer" : "works"),
    server.pipeline?.device_mode ?? "", (server.pipeline?.pods ?? []).length, ago(server.time_ms),
  ];
  return [
    ...section("Alarms", list.length === 0 ? el("p", { class: "good" }, "None")
      : el("ul", { class: "alarms" }, list.slice(0, 50).map(([level, ...text]) => el("li", { class: level }, ...text)))),
    ...section(`Servers (${servers.length})`, table([["Server"], ["State"], ["Device"], ["Pods", "number"], ["Asked"]], servers.map(row))),
    ...section("Pods", ...podsTable(allPods())),
  ];
}

function serverView(name) {
  const server = servers.find((server) => server.name === name);
  if (!server) return section("server/" + name, el("p", {}, "There is no such server."));
  if (server.error) return section("server/" + name, el("p", { class: "bad" }, server.error));
  const stages = server.pipeline.stages.map((stage) => [
    stage.name, stage.packets, stage.packets ? (stage.busy_ns / stage.packets).toFixed(0) : "",
  ]);
  const counts = (title, all) => section(title, table([["Counter"], ["Value", "number"]], Object.entries(all).filter(([, n]) => n > 0)));
  return [
    ...section("server/" + name, ...podsTable(podsOf(server))),
    ...section("Stages of the pipeline", table([["Stage"], ["Packets", "number"], ["ns a packet", "number"]], stages)),
    ...counts("Device", server.pipeline.device),
  ];
}

function podView(key) {
  const one = allPods().find((one) => one.key === key);
  if (!one) return section("pod/" + key, el("p", {}, "There is no such pod."));
  const { pod, self, server } = one;
  const [level, word] = podState(one);
  const history = server.history;
  const hour = one.curves && history.times_ms.length > 1 ? hourOf(one) : el("p", { class: "faint" }, "No samples yet.");
  const peers = (self?.bgp ?? []).map((peer) => [
    el("span", { class: "mono" }, peer.address), el("span", { class: peer.state === "established" ? "good" : "bad" }, peer.state),
    peer.bfd ? el("span", { class: peer.bfd === "up" ? "good" : "bad" }, peer.bfd) : "none", peer.announced.join(", "),
  ]);
  const queues = pod.queues.map((queue, number) => [number, queue.entries, queue.in_use, queue.held]);
  const counters = { ...pod.counters, ...prefixed("order.", pod.order), ...prefixed("limiter.", pod.limiter) };
  return [
    ...section("pod/" + key, el("dl", {},
      el("dt", {}, "State"), el("dd", { class: level }, word),
      el("dt", {}, "Server"), el("dd", {}, link("server/" + server.name, server.name)),
      el("dt", {}, "Spread"), el("dd", {}, `${pod.mode.toUpperCase()}${pod.settled ? "" : ", changing"}`),
      el("dt", {}, "Addresses"), el("dd", { class: "mono" }, pod.own.join(", ") || "none"),
      el("dt", {}, "Sessions"), el("dd", {}, self?.nat_sessions ?? "unknown"),
      el("dt", {}, "Cores"), el("dd", {}, coreBars(one.cores)))),
    ...section("The last hour", hour),
    ...section("BGP sessions", peers.length ? table([["Proxy"], ["State"], ["BFD"], ["Announced"]], peers) : el("p", {}, "None configured")),
    ...section("Tenants", tenantsOf(one)),
    ...section("Order queues", table([["Queue", "number"], ["Places", "number"], ["In use", "number"], ["Held", "number"]], queues)),
    ...section("Counters", table([["Counter"], ["Value", "number"]], Object.entries(counters).filter(([, n]) => n > 0))),
  ];
}

function prefixed(prefix, counts) {
  return Object.fromEntries(Object.entries(counts).map(([name, value]) => [prefix + name, value]));
}

function hourOf({ curves: lines, server }) {
  const known = (line) => line.map((value) => value ?? 0);
  const arrived = known(lines.arrived_pps);
  const most = Math.max(1, ...arrived);
  const busiest = known(lines.busiest_percent);
  const times = server.history.times_ms;
  const since = ago(times[0]);
  return [
    el("p", {}, `Packets a second that arrived (green), at most ${rate(most)}; that the limiter dropped (yellow); dropped otherwise (red)`),
    curves(`at most ${rate(most)} packets a second since ${since}`, SAMPLES, most,
      [["inSync", arrived], ["warnLine", known(lines.limited_pps)], ["badLine", known(lines.dropped_pps)]]),
    el("p", {}, "How busy the busiest core was, of 100 %"),
    curves(`busiest core: at most ${Math.max(0, ...busiest).toFixed(0)} %`, SAMPLES, 100, [["inSync", busiest]]),
    el("p", { class: "faint" }, `Since ${since}`),
  ];
}

function tenantsOf({ pod }) {
  const rows = pod.top_tenants.map((tenant) => [
    tenant.vni, `${tenant.percent.toFixed(1)} %`,
    pod.limited_vnis.includes(tenant.vni) ? el("span", { class: "warn" }, "limited") : pod.bypassed_vnis.includes(tenant.vni) ? "exempted" : "",
  ]);
  const shown = new Set(pod.top_tenants.map((tenant) => tenant.vni));
  for (const vni of pod.limited_vnis) if (!shown.has(vni)) rows.push([vni, "", el("span", { class: "warn" }, "limited")]);
  return rows.length ? table([["VNI", "number"], ["Share of recent packets", "number"], ["Limiter"]], rows) : el("p", { class: "faint" }, "None seen lately");
}

function tenantsView() {
  return allPods().flatMap((one) => section("pod/" + one.key, tenantsOf(one)));
}

// ---- The loop ----------------------------------------------------------------------------------------------------------------

function view(hash) {
  if (hash === "tenants") return tenantsView();
  if (hash.startsWith("server/")) return serverView(hash.slice(7));
  if (hash.startsWith("pod/")) return podView(hash.slice(4));
  return overviewView();
}

async function load() {
  servers = (await ask("servers")).map((server) => ({ pods: {}, pod_errors: {}, history: { times_ms: [], pods: {}, cores_percent: {} }, ...server }));
  return true;
}

function headline() {
  const pods = allPods();
  const good = pods.filter((one) => podState(one)[0] === "good").length;
  const total = pods.reduce((all, one) => all + (latest(one.curves?.arrived_pps) ?? 0), 0);
  return `${servers.length} servers, ${good} of ${pods.length} pods work, ${rate(total)} packets/s`;
}

run({ load, headline, view });
