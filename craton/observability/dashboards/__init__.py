"""Grafana dashboards: cluster, run, node, serving, storage, network, cost and goodput.

`BOARDS` holds them as data, down to every query; `all_dashboards` makes Grafana's JSON of them, which needs the extra
`observe`.
"""
