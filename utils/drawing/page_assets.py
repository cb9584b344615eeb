"""The style sheet and the script of a page (page.py). Colors follow the reader's light or dark scheme."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --muted: #5f6770; --line: #d9dde2; --soft: #f3f5f7;
  --accent: 37 99 200; --warn: #9a4b00; --warn-paper: #fff3e0;
  --s0: #2563c8; --s1: #d9480f; --s2: #2b8a3e; --s3: #9c36b5; --s4: #b08900; --s5: #0b7285; --s6: #c2255c;
  --s7: #5c7080;
  --s8: #7048e8; --s9: #66a80f; --missed: #e03131; --spurious: #e8590c; --class: #ae3ec9; --location: #1c7ed6;
  --duplicate: #b08900; --both: #c2255c; --correct: #2f9e44; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e6e8eb; --muted: #9aa3ad; --line: #363c44;
  --soft: #1e2329; --accent: 110 160 255; --warn: #ffc078; --warn-paper: #33260f; --s0: #74a7ff; --s1: #ff8b5c;
  --s2: #69db7c; --s3: #da77f2; --s4: #ffd43b; --s5: #3bc9db; --s6: #f783ac; --s7: #adb5bd; --s8: #9775fa;
  --s9: #a9e34b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 16px; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.2rem; margin: 0 0 8px; }
h3 { font-size: 1rem; margin: 16px 0 4px; }
p { margin: 6px 0; max-width: 80ch; } ul { padding-left: 20px; margin: 6px 0; max-width: 80ch; } li { margin: 4px 0; }
code { font-family: ui-monospace, monospace; font-size: .9em; background: var(--soft); padding: 0 3px; }
.muted { color: var(--muted); }
.warning { color: var(--warn); background: var(--warn-paper); border-left: 4px solid; padding: 6px 10px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; padding: 10px 0; border-bottom: 1px solid var(--line); }
a { color: rgb(var(--accent)); }
section { padding: 18px 0; border-bottom: 1px solid var(--line); }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 16px;
  align-items: start; }
.row > div { min-width: 0; }
figure { margin: 8px 0; min-width: 0; } figcaption { font-weight: 600; font-size: .9rem; }
svg.chart { display: block; width: 100%; height: auto; max-width: 560px; }
svg.chart text { font: 11px system-ui, sans-serif; fill: var(--muted); }
svg.chart .grid { stroke: var(--line); stroke-width: 1; }
svg.chart .mark { stroke: var(--muted); stroke-dasharray: 4 3; }
svg.chart .line { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round; }
svg.chart .faint { color: var(--line); } svg.chart .strong .line { stroke-width: 3; }
svg.chart circle { fill: currentColor; } svg.chart .bar { fill: rgb(var(--accent)); }
svg.chart .cell { fill: rgb(var(--accent)); }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); } .s3 { color: var(--s3); }
.s4 { color: var(--s4); }
.s5 { color: var(--s5); } .s6 { color: var(--s6); } .s7 { color: var(--s7); } .s8 { color: var(--s8); }
.s9 { color: var(--s9); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 12px; list-style: none; margin: 4px 0; padding: 0;
  font-size: .82rem; }
.legend li { margin: 0; } .legend li::before { content: ""; display: inline-block; width: 14px; height: 0;
  border-top: 3px solid currentColor; vertical-align: middle; margin-right: 5px; }
.legend span { color: var(--ink); }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .86rem; overflow-wrap: normal; }
th, td { padding: 3px 8px; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  max-width: 42ch;
  overflow-wrap: break-word; }
td code { white-space: nowrap; } td:last-child:not(.number, .bar, .bars td, .matrix td) { min-width: 16ch; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid rgb(var(--accent)); }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
table.bars { width: 100%; } table.bars th { font-weight: 400; max-width: 22ch; }
table.bars .bar { width: 60%; min-width: 80px; }
table.bars .bar div { height: 1em; background: rgb(var(--accent)); min-width: 1px; }
table.bars .group div { height: .5em; margin-bottom: 2px; background: currentColor; }
table.matrix td { text-align: right; min-width: 3em; background: rgb(var(--accent) / calc(var(--shade, 0) * .7));
  font-variant-numeric: tabular-nums; }
table.matrix thead td { text-align: left; color: var(--muted); vertical-align: bottom; white-space: nowrap; }
table.matrix th[scope=col] { vertical-align: bottom; } table.matrix th[scope=col] span { writing-mode: vertical-rl;
  max-height: 14em; overflow: hidden; }
details { margin: 8px 0; } summary { cursor: pointer; color: rgb(var(--accent)); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 260px), 1fr)); gap: 4px 18px;
  margin: 8px 0; }
.facts div { min-width: 0; } .facts dt { color: var(--muted); font-size: .8rem; } .facts dd { margin: 0; }
.filters { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; margin: 8px 0; }
select { font: inherit; max-width: 60vw; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--card)), 1fr)); gap: 14px; }
.card { margin: 0; border: 1px solid var(--line); padding: 8px; } .card[hidden] { display: none; }
.card figcaption { font-weight: 400; font-size: .82rem; margin-top: 4px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 230px), 1fr)); gap: 6px; }
.triple { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 150px), 1fr)); gap: 6px; }
.pair > div, .triple > div { min-width: 0; font-size: .8rem; color: var(--muted); }
svg.photo { display: block; max-width: 100%; height: auto; background: var(--soft); }
svg.photo rect, svg.photo path { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke;
  stroke: currentColor; }
svg.photo rect { pointer-events: all; } svg.photo path { stroke-width: 1.5; }
svg.photo text { font: 600 11px system-ui, sans-serif; fill: currentColor; stroke: #000; stroke-width: 2.5px;
  paint-order: stroke; }
svg.photo rect.missed, svg.photo rect.label { stroke-dasharray: 5 3; }
.missed { color: var(--missed); } .spurious { color: var(--spurious); } .class { color: var(--class); }
.location { color: var(--location); } .duplicate { color: var(--duplicate); } .both { color: var(--both); }
.correct { color: var(--correct); } .label { color: #fff; } .label-key { color: var(--muted); }
svg.photo .missed { color: #ff8787; } svg.photo .spurious { color: #ffa94d; } svg.photo .class { color: #e599f7; }
svg.photo .location { color: #74c0fc; } svg.photo .duplicate { color: #ffe066; } svg.photo .both { color: #faa2c1; }
svg.photo .correct { color: #20c05c; }
.store { position: absolute; }
@media (max-width: 700px) { table.sortable td:not(.number) { min-width: 14ch; } }
@media print { .filters, nav { display: none; } }
"""

SCRIPT = """
"use strict";
for (const gallery of document.querySelectorAll(".gallery")) {
  const menus = [...gallery.querySelectorAll("select")], cards = [...gallery.querySelectorAll(".card")];
  const status = gallery.querySelector("[role=status]");
  const update = () => {
    let shown = 0;
    for (const card of cards) {
      const fits = tag => menus.every((menu, i) => menu.value === "" || menu.value === tag[i]);
      const tags = JSON.parse(card.dataset.tags);
      card.hidden = menus.some(menu => menu.value !== "") && !tags.some(fits);
      shown += card.hidden ? 0 : 1;
    }
    if (status) status.textContent = shown + " of " + cards.length + " shown";
  };
  for (const menu of menus) menu.addEventListener("change", update);
}
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const empty = row => value(row) === "";
    const numeric = [...body.rows].every(row => row.cells[column].dataset.value !== undefined);
    const compare = (a, b) => numeric ? value(a) - value(b) : value(a).localeCompare(value(b));
    const rows = [...body.rows].sort((a, b) => empty(a) - empty(b) || (down ? compare(b, a) : compare(a, b)));
    body.append(...rows);
  }));
}
"""
