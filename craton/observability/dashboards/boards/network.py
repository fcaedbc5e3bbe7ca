"""The network by leaf: what runs notice of it, EFA, InfiniBand, NVLink, and what should not be on Ethernet."""

from __future__ import annotations

from craton.observability.dashboards.boards.twins import RUN_HERE, twin
from craton.observability.dashboards.model import LEAF, NODE, RUN, Board, Panel, PanelQuery, PanelRow

HERE = 'node=~"$node", leaf=~"$leaf"'
RATE = "[$__rate_interval]"


def _by_leaf(name: str, matchers: str = HERE) -> str:
    return f"sum by (leaf) (rate({name}{{{matchers}}}{RATE}))"


def _worst_nodes(name: str) -> str:
    return f"topk(10, sum by (leaf, node) (rate({name}{{{HERE}}}{RATE})))"


RUNS = PanelRow(
    "What runs notice",
    (
        Panel(
            "Communication that nothing hides",
            "Time of a step, of all ranks. Above its plan: look below for the leaf, node or device that differs.",
            twin("communication_seconds"),
            unit="s",
            width=12,
            alerts=("NcclBandwidthDrop", "TcpFallback"),
        ),
        Panel(
            "The same by leaf",
            "Median rank of each leaf; dashed is the plan. A leaf that waits longest is not the guilty one: ranks wait "
            "for whoever is slow elsewhere.",
            (
                PanelQuery(
                    f'quantile by (run, leaf) (0.5, craton_run_communication_seconds{{{RUN_HERE}, leaf=~"$leaf"}})',
                    "{{run}} {{leaf}}",
                ),
                twin("communication_seconds")[-1],
            ),
            unit="s",
            width=12,
        ),
        Panel(
            "Bandwidth of collectives",
            "As NCCL's inspector measures it for large messages, by collective, of the slowest node. A fall while "
            "steps get longer is the network's.",
            (
                PanelQuery(
                    'min by (collective) (nccl_bus_bandwidth_gbs{message_size=~".*(MB|GB)"}) * 1e9', "{{collective}}"
                ),
            ),
            unit="Bps",
            width=24,
            alerts=("NcclBandwidthDrop",),
        ),
    ),
)

EFA = PanelRow(
    "EFA",
    (
        Panel(
            "EFA sent, by leaf",
            "Leaves of one run carry about the same. None at all during training: TCP is used instead.",
            (PanelQuery(_by_leaf("node_amazonefa_tx_bytes"), "{{leaf}}"),),
            unit="Bps",
            alerts=("TcpFallback",),
        ),
        Panel(
            "EFA received, by leaf",
            "Much less than is sent elsewhere: packets are lost on the way, look at drops.",
            (PanelQuery(_by_leaf("node_amazonefa_rx_bytes"), "{{leaf}}"),),
            unit="Bps",
        ),
        Panel(
            "Written to and read from others' memory",
            "RDMA, by leaf. Plain sends alone mean an old plugin, or one that was not found.",
            (
                PanelQuery(_by_leaf("node_amazonefa_rdma_write_bytes"), "{{leaf}} written"),
                PanelQuery(_by_leaf("node_amazonefa_rdma_read_bytes"), "{{leaf}} read"),
            ),
            unit="Bps",
        ),
        Panel(
            "Sent again, share of what was sent",
            "By leaf. A leaf of its own: a bad switch or cable. Everywhere: congestion, spread the job less.",
            (
                PanelQuery(
                    f"{_by_leaf('node_amazonefa_retrans_bytes')} / ({_by_leaf('node_amazonefa_tx_bytes')} > 0)"
                    f" or 0 * {_by_leaf('node_amazonefa_retrans_bytes')}",
                    "{{leaf}}",
                ),
            ),
            unit="percentunit",
            alerts=("EfaRetransmits",),
        ),
        Panel(
            "Silent peers and timeouts, worst nodes",
            "Ten of each. Who is silent to many is the guilty one; who alone finds others silent is so itself.",
            (
                PanelQuery(
                    _worst_nodes("node_amazonefa_unresponsive_remote_events"), "{{node}} ({{leaf}}) silent peers"
                ),
                PanelQuery(_worst_nodes("node_amazonefa_retrans_timeout_events"), "{{node}} ({{leaf}}) timeouts"),
                PanelQuery(_worst_nodes("node_amazonefa_impaired_remote_conn_events"), "{{node}} ({{leaf}}) impaired"),
            ),
            unit="ops",
            alerts=("EfaPeerUnresponsive", "EfaTimeouts"),
        ),
        Panel(
            "Dropped on arrival, worst nodes",
            "A host that cannot take packets as fast as they come: PCIe, or memory of another socket.",
            (PanelQuery(_worst_nodes("node_amazonefa_rx_drops"), "{{node}} ({{leaf}})"),),
            unit="ops",
            alerts=("EfaDrops",),
        ),
        Panel(
            "Busiest device over the least busy, worst nodes",
            "1 is even. A device without traffic is a rail that no rank uses: check the binding of ranks to devices.",
            (
                PanelQuery(
                    f"topk(10, max by (leaf, node) (rate(node_amazonefa_tx_bytes{{{HERE}}}{RATE}))"
                    f" / clamp_min(min by (leaf, node) (rate(node_amazonefa_tx_bytes{{{HERE}}}{RATE})), 1))",
                    "{{node}} ({{leaf}})",
                ),
            ),
            unit="short",
            alerts=("EfaRailImbalance",),
        ),
        Panel(
            "Work that failed, worst nodes",
            "Reads and writes of others' memory, and commands to the device.",
            (
                PanelQuery(_worst_nodes("node_amazonefa_rdma_write_wr_err"), "{{node}} writes"),
                PanelQuery(_worst_nodes("node_amazonefa_rdma_read_wr_err"), "{{node}} reads"),
                PanelQuery(_worst_nodes("node_amazonefa_cmds_err"), "{{node}} commands"),
            ),
            unit="ops",
            alerts=("EfaWorkErrors",),
        ),
        Panel(
            "Ports that are not active",
            "Of EFA and InfiniBand, by node. A port that was active yesterday: cable, switch, or the device.",
            (PanelQuery(f"sum by (leaf, node) (node_infiniband_state_id{{{HERE}}} != bool 4)", "{{node}} ({{leaf}})"),),
            unit="short",
            alerts=("InfinibandPortDown", "FabricDeviceMissing"),
        ),
    ),
)

INFINIBAND = PanelRow(
    "InfiniBand",
    (
        Panel(
            "InfiniBand sent, by leaf",
            "Leaves of one run carry about the same.",
            (PanelQuery(_by_leaf("node_infiniband_port_data_transmitted_bytes_total"), "{{leaf}}"),),
            unit="Bps",
        ),
        Panel(
            "Could not be sent, worst nodes",
            "Ticks in which there was data and no credit: congestion behind the switch.",
            (PanelQuery(_worst_nodes("node_infiniband_port_transmit_wait_total"), "{{node}} ({{leaf}})"),),
            unit="ops",
        ),
        Panel(
            "Errors, worst nodes",
            "Broken symbols, and links that went down. A cable, until shown otherwise.",
            (
                PanelQuery(_worst_nodes("node_infiniband_symbol_error_total"), "{{node}} symbols"),
                PanelQuery(_worst_nodes("node_infiniband_link_downed_total"), "{{node}} went down"),
            ),
            unit="ops",
            alerts=("InfinibandErrors",),
        ),
    ),
)

OTHERS = PanelRow(
    "NVLink and Ethernet",
    (
        Panel(
            "NVLink, by leaf",
            "Sent by all cards.",
            (
                PanelQuery(
                    "sum by (leaf) (max by (leaf, UUID) ("
                    f"rate(craton_gpu_nvlink_transmitted_bytes_total{{{HERE}}}{RATE})))",
                    "{{leaf}}",
                ),
            ),
            unit="Bps",
            alerts=("NvlinkErrors",),
        ),
        Panel(
            "Ethernet, by leaf",
            "Storage and TCP. As much as EFA should carry: NCCL fell back to TCP, its log says why.",
            (PanelQuery(_by_leaf("node_network_transmit_bytes_total", f'{HERE}, device!="lo"'), "{{leaf}}"),),
            unit="Bps",
            alerts=("TcpFallback",),
        ),
        Panel(
            "TCP sent again, worst nodes",
            "Share of segments.",
            (
                PanelQuery(
                    f"topk(10, max by (leaf, node) (rate(node_netstat_Tcp_RetransSegs{{{HERE}}}{RATE})"
                    f" / clamp_min(rate(node_netstat_Tcp_OutSegs{{{HERE}}}{RATE}), 1)))",
                    "{{node}} ({{leaf}})",
                ),
            ),
            unit="percentunit",
        ),
    ),
)

NETWORK = Board(
    "network",
    "Network by leaf",
    "What runs notice of the network, and which leaf, node or device differs from its like.",
    (RUN, LEAF, NODE),
    (RUNS, EFA, INFINIBAND, OTHERS),
)
