"""The tile scheduler of the video VAE."""
