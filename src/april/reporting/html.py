"""The report's HTML page: skeleton, style and script, all inline. The page loads nothing from the network.

Every text that comes from a run passes through `html.escape` before it gets here or in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root{color-scheme:light;--page:#f6f5f2;--card:#fff;--ink:#1c1d20;--soft:#5b5f66;--rule:#e3e1dc;--grid:#eceae6;
--blue:#0072b2;--green:#009e73;--amber:#e69f00;--red:#c8371b;--purple:#a2508a;--grey:#8b8f96;--wait:#c9c9cc;
--load:#b7d3e6;--age1:#f3c65f;--age2:#e69f00;--age3:#c47200;--age4:#944a00;--age5:#652c00}
:root.dark{color-scheme:dark;--page:#141518;--card:#1c1e22;--ink:#e9e9ea;--soft:#a3a7ae;--rule:#303338;--grid:#2a2d32;
--blue:#4a9fdc;--green:#2fc79c;--amber:#ffc14d;--red:#ff7a5c;--purple:#d58bc0;--grey:#8b8f96;--wait:#4a4d54;
--load:#27506d;--age1:#f0c777;--age2:#dc972b;--age3:#bc6e18;--age4:#984d14;--age5:#763313}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1180px;margin:0 auto;padding:36px 24px 64px}
header{display:flex;align-items:flex-start;gap:16px;margin-bottom:22px}
header div{flex:1;min-width:0}
h1{font-size:27px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 12px}
h3{font-size:13px;font-weight:600;margin:0 0 6px;color:var(--soft)}
.sub{margin:0;color:var(--soft)}
button,select{font:inherit;font-size:13px;color:var(--ink);background:var(--card);border:1px solid var(--rule);
border-radius:6px;padding:5px 10px;max-width:100%}
button{cursor:pointer}
.lead{margin:0 0 18px;max-width:92ch}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:1px;background:var(--rule);border:1px solid var(--rule);
border-radius:10px;overflow:hidden;margin-bottom:18px}
.tile{background:var(--card);padding:14px 18px}
.tile b{display:block;font-size:23px;line-height:1.3;font-weight:600;letter-spacing:-.01em;white-space:nowrap}
.tile span{display:block;font-size:13px;color:var(--soft)}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:18px 18px 14px}
section{margin-bottom:18px}
.row{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr))}
.row.thirds{grid-template-columns:repeat(auto-fit,minmax(min(100%,290px),1fr))}
.row>div{min-width:0}
.why{margin:10px 0 0;color:var(--soft);font-size:14px;max-width:92ch}
.missing{color:var(--soft);font-style:italic;margin:8px 0}
.plot{margin:0;overflow-x:auto;position:relative}
svg{display:block;width:100%;height:auto;min-width:300px;overflow:visible}
svg text{font-size:11.5px;fill:var(--soft)}
svg text.note{fill:var(--ink);paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
.grid{stroke:var(--grid);fill:none}
.base{stroke:var(--grey);fill:none;stroke-width:.8}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line.faint{opacity:.32;stroke-width:1.2}
.dot{fill:var(--c);stroke:var(--card);stroke-width:1.2}
.area{fill:var(--c)}
.layer{stroke:var(--card);stroke-width:.7}
.marker{stroke:var(--ink);stroke-dasharray:2 3;fill:none;opacity:.65}
.satisfied{stroke:var(--ink);stroke-width:1.5;fill:none}
.wait{stroke:var(--wait);stroke-width:1;fill:none}
.away{stroke:var(--purple);stroke-width:1.5;fill:none}
svg rect{fill:var(--c)}
.c-blue{--c:var(--blue)}.c-green{--c:var(--green)}.c-amber{--c:var(--amber)}.c-red{--c:var(--red)}
.c-purple{--c:var(--purple)}.c-grey{--c:var(--grey)}.c-load{--c:var(--load)}.c-wait{--c:var(--wait)}
.c-age0{--c:var(--blue)}.c-age1{--c:var(--age1)}.c-age2{--c:var(--age2)}.c-age3{--c:var(--age3)}
.c-age4{--c:var(--age4)}.c-age5{--c:var(--age5)}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;list-style:none;margin:0 0 4px;padding:0;font-size:13px;
color:var(--soft)}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px;background:var(--c);
print-color-adjust:exact;-webkit-print-color-adjust:exact}
.choices{display:flex;flex-wrap:wrap;gap:8px;margin-bottom:8px}
.steps{display:flex;flex-wrap:wrap;justify-content:space-between;align-items:center;gap:8px 16px;margin-bottom:8px}
.timeline[hidden]{display:none}
.timeline.pick g[data-g]{opacity:.22}.timeline.pick g[data-g].on{opacity:1}
#tip{position:fixed;pointer-events:none;background:var(--card);color:var(--ink);border:1px solid var(--rule);
border-radius:6px;box-shadow:0 3px 14px rgb(0 0 0/.16);padding:6px 10px;font-size:13px;line-height:1.45;z-index:9;
max-width:300px}
#tip[hidden]{display:none}
#tip div{white-space:nowrap}
#tip i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px;background:var(--c)}
.rule{stroke:var(--ink);opacity:.45;stroke-width:1;fill:none}
details{margin:0}
summary{cursor:pointer;font-weight:600;font-size:15px}
pre{margin:12px 0 0;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
.completion{border-bottom:1px solid var(--rule);padding:5px 0}
.completion summary{font-weight:400;font-size:13px;overflow-wrap:anywhere}
.completion[hidden]{display:none}
.ending{display:block;color:var(--soft);white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.completion[open] .ending{display:none}
.prompt{color:var(--soft)}
.turn{margin:12px 0 0;color:var(--soft);font-size:13px}.turn+pre{margin-top:2px}
.piece{box-shadow:inset 0 -2px var(--c);border-left:2px solid var(--c);padding-left:1px}
.scroll{overflow-x:auto}
.narrow{display:none}
table{border-collapse:collapse;width:100%;margin-top:12px;font-size:13px}
tr.chosen{font-weight:600}
th,td{text-align:right;padding:3px 10px;border-bottom:1px solid var(--rule);white-space:nowrap}
th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left;padding-left:0}
.text{text-align:left;white-space:normal;overflow-wrap:anywhere}
footer{color:var(--soft);font-size:13px}
@media(max-width:760px){main{padding:20px 12px}.tiles{grid-template-columns:repeat(2,1fr)}
.broad{display:none}.narrow{display:block}table{font-size:12px}th,td{padding:3px 4px}
.timeline svg text{font-size:21px}.timeline svg text.note{stroke-width:6px}}
@media print{:root,:root.dark{color-scheme:light;--page:#fff;--card:#fff;--ink:#000;--soft:#444;--rule:#ccc;
--grid:#e5e5e5;--blue:#0072b2;--green:#009e73;--amber:#e69f00;--red:#c8371b;--purple:#a2508a;--wait:#c9c9cc;
--load:#b7d3e6;--age1:#f3c65f;--age2:#e69f00;--age3:#c47200;--age4:#944a00;--age5:#652c00}
main{max-width:none;padding:0}section,.tile{break-inside:avoid}button,select,#tip{display:none}}
"""

SCRIPT = """
const root = document.documentElement, tip = document.getElementById('tip');
const wish = matchMedia('(prefers-color-scheme: dark)');
const paint = dark => root.classList.toggle('dark', dark);
paint(location.hash === '#dark' || (location.hash !== '#light' && wish.matches));
wish.addEventListener('change', event => paint(event.matches));
document.getElementById('theme').addEventListener('click', () => paint(!root.classList.contains('dark')));

const place = event => {
  const box = tip.getBoundingClientRect(), gap = 14;
  const left = event.clientX + gap + box.width > innerWidth ? event.clientX - gap - box.width : event.clientX + gap;
  const top = Math.min(event.clientY + gap, innerHeight - box.height - gap);
  tip.style.left = Math.max(0, left) + 'px';
  tip.style.top = Math.max(0, top) + 'px';
};
const line = (text, style) => {
  const row = document.createElement('div');
  if (style) row.append(Object.assign(document.createElement('i'), {className: style}));
  row.append(text);
  return row;
};
for (const svg of document.querySelectorAll('svg[data-hover]')) {
  const data = JSON.parse(svg.dataset.hover);
  const rule = document.createElementNS('http://www.w3.org/2000/svg', 'path');
  rule.setAttribute('class', 'rule');
  svg.append(rule);
  svg.addEventListener('pointermove', event => {
    if (!data.x.length) return;
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    let near = 0;
    data.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(data.x[near] - at)) near = i; });
    rule.setAttribute('d', `M${data.x[near]},10V${svg.dataset.floor}`);
    tip.replaceChildren(line(data.heads[near]));
    data.series.forEach(([name, style], i) => {
      if (data.values[i][near]) tip.append(line(`${name}: ${data.values[i][near]}`, style));
    });
    tip.hidden = false;
    place(event);
  });
  svg.addEventListener('pointerleave', () => { rule.removeAttribute('d'); tip.hidden = true; });
}

const list = document.getElementById('completions');
if (list) {
  const [find, which, at, order] = ['find', 'which', 'at', 'order'].map(id => document.getElementById(id)), most = 40;
  const items = [...list.children];
  const arrange = () => {
    const name = order.value.replace('-', ''), sign = order.value[0] === '-' ? -1 : 1;
    const value = item => sign * (parseFloat(item.dataset[name]) || 0);
    const wanted = find.value.toLowerCase();
    const fits = ({dataset: own, textContent: text}) => (!which.value || own.held === which.value)
      && (!at.value || own.step === at.value) && (!wanted || text.toLowerCase().includes(wanted));
    items.sort((a, b) => value(a) - value(b));
    let shown = 0;
    for (const item of items) { item.hidden = !fits(item) || ++shown > most; list.append(item); }
  };
  for (const control of [find, which, at, order]) control.addEventListener('input', arrange);
  arrange();
}

const pick = document.getElementById('pick');
if (pick) pick.addEventListener('change', () => {
  for (const part of document.querySelectorAll('.timeline')) part.hidden = part.dataset.step !== pick.value;
});
for (const part of document.querySelectorAll('.timeline')) {
  part.addEventListener('pointerover', event => {
    const bar = event.target.closest('g[data-g]');
    part.classList.toggle('pick', !!bar);
    for (const other of part.querySelectorAll('g[data-g]'))
      other.classList.toggle('on', !!bar && other.dataset.g === bar.dataset.g);
  });
  part.addEventListener('pointerleave', () => part.classList.remove('pick'));
}
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """Headline figure: name, value and detail."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. `body` is HTML; `title` and `why`, its explanation, are plain text."""

    title: str
    body: str
    why: str = ""


def page(
    title: str,
    subtitle: str,
    tiles: Sequence[Tile],
    sections: Sequence[Section],
    footer: str,
    refresh: int = 0,
    summary: str = "",
) -> str:
    """Return the whole document. All arguments but the bodies of the sections are plain text.

    Args:
        refresh: seconds after which a browser reloads the page; 0 for never.
        summary: sentences above the tiles; empty for none.
    """
    figures = "".join(
        f'<div class="tile"><span>{escape(tile.name)}</span><b>{escape(tile.value)}</b>'
        f"<span>{escape(tile.detail)}</span></div>"
        for tile in tiles
    )
    # With this policy a browser refuses every request of the page.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    lead = f'<p class="lead">{escape(summary)}</p>\n' if summary else ""
    again = f'\n<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width,initial-scale=1">{again}
<title>{escape(title)} · april</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><div><h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p></div>
<button id="theme" type="button">Light / dark</button></header>
{lead}<div class="tiles">{figures}</div>
{"".join(_section(section) for section in sections)}
<footer>{escape(footer)}</footer>
</main>
<div id="tip" hidden></div>
<script>{SCRIPT}</script>
</body>
</html>
"""


def row(*parts: tuple[str, str], thirds: bool = False) -> str:
    """Return titled plots in a row that wraps on narrow screens."""
    cells = "".join(f"<div><h3>{escape(title)}</h3>{body}</div>" for title, body in parts)
    return f'<div class="row{" thirds" if thirds else ""}">{cells}</div>'


def both_widths(broad: str, narrow: str) -> str:
    """A plot drawn for a wide screen, and the same drawn for a phone."""
    return f'<div class="broad">{broad}</div><div class="narrow">{narrow}</div>'


def folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _section(section: Section) -> str:
    heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    why = f'<p class="why">{escape(section.why)}</p>' if section.why else ""
    return f"<section>{heading}{section.body}{why}</section>\n"
