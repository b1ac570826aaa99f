"""Tiles of the video VAE: the plan, the scheduler, the parts that passes exchange, and CUDA graphs of the decoder."""
