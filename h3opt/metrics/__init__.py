"""Measures of the difference between outputs: bits, LPIPS, video, audio and seams."""
