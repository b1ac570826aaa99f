"""Distances between outputs: bits, LPIPS, video and audio measures, seams."""
