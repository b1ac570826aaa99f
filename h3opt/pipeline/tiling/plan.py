"""The plan of one decode or encode: tiles, clips, batches, bytes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from h3opt.errors import MemoryBudgetError, PipelineError
from h3opt.metrics.seams import Borders
from h3opt.pipeline.tiling.strategies import BatchRunner, TileOptions

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Tile:
    """One tile by its place; tiles run and merge in this order."""

    clip: int
    row: int
    column: int


@dataclass(frozen=True)
class Axis:
    """Tiles along height or width.

    Attributes:
        sources: where each is read, ``(start, stop)`` in units of the input.
        sizes: of what comes back for each, in units of the output.
        overlaps: of each with the next, likewise.
    """

    sources: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    overlaps: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each tile begins in the output."""
        found = [0]
        for size, overlap in zip(self.sizes, self.overlaps, strict=False):
            found.append(found[-1] + size - overlap)
        return tuple(found)

    @property
    def length(self) -> int:
        """Of the output."""
        return self.offsets[-1] + self.sizes[-1]

    @property
    def borders(self) -> list[int]:
        """Where blending begins and ends: the lines of the output on which a seam would show."""
        starts = self.offsets[1:]
        return sorted({*starts, *(start + overlap for start, overlap in zip(starts, self.overlaps, strict=True))})

    def shown(self, number: int) -> int:
        """How much of a tile reaches the output: the next one covers its overlap."""
        return self.sizes[number] - (self.overlaps[number] if number < len(self.overlaps) else 0)


@dataclass(frozen=True)
class Clips:
    """What frames are cut into, and how the clips follow one another in the output.

    Attributes:
        sources: input frames of each clip, ``(start, stop)``.
        padding: times the last input frame is repeated.
        kept: output frames of a clip that are kept, ``(start, stop, offset from the clip's place)``.
        stride: output frames from one clip to the next.
        faded: frames at the head of a clip that are cross-faded with the tail of the one before it.
        length: output frames of all clips.
        cut: of these, frames cut off at the end.
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
        what: ``"decode"`` or ``"encode"``.
        samples: videos in the input.
        clips, rows, columns: how it is cut.
        batch: most tiles in one call of the model.
        activation_bytes: that one tile needs while the model runs.
        tile_bytes: of one finished tile.
        result_bytes: of the finished video or latents.
        budget: bytes that the decode is held to, if it is.
        kept: finished batches that stay besides those being merged.
    """

    what: str
    samples: int
    clips: Clips
    rows: Axis
    columns: Axis
    activation_bytes: int
    tile_bytes: int
    result_bytes: int
    batch: int = 1
    budget: int | None = None
    kept: int = 0

    @property
    def tiles(self) -> list[Tile]:
        """All tiles, in the order they run and merge in."""
        clips, rows, columns = (range(len(axis.sources)) for axis in (self.clips, self.rows, self.columns))
        return [Tile(clip, row, column) for clip in clips for row in rows for column in columns]

    @property
    def borders(self) -> Borders:
        """Rows and columns of the result at which a blended region begins or ends: where a seam would show."""
        return self.rows.borders, self.columns.borders

    @property
    def size(self) -> str:
        """Of the result, in words."""
        return f"{self.rows.length}x{self.columns.length}, {self.clips.length - self.clips.cut} frames"

    @property
    def equal(self) -> bool:
        """Whether all tiles have one shape, without which they make no batch."""
        cuts = (self.clips.sources, self.rows.sources, self.columns.sources)
        return all(len({stop - start for start, stop in sources}) == 1 for sources in cuts)

    @property
    def batches(self) -> Iterator[list[Tile]]:
        """Of nearly equal size: a lone tile at the end would be another shape, and other kernels."""
        tiles = self.tiles
        for left in range(-(-len(tiles) // self.batch), 0, -1):
            size = -(-len(tiles) // left)
            yield tiles[:size]
            tiles = tiles[size:]

    def region(self, tile: Tile) -> tuple[Any, ...]:
        """The part of the (padded) input that a tile is made from."""
        cut = (self.clips.sources[tile.clip], self.rows.sources[tile.row], self.columns.sources[tile.column])
        return (slice(None), slice(None), *(slice(*source) for source in cut))

    def in_flight(self, batch: int) -> int:
        """Bytes needed besides the result: activations of a batch, and finished tiles that wait or are being merged.

        Waiting are a row of tiles and one more, for their neighbours below and to the right; the batch that merges,
        the one that runs and those kept hold theirs. Blending takes a copy of a tile, and two products and a sum of
        no more.
        """
        waiting = len(self.columns.sources) + 1 + (2 + self.kept) * batch
        return batch * self.activation_bytes + (waiting + 4) * self.tile_bytes

    def peak(self, batch: int) -> int:
        """Bytes that a decode in batches of this size adds to weights and input."""
        return self.result_bytes + self.in_flight(batch)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        return {
            "what": self.what,
            "clips": len(self.clips.sources),
            "rows": len(self.rows.sources),
            "columns": len(self.columns.sources),
            "tiles": len(self.tiles),
            "tile": [self.rows.sizes[0], self.columns.sizes[0]],
            "overlaps": {"rows": list(self.rows.overlaps), "columns": list(self.columns.overlaps)},
            "faded_frames": self.clips.faded,
            "result": [self.clips.length - self.clips.cut, self.rows.length, self.columns.length],
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
        found = self.to_dict()
        sizes = found["batches"]
        counts = ", ".join(f"{sizes.count(size)} of {size}" for size in sorted(set(sizes), reverse=True))
        overlaps = "; ".join(
            f"{name} {', '.join(map(str, values))}" for name, values in found["overlaps"].items() if values
        )
        size = found["bytes"]
        budget = "" if self.budget is None else f", budget {memory_text(self.budget)}"
        lines = [
            f"{self.what} to {self.size}",
            f"clips      {found['clips']}, {self.clips.faded} frames cross-faded",
            f"tiles      {found['tiles']}: {found['rows']} x {found['columns']} a clip, each "
            f"{found['tile'][0]}x{found['tile'][1]}",
            f"overlaps   {overlaps or 'none'}",
            f"batches    {len(sizes)}: {counts} tiles",
            f"in flight  {memory_text(size['in_flight'])}, {memory_text(size['activations'])} of it activations",
            f"peak       {memory_text(size['peak'])} with the result's {memory_text(size['result'])}{budget}",
        ]
        return "\n".join(lines)


def plan_decode(vae: Any, shape: Sequence[int], choices: Sequence[TileOptions] = ()) -> TilePlan:
    """The plan that :meth:`TileScheduler.decode` follows for latents of this shape; nothing is computed.

    Args:
        vae: may be on the meta device.
        shape: ``[batch, channels, frames, rows, columns]``.
        choices: of the passes.

    Raises:
        PipelineError: these latents are too short for a clip, or tiles cannot be laid over them.
        H3OptError: what the passes raise.
    """
    chosen = _all(choices)
    samples, _, frames, height, width = shape
    if chosen.tile is None:
        sizes = vae.tile_sample_min_height, vae.tile_sample_min_width
        overlaps = vae.tile_sample_min_overlap_height, vae.tile_sample_min_overlap_width
    else:
        sizes, overlaps = chosen.tile[:2], (chosen.tile[2],) * 2
        _check_tile(vae, sizes, height, width)
    clips = _decoded_clips(vae, frames)
    rows, columns = (
        _axis(vae, length, size, overlap, True)
        for length, size, overlap in zip((height, width), sizes, overlaps, strict=True)
    )
    item = vae.decoder.proj_out.weight.dtype.itemsize
    clip = clips.sources[0][1] - clips.sources[0][0]
    area = max(stop - start for start, stop in rows.sources) * max(stop - start for start, stop in columns.sources)
    pixels = samples * vae.config.out_channels * item
    return _batched(
        TilePlan(
            "decode",
            samples,
            clips,
            rows,
            columns,
            activation_bytes=samples * _decoder_bytes(vae, clip * area),
            tile_bytes=pixels * clip * vae.temporal_compression_ratio * max(rows.sizes) * max(columns.sizes),
            result_bytes=pixels * clips.length * rows.length * columns.length,
        ),
        chosen,
    )


def tile_borders(vae: Any, height: int, width: int, choices: Sequence[TileOptions] = ()) -> Borders:
    """Rows and columns at which a seam would show in a decoded frame, in pixels; see :attr:`TilePlan.borders`.

    Args:
        vae: may be on the meta device.
        height, width: of the frame, in pixels.
        choices: of the passes.

    Raises:
        H3OptError: as :func:`plan_decode`.
    """
    ratio, clip = vae.spatial_compression_ratio, vae.tokens_chunk_size + vae.token_overlap
    shape = (1, 1, clip, height // ratio, width // ratio)  # borders depend on neither samples nor channels nor frames
    return plan_decode(vae, shape, choices).borders


def plan_encode(vae: Any, shape: Sequence[int], choices: Sequence[TileOptions] = ()) -> TilePlan:
    """The plan that :meth:`TileScheduler.encode` follows for pixels of this shape; as :func:`plan_decode`.

    The tile size that passes choose is that of decoding; encoding keeps the model's.
    """
    samples, _, frames, height, width = shape
    clips = _encoded_clips(vae, frames)
    rows = _axis(vae, height, vae.tile_sample_min_height, vae.tile_sample_min_overlap_height, False)
    columns = _axis(vae, width, vae.tile_sample_min_width, vae.tile_sample_min_overlap_width, False)
    item = vae.quant_conv.weight.dtype.itemsize
    clip = clips.sources[0][1] - clips.sources[0][0]
    area = max(stop - start for start, stop in rows.sources) * max(stop - start for start, stop in columns.sources)
    latents = samples * vae.quant_conv.weight.shape[0] * item
    return _batched(
        TilePlan(
            "encode",
            samples,
            clips,
            rows,
            columns,
            # first level: residual, activation, its copy inside the norm, and both paddings of the convolution
            activation_bytes=samples * vae.config.block_out_channels[0] * area * item * (6 * clip + 2),
            tile_bytes=latents * clips.stride * max(rows.sizes) * max(columns.sizes),
            result_bytes=latents * clips.length * rows.length * columns.length,
        ),
        _all(choices),
    )


def memory_bytes(size: int | str) -> int:
    """Bytes from a number, or a text such as ``"512 MiB"`` or ``"1.5GiB"``.

    Raises:
        ValueError: it is neither, or not positive.
    """
    text = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if text is not None and text[2].upper() in _UNITS:
        size_in_units = float(text[1])
        found = int(size_in_units * _UNITS[text[2].upper()]) if size_in_units < 2**63 else 0
    else:
        found = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if found < 1:
        raise ValueError(f"a memory size is a positive number of bytes or a text such as '2GiB', not {size!r}")
    return found


def memory_text(size: int) -> str:
    """Bytes for people, rounded up so that :func:`memory_bytes` of it is enough."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{-(-size * 100 // unit) / 100:.2f} {name}"
    return f"{size} B"


def _all(choices: Sequence[TileOptions]) -> TileOptions:
    chosen = TileOptions()
    for one in choices:
        chosen = chosen.joined(one)
    return chosen


def _batched(plan: TilePlan, chosen: TileOptions) -> TilePlan:
    plan = dataclasses.replace(plan, kept=(chosen.calls or BatchRunner()).kept)
    budget, most = chosen.memory_budget, (chosen.max_tiles or 1) if plan.equal else 1
    sizes = [size for size in range(1, most + 1) if budget is None or plan.peak(size) <= budget]
    if not sizes:
        raise MemoryBudgetError(
            f"A memory budget of {memory_text(budget or 0)} is too small to {plan.what} {plan.size}: one tile at a "
            f"time needs {memory_text(plan.peak(1))}. Set memory_budget to at least that, or choose a smaller canvas."
        )
    plan = dataclasses.replace(plan, batch=sizes[-1], budget=budget)
    return dataclasses.replace(plan, batch=max(len(batch) for batch in plan.batches))


def _axis(vae: Any, length: int, tile: int, overlap: int, decode: bool) -> Axis:
    """Tiles over ``length`` units of the input; ``tile`` and ``overlap`` are in pixels, and so is the layout."""
    ratio = vae.spatial_compression_ratio
    pixels = length * ratio if decode else length
    if not vae.use_tiling or tile >= pixels:
        starts, lengths, overlaps = [0], [pixels], []
    elif not 0 < overlap < tile:
        raise PipelineError(
            f"Tiles of {tile} pixels cannot overlap by {overlap}. Set an overlap that is positive and less than a tile."
        )
    else:
        starts, lengths, overlaps = vae._split_tiles(pixels, tile, overlap)
    if decode:
        places = [(start // ratio, size // ratio) for start, size in zip(starts, lengths, strict=True)]
        read = tuple((start, start + size) for start, size in places)
        return Axis(read, tuple(size * ratio for _, size in places), tuple(overlaps))
    sources = tuple((start, min(start + size, length)) for start, size in zip(starts, lengths, strict=True))
    sizes = tuple((stop - start) // ratio for start, stop in sources)  # each level of the encoder rounds down
    return Axis(sources, sizes, tuple(one // ratio for one in overlaps))


def _decoded_clips(vae: Any, frames: int) -> Clips:
    """As ``_decode``: clips of ``tokens_chunk_size`` latents, and ``token_overlap`` more that the next clip has too."""
    size, dropped, ratio = vae.tokens_chunk_size, vae.config.token_drop, vae.temporal_compression_ratio
    padding = -(frames + dropped) % size
    count = (frames + dropped + padding) // size - int(dropped > 0)
    if count < 1:
        raise PipelineError(
            f"{frames} latent frames make no clip. Decode at least {size + vae.token_overlap} latent frames."
        )
    skipped, chunk = vae.frame_pre_padding, size * ratio
    stride, faded = chunk - skipped, vae.frame_overlap
    kept = ((skipped, chunk, 0), (chunk + skipped, chunk + skipped + faded, stride))[: 1 + int(dropped > 0)]
    # the last latent of a chunk stands for fewer frames than the others
    short = vae.config.clip_length % ratio or ratio
    cut = sum(short if (frames + number) % size == 0 else ratio for number in range(padding))
    sources = tuple((number * size, (number + 1) * size + vae.token_overlap) for number in range(count))
    return Clips(sources, padding, kept, stride, faded, count * stride + faded * int(dropped > 0), cut)


def _encoded_clips(vae: Any, frames: int) -> Clips:
    """As ``_encode``: clips of ``clip_length`` frames side by side, trailing latents dropped; one frame as it is."""
    if frames == 1:
        return Clips(((0, 1),), 0, ((0, 1, 0),), 1, 0, 1, 0)
    clip, size = vae.config.clip_length, vae.tokens_chunk_size
    padding = -frames % clip
    count = (frames + padding) // clip
    sources = tuple((number * clip, (number + 1) * clip) for number in range(count))
    return Clips(sources, padding, ((0, size, 0),), size, 0, count * size, vae.config.token_drop)


def _decoder_bytes(vae: Any, latents: int) -> int:
    """Bytes alive at once in the widest place of a decoder block, for one sample.

    Two copies of the residual stream in float32 (what the block was given and what it has so far) and the norm's
    result; besides, in the feed-forward layer, both halves of the projection, the gate of one and the product of both;
    in attention, seven or eight tensors of the size of a query while the key is rotated.
    """
    decoder = vae.decoder
    block, item = decoder.transformer_blocks[0], decoder.proj_out.weight.dtype.itemsize
    halves, channels = block.ff.net[0].proj.weight.shape
    tokens = latents + decoder.num_register_tokens + 1
    return tokens * (2 * 4 * channels + item * channels + item * max(2 * halves, 8 * block.attn.to_q.weight.shape[0]))


def _check_tile(vae: Any, tile: Sequence[int], rows: int, columns: int) -> None:
    ratio = vae.spatial_compression_ratio
    frame = (rows * ratio, columns * ratio)
    if not vae.use_tiling:
        raise PipelineError("A tile size is chosen, but tiling is off. Call vae.enable_tiling() or leave the size out.")
    if tile[0] > frame[0] or tile[1] > frame[1]:
        raise PipelineError(
            f"A tile of {tile[0]}x{tile[1]} pixels is larger than the frame of {frame[0]}x{frame[1]}. "
            "Choose a tile within the frame."
        )
