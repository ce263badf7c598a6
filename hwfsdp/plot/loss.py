"""Loss curves on top of each other: do these runs learn the same?

The most interesting result is hard to see: two curves that are the same. So the curves get thinner from first to last, and all
except the first are dashed. A curve that lies on another one shows as a dashed core in a wide band. A curve that leaves it shows
as a separate line. A drawing cannot show that curves are equal to the last bit. The legend says so in words. For curves that only
look equal, it gives the largest difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


from hwfsdp.errors import UsageError
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, ConstrainedLayoutEngine, Figure, MaxNLocator

Curve = Sequence[float]

_COLORS = (style.SKY_BLUE, style.VERMILION, style.BLACK, style.GREEN, style.PURPLE, style.BLUE, style.ORANGE)
_DASHES = ("solid", (0.0, (4.0, 2.0)), (0.0, (1.0, 1.6)), (0.0, (6.0, 1.5, 1.0, 1.5)))
_MARKERS = "os^Dv<>"
_WIDEST, _THINNEST = 7.0, 1.6  # points
_LOOKS_EQUAL = 0.005  # of the range of all curves: about the width of a line


def plot_losses(curves: Mapping[str, Sequence[float]], *, width: float = sheet.PAGE) -> Figure:
    """Draw the loss by step, one curve per name. The first curve is the widest and lies below the others.

    Args:
        curves: name → loss of steps 0, 1, …; lengths may differ. A loss that is not finite leaves a gap.
        width: of the picture, in inches.

    Raises:
        UsageError: there are no curves, or a curve has no values.
    """
    _check(curves)
    figure = Figure(
        figsize=(width, 4.6), dpi=sheet.DPI, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15)
    )
    axes = figure.add_subplot()
    labels = {name: "\n".join(sheet.broken(label, 0.6 * width)) for name, label in _labels(curves).items()}
    for place, (name, curve) in enumerate(curves.items()):
        _draw(axes, curve, labels[name], place, len(curves))
    style.open_frame(axes)
    style.draw_grid(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    steps = max(len(curve) for curve in curves.values())
    runs = "1 run" if len(curves) == 1 else f"{len(curves)} runs"
    axes.set_title(f"Loss of {runs} over {steps} steps", loc="left", fontsize=style.TITLE_SIZE, weight="bold")
    axes.legend(
        edgecolor=style.WHITE, framealpha=0.9, fontsize=style.TEXT_SIZE, handlelength=5.0, labelspacing=0.9
    )
    return figure


def _check(curves: Mapping[str, Curve]) -> None:
    empty = [name for name, curve in curves.items() if len(curve) == 0]
    if curves and not empty:
        return
    raise UsageError(
        "plot_losses",
        expected="one or more curves of at least one loss each",
        got=f"no values for {', '.join(map(repr, empty))}" if empty else "no curves",
        remedy="Pass {name: [loss of step 0, loss of step 1, …]}.",
    )


def _draw(axes: Axes, curve: Curve, label: str, place: int, count: int) -> None:
    share = place / max(1, count - 1)  # 0.0 for the first, 1.0 for the last
    every = max(1, len(curve) // 8)
    width = _WIDEST + share * (_THINNEST - _WIDEST) if count > 1 else 2.0
    axes.plot(
        range(len(curve)),
        curve,
        label=label,
        color=_COLORS[place % len(_COLORS)],
        linewidth=width,
        linestyle=_DASHES[place % len(_DASHES)],
        dash_capstyle="butt",
        marker=_MARKERS[place % len(_MARKERS)],
        markersize=max(6.0, width + 3.0),
        markeredgecolor=style.WHITE,
        markeredgewidth=0.8,
        markevery=(place * every // count, every),  # markers of coinciding curves stand side by side
        zorder=2.0 + place,
    )


def _labels(curves: Mapping[str, Curve]) -> dict[str, str]:
    """Make the label of each curve: its name, and the earlier curve that it equals, or seems to equal, if any."""
    names = list(curves)
    finite = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    visible = _LOOKS_EQUAL * (max(finite) - min(finite)) if finite else 0.0
    labels = {}
    for place, name in enumerate(names):
        alike = [earlier for earlier in names[:place] if len(curves[earlier]) == len(curves[name])]
        distances = {earlier: _distance(curves[earlier], curves[name]) for earlier in alike}
        twin = min(distances, key=distances.__getitem__, default=None)
        if twin is None or distances[twin] > visible:
            labels[name] = name
        elif distances[twin] == 0.0:
            labels[name] = f"{name} (equals {twin} exactly)"
        else:
            labels[name] = f"{name} (at most {distances[twin]:.1e} from {twin})"
    return labels


def _distance(first: Curve, second: Curve) -> float:
    """Return the largest difference at any step. NaN equals only NaN, and an infinity equals only itself."""
    return max(_apart(a, b) for a, b in zip(first, second, strict=True))


def _apart(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf
