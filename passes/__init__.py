"""The passes h3opt ships: one file each, known to the rest only through the registry."""
