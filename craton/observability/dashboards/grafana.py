"""Convert boards to Grafana's JSON with the typed builders of grafana-foundation-sdk.

Pure: the same boards give the same JSON. Panel ids and grid positions follow from their order.
"""

from __future__ import annotations

import json
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from craton.observability.dashboards.boards import BOARDS
from craton.observability.dashboards.model import Board, Panel, PanelQuery, Variable
from craton.observability.prometheus import ALERTS, DATA_SOURCE

COLUMNS = 24
TAG = "craton"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
RULES = {alert.name: alert for alert in ALERTS}
RUNBOOKS_AT = "/public/craton/docs/runbooks"  # served by Grafana if docs/ is copied to its public/craton
DASHED = {"fill": "dash", "dash": [8, 6]}
AnyPanel = timeseries.Panel | stat.Panel | table.Panel | bargauge.Panel
_UNSTACKED = {"mode": "none", "group": "A"}
_EVERYTHING = models.VariableOption(text="All", value="$__all", selected=True)


def all_dashboards(runbooks: str | None = None) -> dict[str, dict[str, Any]]:
    """Return file name without .json → dashboard. `runbooks` is the URL of the runbook folder."""
    return {board.name: dashboard_of(board, runbooks) for board in BOARDS}


def dashboard_of(board: Board, runbooks: str | None = None) -> dict[str, Any]:
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time(board.since, "now")
        .timezone("browser")
        .refresh("30s")
        .link(_other_boards())
        .annotation(_alerts_of(board))
        .with_variable(_data_source())
        .with_variable(_runbooks(runbooks or RUNBOOKS_AT))
    )
    for variable in board.variables:
        built = built.with_variable(_variable(variable))
    top, number = 0, 1
    for row in board.rows:
        built = built.with_row(dashboard.Row(row.title).id(number).grid_pos(models.GridPos(x=0, y=top, w=COLUMNS, h=1)))
        top, number, left, tallest = top + 1, number + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, tallest = 0, top + tallest, 0
            place = models.GridPos(x=left, y=top, w=panel.width, h=panel.height)
            built = built.with_panel(_panel(panel).id(number).grid_pos(place))
            left, tallest, number = left + panel.width, max(tallest, panel.height), number + 1
        top += tallest
    document: dict[str, Any] = json.loads(json.dumps(built.build(), cls=JSONEncoder, sort_keys=True))
    return document


def _panel(panel: Panel) -> AnyPanel:
    built: AnyPanel
    if panel.kind == "lines":
        built = _lines(panel)
    elif panel.kind == "table":
        built = _table(panel)
    elif panel.kind == "stat":
        built = (
            stat.Panel()
            .graph_mode(common_models.BigValueGraphMode.NONE)
            .color_mode(common_models.BigValueColorMode.VALUE)
            .text_mode(common_models.BigValueTextMode.VALUE_AND_NAME)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        )
    else:
        built = (
            bargauge.Panel()
            .orientation(common_models.VizOrientation.HORIZONTAL)
            .display_mode(common_models.BarGaugeDisplayMode.BASIC)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        )
    built = built.title(panel.title).description(_description(panel)).datasource(SOURCE).unit(panel.unit)
    if panel.nothing:
        built = built.no_value(panel.nothing)
    if panel.alerts:
        built = built.links([_runbook(name) for name in panel.alerts])
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        built = built.with_target(_target(panel, query, letter))
    return built.thresholds(_thresholds(panel))


def _lines(panel: Panel) -> timeseries.Panel:
    built = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(20 if panel.stacked else 0)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    if panel.stacked:
        built = built.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        if query.is_plan:
            built = built.override_by_query(letter, _plan_looks())
    return built


def _plan_looks() -> list[models.DynamicConfigValue]:
    """Return the style of planned lines: dashed, not filled, and not stacked with measured ones."""
    looks = {"custom.lineStyle": DASHED, "custom.lineWidth": 2, "custom.fillOpacity": 0, "custom.stacking": _UNSTACKED}
    return [models.DynamicConfigValue(id_val=name, value=value) for name, value in looks.items()]


def _table(panel: Panel) -> table.Panel:
    """Return a table with a row per label set and a column per query."""
    hidden = {"Time": True, **{f"Time {number}": True for number in range(1, len(panel.queries) + 1)}}
    built = (
        table.Panel()
        .filterable(True)
        .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(models.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden}))
    )
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        # Grafana names the column of a single query Value.
        column = f"Value #{letter}" if len(panel.queries) > 1 else "Value"
        looks: dict[str, object] = {"displayName": query.legend, "unit": query.unit or panel.unit}
        built = built.override_by_name(
            column, [models.DynamicConfigValue(id_val=name, value=value) for name, value in looks.items()]
        )
    if panel.opens:
        link = {
            "title": f"Open {panel.opens}",
            "url": f"/d/craton-{panel.opens}?${{datasource:queryparam}}&var-{panel.opens}=${{__value.text}}",
        }
        built = built.override_by_name(panel.opens, [models.DynamicConfigValue(id_val="links", value=[link])])
    return built


def _target(panel: Panel, query: PanelQuery, letter: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter).datasource(SOURCE)
    if panel.kind == "lines":
        return target.range()
    return target.instant().format(PromQueryFormat.TABLE if panel.kind == "table" else PromQueryFormat.TIME_SERIES)


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    """Return green, then yellow and red; reversed when low values are bad."""
    warn, bad = panel.warn, panel.bad
    steps: list[tuple[float | None, str]] = [(None, "green")]
    if warn is not None and bad is not None and bad < warn:
        steps = [(None, "red"), (bad, "yellow"), (warn, "green")]
    else:
        steps += [(value, color) for value, color in ((warn, "yellow"), (bad, "red")) if value is not None]
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=color) for value, color in steps])
    )


def _description(panel: Panel) -> str:
    """Return the description with the paths of the runbooks, for installations that do not serve them."""
    pages = [f"{name}: {RULES[name].runbook}" for name in panel.alerts]
    return panel.description + (f"\n\nRunbooks: {', '.join(pages)}." if pages else "")


def _runbook(alert: str) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(f"Runbook: {alert}")
        .type(models.DashboardLinkType.LINK)
        .url(f"${{runbooks}}/{RULES[alert].runbook_page}")
        .target_blank(True)
    )


def _other_boards() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("Craton")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _alerts_of(board: Board) -> dashboard.AnnotationQuery:
    """Return annotations for firing alerts in every panel, limited to the selected run, node or leaf."""
    chosen = [f'{variable.name}=~"${variable.name}|"' for variable in board.variables]
    matchers = ", ".join(['alertstate="firing"', *chosen])
    return (
        dashboard.AnnotationQuery()
        .name("Alerts")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("red")
        .expr(f"ALERTS{{{matchers}}}")
    )


def _data_source() -> dashboard.DatasourceVariable:
    return (
        dashboard.DatasourceVariable("datasource")
        .label("Data source")
        .type("prometheus")
        .current(models.VariableOption(text="Craton", value=DATA_SOURCE, selected=True))
    )


def _runbooks(url: str) -> dashboard.TextBoxVariable:
    """Return the variable with the URL that serves docs/runbooks; links start with it."""
    return (
        dashboard.TextBoxVariable("runbooks")
        .label("Runbook URL")
        .description("URL that serves Craton's docs/runbooks")
        .default_value(url)
    )


def _variable(variable: Variable) -> dashboard.QueryVariable:
    built = (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .query({"query": variable.query, "refId": f"variable-{variable.name}"})
        .datasource(SOURCE)
        .multi(variable.multi)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
    )
    return built.include_all(True).all_value(".*").current(_EVERYTHING) if variable.has_all else built
