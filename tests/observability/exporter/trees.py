"""Node images with what the exporter reads beyond them: counters of the kernel, of EFA, InfiniBand and Lustre's client.

Texts have the shape of what the kernel writes; numbers are made up.
"""

from __future__ import annotations

from pathlib import Path

from infrastructure.node_images import HEALTHY, Node

EFA_COUNTERS = """
    tx_bytes rx_bytes tx_pkts rx_pkts rx_drops send_bytes recv_bytes send_wrs recv_wrs rdma_read_bytes
    rdma_read_resp_bytes rdma_read_wrs rdma_read_wr_err rdma_write_bytes rdma_write_recv_bytes rdma_write_wrs
    rdma_write_wr_err retrans_bytes retrans_pkts retrans_timeout_events impaired_remote_conn_events
    unresponsive_remote_events reg_mr_err create_ah_err create_cq_err create_qp_err mmap_err no_completion_cmds
    submitted_cmds completed_cmds keep_alive_rcvd lifespan alloc_pd_err alloc_ucontext_err cmds_err
"""
INSTANCE = "ffff8f0012345800"
LLITE_STATS = """snapshot_time             1794700000.123456789 secs.nsecs
start_time                1794600000.123456789 secs.nsecs
elapsed_time              100000.000000000 secs.nsecs
read_bytes                25673 samples [bytes] 1 3366225 145121869 99999999
write_bytes               13641 samples [bytes] 1 3366225 468230469 99999999
read                      25673 samples [usec] 1 5000 250000 9999999
open                      1200 samples [usec] 90 5000 600000 9999999
close                     1190 samples [usec] 30 800 119000 9999999
getattr                   88 samples [usec] 10 80 1760 99999
"""
MDC_STATS = """snapshot_time             1794700000.123456789 secs.nsecs
req_waittime              1885503 samples [usec] 32 4826358 908745020 670751020176306
req_active                1885503 samples [reqs] 1 357 2176198 17811836
mds_getattr               231 samples [usec] 50 5735 45029 60616599
mds_close                 312481 samples [usec] 38 356200 47378914 142563767708
ldlm_ibits_enqueue        1200 samples [reqs] 1 1 1200 1200
"""
OSC_STATS = """snapshot_time             1794700000.123456789 secs.nsecs
req_waittime              40000 samples [usec] 100 900000 80000000 99999999999
req_active                40000 samples [reqs] 1 20 90000 400000
read_bytes                20000 samples [bytes] 4096 4194304 83886080000 1
write_bytes               20000 samples [bytes] 4096 4194304 83886080000 1
"""
IMPORT = """import:
    name: {target}
    target: {target}_UUID
    state: {state}
    connect_flags: [ write_grant, server_lock, version ]
    rpcs:
       inflight: 0
       unregistering: 0
       timeouts: 0
       avg_waittime: 2000 usec
"""


def full_node(kind: str = "p5en", *, lustre_root: str = "sys/kernel/debug/lustre") -> Node:
    """A healthy node of this kind with everything that is counted on it."""
    node = HEALTHY[kind]()
    for number, port in enumerate(node.ports):
        if port.driver == "efa":
            port.counters |= {name: 1000 * number + place for place, name in enumerate(EFA_COUNTERS.split())}
    node.files |= kernel_files(node.processors)
    for port in node.ports:
        place = f"sys/class/infiniband/{port.name}/ports/1"
        node.files[f"{place}/phys_state"] = "5: LinkUp"
        if port.driver != "efa":
            node.files |= {
                f"{place}/counters/{name}": str(value)
                for name, value in {
                    "port_xmit_data": 2_000_000,
                    "port_rcv_data": 1_000_000,
                    "port_xmit_packets": 77,
                    "port_rcv_packets": 66,
                    "link_downed": 1,
                    "symbol_error": 4,
                    "port_xmit_wait": 9,
                    "excessive_buffer_overrun_errors": 0,
                    "port_rcv_errors": "N/A (no PMA)",
                }.items()
            }
    if node.lustre:
        node.files |= lustre_files(lustre_root)
    return node


def write_root(folder: Path, kind: str = "p5en") -> Path:
    return full_node(kind).write(folder)


def lustre_files(root: str) -> dict[str, str]:
    mdc, osc = f"{root}/mdc/abcdefgh-MDT0000-mdc-{INSTANCE}", f"{root}/osc/abcdefgh-OST0003-osc-{INSTANCE}"
    return {
        f"{root}/llite/abcdefgh-{INSTANCE}/stats": LLITE_STATS,
        f"{mdc}/stats": MDC_STATS,
        f"{mdc}/import": IMPORT.format(target="abcdefgh-MDT0000", state="FULL"),
        f"{osc}/stats": OSC_STATS,
        f"{osc}/import": IMPORT.format(target="abcdefgh-OST0003", state="DISCONN"),
    }


def kernel_files(processors: int) -> dict[str, str]:
    cpus = [f"cpu{number} {1000 + number} 0 500 90000 10 0 5 0 0 0" for number in range(processors)]
    stat = ["cpu  1 2 3 4 5 6 7 8 9 10", *cpus, "intr 1 2 3", "ctxt 123456", "btime 1794600000", "processes 4242"]
    interface = "  eth0: 1000 10 1 2 0 0 0 0 2000 20 3 4 0 0 0 0"
    loop = "    lo: 5 5 0 0 0 0 0 0 5 5 0 0 0 0 0 0"
    return {
        "proc/stat": "\n".join([*stat, "procs_running 3", "procs_blocked 2"]),
        "proc/loadavg": "1.50 2.25 3.00 3/999 4242",
        "proc/uptime": "100000.00 1.00",
        "proc/vmstat": "nr_free_pages 5\noom_kill 2\npgmajfault 7\npswpin 0\npswpout 0",
        "proc/net/dev": "\n".join(["Inter-|   Receive", " face |bytes packets", interface, loop]),
        "proc/net/snmp": "Tcp: RtoAlgorithm InSegs OutSegs RetransSegs\nTcp: 1 100 200 9",
        "proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2000000",
        "proc/pressure/io": "some avg10=0 avg60=0 avg300=0 total=3000000\nfull avg10=0 avg60=0 avg300=0 total=1500000",
        "proc/pressure/memory": "some avg10=0 avg60=0 avg300=0 total=4\nfull avg10=0 avg60=0 avg300=0 total=2",
        "proc/sys/fs/file-nr": "5000 0 9223372036854775807",
        "proc/diskstats": (
            " 259 0 nvme1n1 10 0 2048 30 20 0 4096 60 1 70 80 0 0 0 0\n"
            " 259 1 nvme1n1p1 10 0 2048 30 20 0 4096 60 1 70 80 0 0 0 0\n"
            "   7 0 loop0 1 0 1 1 1 0 1 1 0 1 1 0 0 0 0"
        ),
        "sys/class/net/eth0/operstate": "up",
        "sys/class/net/eth0/speed": "100000",
        "sys/devices/system/edac/mc/mc0/ce_count": "6",
        "sys/devices/system/edac/mc/mc0/ue_count": "0",
        "sys/class/nvme/nvme1/model": "Amazon EC2 NVMe Instance Storage",
    }


def smart_page(
    *, warning: int = 0, celsius: int = 40, spare: int = 100, threshold: int = 10, used: int = 3, media_errors: int = 0
) -> bytes:
    """512 bytes of the SMART log, as the NVMe specification lays them out."""
    page = bytearray(512)
    page[0] = warning
    page[1:3] = (celsius + 273).to_bytes(2, "little")
    page[3:6] = bytes((spare, threshold, used))
    page[144:160] = (11).to_bytes(16, "little")
    page[160:176] = media_errors.to_bytes(16, "little")
    return bytes(page)
