"""Verification: compare a pipeline with passes to the unmodified pipeline."""
