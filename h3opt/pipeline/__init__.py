"""The diffusers pipeline as h3opt sees it: components, steps, calls, generation and tiling."""
