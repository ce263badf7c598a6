"""The parts of matplotlib and Pillow that pictures are made of. The import of this module says what to install if one is missing."""

from __future__ import annotations

from hwfsdp.extras import needed_by

with needed_by("pictures"):
    from matplotlib.artist import Artist as Artist
    from matplotlib.axes import Axes as Axes
    from matplotlib.colors import LinearSegmentedColormap as LinearSegmentedColormap
    from matplotlib.colors import to_hex as to_hex
    from matplotlib.colors import to_rgb as to_rgb
    from matplotlib.figure import Figure as Figure
    from matplotlib.font_manager import FontProperties as FontProperties
    from matplotlib.layout_engine import ConstrainedLayoutEngine as ConstrainedLayoutEngine
    from matplotlib.lines import Line2D as Line2D
    from matplotlib.patches import FancyArrowPatch as FancyArrowPatch
    from matplotlib.patches import FancyBboxPatch as FancyBboxPatch
    from matplotlib.patches import Patch as Patch
    from matplotlib.patches import Rectangle as Rectangle
    from matplotlib.patheffects import withStroke as withStroke
    from matplotlib.textpath import text_to_path as text_to_path
    from matplotlib.ticker import MaxNLocator as MaxNLocator
    from PIL import Image as Image
