"""Verification: a pipeline with passes is held against the unmodified pipeline."""
