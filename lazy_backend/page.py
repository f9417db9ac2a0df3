"""The look that all our HTML pages share: one file, no network, light and dark. Imports nothing of ours."""

from __future__ import annotations

from html import escape
from typing import Sequence

_WIDTH, _BAR = 1000, 20
_STYLE = """
:root { color-scheme: light dark; --back: #fbfbf9; --card: #fff; --ink: #1d1d22; --soft: #6b6b76; --line: #e3e2dd;
  --idle: #c9c8c2; --good: #2e7d4f; --bad: #b3372f; --part: #a86a00; }
@media (prefers-color-scheme: dark) { :root { --back: #16161a; --card: #1f1f25; --ink: #ececf1; --soft: #9a9aa6;
  --line: #32323b; --idle: #4a4a55; --good: #6fcf97; --bad: #f2857c; --part: #f0b357; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1120px; padding: 2rem 1.25rem 4rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 1rem }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: .8rem }
.tile, .box { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .8rem 1rem }
.tile b { display: block; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums }
.tile span, .soft, figcaption { color: var(--soft); font-size: .86rem }
.scroll { overflow-x: auto }
svg { display: block; width: 100%; height: auto }
figure { margin: 0 0 1rem }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
svg .in { fill: #fff; font-size: 11px; pointer-events: none }
svg .axis { fill: var(--soft) }
.lane { fill: var(--line); opacity: .45 }
.none { fill: var(--idle) }
.bar { fill: var(--good) }
[data-s] { transition: opacity .12s }
.dim [data-s]:not(.on) { opacity: .18 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { font-weight: 500; color: var(--soft) }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 3px; margin-right: .5em }
ul { list-style: none; padding: 0; margin: 0 }
li { padding: .35rem 0; border-bottom: 1px solid var(--line) }
li:last-child { border: 0 }
.good { color: var(--good) }
.bad { color: var(--bad) }
.part { color: var(--part) }
code { font: 13px ui-monospace, monospace }
"""


def document(title: str, body: str, script: str = "") -> str:
    """A whole page."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    after = f"<script>{script}</script>" if script else ""
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}{after}</body></html>\n'


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """A bar for each row (name, length, the length in words), in order, the longest as wide as the page allows."""
    longest = max((length for _, length, _ in rows), default=0.0) or 1.0
    shapes = []
    for place, (name, length, told) in enumerate(rows):
        top = place * _BAR
        width = max(length / longest * (_WIDTH - 460), 1.0)
        shapes.append(f'<g><title>{escape(name)}: {escape(told)}</title>'
                      f'<text x="340" y="{top + 14}" text-anchor="end">{escape(name[:48])}</text>'
                      f'<rect class="bar" x="350" y="{top + 3}" width="{width:.1f}" height="{_BAR - 6}" rx="3"/>'
                      f'<text class="axis" x="{356 + width:.1f}" y="{top + 14}">{escape(told)}</text></g>')
    return (f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {len(rows) * _BAR + 4}" role="img">'
            f'{"".join(shapes)}</svg></figure>')
