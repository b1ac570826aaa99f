"""The semantic graph: how it is traced, brought into one spelling, matched and rewritten."""
