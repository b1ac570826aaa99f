"""Bar charts of benchmark results, drawn by matplotlib."""

from __future__ import annotations

from pathlib import Path

from h3opt.bench.harness import BenchResult
from h3opt.errors import MissingDependencyError
from h3opt.files import atomic_write

_COLORS = {"attention": "#3b6ea5", "gemm": "#7aa974", "h3opt": "#d98c3f", "other": "#b0b0b0"}


def write_bench_chart(path: Path, bench: BenchResult) -> None:
    """Draw a bar for each variant: its milliseconds, split by the kinds of kernels that a profiler saw.

    Args:
        path: the PNG file to write.
        bench: the result; variants without figures are left out.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        PipelineError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError("A chart needs matplotlib. Run `pip install matplotlib`.") from error
    variants = [(variant, ms) for variant in bench.variants if (ms := variant.milliseconds) is not None]
    figure = Figure(figsize=(9, 1.2 + 0.36 * len(variants)), layout="constrained")
    axes = figure.add_subplot()
    for row, (variant, ms) in enumerate(variants):
        left = 0.0
        for kind, color in _COLORS.items():
            width = variant.spent.get(kind, 0.0) / bench.profiled_share(variant)
            axes.barh(row, width, left=left, color=color, label=kind if row == 0 else None)
            left += width
        axes.text(max(left, ms), row, f" {ms:.0f} ms", va="center", fontsize=8)
        axes.plot([ms, ms], [row - 0.4, row + 0.4], color="black", linewidth=1)
    axes.set_yticks(range(len(variants)), [variant.name for variant, _ in variants], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms (black line: measured end to end; colours: time of kernels by a profiler)", fontsize=8)
    axes.set_title(bench.title, fontsize=10)
    axes.set_xlim(0, 1.12 * max((ms for _, ms in variants), default=1.0))
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=150, format="png")
