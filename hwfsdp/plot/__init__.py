"""Figures of a log, one module per picture.

    style       what the pictures share: colors, hatches, units of bytes
    loss        loss curves laid over each other
    timeline    streams of every rank: what ran when, and what waited for what
    memory      bytes alive over time, by kind

Every function returns a `matplotlib.figure.Figure` and does nothing else: no window opens, no file is
written, no state of pyplot changes. `figure.savefig(path)` writes it; a notebook shows it when it is a
cell's value and `%matplotlib inline` has been said.
"""
