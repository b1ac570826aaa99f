"""Capture, lowering and execution: from a pipeline and passes to rewritten graphs that run."""
