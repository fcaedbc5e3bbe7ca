"""A report as one HTML file that needs nothing else: its skeleton, look and plots; what it says is the caller's."""

from craton.page.document import page_html
from craton.page.markup import Markup, with_code
from craton.page.plots import Figure, axis_name, axis_title, label, log_axis, log_range, plain_layout, vertical_line
from craton.page.sections import Tile, absent_section, chip, plot_section, section, table, tiles, warning_list

__all__ = [
    "Figure",
    "Markup",
    "Tile",
    "absent_section",
    "axis_name",
    "axis_title",
    "chip",
    "label",
    "log_axis",
    "log_range",
    "page_html",
    "plain_layout",
    "plot_section",
    "section",
    "table",
    "tiles",
    "vertical_line",
    "warning_list",
    "with_code",
]
