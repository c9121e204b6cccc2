"""Pictures of a ``Traffic``, as PNG: bytes from rank to rank, rows per rank. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import functional as F

from moe_core.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moe_core.traffic.result import Traffic

INSTALL = 'pictures need matplotlib: pip install "moe-core[bench]"'
MOST_CELLS = 256  # along a side; fewer than pixels, so that none is left out
MOST_LINES = 64  # nodes; more would hide what they part
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def check_matplotlib() -> None:
    """Raises ``InputError`` that says how to install it."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError(f"{INSTALL} ({error})") from error


def save_pictures(traffic: Traffic, folder: str | Path) -> list[Path]:
    """``links.png`` and ``rows.png`` in ``folder``, made if need be. Raises ``InputError``."""
    check_matplotlib()
    written: list[Path] = []
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, figure in (("links", draw_links(traffic)), ("rows", draw_rows(traffic))):
            written.append(Path(folder) / f"{name}.png")
            figure.savefig(written[-1])
    except OSError as error:
        raise InputError(f"pictures can't be written to {folder}: {error}") from error
    return written


def _figure(traffic: Traffic, title: str, size: tuple[float, float]) -> tuple[Figure, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of its own: whatever backend pyplot has stays
    axes: Any = figure.subplots()
    about = traffic.about
    axes.set_title(f"{title}\n{about['transport']}, {about['routing']}", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def draw_links(traffic: Traffic) -> Figure:
    """A cell per pair of ranks, or of blocks of ranks, darker for more dispatched bytes; lines part
    the nodes."""
    from matplotlib.colors import PowerNorm

    figure, axes = _figure(traffic, "Token rows dispatched, from rank to rank", (6, 5))
    matrix, step = traffic.dispatch, -(-traffic.world_size // MOST_CELLS)
    scale, unit = next((s, u) for s, u in UNITS if int(matrix.max()) >= s or s == 1)
    # The busiest link of a square stands for it: averaged, one hot rank would hardly be seen.
    cells = F.max_pool2d(matrix.double()[None] / scale, step, ceil_mode=True)[0].numpy()
    end = len(cells) * step - 0.5
    # A square root, so that what is next to a hot link can be seen as well.
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(cells.max()), 1e-9))
    image = axes.imshow(
        cells, cmap="Blues", norm=norm, interpolation="nearest", extent=(-0.5, end, end, -0.5)
    )
    axes.set_xlim(-0.5, traffic.world_size - 0.5)
    axes.set_ylim(traffic.world_size - 0.5, -0.5)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    if 1 < traffic.num_nodes <= MOST_LINES:
        edges = (traffic.node_of.diff().nonzero().flatten() + 0.5).tolist()
        for draw in (axes.axvline, axes.axhline):
            for edge in edges:
                draw(edge, color="0.6", linewidth=0.5)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label(
        f"{unit} per link" + (f", the most of {step} by {step} links" if step > 1 else "")
    )
    bar.outline.set_visible(False)
    return figure


def draw_rows(traffic: Traffic) -> Figure:
    """A bar per rank, or per block of ranks: rows that its experts compute. A line: the mean."""
    figure, axes = _figure(traffic, "Rows that each rank's experts compute", (6, 3.4))
    step = -(-traffic.world_size // MOST_CELLS)
    bars = F.max_pool1d(traffic.rows.double()[None], step, ceil_mode=True)[0].tolist()
    edges = [start * step - 0.5 for start in range(len(bars) + 1)]
    axes.stairs(bars, edges, fill=True, color="#3b76af")
    mean, worst = float(traffic.rows.double().mean()), int(traffic.rows.max())
    axes.axhline(mean, color="#c44e52", linewidth=1)
    said = "no rows"
    if traffic.imbalance is not None:
        said = f"mean {mean:,.0f}, worst {worst:,} ({traffic.imbalance:.2f} times the mean)"
    axes.annotate(
        said, (1, 1), xycoords="axes fraction", ha="right", va="top", fontsize=8, color="#c44e52"
    )
    axes.set_xlim(-0.5, traffic.world_size - 0.5)
    axes.set_ylim(0, max(worst, 1) * 1.12)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("rank")
    axes.set_ylabel("rows" + (f", the most of {step} ranks" if step > 1 else ""))
    return figure
