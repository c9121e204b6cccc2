"""``torchrun --nnodes 2`` on one machine: two hosts are two network namespaces joined by a cable.

    sudo python examples/two_hosts.py            # flat, and what a rule chooses; 2 ranks each
    sudo python examples/two_hosts.py --modes hierarchical --nproc 3 --json

Each namespace (Linux, iproute2, root) has its own loopback and one end of a veth pair: what its
ranks say to each other stays inside, all else goes through the cable, whose counters are the
kernel's own. A step is forward and backward of one layer. Every rank compares its results with one
process's; the rows that crossed are compared with what the routing needs. The namespaces, and
whatever still runs in them, are removed at the end, also after an error or a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CABLE = "moe0"  # the name of the interface on either host
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # TEST-NET-1 (RFC 5737): nobody has these
PORT = 29500  # free: nothing else lives in these namespaces
MODES = ("all_to_all", "auto", "hierarchical")
STEPS = 3


def why_not() -> str:
    """Why namespaces can't be made here, or nothing."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "needs the ip command (Debian: apt-get install iproute2)"
    name = f"moe-try-{os.getpid()}"
    tried = _ip("netns", "add", name, check=False)
    if tried.returncode == 0:
        tried = _ip("-n", name, "link", "add", "t0", "type", "veth", "peer", "t1", check=False)
        _ip("netns", "del", name)
    return "" if tried.returncode == 0 else f"ip says: {tried.stderr.strip()}"


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done


@contextlib.contextmanager
def two_hosts() -> Any:
    """Two namespaces joined by a cable → their names. Gone afterwards, with all that runs there."""
    names = [f"moe-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        there = ("peer", "name", CABLE, "netns", names[1])
        _ip("-n", names[0], "link", "add", CABLE, "type", "veth", *there)
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/30", "dev", CABLE)
            for link in ("lo", CABLE):
                _ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough to end this
        for name in names:
            for pid in _ip("netns", "pids", name, check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", name, check=False)  # takes the cable along


def crossed(name: str) -> int:
    """Bytes that this host's end of the cable has sent: frames, with their headers and ACKs."""
    shown = _ip("-n", name, "-s", "-j", "link", "show", "dev", CABLE).stdout
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def launch(hosts: list[str], mode: str, nproc: int, limit: float) -> dict[str, Any]:
    """One ``torchrun`` on each host → what the ranks found, and what the cable carried."""
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        agents: list[subprocess.Popen[str]] = []
        logs = [stack.enter_context((Path(folder) / name).open("w+")) for name in hosts]
        before = [crossed(name) for name in hosts]
        for node, (name, log) in enumerate(zip(hosts, logs, strict=True)):
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            place = [f"--nnodes={len(hosts)}", f"--node-rank={node}", f"--nproc-per-node={nproc}"]
            meet = [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
            here = [f"--local-addr={ADDRESSES[node]}"]
            script = [str(Path(__file__).resolve()), "--rank", "--modes", mode]
            # gloo listens on one interface; by default it asks for the address of the host's name
            env = os.environ | {"GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1"}
            env = {n: v for n, v in env.items() if not n.startswith("MOE_")}
            command = ["ip", "netns", "exec", name, *torchrun, *place, *meet, *here, *script]
            process = subprocess.Popen(
                command, env=env | {"TWO_HOSTS_OUT": folder}, stdout=log, stderr=log, text=True
            )
            agents.append(process)
        try:
            for agent in agents:
                agent.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for agent in agents:
                agent.kill()  # its ranks go with the namespaces
                agent.wait()
        found = sorted(Path(folder).glob("rank*.json"))
        if any(agent.returncode for agent in agents) or len(found) != len(hosts) * nproc:
            texts = []
            for name, log in zip(hosts, logs, strict=True):
                log.seek(0)
                texts.append(f"--- {name}\n{log.read()[-3000:]}")
            raise RuntimeError(f"mode {mode} failed within {limit:g} s:\n" + "\n".join(texts))
        cable = sum(crossed(name) - was for name, was in zip(hosts, before, strict=True))
        ranks = [json.loads(path.read_text()) for path in found]
    return {"mode": mode, "cable": cable, **_sum(ranks)}


def _sum(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = ("dispatch", "combine", "combine.backward", "dispatch.backward")
    return {
        "parts": ranks[0]["parts"],
        "nodes": sorted({rank["node"] for rank in ranks}),
        "error": max(rank["error"] for rank in ranks),
        "rows": {kind: sum(rank["sent"][kind] for rank in ranks) for kind in kinds},
        "bound": {kind: sum(rank["bound"][kind] for rank in ranks) for kind in kinds},
        "counted": sum(rank["all"] for rank in ranks),
    }


# ------------------------------------------------------------------------------------- one rank


@dataclass(frozen=True)
class Sizes:
    hidden: int = 256
    experts: int = 24
    top_k: int = 4
    tokens: int = 256


def rank_main(mode: str) -> None:
    """Forward and backward on this rank, checked against one process; a JSON file with counts."""
    import torch
    import torch.distributed as dist

    from moe_core import Experts, MoEConfig, ParallelConfig, trace

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    s = Sizes()
    config = MoEConfig(
        hidden_size=s.hidden, intermediate_size=32, num_experts=s.experts, top_k=s.top_k,
        dtype="float64",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(shape, generator=generator, dtype=torch.float64) / 8
        for shape in ((s.experts, 64, s.hidden), (s.experts, s.hidden, 32))
    ]
    batches = []
    for _ in range(world):
        x = torch.randn(s.tokens, s.hidden, generator=generator, dtype=torch.float64)
        scores = torch.rand(s.tokens, s.experts, generator=generator)
        batches.append((x, scores.topk(s.top_k).indices, scores.topk(s.top_k).values))

    spec = "nccl+torch" if mode == "auto" else f"nccl[mode={mode}]+torch"
    experts = Experts(config, ParallelConfig(ep_size=world), spec)
    alone = Experts(config, backend="torch")
    for layer in (experts, alone):
        layer.load_full_weights(*weights)
    x, ids, topk = batches[rank]

    def results(layer: Experts) -> tuple[Any, Any]:
        """Output and gradient of this rank's tokens, and the trace of the last step."""
        rows = x.clone().requires_grad_()
        for _ in range(STEPS):
            rows.grad = None
            with trace() as seen:
                y = layer(rows, ids, topk)
            y.square().sum().backward()
        return (y.detach(), rows.grad), seen.calls[0]

    got, call = results(experts)
    want, _ = results(alone)
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True)]

    transport: Any = experts.pipeline.transport
    node, home = rank // per_node, s.experts // world

    def over_there(kind: str) -> int:
        sent = transport.ep.bytes_sent[kind]
        return sum(n for peer, n in enumerate(sent) if peer // per_node != node)

    def needed(ids: Any, here: int) -> int:
        """Distinct (token, node) pairs from that node's rank to the other nodes."""
        nodes = (ids // home // per_node).tolist()
        return sum(len({n for n in row if n != here}) for row in nodes)

    def brought(here: int) -> int:
        """Those of which the results come from this rank: its counterparts' tokens for its node."""
        count = 0
        for peer in range(rank % per_node, world, per_node):
            if peer // per_node != here:
                nodes = (batches[peer][1] // home // per_node).tolist()
                count += sum(here in row for row in nodes)
        return count

    row, kinds = s.hidden * 8, ("dispatch", "combine", "combine.backward", "dispatch.backward")
    traced = call.inter_node_bytes(per_node) * STEPS  # the trace of one step, every step alike
    assert traced == over_there("dispatch"), "the trace and the channel count the same"
    out, back = needed(ids, node) * row * STEPS, brought(node) * row * STEPS
    found = {
        "node": node,
        "parts": experts.describe()["parts"]["transport"],
        "error": max(errors),
        "sent": {kind: over_there(kind) for kind in kinds},
        "bound": dict(zip(kinds, (out, back, out, back), strict=True)),
        "all": sum(over_there(kind) for kind in transport.ep.bytes_sent),
    }
    dist.barrier()
    dist.destroy_process_group()
    path = Path(os.environ["TWO_HOSTS_OUT"]) / f"rank{rank}.json"
    path.write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES[:2]))
    parser.add_argument("--nproc", type=int, default=2, help="ranks on each host")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each mode")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.modes[0])
        return 0
    reason = why_not()
    if reason:
        print(f"two_hosts: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces go
    try:
        with two_hosts() as hosts:
            results = [launch(hosts, mode, args.nproc, args.limit) for mode in args.modes]
    except RuntimeError as error:
        print(f"two_hosts: {error}", file=sys.stderr)
        return 1
    print(json.dumps(results, indent=2) if args.json else table(results))
    return 0 if all(r["error"] < 1e-10 for r in results) else 1


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"KiB between the hosts in {STEPS} steps of forward and backward"]
    lines.append(f"{'mode':<14}{'':<20}{'sent':>10}{'bound':>10}{'sent/bound':>12}")
    for r in results:
        mode = r["parts"].partition("=")[2].partition("]")[0]
        for kind, sent in r["rows"].items():
            bound = r["bound"][kind]
            shown = f"{sent / 1024:>10.1f}{bound / 1024:>10.1f}{sent / bound:>12.2f}"
            lines.append(f"{mode:<14}{kind:<20}{shown}")
        ratio = r["cable"] / r["counted"]
        lines.append(f"{mode:<14}{'all, with ids':<20}{r['counted'] / 1024:>10.1f}")
        lines.append(f"{'':<14}{'on the cable':<20}{r['cable'] / 1024:>10.1f}   x {ratio:.3f}")
        lines.append(f"{'':<14}asked for {r['mode']}; off by {r['error']:.1e} at most")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
