"""The step player: a log as one page that plays a training step. It opens in any browser, without a network.

    sources     the functions that issued events, with their text
    page_data   a log as columns of numbers, for the page
    page        the page: template, style, scripts and data in one text

The page itself is `page.html`, `style.css`, and the scripts, which the browser runs one after the other, as they stand here:

    format      numbers as people read them
    looks       areas filled with colors and hatches
    events      a log unpacked, with its indexes
    reasons     why compute stood still, in a sentence
    state       the cursor, the window of time, the chosen rank; tells the panes
    chart       what panes share: a canvas that is sharp, an axis of time
    timeline    ranks and their streams
    memory      bytes by kind
    parameters  a grid of groups and ranks
    code        the line that issued the event
    summary     the head of the page, where to look, the same as tables
    controls    playing, stepping, keys, the link to a moment
    main        puts them together
"""

from hwfsdp.plot.player.page import make_page as make_page

__all__ = ["make_page"]
