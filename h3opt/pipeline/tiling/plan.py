"""The plan of one decode or encode: chunks, tiles, batches, bytes.

How large a tile's activations are is an estimate, made before anything runs: the tensors that are alive at once in
the widest layer of the unmodified model. The workspace of libraries and what other passes keep are not included.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from h3opt.errors import MemoryBudgetError, PipelineError
from h3opt.metrics.seams import Borders
from h3opt.pipeline import minimax_h3
from h3opt.pipeline.minimax_h3 import VideoGeometry, video_geometry
from h3opt.pipeline.tiling.strategies import BatchRunner, TileOptions, combine_options


def plan_decode(vae: Any, shape: Sequence[int], options: Sequence[TileOptions] = ()) -> TilePlan:
    """Plan what :meth:`TileScheduler.decode` does with latents of this shape; nothing is computed.

    Args:
        vae: may be on the meta device.
        shape: ``[batch, channels, frames, rows, columns]``.
        options: of the passes.

    Raises:
        PipelineError: these latents are too short for a chunk, or tiles cannot be laid over them.
        MemoryBudgetError: one tile at a time does not fit into the memory budget.
    """
    chosen, geometry = combine_options(options), video_geometry(vae)
    samples, _, frames, height, width = shape
    if chosen.tile is None:
        tile, overlap = geometry.tile, geometry.overlap
    else:
        tile, overlap = chosen.tile[:2], (chosen.tile[2], chosen.tile[2])
        _check_tile(geometry, tile, height, width)
    chunks = _decoded_chunks(geometry, frames)
    rows, columns = (_decoded_axis(vae, *sizes) for sizes in zip((height, width), tile, overlap, strict=True))
    tile_frames, tile_area = _largest_tile(chunks, rows, columns)
    pixel_bytes = samples * minimax_h3.decoded_bytes(vae)
    plan = TilePlan(
        "decode",
        samples,
        chunks,
        rows,
        columns,
        activation_bytes=samples * minimax_h3.decoder_activation_bytes(vae, tile_frames * tile_area),
        tile_bytes=pixel_bytes * tile_frames * geometry.temporal_ratio * max(rows.sizes) * max(columns.sizes),
        result_bytes=pixel_bytes * chunks.length * rows.length * columns.length,
    )
    return _with_batches(plan, chosen)


def plan_encode(vae: Any, shape: Sequence[int], options: Sequence[TileOptions] = ()) -> TilePlan:
    """Plan what :meth:`TileScheduler.encode` does with pixels of this shape; as :func:`plan_decode`.

    The tile size that passes choose is that of decoding; encoding keeps the model's tile size.
    """
    geometry = video_geometry(vae)
    samples, _, frames, height, width = shape
    chunks = _encoded_chunks(geometry, frames)
    rows, columns = (
        _encoded_axis(vae, *sizes) for sizes in zip((height, width), geometry.tile, geometry.overlap, strict=True)
    )
    tile_frames, tile_area = _largest_tile(chunks, rows, columns)
    latent_bytes = samples * minimax_h3.encoded_bytes(vae)
    plan = TilePlan(
        "encode",
        samples,
        chunks,
        rows,
        columns,
        activation_bytes=samples * minimax_h3.encoder_activation_bytes(vae, tile_frames, tile_area),
        tile_bytes=latent_bytes * chunks.stride * max(rows.sizes) * max(columns.sizes),
        result_bytes=latent_bytes * chunks.length * rows.length * columns.length,
    )
    return _with_batches(plan, combine_options(options))


def tile_borders(vae: Any, height: int, width: int, options: Sequence[TileOptions] = ()) -> Borders:
    """Return the rows and columns at which a seam would show in a decoded frame; see :attr:`TilePlan.borders`.

    Args:
        vae: may be on the meta device.
        height, width: of the frame, in pixels.
        options: of the passes.

    Raises:
        H3OptError: as :func:`plan_decode`.
    """
    geometry = video_geometry(vae)
    frames = geometry.chunk_latents + geometry.overlap_latents
    # Borders depend on neither samples nor channels nor frames.
    shape = (1, 1, frames, height // geometry.spatial_ratio, width // geometry.spatial_ratio)
    return plan_decode(vae, shape, options).borders


@dataclass(frozen=True)
class Tile:
    """The position of one tile; tiles run and merge in the order of these numbers."""

    chunk: int
    row: int
    column: int


@dataclass(frozen=True)
class Axis:
    """Tiles along height or along width.

    Attributes:
        sources: the part of the input that each tile reads, ``(start, stop)``, in units of the input.
        sizes: the size of each finished tile, in units of the output.
        overlaps: the overlap of each finished tile with the next tile, in units of the output.
    """

    sources: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    overlaps: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each tile begins in the output."""
        offsets = [0]
        for size, overlap in zip(self.sizes, self.overlaps, strict=False):
            offsets.append(offsets[-1] + size - overlap)
        return tuple(offsets)

    @property
    def length(self) -> int:
        """The length of the output."""
        return self.offsets[-1] + self.sizes[-1]

    @property
    def borders(self) -> list[int]:
        """Where blending begins and ends: the lines of the output on which a seam would show."""
        starts = self.offsets[1:]
        return sorted({*starts, *(start + overlap for start, overlap in zip(starts, self.overlaps, strict=True))})

    def visible(self, number: int) -> int:
        """How much of a tile reaches the output: the next tile covers the overlap."""
        return self.sizes[number] - (self.overlaps[number] if number < len(self.overlaps) else 0)


@dataclass(frozen=True)
class Chunks:
    """The pieces that frames are cut into, and how the finished pieces follow one another in the output.

    Attributes:
        sources: input frames of each chunk, ``(start, stop)``.
        padding: how many times the last input frame is repeated at the end.
        kept: output frames of a chunk that are kept, ``(start, stop, offset from the position of the chunk)``.
        stride: output frames from one chunk to the next.
        faded: frames at the start of a chunk that are cross-faded with the end of the previous chunk.
        length: output frames of all chunks.
        cut: frames that are cut off at the end of these.
    """

    sources: tuple[tuple[int, int], ...]
    padding: int
    kept: tuple[tuple[int, int, int], ...]
    stride: int
    faded: int
    length: int
    cut: int


@dataclass(frozen=True)
class TilePlan:
    """What one decode or encode will do.

    Attributes:
        operation: ``"decode"`` or ``"encode"``.
        samples: videos in the input.
        chunks, rows, columns: how the input is cut.
        activation_bytes: bytes that one tile needs while the model runs.
        tile_bytes: bytes of one finished tile.
        result_bytes: bytes of the finished video or latents.
        batch: most tiles in one call of the model.
        budget: bytes that the operation may add to weights and input; ``None`` for no limit.
        retained_batches: finished batches kept in memory besides the batches being merged.
    """

    operation: str
    samples: int
    chunks: Chunks
    rows: Axis
    columns: Axis
    activation_bytes: int
    tile_bytes: int
    result_bytes: int
    batch: int = 1
    budget: int | None = None
    retained_batches: int = 0

    @property
    def tiles(self) -> list[Tile]:
        """All tiles, in the order in which they run and merge."""
        chunks, rows, columns = (range(len(axis.sources)) for axis in (self.chunks, self.rows, self.columns))
        return [Tile(chunk, row, column) for chunk in chunks for row in rows for column in columns]

    @property
    def frames(self) -> int:
        """Frames of the result."""
        return self.chunks.length - self.chunks.cut

    @property
    def borders(self) -> Borders:
        """Rows and columns of the result at which a blended region begins or ends: where a seam would show."""
        return self.rows.borders, self.columns.borders

    @property
    def size(self) -> str:
        """The size of the result, in words."""
        return f"{self.rows.length}x{self.columns.length}, {self.frames} frames"

    @property
    def has_equal_tiles(self) -> bool:
        """Whether all tiles have one shape; others cannot be batched."""
        axes = (self.chunks.sources, self.rows.sources, self.columns.sources)
        return all(len({stop - start for start, stop in sources}) == 1 for sources in axes)

    @property
    def batches(self) -> Iterator[list[Tile]]:
        """Batches of nearly equal size: a single tile at the end would have another shape, and run other kernels."""
        tiles = self.tiles
        for left in range(-(-len(tiles) // self.batch), 0, -1):
            size = -(-len(tiles) // left)
            yield tiles[:size]
            tiles = tiles[size:]

    def region(self, tile: Tile) -> tuple[Any, ...]:
        """The index of the part of the (padded) input that a tile is made from."""
        sources = (self.chunks.sources[tile.chunk], self.rows.sources[tile.row], self.columns.sources[tile.column])
        return (slice(None), slice(None), *(slice(*source) for source in sources))

    def in_flight(self, batch: int) -> int:
        """Bytes needed besides the result: activations of a batch, and finished tiles that wait or are being merged.

        A row of tiles and one more wait for their neighbours below and to the right. The batch that merges, the batch
        that runs and the retained batches hold their tiles. Blending needs at most a copy of a tile, two products and
        a sum.
        """
        waiting = len(self.columns.sources) + 1 + (2 + self.retained_batches) * batch
        return batch * self.activation_bytes + (waiting + 4) * self.tile_bytes

    def peak(self, batch: int) -> int:
        """Bytes that a decode in batches of this size adds to weights and input."""
        return self.result_bytes + self.in_flight(batch)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        return {
            "operation": self.operation,
            "chunks": len(self.chunks.sources),
            "rows": len(self.rows.sources),
            "columns": len(self.columns.sources),
            "tiles": len(self.tiles),
            "tile": [self.rows.sizes[0], self.columns.sizes[0]],
            "overlaps": {"rows": list(self.rows.overlaps), "columns": list(self.columns.overlaps)},
            "faded_frames": self.chunks.faded,
            "result": [self.frames, self.rows.length, self.columns.length],
            "batches": [len(batch) for batch in self.batches],
            "bytes": {
                "activations": self.batch * self.activation_bytes,
                "in_flight": self.in_flight(self.batch),
                "result": self.result_bytes,
                "peak": self.peak(self.batch),
                "budget": self.budget,
            },
        }

    def __str__(self) -> str:
        sizes = [len(batch) for batch in self.batches]
        counts = ", ".join(f"{sizes.count(size)} of {size}" for size in sorted(set(sizes), reverse=True))
        axes = {"rows": self.rows.overlaps, "columns": self.columns.overlaps}
        overlaps = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in axes.items() if values)
        activations, result = (memory_text(size) for size in (self.batch * self.activation_bytes, self.result_bytes))
        budget = "" if self.budget is None else f", budget {memory_text(self.budget)}"
        lines = [
            f"{self.operation} to {self.size}",
            f"chunks     {len(self.chunks.sources)}, {self.chunks.faded} frames cross-faded",
            f"tiles      {len(self.tiles)}: {len(self.rows.sources)} x {len(self.columns.sources)} a chunk, each "
            f"{self.rows.sizes[0]}x{self.columns.sizes[0]}",
            f"overlaps   {overlaps or 'none'}",
            f"batches    {len(sizes)}: {counts} tiles",
            f"in flight  {memory_text(self.in_flight(self.batch))}, {activations} of it activations",
            f"peak       {memory_text(self.peak(self.batch))} with the result's {result}{budget}",
        ]
        return "\n".join(lines)


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def memory_bytes(size: int | str) -> int:
    """Bytes from a number, or a text such as ``"512 MiB"`` or ``"1.5GiB"``.

    Raises:
        ValueError: it is neither, or not positive.
    """
    count = 0
    text = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if text is not None and text[2].upper() in _UNITS:
        size_in_units = float(text[1])
        count = int(size_in_units * _UNITS[text[2].upper()]) if size_in_units < 2**63 else 0
    elif isinstance(size, int) and not isinstance(size, bool):
        count = size
    if count < 1:
        raise ValueError(f"a memory size is a positive number of bytes or a text such as '2GiB', not {size!r}")
    return count


def memory_text(size: int) -> str:
    """Bytes for people, rounded up so that :func:`memory_bytes` of the text is enough."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{-(-size * 100 // unit) / 100:.2f} {name}"
    return f"{size} B"


def _with_batches(plan: TilePlan, options: TileOptions) -> TilePlan:
    """Choose the largest batch that the options and the budget allow."""
    plan = dataclasses.replace(plan, retained_batches=(options.batch_runner or BatchRunner()).retained_batches)
    budget, most = options.memory_budget, (options.max_tiles or 1) if plan.has_equal_tiles else 1
    sizes = [size for size in range(1, most + 1) if budget is None or plan.peak(size) <= budget]
    if not sizes:
        raise MemoryBudgetError(
            f"A memory budget of {memory_text(budget or 0)} is too small to {plan.operation} {plan.size}: one tile at "
            f"a time needs {memory_text(plan.peak(1))}. Set memory_budget to at least that, or choose a smaller canvas."
        )
    plan = dataclasses.replace(plan, batch=sizes[-1], budget=budget)
    return dataclasses.replace(plan, batch=max(len(batch) for batch in plan.batches))


def _largest_tile(chunks: Chunks, rows: Axis, columns: Axis) -> tuple[int, int]:
    """Return the frames of a chunk and the largest area of a tile, in units of the input."""
    (first, last), *_ = chunks.sources
    heights, widths = ([stop - start for start, stop in axis.sources] for axis in (rows, columns))
    return last - first, max(heights) * max(widths)


def _decoded_axis(vae: Any, latents: int, tile: int, overlap: int) -> Axis:
    """Lay tiles over the pixels that ``latents`` latents decode to; ``tile`` and ``overlap`` are in pixels."""
    ratio = video_geometry(vae).spatial_ratio
    starts, sizes, overlaps = _lay_tiles(vae, latents * ratio, tile, overlap)
    sources = [(start // ratio, start // ratio + size // ratio) for start, size in zip(starts, sizes, strict=True)]
    return Axis(tuple(sources), tuple((stop - start) * ratio for start, stop in sources), tuple(overlaps))


def _encoded_axis(vae: Any, pixels: int, tile: int, overlap: int) -> Axis:
    """Lay tiles over ``pixels`` pixels that are to be encoded; ``tile`` and ``overlap`` are in pixels."""
    ratio = video_geometry(vae).spatial_ratio
    starts, lengths, overlaps = _lay_tiles(vae, pixels, tile, overlap)
    sources = tuple((start, min(start + size, pixels)) for start, size in zip(starts, lengths, strict=True))
    sizes = tuple((stop - start) // ratio for start, stop in sources)  # each level of the encoder rounds down
    return Axis(sources, sizes, tuple(each // ratio for each in overlaps))


def _lay_tiles(vae: Any, pixels: int, tile: int, overlap: int) -> tuple[list[int], list[int], list[int]]:
    """Return starts, sizes and overlaps of tiles in pixels; a single tile where tiling is off or not needed."""
    if not video_geometry(vae).tiled or tile >= pixels:
        return [0], [pixels], []
    if not 0 < overlap < tile:
        raise PipelineError(
            f"Tiles of {tile} pixels cannot overlap by {overlap}. Set an overlap that is positive and less than a tile."
        )
    return minimax_h3.split_tiles(vae, pixels, tile, overlap)


def _decoded_chunks(geometry: VideoGeometry, frames: int) -> Chunks:
    """Cut latents as ``_decode`` does: into chunks that also read the first latents of the next chunk."""
    size, dropped, ratio = geometry.chunk_latents, geometry.dropped_latents, geometry.temporal_ratio
    padding = -(frames + dropped) % size
    count = (frames + dropped + padding) // size - int(dropped > 0)
    if count < 1:
        least = size + geometry.overlap_latents
        raise PipelineError(f"{frames} latent frames make no chunk. Decode at least {least} latent frames.")
    skipped, faded, chunk = geometry.skipped_frames, geometry.faded_frames, size * ratio
    stride = chunk - skipped
    kept = ((skipped, chunk, 0), (chunk + skipped, chunk + skipped + faded, stride))[: 1 + int(dropped > 0)]
    # the last latent of a chunk stands for fewer frames than the other latents
    short = geometry.chunk_frames % ratio or ratio
    cut = sum(short if (frames + number) % size == 0 else ratio for number in range(padding))
    sources = tuple((number * size, (number + 1) * size + geometry.overlap_latents) for number in range(count))
    return Chunks(sources, padding, kept, stride, faded, count * stride + faded * int(dropped > 0), cut)


def _encoded_chunks(geometry: VideoGeometry, frames: int) -> Chunks:
    """Cut frames as ``_encode`` does: into chunks side by side, with the last latents dropped; a single frame as is."""
    if frames == 1:
        return Chunks(((0, 1),), 0, ((0, 1, 0),), 1, 0, 1, 0)
    chunk, size = geometry.chunk_frames, geometry.chunk_latents
    padding = -frames % chunk
    count = (frames + padding) // chunk
    sources = tuple((number * chunk, (number + 1) * chunk) for number in range(count))
    return Chunks(sources, padding, ((0, size, 0),), size, 0, count * size, geometry.dropped_latents)


def _check_tile(geometry: VideoGeometry, tile: Sequence[int], rows: int, columns: int) -> None:
    frame = (rows * geometry.spatial_ratio, columns * geometry.spatial_ratio)
    if not geometry.tiled:
        raise PipelineError("A tile size is chosen, but tiling is off. Call vae.enable_tiling() or leave the size out.")
    if tile[0] > frame[0] or tile[1] > frame[1]:
        raise PipelineError(
            f"A tile of {tile[0]}x{tile[1]} pixels is larger than the frame of {frame[0]}x{frame[1]}. "
            "Choose a tile within the frame."
        )
