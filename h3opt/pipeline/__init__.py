"""The diffusers pipeline: facts about the model, components, steps, module calls, generation and tiling."""
