"""What all pages share: a frame without anything from elsewhere, colors for light and dark, a few shapes.

Colors never speak alone: each verdict has a sign as well. A page runs no script, and whatever a student wrote is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

SIGNS = {"passed": "✓", "failed": "✗", "skipped": "·", "void": "○"}
WORDS = {
    "passed": "passed",
    "failed": "failed",
    "skipped": "not run",
    "void": "holds, but the exercise does not count",
}

_STYLE = """
:root { --ink: #1b1f24; --soft: #5b6570; --line: #d9dee4; --page: #ffffff; --panel: #f6f8fa; --accent: #2f5fa7;
  --pass: #d4efe3; --pass-ink: #0b6b47; --fail: #fbd9d0; --fail-ink: #a8320f; --skip: #eceff2; --skip-ink: #7b858f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --soft: #9aa5b1; --line: #343c45; --page: #14181d;
  --panel: #1c2229; --accent: #8ab4f8; --pass: #123d2e; --pass-ink: #7fdcb4; --fail: #4d2015; --fail-ink: #ffab91;
  --skip: #252c34; --skip-ink: #77828e; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 80px; }
h1 { font-size: 26px; margin: 0 0 2px; letter-spacing: -.01em; }
h2 { font-size: 19px; margin: 44px 0 12px; }
h3 { font-size: 17px; margin: 0; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
.soft { color: var(--soft); } .small { font-size: 13px; } .right { text-align: right; }
code, pre, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 13px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 22px 0 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px; min-width: 120px; }
.tile b { display: block; font-size: 23px; font-weight: 650; font-variant-numeric: tabular-nums; }
.columns { display: grid; grid-template-columns: minmax(320px, 5fr) minmax(360px, 7fr); gap: 36px; align-items: start; }
@media (max-width: 900px) { .columns { grid-template-columns: 1fr; gap: 0; } }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.list { width: 100%; } .list td, .list th { padding: 6px 10px 6px 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; } .list th { font-weight: 600; color: var(--soft); font-size: 13px; }
.bar { display: inline-block; height: 10px; border-radius: 3px; background: var(--fail-ink); opacity: .75; }
.scroll { overflow: auto; max-height: 80vh; border: 1px solid var(--line); border-radius: 10px; }
.matrix th, .matrix td { padding: 0; height: 26px; border-bottom: 1px solid var(--line); background: var(--page); }
.matrix thead th { position: sticky; top: 0; z-index: 2; background: var(--panel); font-size: 12px; font-weight: 600; }
.matrix thead tr + tr th { top: 27px; height: 96px; vertical-align: bottom; }
.matrix .name { position: sticky; left: 0; z-index: 1; padding: 0 12px; text-align: left; font-weight: 500;
  white-space: nowrap; max-width: 240px; overflow: hidden; text-overflow: ellipsis; border-right: 1px solid var(--line); }
.matrix thead .name { z-index: 3; background: var(--panel); }
.matrix .points { padding: 0 10px; text-align: right; border-right: 1px solid var(--line); }
.matrix .check { writing-mode: vertical-rl; transform: rotate(180deg); padding: 6px 4px; font-weight: 500; color: var(--soft);
  white-space: nowrap; } .matrix .first { border-left: 2px solid var(--line); }
.matrix .cell { width: 24px; min-width: 24px; text-align: center; font-size: 13px; }
.matrix tfoot td, .matrix tfoot th { font-size: 11px; color: var(--soft); position: sticky; bottom: 0;
  background: var(--panel); } .matrix tfoot td { text-align: center; }
.matrix .passed, .badge.passed { background: var(--pass); color: var(--pass-ink); }
.matrix .failed, .badge.failed { background: var(--fail); color: var(--fail-ink); font-weight: 700; }
.matrix .skipped, .badge.skipped { background: var(--skip); color: var(--skip-ink); }
.matrix .void, .badge.void { background: var(--skip); color: var(--fail-ink); }
.badge { display: inline-block; min-width: 20px; padding: 0 5px; border-radius: 5px; text-align: center; font-size: 13px; }
.legend { margin: 10px 0; } .legend > span { margin-right: 18px; white-space: nowrap; }
.student { border: 1px solid var(--line); border-radius: 12px; margin: 18px 0; padding: 16px 20px; scroll-margin-top: 12px; }
.student > header { display: flex; justify-content: space-between; align-items: baseline; gap: 16px; }
.student .total { font-size: 18px; font-weight: 650; white-space: nowrap; }
.note { background: var(--fail); color: var(--fail-ink); border-radius: 8px; padding: 7px 12px; margin: 10px 0 0; }
.remark { background: var(--panel); border-radius: 8px; padding: 7px 12px; margin: 10px 0 0; }
details.exercise { border-top: 1px solid var(--line); padding: 8px 0; } details.exercise:first-of-type { margin-top: 12px; }
details.exercise > summary { cursor: pointer; display: flex; gap: 10px; align-items: baseline; list-style-position: inside; }
summary .grow { flex: 1; }
.finding { margin: 10px 0 12px 4px; padding: 2px 0 2px 14px; border-left: 3px solid var(--fail-ink); }
.finding.quiet { border-left-color: var(--line); }
.finding p { margin: 2px 0; } .finding .what { font-weight: 600; }
.finding.quiet { margin: 4px 0 4px 4px; } .finding.quiet .what { font-weight: 400; } .finding .ask { color: var(--accent); font-style: italic; }
.finding pre { margin: 6px 0; padding: 8px 12px; background: var(--panel); border-radius: 8px; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; } svg .count { fill: var(--ink); font-weight: 600; }
svg .column { fill: var(--accent); opacity: .85; } svg .axis { stroke: var(--line); }
footer { margin-top: 60px; color: var(--soft); font-size: 13px; }
@media print { .scroll { max-height: none; overflow: visible; } .student { break-inside: avoid; } }
"""


def text(value: object) -> str:
    """A value as text in a page."""
    return html.escape(str(value), quote=True)


def page(title: str, body: Iterable[str]) -> Iterator[str]:
    """A whole page."""
    yield f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<style>{_STYLE}</style></head><body><main>\n"
    yield from body
    yield "</main></body></html>\n"


def tiles(pairs: Sequence[tuple[object, str]]) -> str:
    """Large figures, each with what it is."""
    inner = "".join(
        f'<div class="tile"><b>{text(value)}</b><span class="soft small">{text(what)}</span></div>'
        for value, what in pairs
    )
    return f'<div class="tiles">{inner}</div>\n'


def histogram(counts: Sequence[int], labels: Sequence[str], caption: str) -> str:
    """Columns, a count above each, a label below."""
    width, height, top = 460, 210, 20
    step, most = width / max(1, len(counts)), max([*counts, 1])
    parts = []
    for index, (count, label) in enumerate(zip(counts, labels, strict=True)):
        tall = (height - top - 30) * count / most
        x, y, middle = index * step + 3, height - 30 - tall, (index + 0.5) * step
        parts.append(
            f'<rect class="column" x="{x:.1f}" y="{y:.1f}" width="{step - 6:.1f}" height="{tall:.1f}" rx="3"/>'
        )
        if count:
            parts.append(
                f'<text class="count" x="{middle:.1f}" y="{y - 5:.1f}" text-anchor="middle">{count}</text>'
            )
        parts.append(f'<text x="{middle:.1f}" y="{height - 12}" text-anchor="middle">{text(label)}</text>')
    axis = f'<line class="axis" x1="0" x2="{width}" y1="{height - 30}" y2="{height - 30}"/>'
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="{text(caption)}">'
        f"{axis}{''.join(parts)}</svg>\n"
    )


def badge(verdict: str) -> str:
    """The sign of a verdict."""
    return f'<span class="badge {verdict}" title="{WORDS[verdict]}">{SIGNS[verdict]}</span>'


def legend() -> str:
    """What the signs mean."""
    inner = "".join(f"<span>{badge(found)} {WORDS[found]}</span>" for found in SIGNS)
    return f'<p class="legend small soft">{inner}</p>\n'
