"""The network by leaf: exposed communication of runs, EFA, InfiniBand, NVLink, and misrouted Ethernet traffic."""

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
    "Impact on runs",
    (
        Panel(
            "Exposed communication",
            "Time per step, over all ranks. Above its plan: look below for the leaf, node or device that differs.",
            twin("communication_seconds"),
            unit="s",
            width=12,
            alerts=("NcclBandwidthDrop", "TcpFallback"),
        ),
        Panel(
            "Exposed communication, by leaf",
            "Median rank of each leaf; dashed is the plan. The leaf that waits longest is not the cause: its ranks "
            "wait for a slower one elsewhere.",
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
            "Bus bandwidth of collectives",
            "From NCCL Inspector, for large messages, by collective, of the slowest node. A drop while steps get "
            "longer points at the network.",
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
            "Leaves of one run carry about the same traffic. No traffic during training: NCCL uses TCP instead.",
            (PanelQuery(_by_leaf("node_amazonefa_tx_bytes"), "{{leaf}}"),),
            unit="Bps",
            alerts=("TcpFallback",),
        ),
        Panel(
            "EFA received, by leaf",
            "Much less than other leaves send: packets are lost, check drops.",
            (PanelQuery(_by_leaf("node_amazonefa_rx_bytes"), "{{leaf}}"),),
            unit="Bps",
        ),
        Panel(
            "RDMA writes and reads, by leaf",
            "Plain sends only: the aws-ofi-nccl plugin is old or was not found.",
            (
                PanelQuery(_by_leaf("node_amazonefa_rdma_write_bytes"), "{{leaf}} written"),
                PanelQuery(_by_leaf("node_amazonefa_rdma_read_bytes"), "{{leaf}} read"),
            ),
            unit="Bps",
        ),
        Panel(
            "Retransmitted share",
            "By leaf. One leaf: a bad switch or cable. All leaves: congestion, place the job more compactly.",
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
            "Unresponsive peers and timeouts, worst nodes",
            "Ten of each. A peer that many nodes report is faulty; a node that alone reports others is faulty itself.",
            (
                PanelQuery(
                    _worst_nodes("node_amazonefa_unresponsive_remote_events"), "{{node}} ({{leaf}}) unresponsive peers"
                ),
                PanelQuery(_worst_nodes("node_amazonefa_retrans_timeout_events"), "{{node}} ({{leaf}}) timeouts"),
                PanelQuery(_worst_nodes("node_amazonefa_impaired_remote_conn_events"), "{{node}} ({{leaf}}) impaired"),
            ),
            unit="ops",
            alerts=("EfaPeerUnresponsive", "EfaTimeouts"),
        ),
        Panel(
            "Dropped on arrival, worst nodes",
            "The host cannot receive packets fast enough: PCIe, or memory of another NUMA node.",
            (PanelQuery(_worst_nodes("node_amazonefa_rx_drops"), "{{node}} ({{leaf}})"),),
            unit="ops",
            alerts=("EfaDrops",),
        ),
        Panel(
            "Rail imbalance, worst nodes",
            "Busiest device over the least busy; 1 is even. No traffic is an unused rail: check rank binding.",
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
            "Failed work requests, worst nodes",
            "RDMA reads and writes, and device commands.",
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
            "EFA and InfiniBand, by node. A port that was active before: check cable, switch and device.",
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
            "Leaves of one run carry about the same traffic.",
            (PanelQuery(_by_leaf("node_infiniband_port_data_transmitted_bytes_total"), "{{leaf}}"),),
            unit="Bps",
        ),
        Panel(
            "Transmit wait, worst nodes",
            "Ticks with data to send but no credit: congestion behind the switch.",
            (PanelQuery(_worst_nodes("node_infiniband_port_transmit_wait_total"), "{{node}} ({{leaf}})"),),
            unit="ops",
        ),
        Panel(
            "Errors, worst nodes",
            "Symbol errors, and links that went down. Suspect the cable first.",
            (
                PanelQuery(_worst_nodes("node_infiniband_symbol_error_total"), "{{node}} symbols"),
                PanelQuery(_worst_nodes("node_infiniband_link_downed_total"), "{{node}} link down"),
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
            "Sent by all GPUs.",
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
            "Storage and TCP. As much as EFA should carry: NCCL fell back to TCP; its log has the reason.",
            (PanelQuery(_by_leaf("node_network_transmit_bytes_total", f'{HERE}, device!="lo"'), "{{leaf}}"),),
            unit="Bps",
            alerts=("TcpFallback",),
        ),
        Panel(
            "TCP retransmits, worst nodes",
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
    "Exposed communication of runs, and the leaf, node or device that differs from its peers.",
    (RUN, LEAF, NODE),
    (RUNS, EFA, INFINIBAND, OTHERS),
)
