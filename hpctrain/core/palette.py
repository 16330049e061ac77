"""The colours, marks and titles of every plot, and dashes that tell lines apart in grey.

Colours of Okabe and Ito (2008), which colour-blind people can tell apart.
"""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
BLUE, VERMILION, GREEN, _, ORANGE, _, BLACK, _ = COLORS
GREY = "#D4D4D4"  #: paler than ORANGE also in grey
MARKERS = "osD^vP*X"
DASHES = ("-", "--", "-.", ":")


def plain(title: str) -> str:
    """Return a title in which a dollar sign begins no formula."""
    return title.replace("$", r"\$")
