// The page: its address chooses what it shows, which is read again every few seconds.

import { notice } from "/actions.js";
import { get, takeSecret } from "/api.js";
import { clusterView } from "/cluster.js";
import { el } from "/dom.js";
import { logView } from "/log.js";
import { logsView } from "/logs.js";

const REFRESH_MS = 3000;
const main = document.getElementById("main");
let session = null;
let views = [];
let turn = 0;

function wanted() {
  const found = /^#\/log\/(.+)$/.exec(location.hash);
  return found ? [logView(decoded(found[1]), session)] : [clusterView(), logsView()];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function show() {
  if (location.hash === "#main") return; // of the link that skips the head
  for (const each of views) each.end?.();
  views = wanted();
  main.replaceChildren(...views.map((each) => each.section));
  main.focus();
  refresh();
}

async function refresh() {
  const mine = ++turn;
  const problems = [];
  for (const each of views) {
    try {
      await each.refresh();
    } catch (error) {
      problems.push(error.message);
    }
    if (mine !== turn) return;
  }
  if (problems.length) notice(problems.join("; "));
  setTimeout(() => { if (mine === turn) again(); }, REFRESH_MS);
}

function again() {
  const isAsking = document.getElementById("dialog").open;
  if (document.hidden || isAsking) setTimeout(again, REFRESH_MS);
  else refresh();
}

async function start() {
  takeSecret();
  try {
    session = await get("session");
  } catch (error) {
    main.replaceChildren(el("p", { class: "bad" }, error.message));
    return;
  }
  document.getElementById("where").textContent = session.uri;
  addEventListener("hashchange", show);
  addEventListener("changed", refresh);
  show();
}

start();
