"""Semantic graphs: tracing, canonical form, pattern matching and rewriting."""
