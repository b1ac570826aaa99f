"""GPU profiles shipped with h3opt: one YAML file per GPU."""
